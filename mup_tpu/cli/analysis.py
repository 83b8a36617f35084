"""Commands on stored results and on tables of runs: analyze and predict. They need neither torch nor Ray."""

from __future__ import annotations

import itertools
import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mup_tpu.cli.console import Console, to_csv, to_json, write_figures, write_output
from mup_tpu.cli.table import TableOptions
from mup_tpu.config.options import File, Repeated, Several, Where
from mup_tpu.errors import ConfigError, given
from mup_tpu.files import near

if TYPE_CHECKING:
    import pandas as pd

    from mup_tpu.analysis.planned import Recipe
    from mup_tpu.cli.results import Results


_RESULT = ("experiment", "loss", "status", "steps_done", "wall_time_s")
_MOST_ROWS, _ENDS = 1000, 20  # rows of a run table that are all shown; first and last ones of a longer one


def analyze(
    paths: Several = (),
    table: TableOptions = TableOptions(),
    delta: float = TableOptions.delta,
    next: bool = False,
    runs: bool = False,
    csv: File | None = None,
    figures: bool = False,
    report: bool = False,
    out: File | None = None,
    keep: bool = False,
    json: bool = False,
) -> None:
    """Print the optimum of every scale, its drift and regret, and the verdict.

    A search shows its best trials, and a coordinate check its exponents; a folder of sweeps, or several
    folders, show all sweeps beside each other.

    Args:
        paths: Results folder (or fsspec URL); or a table in a file (CSV, Markdown, JSON, Parquet …); or the
            runs of a tracker: wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, or a folder of TensorBoard's; or a
            folder of Ray Tune, Lightning, Trainer or logs; or a database of MLflow or Optuna. Several
            tables are read as one. By default the folder in results that was written last.
        table: Columns and rows of the table.
        delta: Largest drift exponent that does not matter.
        next: Print the runs that would settle each open verdict, why, and their cost.
        runs: Print the run table of a results folder; of more than 1 000 runs the first and last 20.
        csv: File for the rows of a results folder, with every column.
        figures: Also draw the figures, as PNG and SVG, with the numbers behind them.
        report: Also write a page with verdict, figures, tables, origin of the runs and warnings: one
            self-contained HTML file, or with --out NAME.md Markdown with its figures beside it.
        out: Folder for --figures, or file for --report; by default figures or report.html in the results
            folder, or beside a table's file.
        keep: Store --where in the results folder: every later command uses these rows. Without --where, use
            all rows again.
        json: Print JSON only, for machines.
    """
    if out is not None and figures == report:
        raise ConfigError(f"out {str(out)!r} needs either --figures or --report")
    table = replace(table, delta=delta)
    if not paths:
        paths = (last_folder(),)
        Console(stderr=json).print(f"{paths[0]}:")
    # These change or show stored rows; they need no analysis, which may fail for want of optima.
    if keep or runs or csv is not None:
        if len(paths) != 1:
            raise ConfigError("keep, runs and csv take exactly one results folder")
        _show_folder(Console(stderr=json), paths[0], table, runs, csv, keep)
        if (runs or csv is not None) and not (next or figures or report or json):
            return
    from mup_tpu.cli.results import open_results

    console, results = Console(), open_results(paths, table)
    if json:
        console.write(to_json(results.next_to_dict() if next else results.to_dict()))
    elif next:
        results.show_next(console)
    else:
        results.show(console)
    console = Console(stderr=json)
    if figures:
        _print_figures(console, results.draw(out))
    if report:
        console.print(f"report: {results.write_report(out)}", wrap=False)


def last_folder() -> str:
    """Return the folder in results whose runs were written last."""
    stores = [file.parent for file in Path("results").glob("*/store.json")]
    if not stores:
        raise ConfigError("paths are missing: give a results folder or a table")
    return str(max(stores, key=lambda at: max(p.stat().st_mtime for p in (at, at / "runs") if p.exists())))


