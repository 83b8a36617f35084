"""Commands that replay stored results: runs, analyze, plot, report. They need no torch and no ray."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from mup_tpu.cli.console import console as make_console
from mup_tpu.config import columns, field_column
from mup_tpu.errors import TableError, reason
from mup_tpu.files import Folder
from mup_tpu.files.leftovers import scratch_folder
from mup_tpu.store.conditions import Condition

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from mup_tpu.analysis import RunTable, TransferAnalysis
    from mup_tpu.report import Page

Where = Annotated[str, tyro.conf.Positional]


def runs(path: Where, csv: Path | None = None, compact: bool = False, where: tuple[str, ...] = ()) -> None:
    """Show the run table of a results folder, or export it.

    Args:
        path: Results folder (or fsspec URL).
        where: Rows to show or export alone, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE.
        csv: File to export the whole table to, every column.
        compact: Merge the folder's parts into one file each, as for committing it.
    """
    from mup_tpu.analysis.rows import select
    from mup_tpu.store import Store, load_axes, load_runs

    table = select(load_runs(path), [Condition.parse(text) for text in where])
    console = make_console()
    if compact:
        Store(path, str(table["experiment"].iloc[0])).compact()
    if csv is not None:
        try:
            table.to_csv(csv, index=False)
        except OSError as error:
            raise TableError(f"csv {csv} cannot be written: {error.strerror}") from None
        console.print(f"{len(table)} runs exported to {csv}", highlight=False)
        return
    shown = Table(title=f"{table['experiment'].iloc[0]}: {len(table)} runs")
    axes = load_axes(path)
    varied = [field_column(field) for axis in (axes.compare, axes.scale, axes.tune) for field in axis.fields]
    shown_columns = dict(zip(varied, varied, strict=True)) | {
        "seed": "seed",
        "loss": "loss",
        "status": "status",
        "steps_done": "steps",
        "wall_time_s": "seconds",
    }
    for column, heading in shown_columns.items():
        shown.add_column(heading, justify="right" if table[column].dtype.kind in "if" else "left")
    for row in table[list(shown_columns)].itertuples(index=False):
        shown.add_row(*(_cell(name, value) for name, value in zip(shown_columns, row, strict=True)))
    console.print(shown)


@dataclass(frozen=True)
class TableOptions:
    """How to read a table, and what to compare in it."""

    width_col: str | None = None
    """Column of what grows. By default width, or one of another usual name, as d_model; in a results folder
    its sweep's scale."""
    lr_col: str | None = None
    """Column of the learning rate (plain, not log2). By default lr, or one of another usual name; in a
    results folder what was tuned."""
    loss_col: str = "loss"
    """Column of the loss. By default loss, or a held-out one of another usual name, or else training's."""
    seed_col: str = "seed"
    """Column of the seed; not needed."""
    parametrization_col: str | None = None
    """Column of what is compared; not needed. By default parametrization; in a results folder what its sweep
    compared."""
    status_col: str = "status"
    """Column that says how a run ended; not needed, and by default one called State too."""
    step_col: str = "step"
    """Column of the step, in a table with a row a step; not needed."""
    params_col: str = "params_non_embedding"
    """Column of the parameters without embeddings; not needed, but a scaling law wants it."""
    cost_col: str = ""
    """Column of what a run cost, in any unit; not needed. By default wall_time_s, or flops."""
    hyperparameter: str | None = None
    """Column to analyse in place of the learning rate, e.g. init_std."""
    scale: str | None = None
    """Column to analyse in place of the width, e.g. depth."""
    along: tuple[str, ...] = ()
    """Further columns that change with the scale, as on a ladder of shapes: depth."""
    where: tuple[str, ...] = ()
    """Rows to take alone, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE: tied=true width>=64. By default
    those that a results folder asks for (`mup-tpu ask`)."""
    finished_states: tuple[str, ...] = ()
    """States of the status column that mean finished, besides finished, completed, success and their like."""
    diverged_states: tuple[str, ...] = ()
    """States that mean diverged, besides diverged: failed, say, where nothing else fails."""
    unfinished_states: tuple[str, ...] = ()
    """States that say nothing of their trial, besides running, failed, crashed, killed and their like."""
    chance: float | None = None
    """Loss of guessing, nat per token; runs at or above it count as diverged."""
    epsilon: float = 0.01
    """Regret that does not matter, nat per token."""
    delta: float = 0.2
    """Drift exponent that does not matter."""

    def analyze(self, path: str) -> TransferAnalysis:
        """Read, check and analyse a results folder or table."""
        return self.analyze_table(self.load(path))

    def analyze_table(self, table: RunTable) -> TransferAnalysis:
        """Analyse a table that was read."""
        from mup_tpu.analysis import analyze as analyze_table

        return analyze_table(table, self.epsilon, self.delta)

    def load(self, path: str) -> RunTable:
        """Read and check a results folder or table."""
        from mup_tpu.analysis import load_table
        from mup_tpu.analysis.ingest.table_values import States
        from mup_tpu.analysis.load import default_columns

        usual = default_columns(path)
        columns = replace(
            usual,
            scale=self.scale or self.width_col or usual.scale,
            hyperparameter=self.hyperparameter or self.lr_col or usual.hyperparameter,
            parametrization=self.parametrization_col or usual.parametrization,
            loss=self.loss_col,
            seed=self.seed_col,
            status=self.status_col,
            step=self.step_col,
            params=self.params_col,
            cost=self.cost_col,
            along=(*usual.along, *self.along),
        )
        states = States(self.finished_states, self.diverged_states, self.unfinished_states)
        where = [Condition.parse(text) for text in self.where] if self.where else None
        return load_table(path, columns, self.chance, where, states)


