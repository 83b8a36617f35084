"""A path as one object, with the options that name its columns: analysed, shown, drawn and reported."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mup_tpu.analysis.ingest.files import without_suffix
from mup_tpu.analysis.ingest.readers import TRACKERS
from mup_tpu.analysis.run_table import ranked, varied
from mup_tpu.cli.console import Console, to_csv, to_json, write_figures, write_file, write_output
from mup_tpu.config import columns
from mup_tpu.config.columns import Table
from mup_tpu.config.values import counted
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import is_search, load_runs
from mup_tpu.store.header import STORE_FILE, load_predictions
from mup_tpu.words import tables, verdicts
from mup_tpu.words.names import power, rule_name
from mup_tpu.words.reasons import because, notes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mup_tpu.analysis import RunTable, TransferAnalysis
    from mup_tpu.analysis.planned import Recipe
    from mup_tpu.analysis.prediction import Score
    from mup_tpu.analysis.referee import Comparison
    from mup_tpu.cli.table import TableOptions
    from mup_tpu.report import Page


# Figures, reports and what a path seldom holds are imported in functions: half of a command is imports.
# Significant digits of stored analyses: later ones depend on the processor
_DIGITS = 4
CHECK_FILE = "coord_check.parquet"  # table of a coordinate check in its results folder


def open_results(paths: str | Sequence[str], options: TableOptions) -> Results:
    """Open the content of a path, or of several: results folders stand beside each other, tables are one.

    An unknown kind is read as a table.
    """
    given = [paths] if isinstance(paths, str) else [*paths]
    if not given:
        raise ConfigError("paths are missing: give a results folder or a table")
    paths = []
    for path in given:  # the shell leaves a pattern alone that is quoted, or that a URL follows
        is_pattern = glob.has_magic(path) and not Path(path).exists()
        paths += (is_pattern and sorted(glob.glob(path))) or [path]
    path = paths[0]
    # Results folders are compared; tables are read as one, as a tool may write a file per run.
    if len(paths) > 1:
        of_sweeps = all((Path(path) / STORE_FILE).exists() for path in paths)
        innermost = os.path.commonpath([os.path.abspath(path) for path in paths])
        return SeveralSweeps(innermost, options, paths) if of_sweeps else Results(path, options, paths)
    folder = Path(path)
    is_store = (folder / STORE_FILE).exists()
    if not is_store and (sweeps := sorted(str(file.parent) for file in folder.glob(f"*/{STORE_FILE}"))):
        return SeveralSweeps(path, options, sweeps)
    if is_search(path):
        return SearchResults(path, options)
    if (folder / "plan.json").exists() and options == type(options)():
        from mup_tpu.analysis.planned import Planned

        if (planned := Planned.load(path)) is not None and len(planned.follows) > 1:
            return PlannedResults(path, options)
    return CheckResults(path, options) if (folder / CHECK_FILE).exists() else Results(path, options)


class Results:
    """Runs of a sweep, or any table of runs."""

    other = ""  # content that is no run table, in words

    def __init__(self, path: str, options: TableOptions, paths: Sequence[str] = ()) -> None:
        self.path, self.options, self.name, self._paths = path, options, Path(path).name, paths or (path,)

    @cached_property
    def table(self) -> RunTable:
        if self.other:
            raise ConfigError(f"{self.path} holds {self.other}; give a sweep or a table of runs")
        return self.options.load(*self._paths)

    @cached_property
    def _judged(self) -> tuple[TransferAnalysis, list[Score]]:
        scores: list[Score] = []
        analysis = self.options.analyze(self.table)
        if not self.is_folder:
            return analysis, scores
        from mup_tpu.analysis.prediction import answered, score

        try:
            scores = score(load_predictions(self.path), analysis)
        except StoreError as error:  # the verdict does not need them
            # A higher level would be functools, whose warnings are shown as Python's.
            warnings.warn(f"{error}; kept predictions are left out", stacklevel=1)
        # A predicted scale alone has its score in the verdict's place.
        return answered(analysis, scores), scores

    @property
    def analysis(self) -> TransferAnalysis:
        return self._judged[0]

    @property
    def scores(self) -> list[Score]:
        return self._judged[1]

    def to_dict(self) -> dict[str, Any]:
        return verdicts.to_dict(self.analysis, self.scores)

    @property
    def is_folder(self) -> bool:
        # Then figures and report belong into the path itself.
        return self.table.stored is not None

    def show(self, console: Console) -> None:
        analysis, scale = self.analysis, columns.label(self.analysis.scale)
        are_targets = all(map(verdicts.is_target, analysis.results))  # single runs, as of a transfer
        if not are_targets:
            self.show_notes(console, analysis)
        for part in () if are_targets else analysis.parts:
            for result in part.results:
                optima = tables.optima_table(result, part.columns, "")
                name, tuned = rule_name(result.compared, part.compares), columns.label(part.hyperparameter)
                console.print(optima.between(0, -1, f"{name}: best {tuned} by {scale}"))
                for at, *_, status in optima.rows:
                    if status != "bracketed":
                        console.print(f"  {scale} {at}: {status}")
        printed = []
        for result in analysis.results:
            printed.append(verdicts.verdict(result, analysis, self.scores))
            console.print(printed[-1], style="bold")
            for detail in verdicts.details(result, analysis):
                console.print(f"  {detail}")
        for scored in self.scores:
            if (line := f"{verdicts.score_sentence(scored, analysis.columns)}.") not in printed:
                console.print(line)

    def show_notes(self, console: Console, analysis: TransferAnalysis) -> None:
        for note in notes(analysis):
            console.print(f"note: {note}", style="yellow")

    def show_next(self, console: Console) -> None:
        """Print the runs that would settle each open verdict, with reason, cost and commands."""
        analysis = self.analysis
        self.show_notes(console, analysis)
        headings = *map(columns.label, (analysis.scale, *analysis.columns.tuned)), "add", "then"
        for result in analysis.results:
            console.print(verdicts.verdict(result, analysis, self.scores), style="bold")
            batch = result.next_batch
            if batch is None:
                needed = "settled: no runs needed"
                if not analysis.columns.loss:
                    needed = verdicts.details(result, analysis)[0]
                console.print(f"  {needed}")
                continue
            scale = partial(columns.write_scale, analysis.scale)
            rows = [(scale(c.scale), *map(power, c.values), f"{c.runs}", f"{c.seeds}") for c in batch.cells]
            title = f"{rule_name(result.compared, analysis.compares)}: runs to add"
            console.print(Table(headings, rows, title))
            console.print(f"  {because(batch.reason, analysis.columns)}; {verdicts.price(batch)}")
            for line in verdicts.commands(batch, analysis.columns, analysis.table.command):
                console.print(f"  {line}", wrap=False)

    def next_to_dict(self) -> dict[str, Any]:
        batches = {r.compared: r.next_batch for r in self.analysis.results}
        return {rule: b and verdicts.batch_to_dict(b, self.analysis.columns) for rule, b in batches.items()}

    def figures(self) -> Mapping[str, Figure]:
        from mup_tpu.plots import transfer_figures

        return transfer_figures(self.analysis)

    def numbers(self) -> Mapping[str, str | bytes]:
        return (
            {} if self.other else {"analysis.json": to_json(verdicts.to_dict(self.analysis), _DIGITS) + "\n"}
        )

    def page(self) -> Page:
        from mup_tpu.report import sweep_page

        return sweep_page(self.analysis, self.scores)

    def draw(self, folder: Path | str | None = None) -> list[str]:
        """Write figures and their numbers, by default beside the results; returns paths of the PNG files."""
        folder = folder or self.figures_folder
        written = write_figures(self.figures(), folder)
        for file, content in self.numbers().items():
            write_file(f"figures folder {folder}", f"{folder}/{file}", content)
        return written

    def write_report(self, out: Path | None = None) -> str:
        """Write the report, by default beside the results, and of Markdown its figures; return its path."""
        from mup_tpu.report import Picture, render

        page = self.page()
        beside = f"{without_suffix(self._local_path)}.html"
        file = str(out or (f"{self.path.rstrip('/')}/report.html" if self.is_folder else beside))
        if not file.endswith(".md"):
            write_output("report", file, render(page))
            return file
        write_output("report", file, render(page, "md"))
        blocks = [*page.lead, *(block for section in page.sections for block in section.blocks)]
        pictures = {block.file: block.draw() for block in blocks if isinstance(block, Picture)}
        write_figures(pictures, file.rpartition("/")[0] or ".")
        return file

    @property
    def figures_folder(self) -> str:
        if "://" not in self.path:
            source = Path(self._local_path)
            return str((source if source.is_dir() else source.parent) / "figures")
        head, _, name = self.path.rstrip("/").rpartition("/")
        is_file = without_suffix(name) != name
        return f"{head}/figures" if is_file else f"{head}/{name}/figures"

    @property
    def _local_path(self) -> str:
        # Files about `wandb:ENTITY/PROJECT` begin with PROJECT.
        tracker, colon, runs = self.path.partition(":")
        return runs.rpartition("/")[2] if colon and tracker in TRACKERS else self.path


class SeveralSweeps(Results):
    """Several sweeps, each in a folder of the path."""

    is_folder, other = True, "several sweeps"

    @cached_property
    def comparison(self) -> Comparison:
        from mup_tpu.analysis.referee import compare

        names = [Path(path).name for path in self._paths]
        names = names if len(set(names)) == len(names) else [*self._paths]
        folders = dict(zip(names, self._paths, strict=True))
        judge = partial(self.options.analyze, whole=False)
        return compare(folders, lambda path: self.options.load(str(path)), judge)

    def show(self, console: Console) -> None:
        for note in tables.left_out(self.comparison):
            console.print(f"note: left out: {note}", style="yellow")
        console.print(f"{self.name}: {tables.verdict_counts(self.comparison)}")
        for table in tables.ruling_tables(self.comparison):
            console.print(table)

    def figures(self) -> Mapping[str, Figure]:
        from mup_tpu.plots import sweeps_figure

        return {"sweeps": sweeps_figure(self.comparison.rulings)}

    def numbers(self) -> Mapping[str, str | bytes]:
        numbers = self.comparison.table(rule_name).drop(columns="regret_status")
        return {"sweeps.csv": to_csv(numbers.round(4))}

    def page(self) -> Page:
        from mup_tpu.analysis.referee import predictions_inside
        from mup_tpu.report import sweeps_page

        return sweeps_page(self.name, self.comparison, predictions_inside(Path(self.path)))


class PlannedResults(Results):
    """Runs of a plan whose sizes grow together: its recipe, since a drift along one of them means nothing."""

    @cached_property
    def recipe(self) -> Recipe:
        from mup_tpu.analysis.planned import predict_planned

        made = predict_planned(self.path)
        assert made is not None
        return made

    def to_dict(self) -> dict[str, Any]:
        return self.recipe.to_dict()

    def figures(self) -> Mapping[str, Figure]:
        from mup_tpu.plots import transfer_figure

        return {"transfer": transfer_figure(self.analysis, is_judged=False)}

    def numbers(self) -> Mapping[str, str | bytes]:
        return {"analysis.json": to_json(self.to_dict(), _DIGITS) + "\n"}

    def page(self) -> Page:
        from mup_tpu.report import recipe_page

        return recipe_page(self.name, self.recipe, self.analysis)

    def show(self, console: Console) -> None:
        from mup_tpu.words.plans import recipe_lines, recipe_table

        console.print(recipe_table(self.recipe))
        for line in recipe_lines(self.recipe):
            console.print(line)

    def show_next(self, console: Console) -> None:
        self.show(console)


class SearchResults(Results):
    """Trials of a search."""

    is_folder, other = True, "a search"

    def show(self, console: Console) -> None:
        runs = load_runs(self.path)
        counts = counted(runs["status"].value_counts().items())
        best = tables.trials_table(runs)
        console.print(best.between(1, None, f"best of {len(runs)} trials ({counts})"))

    def figures(self) -> Mapping[str, Figure]:
        from mup_tpu.plots import search_figure

        runs = load_runs(self.path)
        return {"search": search_figure(ranked(runs), varied(runs))}

    def page(self) -> Page:
        from mup_tpu.report import search_page

        return search_page(self.name, load_runs(self.path))


class CheckResults(Results):
    """Measurements of coordinate checks."""

    is_folder, other = True, "a coordinate check"

    @cached_property
    def measured(self) -> pd.DataFrame:
        return pd.read_parquet(Path(self.path) / CHECK_FILE)

    def show(self, console: Console) -> None:
        from mup_tpu.analysis.diagnosis import SIZES, by_setting, scale_of

        for setting, table in by_setting(self.measured).items():
            rules = list(table["parametrization"].unique())
            title = f"{setting}: exponent of {columns.label(scale_of(table))} (95 %)"
            for i in range(0, len(rules), 2):  # three would be too wide for a terminal
                console.print(tables.slopes_table(table, rules[i : i + 2], SIZES, title))
            for rule, (_, *lines) in tables.conclusions(self.measured.attrs, setting).items():
                for line in lines:
                    console.print(f"{rule_name(rule)}: {line}", style="bold")

    def figures(self) -> Mapping[str, Figure]:
        from mup_tpu.plots import coordinate_check_figures

        return coordinate_check_figures(self.measured)

    def page(self) -> Page:
        from mup_tpu.report import coordinate_check_page

        return coordinate_check_page(self.name, self.measured)
