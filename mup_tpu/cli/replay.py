"""Commands that replay stored results; they need neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.cli.output import to_csv, to_json, write_figures, write_file
from mup_tpu.cli.tables import TableOptions
from mup_tpu.config import columns
from mup_tpu.config.paths import File, Several, Where
from mup_tpu.config.table import Table
from mup_tpu.errors import TableError
from mup_tpu.store.conditions import Condition

if TYPE_CHECKING:
    import pandas as pd


def runs(path: Where, csv: File | None = None, compact: bool = False, where: tuple[str, ...] = ()) -> None:
    """Show the run table of a results folder, or export it.

    Args:
        path: Results folder (or fsspec URL).
        where: Rows to show or export, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE.
        csv: File for the rows, with every column; a quote goes before text that a spreadsheet would take for
            a formula.
        compact: Merge the folder's parts into one file each, for example before committing it.
    """
    from mup_tpu.analysis import ranking
    from mup_tpu.analysis.rows import select
    from mup_tpu.store import Store, is_search, load_axes, load_runs

    table = select(load_runs(path), [Condition.parse(text) for text in where])
    if compact:
        Store(path, str(table["experiment"].iloc[0])).compact()
    if csv is not None:
        write_file(f"csv {csv}", csv, to_csv(table))
        Console().print(f"{len(table)} runs exported to {csv}")
        return
    if is_search(path):
        varied = ranking.varied(table)
    else:
        axes = load_axes(path)
        varied = [column for axis in (axes.compare, axes.scale, axes.tune) for column in axis.columns]
    Console().print(_run_table(table, varied))


def _run_table(table: pd.DataFrame, varied: Sequence[str]) -> Table:
    """One row a run; a setting that all runs share stands in the title."""
    shared = [c for c in (*varied, "seed") if len(table) > 1 and table[c].nunique(dropna=False) == 1]
    said = "".join(f", {c} {_cell(c, table[c].iloc[0])}" for c in shared)
    headings = {c: c.replace("_", "_\n") for c in (*varied, "seed") if c not in shared} | {
        "loss": "loss",
        "status": "status",
        "steps_done": "steps",
        "wall_time_s": "s",
    }
    left = {heading for c, heading in headings.items() if table[c].dtype.kind not in "if"}
    title = f"{table['experiment'].iloc[0]}: {len(table)} runs{said}"
    rows = [
        [_cell(name, value) for name, value in zip(headings, row, strict=True)]
        for row in table[list(headings)].itertuples(index=False)
    ]
    return Table([*headings.values()], rows, title, left)


def _cell(column: str, value: Any) -> str:
    if column in ("loss", "wall_time_s"):
        return f"{value:.4f}" if column == "loss" else f"{value:.1f}"
    return columns.write(column, value)


def where_(path: Where, where: tuple[str, ...] = (), all: bool = False) -> None:
    """Set which rows the verdict of a results folder uses; without options, print them.

    Every command and page then takes these rows.

    Args:
        path: Results folder (or fsspec URL).
        where: Conditions on rows, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE: width>=64.
        all: Use all rows again.
    """
    from mup_tpu.analysis.rows import select
    from mup_tpu.store import Store, load_header, load_runs

    if where and all:
        raise TableError("where and all were both given: give the rows to ask about, or all of them")
    stored = load_runs(path)
    asked = tuple(Condition.parse(text) for text in where)
    select(stored, asked)
    if where or all:
        Store(path, str(stored["experiment"].iloc[0])).ask(asked)
    words = ", ".join(condition.words for condition in load_header(path).where) or "all rows"
    Console().print(f"{path} asks about {words}")


def analyze(paths: Several, table: TableOptions = TableOptions(), json: bool = False) -> None:
    """Print the optimum of every width, its drift and regret, and the verdict: does it transfer?

    A search shows its best trials; a folder of sweeps, or several folders, show all sweeps beside each other.

    Args:
        paths: Results folder (or fsspec URL); or a table in a file (CSV, TSV, JSON, JSONL, Parquet); or the
            runs of a tracker: wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, or a folder of TensorBoard's; or a
            folder of Ray Tune, Lightning, Trainer or nanoGPT; or a database of MLflow or Optuna. Several
            tables are read as one.
        table: Columns and rows of the table.
        json: Print JSON only, for machines.
    """
    from mup_tpu.cli.results import open_results

    found = open_results(paths, table)
    if json:
        Console().write(to_json(found.to_dict()))
    else:
        found.show(Console())


def next_(path: Where, table: TableOptions = TableOptions(), json: bool = False) -> None:
    """Print the runs that would settle each open verdict, why, and their cost.

    Args:
        path: Results folder (or fsspec URL); or a table in a file (CSV, TSV, JSON, JSONL, Parquet); or the
            runs of a tracker: wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, or a folder of TensorBoard's.
        table: Columns and rows of the table.
        json: Print JSON only, for machines.
    """
    from mup_tpu.cli.results import open_results

    found = open_results(path, table)
    if json:
        batches = {r.compared: r.next_batch for r in found.analysis.results}
        Console().write(to_json({name: batch and batch.to_dict() for name, batch in batches.items()}))
    else:
        found.show_next(Console())


def predict(
    path: Where,
    at: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    table: TableOptions = TableOptions(),
    json: bool = False,
    figure: File | None = None,
    keep: bool = False,
) -> None:
    """Print the optimum to expect at a scale that was not run, with intervals, costs and loss.

    Args:
        path: Results folder (or fsspec URL), or any table, as for analyze.
        at: Targets, NAME=VALUE, several with commas: the table's scale (width=4096), or a column that follows
            from it (params=1.3e9).
        table: Columns and rows of the table.
        json: Print JSON only, for machines.
        figure: Folder for the figure: optima, their line, and the fan out to the targets.
        keep: Keep the predictions in the results folder (predictions.json): analyze scores them when their
            scale is run.
    """
    from mup_tpu.cli.results import open_results

    found = open_results(path, table)
    predictions, drawn = found.predict(at), list[str]()
    if keep:
        found.keep(predictions)
    if figure is not None:
        from mup_tpu import plots

        drawn = write_figures({"prediction": plots.prediction_figure(predictions)}, figure)
    if json:
        Console().write(to_json(predictions.to_dict()))
        return
    found.show_predictions(Console(), predictions)
    _print_figures(drawn)


def law(
    path: Where,
    scales: tuple[str, ...] = (),
    at: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    best_over: tuple[str, ...] = (),
    table: TableOptions = TableOptions(),
    json: bool = False,
    figure: File | None = None,
) -> None:
    """Print the optimum as a power law of several scales that vary together: lr* ∝ N^a · D^b · B^c.

    Args:
        path: Results folder (or fsspec URL), or a table in a file.
        scales: Columns of sizes: width depth, or N D bs.
        at: Sizes at which to predict, a number for each scale: N=1e9,D=2e10,bs=512.
        best_over: Columns that are tuned too; of their values the best is taken in each cell.
        table: Columns and rows of the table.
        json: Print JSON only, for machines.
        figure: Folder for the figure: contours of the optimum over the first two scales.
    """
    from mup_tpu.analysis.power_law import fit_power_laws, read_sizes
    from mup_tpu.analysis.prediction import plain

    laws = fit_power_laws(path, scales, table.columns(path), best_over, table.conditions or ())
    sizes, drawn = [read_sizes(text) for text in at], list[str]()
    if figure is not None:
        from mup_tpu import plots

        drawn = write_figures({"law": plots.law_figure(laws)}, figure)
    if json:
        found = [one.to_dict() | {"at": [{"sizes": s, "x": one.at(s)} for s in sizes]} for one in laws]
        Console().write(to_json(found))
        return
    console = Console()
    for note in laws[0].notes:
        console.print(f"note: {note}", style="yellow")
    for one in laws:
        first, *others = one.lines()
        console.print(first, style="bold")
        for line in others:
            console.print(f"  {line}")
        for text, size in zip(at, sizes, strict=True):
            x, low, high = one.at(size)
            console.print(
                f"  at {text}: {columns.label(one.hyperparameter)} 2^{x:.2f} ({plain(x)}), 95 % 2^{low:.2f} "
                f"to 2^{high:.2f} ({plain(low)} to {plain(high)})"
            )
    _print_figures(drawn)


def isoflop(
    path: Where,
    at: tyro.conf.UseAppendAction[tuple[float, ...]] = (),
    params: str = "params",
    tokens: str = "tokens",
    loss: str = "loss",
    where: tuple[str, ...] = (),
    json: bool = False,
) -> None:
    """Print compute-optimal sizes, N* and D* by budget, from runs of several parameters and tokens.

    Args:
        path: Results folder (or fsspec URL), or a table in a file.
        at: Budgets in FLOP (6·N·D) at which to say N*, D* and the loss: 1e21.
        params: Column of the parameters.
        tokens: Column of the tokens.
        loss: Column of the loss, nat per token.
        where: Rows to take, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE: source=llama_3.
        json: Print JSON only, for machines.
    """
    from dataclasses import asdict

    from mup_tpu.analysis.compute_optimal import compute_optimal
    from mup_tpu.analysis.load import read_rows
    from mup_tpu.analysis.rows import no_column, select

    rows = select(read_rows(path), [Condition.parse(text) for text in where])
    own = {params: "params", tokens: "tokens", loss: "loss"}
    if missing := [column for column in own if column not in rows]:
        raise TableError(f"{no_column(rows, *missing)}; --params, --tokens and --loss name them")
    found = compute_optimal(rows[[*own]].rename(columns=own))
    optimal = [found.at(flops) for flops in at]
    if json:
        Console().write(to_json(found.to_dict() | {"at": [asdict(one) for one in optimal]}))
        return
    for line in (*found.lines(), *map(found.sentence, optimal)):
        Console().print(line)


def plot(paths: Several, out: File | None = None, table: TableOptions = TableOptions()) -> None:
    """Draw the figures of a results folder or table again, as PNG and SVG, with the numbers behind them.

    Args:
        paths: Results folder, or any table, as for analyze; or several.
        out: Folder for the figures; by default PATH/figures, or figures beside a file, or here.
        table: Columns and rows of the table.
    """
    from mup_tpu.cli.results import open_results

    _print_figures(open_results(paths, table).draw(out))


def show(path: str, table: TableOptions = TableOptions()) -> None:
    """Draw the figures of a results folder and print its analysis, from one reading."""
    from mup_tpu.cli.results import open_results

    found, drawn = open_results(path, table), list[str]()
    try:
        drawn = found.draw()
    finally:
        found.show(Console())
    _print_figures(drawn)


def report(paths: Several, out: File | None = None, table: TableOptions = TableOptions()) -> None:
    """Write one self-contained HTML file: verdict, figures, tables, origin of the runs, warnings.

    Figures react to the pointer: a point shows its loss, seeds and trials; a click on the key hides a curve.

    Args:
        paths: Results folder (or fsspec URL) of a sweep, a search or a coordinate check; or a folder of
            sweeps; or any table, as for analyze; or several.
        out: The file; by default report.html in the folder, or NAME.html beside a file.
        table: Columns and rows of the table.
    """
    from mup_tpu.cli.results import open_results

    Console().print(f"report: {open_results(paths, table).write_report(out)}", wrap=False)


def referee(path: Where = "results", out: File | None = None) -> None:
    """Print one page about all sweeps in the folders of a folder: each rule's verdict, interval and cost.

    Args:
        path: Folder of results folders.
        out: Markdown file for the page, in place of printing it; the figure, referee.png and referee.svg, is
            written beside it.
    """
    from mup_tpu.analysis.referee import Judged, held, page, rulings

    judged: Judged = {}
    found, left_out = rulings(path, judged)
    figure = "" if out is None else "referee.png"
    text = page(Path(path).name, found, left_out, figure, held(path, judged))
    if out is None:
        Console().write(text.removesuffix("\n"))
        return
    from mup_tpu import plots

    write_file(f"page {out}", out, text)
    _print_figures(write_figures({"referee": plots.referee_figure(found)}, out.parent))


def _print_figures(paths: Sequence[str]) -> None:
    for path in paths:
        Console().print(f"figure: {path}", wrap=False)