def ask(path: Where, where: tuple[str, ...] = (), all: bool = False) -> None:
    """Say which rows of a results folder its verdict is of: every command and page then takes those.

    Without options it prints what the folder asks.

    Args:
        path: Results folder (or fsspec URL).
        where: Conditions on its rows, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE: width>=64.
        all: Ask about all rows again.
    """
    from mup_tpu.analysis.rows import select
    from mup_tpu.store import Store, load_question, load_runs

    if where and all:
        raise TableError("where and all were both given: give the rows to ask about, or all of them")
    stored = load_runs(path)
    asked = tuple(Condition.parse(text) for text in where)
    select(stored, asked)
    if where or all:
        Store(path, str(stored["experiment"].iloc[0])).ask(asked)
    words = ", ".join(condition.words for condition in load_question(path)) or "all rows"
    make_console().print(f"{path} asks about {words}", highlight=False, soft_wrap=True)


def analyze(path: Where, table: TableOptions = TableOptions(), json: bool = False) -> None:
    """Print the optimum of every width, its drift and regret, and the verdict: does it transfer?

    Of a search, its best trials; of a folder of sweeps, all beside each other.

    Args:
        path: Results folder (or fsspec URL); or a table in a file (CSV, TSV, JSON, JSONL, Parquet); or the
            runs of a tracker: wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, or a folder of TensorBoard's.
        table: How to read it.
        json: Print JSON alone, for machines.
    """
    if json:
        print(_to_json(table.analyze(path).to_dict()))
        return
    match _kind(path):
        case "search":
            _print_ranking(path)
        case "sweeps":
            show_ablations(path, figures=False)
        case _:
            _print_analysis(table.analyze(path))