def _show_folder(
    console: Console, path: str, options: TableOptions, runs: bool, csv: Path | None, keep: bool
) -> None:
    from mup_tpu.analysis.run_table import select, varied
    from mup_tpu.store import Store, is_search, load_axes, load_header, load_runs

    header, conditions = load_header(path), tuple(options.conditions or ())
    axes = load_axes(path)
    along = axes.columns((*axes.compare, *axes.scale, *axes.tune))
    # A few columns of a long table are read fast.
    is_whole = csv is not None or conditions or is_search(path)
    table = select(load_runs(path, None if is_whole else [*along, *_RESULT]), conditions)
    if keep:
        Store(path, header.experiment).ask(conditions)
        words = ", ".join(condition.words for condition in load_header(path).where) or "all rows"
        console.print(f"the verdict of {path} uses {words}")
    if csv is not None:
        write_output("csv", csv, to_csv(table))
        console.print(f"{len(table)} runs exported to {csv}")
    if not runs:
        return
    from mup_tpu.config.columns import Table, write

    columns = [*(varied(table) if is_search(path) else along), "seed"]
    shared = [c for c in columns if len(table) > 1 and table[c].nunique(dropna=False) == 1]
    headings = {c: c.replace("_", "_\n") for c in columns if c not in shared}
    headings |= {"loss": "loss", "status": "status", "steps_done": "steps", "wall_time_s": "s"}
    digits = {"loss": 4, "wall_time_s": 1}

    def cell(column: str, value: Any) -> str:
        return f"{value:.{digits[column]}f}" if column in digits else write(column, value)

    shown = [(0, len(table))] if len(table) <= _MOST_ROWS else [(0, _ENDS), (len(table) - _ENDS, len(table))]
    parts = [table[[*headings]].iloc[first:last].to_dict("records") for first, last in shown]
    rows = [[cell(c, row[c]) for c in headings] for part in parts for row in part]
    if left_out := len(table) - len(rows):
        rows.insert(_ENDS, ["…"] * len(headings))
    settings = "".join(f", {c} {cell(c, table[c].iloc[0])}" for c in shared)
    title = f"{table['experiment'].iloc[0]}: {len(table)} runs{settings}"
    left = {heading for c, heading in headings.items() if table[c].dtype.kind not in "if"}
    console.print(Table([*headings.values()], rows, title, left))
    if left_out:
        console.print(f"{left_out} runs are not shown: --csv FILE writes all, --where CONDITION shows some")