def next_(path: Where, table: TableOptions = TableOptions(), json: bool = False) -> None:
    """Say which runs next would settle each open verdict, why, and what they cost.

    Args:
        path: Results folder (or fsspec URL); or a table in a file (CSV, TSV, JSON, JSONL, Parquet); or the
            runs of a tracker: wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, or a folder of TensorBoard's.
        table: How to read it.
        json: Print JSON alone, for machines.
    """
    checked = table.load(path)
    analysis = table.analyze_table(checked)
    if json:
        batches = {r.parametrization: r.next_batch for r in analysis.results}
        print(_to_json({name: batch and batch.to_dict() for name, batch in batches.items()}))
        return
    console = make_console()
    _print_notes(console, analysis)
    for result in analysis.results:
        console.print(result.verdict.sentence, style="bold", highlight=False, soft_wrap=True)
        batch = result.next_batch
        if batch is None:
            console.print("  settled: nothing to run", highlight=False)
            continue
        shown = Table(title=f"{result.parametrization}: runs to add")
        for heading in (columns.label(analysis.scale), columns.label(analysis.hyperparameter), "add", "then"):
            shown.add_column(heading, justify="right")
        for cell in batch.cells:
            scale = columns.write_scale(analysis.scale, cell.scale)
            shown.add_row(scale, f"2^{cell.x:.4g}", str(cell.runs), str(cell.seeds))
        console.print(shown)
        console.print(f"  {batch.reason}; {batch.price()}", highlight=False, soft_wrap=True)
        for line in batch.commands(checked.columns, checked.command):
            console.print(f"  {line}", highlight=False, soft_wrap=True)


def show(path: str, table: TableOptions = TableOptions()) -> None:
    """Print the analysis of a results folder and draw its figures there, from one reading."""
    analysis = table.analyze(path)
    _print_analysis(analysis)
    _draw(analysis, _figures_folder(path))


def show_ablations(path: str, figures: bool = True) -> None:
    """Print the sweeps of a folder beside each other, and draw them there."""
    table = _compared(path)
    shown = Table(title=f"{Path(path).name}: {len(table)} sweeps, the worst regret first")
    for heading in ("", "α (95 %)", "regret (nat, 95 %)", "best loss, largest", "verdict"):
        shown.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
    rows: list[dict[Any, Any]] = table.to_dict("records")
    for row in rows:
        shown.add_row(
            row["name"],
            f"{row['alpha']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            f"{row['regret']:.3f} ({row['regret_low']:.3f} to {row['regret_high']:.3f})",
            f"{row['best_loss']:.3f}",
            row["verdict"],
        )
    make_console().print(shown)
    if figures:
        _draw_ablations(table, _figures_folder(path))


def _kind(path: str) -> Literal["sweeps", "search", "coordinate check", "table"]:
    """What a path holds; of what is none of the others, reading it as a table says what is wrong."""
    from mup_tpu.store import is_search

    if _sweeps_in(path):
        return "sweeps"
    if is_search(path):
        return "search"
    return "coordinate check" if _coordinate_check(path).exists() else "table"


def _coordinate_check(path: str) -> Path:
    return Path(path) / "coord_check.parquet"


def _sweeps_in(path: str) -> list[Path]:
    """Stores in the folders of a folder that is none itself."""
    if (Path(path) / "store.json").exists() or not Path(path).is_dir():
        return []
    return sorted(file.parent for file in Path(path).glob("*/store.json"))


def _compared(path: str) -> pd.DataFrame:
    from mup_tpu.analysis.ablations import compare

    return compare({folder.name: TableOptions().analyze(str(folder)) for folder in _sweeps_in(path)})


def _draw_ablations(table: pd.DataFrame, folder: Path | str) -> None:
    from mup_tpu import plots

    _save({"ablations": plots.ablations_figure(table)}, folder)
    numbers = table.to_csv(index=False, float_format="%.4f")
    _write(f"figures folder {folder}", folder, "ablations.csv", numbers.encode())


def _print_ranking(path: str) -> None:
    from mup_tpu.analysis.ranking import ranking
    from mup_tpu.store import load_runs

    trials = ranking(load_runs(path))
    counts = ", ".join(f"{n} {status}" for status, n in trials["status"].value_counts().items())
    best = trials[trials["status"] == "finished"].drop(columns=["status", "steps_done"]).head(10)
    shown = Table(title=f"best of {len(trials)} trials ({counts})")
    for column in best:
        shown.add_column(str(column).removesuffix("_steps"), justify="right")
    for row in best.itertuples(index=False):
        shown.add_row(
            *(
                f"{value:.4f}" if name == "loss" else f"{value:.3g}"
                for name, value in zip(best.columns, row, strict=True)
            )
        )
    make_console().print(shown)


def _print_notes(console: Console, analysis: TransferAnalysis) -> None:
    for note in analysis.notes:
        console.print(f"note: {note}", style="yellow", highlight=False)


def _print_analysis(analysis: TransferAnalysis) -> None:
    from mup_tpu import report

    console = make_console()
    _print_notes(console, analysis)
    for result in analysis.results:
        cells = report.optima_cells(result, analysis.scale)
        tuned, scale = columns.label(analysis.hyperparameter), columns.label(analysis.scale)
        shown = Table(title=f"{result.parametrization}: best {tuned} by {scale}")
        for heading in cells["headings"]:
            shown.add_column(heading, justify="left" if heading == "status" else "right")
        for row in cells["rows"]:
            shown.add_row(*row)
        console.print(shown)
    for result in analysis.results:
        console.print(result.verdict.sentence, style="bold", highlight=False, soft_wrap=True)
        for detail in report.details(result, analysis):
            console.print(f"  {detail}", highlight=False, soft_wrap=True)


def plot(path: Where, out: Path | None = None, table: TableOptions = TableOptions()) -> None:
    """Draw the figures of a results folder or table again, as PNG and SVG, with the numbers behind them.

    Args:
        path: Results folder, or any table, as for analyze.
        out: Folder for the figures; by default PATH/figures, or figures beside a file, or here.
        table: How to read it.
    """
    import pandas as pd

    from mup_tpu import plots
    from mup_tpu.analysis.ranking import ranking
    from mup_tpu.store import load_runs

    folder = out or _figures_folder(path)
    match _kind(path):
        case "sweeps":
            _draw_ablations(_compared(path), folder)
        case "search":
            _save({"search": plots.search_figure(ranking(load_runs(path)))}, folder)
        case "coordinate check":
            _save(plots.coordinate_check_figures(pd.read_parquet(_coordinate_check(path))), folder)
        case _:
            _draw(table.analyze(path), folder)


def _figures_folder(path: str) -> Path | str:
    if "://" in path:
        return f"{_without_file(path)}/figures"
    source = Path(_without_tracker(path))
    return source / "figures" if source.is_dir() else source.parent / "figures"


def _without_tracker(path: str) -> str:
    """A local path for what is drawn of a tracker's runs: `wandb:ENTITY/PROJECT` is PROJECT, here."""
    from mup_tpu.analysis.ingest.trackers import TRACKERS

    tracker, colon, runs = path.partition(":")
    return runs.rpartition("/")[2] if colon and tracker in TRACKERS else path


def _without_file(url: str) -> str:
    """The folder of a table's URL, or the URL of a results folder itself."""
    from mup_tpu.analysis.ingest.table_files import without_suffix

    head, _, name = url.rstrip("/").rpartition("/")
    return f"{head}/{name}" if without_suffix(name) == name else head


def _draw(analysis: TransferAnalysis, folder: Path | str) -> None:
    from mup_tpu import plots

    _save(plots.transfer_figures(analysis), folder, _to_json(analysis.to_dict()))


def _save(figures: Mapping[str, Figure], folder: Path | str, numbers: str | None = None) -> None:
    """Figures as files, and the numbers behind them as analysis.json, in a folder or at an fsspec URL."""
    from mup_tpu import plots

    names = []
    with scratch_folder() as scratch:
        for name, figure in figures.items():
            for file in plots.save_figure(figure, scratch, name):
                _write(f"figures folder {folder}", folder, file.name, file.read_bytes())
                names.append(file.name)
    if numbers is not None:
        _write(f"figures folder {folder}", folder, "analysis.json", f"{numbers}\n".encode())
    for name in names:
        if name.endswith(".png"):
            make_console().print(f"figure: {folder}/{name}", highlight=False, soft_wrap=True)