def predict(
    path: Where = "",
    at: Repeated = (),
    table: TableOptions = TableOptions(),
    loss_law: bool = False,
    asymptote: float | None = None,
    figures: bool = False,
    out: File | None = None,
    keep: bool = False,
    claim: Literal["by-name", "yes", "no"] = "by-name",
    format: Literal[
        "text", "toml", "transformers", "nanochat", "torchtitan", "olmo-core", "megatron"
    ] = "text",
    json: bool = False,
) -> None:
    """Predict the optimum at a scale that was not run.

    Prints the optimum with its interval, its cost and the loss. Several scales that vary together (--scale
    N,D,bs) give one power law of all, lr* ∝ N^a · D^b · bs^c. With --loss-law, fits the loss instead: a table
    of (parameters, tokens, loss) or (compute, loss) needs no learning rate.

    Args:
        path: Results folder (or fsspec URL), or any table, as for analyze; or the file of a plan. Without
            one, published laws say a transformer's learning rate: --at params=1.3B, or width=2048 depth=24.
        at: Targets, NAME=VALUE: the table's scale (width=4096), or a column that follows from it
            (params=1.3e9). Of several scales a value each, with commas: N=1e9,D=2e10,bs=512.
        table: Columns and rows of the table; --scale takes several columns, with commas.
        loss_law: Fit L = E + A·N^-α + B·D^-β, or E + A·C^-α, and predict losses at params=7e9,tokens=2e12, or
            the best size of a budget, compute=1e21; --compare tells how much compute one recipe saves.
        asymptote: The irreducible loss E of --loss-law, where it is known.
        figures: Also draw the prediction, or the law of two scales, as PNG and SVG.
        out: Folder for --figures; by default figures in the results folder or beside the file.
        keep: Store the predictions in the results folder; analyze scores them when their scale is run.
        claim: Whether the rules claim to keep the optimum along the scale, which narrows intervals; by-name
            for the claims of rules that are known by name, such as mup.
        format: Program that takes the values, with its parameter groups under μP: text for people; TOML;
            TrainingArguments and a Trainer of transformers; Python of torchtitan or OLMo-core; or a command
            line of nanochat, torchtitan or Megatron-LM.
        json: Print JSON only, for machines.
    """
    if out is not None and not figures:
        raise ConfigError(f"out {str(out)!r} needs --figures")
    console = Console()
    if not path:
        if loss_law or figures or keep or claim != "by-name" or format != "text" or table != TableOptions():
            raise ConfigError("without a table or results folder, published laws take --at and --json alone")
        if not at:
            raise ConfigError("predict needs a table or folder, or a transformer's size: --at params=1.3B")
        from mup_tpu.tuning.target import goal_of, read_target
        from mup_tpu.words.plans import published_table, published_words

        goal = goal_of(read_target(at), None, 0)
        prior = goal.published
        assert prior is not None
        if json:
            console.write(to_json(prior.to_dict() | {"derived": list(goal.derived)}))
            return
        console.print(published_words(prior), style="bold")
        for sentence in goal.derived:
            console.print(f"  derived: {sentence}")
        console.print(published_table(prior))
        console.print("next: mup-tpu plan --at ... --budget 200h names the runs that move it", wrap=False)
        return
    if loss_law and (keep or claim != "by-name" or format != "text"):
        raise ConfigError("loss_law predicts losses, which take no option keep, claim or format")
    if asymptote is not None and not loss_law:
        raise ConfigError(f"{given('asymptote', asymptote)} needs {given('loss_law')}")
    path = path if loss_law else folder_of_plan(path)
    if format != "text" and (json or figures):
        raise ConfigError(f"format {format} prints the values alone: give no other output")
    if not loss_law and (recipe := predict_planned_folder(path, at)) is not None:
        if figures or claim != "by-name" or table != TableOptions():
            raise ConfigError("the prediction of a plan takes --at, --keep, --format and --json alone")
        if keep:
            from mup_tpu.config.options import TransferOptions
            from mup_tpu.store import load_axes
            from mup_tpu.tuning.transfer import Transfer

            if (axes := load_axes(path)).is_study:
                raise ConfigError(f"the prediction of your own training is kept by mup-tpu transfer {path}")
            Transfer(path, TransferOptions(tuple(f"{n}={recipe.values[n]}" for n in axes.scale))).keep(path)
        print_recipe(recipe, path, format, json)
        return
    from mup_tpu.cli.results import Results, open_results
    from mup_tpu.words import predictions
    from mup_tpu.words.reasons import because, notes

    # Rows of a rule and its predicted values at a target, as programs take them
    answers: list[tuple[pd.DataFrame, Mapping[str, Sequence[float]], Mapping[str, Any], str]] = []
    if loss_law:
        from mup_tpu.analysis import loss_laws

        laws, results = loss_laws(path, at, asymptote, table.reading(path)), Results(path, table)
        values, lines = predictions.loss_laws_to_dict(laws), predictions.loss_law_lines(laws)
        before, after = [because(note, laws.table.columns) for note in laws.notes], list[str]()
    else:
        from mup_tpu.analysis.prediction import predict_analysis, read_targets, to_keep
        from mup_tpu.analysis.run_table import rows_of
        from mup_tpu.store.header import keep_predictions

        results = open_results(path, table)
        rows, column = results.table.rows, results.table.columns.parametrization
        assert rows is not None, "a place was read"
        targets, claims = read_targets(results.table, at), {"yes": True, "no": False}.get(claim)
        made = predict_analysis(table.analyze(results.table, whole=False), targets, claim=claims)
        if keep:
            keep_predictions(path, to_keep(made))
        values, lines = predictions.predictions_to_dict(made), predictions.lines(made)
        before, after = notes(made.analysis), [because(n, made.analysis.columns) for n in made.notes]
        best: dict[tuple[str, str], tuple[Mapping[str, float], dict[str, Sequence[float]]]] = {}
        for one in made.predictions:
            _, tuned = best.setdefault((one.compared, one.target), (one.sizes, {}))
            tuned[one.hyperparameter] = (one.x, *one.interval)
        answers = [(rows_of(rows, column, rule), tuned, at, rule) for (rule, _), (at, tuned) in best.items()]
    written = list[str]()
    if figures:
        from mup_tpu import plots

        drawn = {"loss_law": plots.loss_law_figure(laws)} if loss_law else plots.prediction_figures(made)
        written = write_figures(drawn, out or results.figures_folder)
    if format != "text":
        for values_of_rule in answers:
            _print_for(format, path, *values_of_rule)
        return
    if json:
        console.write(to_json(values))
        return
    for note in before:
        console.print(f"note: {note}", style="yellow")
    for line in lines:
        console.print(line, style=None if line.startswith(" ") else "bold")
    for note in after:
        console.print(f"note: {note}", style="yellow")
    _print_base_rates(answers)
    _print_figures(console, written)


def folder_of_plan(path: str) -> str:
    """Return the results folder of a plan's file; other paths are returned as they are."""
    if not path.endswith(".toml"):
        return path
    from mup_tpu.config.toml import read_toml

    values = read_toml(path)
    if "target" not in values or "experiment" not in values:
        raise ConfigError(f"{path} is no plan with a [target], as mup-tpu plan writes it")
    folder = f"results/{values['experiment']}"
    if not Path(folder, "plan.json").exists():
        raise ConfigError(f"{path} has no runs in {folder} yet: mup-tpu sweep {path} makes them")
    return folder


def predict_planned_folder(path: str, at: Sequence[str]) -> Recipe | None:
    """Return the recipe for the target of a folder's plan; None without a plan.

    `at` gives other sizes than the target's; a size that the plan does not follow is left to its table.
    """
    from mup_tpu.analysis.planned import Planned, predict_planned
    from mup_tpu.config.values import as_number

    if path.endswith((".csv", ".parquet", ".tsv", ".json", ".jsonl")) or ":" in path.replace("://", ""):
        return None  # a table, or a tracker such as mlflow:NAME
    planned = Planned.load(path)
    sizes = {n.strip(): as_number(v) for text in at for n, _, v in [text.partition("=")]}
    if planned is None or not {*sizes} <= {*planned.follows} or None in sizes.values():
        return None
    return predict_planned(path, {name: value for name, value in sizes.items() if value is not None})


def print_recipe(made: Recipe, path: str, format: str = "text", json: bool = False) -> None:
    """Print the recipe of a plan's target."""
    from mup_tpu.analysis.run_table import rows_of
    from mup_tpu.store import load_axes, load_runs
    from mup_tpu.words.plans import recipe_lines, recipe_table

    if json:
        Console().write(to_json(made.to_dict()))
        return
    rows = rows_of(load_runs(path), load_axes(path).compared, made.rule)
    tuned = {one.hyperparameter: (one.x, *one.interval) for one in made.optima}
    if format != "text":
        _print_for(format, path, rows, tuned, made.values, made.rule)
        return
    Console().print(recipe_table(made))
    lines = recipe_lines(made)
    for line, below in itertools.pairwise([*lines, ""]):
        has_details = below.startswith(" ") and not line.startswith(" ")
        Console().print(line, style="bold" if has_details else None)
    _print_base_rates([(rows, tuned, made.values, made.rule)])
    if made.came is None and all(one.known == made.cells for one in made.optima):
        Console().print(f"next: mup-tpu transfer {near(path)}", wrap=False)


def _print_for(
    format: str,
    path: str,
    rows: pd.DataFrame,
    tuned: Mapping[str, Sequence[float]],
    values: Mapping[str, Any],
    rule: str,
) -> None:
    """Print values for a program; as TOML, those of our networks are a trial for `mup-tpu train`."""
    from mup_tpu.config import Trial
    from mup_tpu.config.columns import CONFIGURED
    from mup_tpu.config.toml import from_dict, write_trial
    from mup_tpu.store import holds_store, load_axes
    from mup_tpu.words.recipes import shared_settings, write_recipe

    def by_field(given: Mapping[str, Any]) -> dict[str, Any]:
        return {CONFIGURED[name].field if name in CONFIGURED else name: x for name, x in given.items()}

    if format == "toml" and holds_store(path) and not load_axes(path).is_study:
        trial = from_dict(Trial, json_format.loads(rows.iloc[-1]["config"]))
        best = {name: float(2.0**x) for name, (x, *_) in by_field(tuned).items()}
        fields = trial.flat()
        counts = {n: int(v) if type(fields.get(n)) is int else v for n, v in by_field(values).items()}
        text = write_trial(trial.replace(**counts | best))
    else:
        text = write_recipe(format, tuned, values, "" if rule == "all" else rule, shared_settings(rows))
    Console().write((f"# {rule}\n" if rule not in ("", "all") else "") + text.rstrip("\n"))


def _print_base_rates(
    of_rules: Sequence[tuple[pd.DataFrame, Mapping[str, Sequence[float]], Mapping[str, Any], str]],
) -> None:
    """Say that a predicted learning rate is the base width's, where the rule gives others to the target."""
    from mup_tpu.words.recipes import base_rate_words, shared_settings

    for rows, tuned, values, rule in of_rules:
        for name, (x, *_) in tuned.items():
            if words := base_rate_words({**shared_settings(rows), **values}, rule, name, 2.0**x):
                Console().print(words)


def show(path: str, table: TableOptions = TableOptions()) -> Results:
    """Draw the figures of a results folder and print its analysis, from one reading."""
    from mup_tpu.cli.results import open_results

    results, written = open_results(path, table), list[str]()
    try:
        written = results.draw()
    finally:
        results.show(Console())
    _print_figures(Console(), written)
    return results


def _print_figures(console: Console, paths: Sequence[str]) -> None:
    if paths:
        names = ", ".join(path.rpartition("/")[2] for path in paths)
        console.print(f"figures in {near(paths[0].rpartition('/')[0])}: {names}")