def _write(what: str, folder: Path | str, name: str, content: bytes) -> None:
    """Put a file into a folder or at an fsspec URL.

    Raises:
        TableError: it cannot be written.
    """
    try:
        Folder(folder).write(name, content)
    except OSError as error:
        raise TableError(f"{what} cannot be written: {reason(error)}") from None


def report(path: Where, out: Path | None = None, table: TableOptions = TableOptions()) -> None:
    """Write one self-contained HTML file: verdict, figures, tables, how the runs were made, warnings.

    Its figures answer to the pointer: a point says its loss, seeds and trials; a click on the key hides a
    curve.

    Args:
        path: Results folder (or fsspec URL) of a sweep, a search or a coordinate check; or a folder of
            sweeps; or any table, as for analyze.
        out: The file; by default report.html in the folder, or NAME.html beside a file.
        table: How to read it.
    """
    from mup_tpu import report as rendering
    from mup_tpu.analysis.ingest.table_files import without_suffix

    page, is_folder = _page(path, table)
    beside = f"{without_suffix(_without_tracker(path))}.html"
    file = str(out or (f"{path.rstrip('/')}/report.html" if is_folder else beside))
    folder, _, name = file.rpartition("/")
    _write(f"report {file}", folder or ".", name, rendering.render(page).encode())
    make_console().print(f"report: {file}", highlight=False, soft_wrap=True)


def _page(path: str, table: TableOptions) -> tuple[Page, bool]:
    """The report of what a path holds, and whether it is a folder of results."""
    import pandas as pd

    from mup_tpu import report as rendering
    from mup_tpu.store import load_runs

    name = Path(path).name
    match _kind(path):
        case "sweeps":
            return rendering.ablations_page(name, _compared(path)), True
        case "search":
            return rendering.search_page(name, load_runs(path)), True
        case "coordinate check":
            return rendering.coordinate_check_page(name, pd.read_parquet(_coordinate_check(path))), True
        case _:
            loaded = table.load(path)
            return rendering.sweep_page(table.analyze_table(loaded), loaded), loaded.stored is not None


def referee(path: Where = "results", out: Path | None = None) -> None:
    """Print one page about all sweeps in the folders of a folder: each rule's verdict, interval and cost.

    Args:
        path: Folder of results folders.
        out: File to write the page to, in Markdown, in place of printing it; its figure, referee.png and
            referee.svg, is written beside it.
    """
    from mup_tpu.analysis.referee import page, rulings

    found, left_out = rulings(path)
    text = page(Path(path).name, found, left_out, "" if out is None else "referee.png")
    if out is None:
        print(text, end="")
        return
    from mup_tpu import plots

    _write(f"page {out}", out.parent, out.name, text.encode())
    _save({"referee": plots.referee_figure(found)}, out.parent)


def _cell(column: str, value: Any) -> str:
    if column in ("loss", "wall_time_s"):
        return f"{value:.4f}" if column == "loss" else f"{value:.1f}"
    return columns.write(column, value)


def _to_json(value: Any) -> str:
    """JSON without the tokens NaN and Infinity, which it does not have: nan is null, infinities are text."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(v) for key, v in item.items()}
        if isinstance(item, list | tuple):
            return [plain(v) for v in item]
        if hasattr(item, "item"):
            item = item.item()
        if isinstance(item, float) and not math.isfinite(item):
            return None if math.isnan(item) else "inf" if item > 0 else "-inf"
        return round(item, 10) if isinstance(item, float) else item

    return json.dumps(plain(value), indent=1)
