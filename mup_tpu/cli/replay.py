"""Commands that replay stored results: runs, analyze, plot. They need no torch and no ray."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from mup_tpu.config import format_learning_rate
from mup_tpu.errors import TableError

Where = Annotated[str, tyro.conf.Positional]


def runs(path: Where, csv: Path | None = None, compact: bool = False) -> None:
    """Show the run table of a results folder, or export it.

    Args:
        path: Results folder (or fsspec URL).
        csv: File to export the whole table to, every column.
        compact: Merge the folder's parts into one file each, as for committing it.
    """
    from mup_tpu.store import Store, load_runs

    table = load_runs(path)
    console = Console()
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
    columns = {
        "parametrization": "parametrization",
        "width": "width",
        "lr": "lr",
        "seed": "seed",
        "loss": "loss",
        "status": "status",
        "steps_done": "steps",
        "wall_time_s": "seconds",
    }
    for column, heading in columns.items():
        shown.add_column(heading, justify="right" if table[column].dtype.kind in "if" else "left")
    for row in table[list(columns)].itertuples(index=False):
        shown.add_row(*(_cell(name, value) for name, value in zip(columns, row, strict=True)))
    console.print(shown)


def analyze(
    path: Where,
    width_col: str = "width",
    lr_col: str = "lr",
    loss_col: str = "loss",
    seed_col: str = "seed",
    parametrization_col: str = "parametrization",
    status_col: str = "status",
    hyperparameter: str | None = None,
    scale: str | None = None,
    chance: float | None = None,
    epsilon: float = 0.01,
    delta: float = 0.2,
    json: bool = False,
) -> None:
    """Print the optimum of every width, its drift and regret, and the verdict: does it transfer?

    Args:
        path: Results folder (or fsspec URL), or a CSV or Parquet file with a row a run.
        width_col: Column of the model width.
        lr_col: Column of the learning rate (plain, not log2).
        loss_col: Column of the loss.
        seed_col: Column of the seed; not needed.
        parametrization_col: Column of the parametrization; not needed.
        status_col: Column that says how a run ended; not needed.
        hyperparameter: Column to analyse in place of the learning rate, e.g. init_std.
        scale: Column to analyse in place of the width, e.g. depth.
        chance: Loss of guessing, nat per token; runs at or above it count as diverged.
        epsilon: Regret that does not matter, nat per token.
        delta: Drift exponent that does not matter.
        json: Print JSON alone, for machines.
    """
    from mup_tpu.analysis import Columns, load_table
    from mup_tpu.analysis import analyze as analyze_table

    columns = Columns(
        scale=scale or width_col,
        hyperparameter=hyperparameter or lr_col,
        loss=loss_col,
        seed=seed_col,
        parametrization=parametrization_col,
        status=status_col,
    )
    analysis = analyze_table(load_table(path, columns, chance), epsilon, delta)
    console = Console()
    if json:
        print(_to_json(analysis.to_dict()))
        return
    for note in analysis.notes:
        console.print(f"note: {note}", style="yellow", highlight=False)
    for result in analysis.results:
        table = Table(title=f"{result.parametrization}: best {analysis.hyperparameter} by {analysis.scale}")
        for heading in (analysis.scale, "optimum", "95 % interval", "loss there", "near-optimal", ""):
            table.add_column(heading, justify="right" if heading else "left")
        for o in result.optima:
            table.add_row(
                f"{o.scale:g}",
                f"2^{o.x:.2f}" if o.is_bracketed else "-",
                f"{_power(o.low)} to {_power(o.high)}" if not math.isnan(o.low) else "-",
                f"{o.loss:.4f}" if math.isfinite(o.loss) else "-",
                f"2^{o.band_low:g} to 2^{o.band_high:g}" if math.isfinite(o.band_low) else "-",
                o.sentence(),
            )
        console.print(table)
    for result in analysis.results:
        console.print(result.verdict.sentence, style="bold", highlight=False, soft_wrap=True)
        if result.verdict.settle:
            console.print(f"  to settle it: {result.verdict.settle}", highlight=False, soft_wrap=True)


def plot(path: Where, out: Path | None = None, chance: float | None = None) -> None:
    """Draw the figures of a results folder or table again, as PNG and SVG, with the data behind each.

    Args:
        path: Results folder, or a CSV or Parquet file.
        out: Folder for the figures; by default PATH/figures, or figures beside a file.
        chance: Loss of guessing, nat per token; runs at or above it count as diverged.
    """
    import pandas as pd

    from mup_tpu import plots
    from mup_tpu.analysis import Columns, load_table
    from mup_tpu.analysis import analyze as analyze_table

    console = Console()
    source = Path(path)
    folder = out or (source / "figures" if source.is_dir() else source.parent / "figures")
    measured = source / "coord_check.parquet"
    try:
        if measured.exists():
            figure = plots.coordinate_check_figure(pd.read_parquet(measured))
            paths = plots.save_figure(figure, folder, "coord_check")
        else:
            analysis = analyze_table(load_table(path, Columns(), chance))
            paths = []
            for name, draw in (
                ("transfer", plots.transfer_figure),
                ("optimum", plots.optimum_figure),
                ("regret", plots.regret_figure),
                ("best_loss", plots.best_loss_figure),
            ):
                paths += plots.save_figure(draw(analysis), folder, name)
            (folder / "analysis.json").write_text(_to_json(analysis.to_dict()) + "\n")
    except OSError as error:
        raise TableError(f"figures folder {folder} cannot be written: {error.strerror}") from None
    for figure_path in paths:
        if figure_path.suffix == ".png":
            console.print(f"figure: {figure_path}", highlight=False, soft_wrap=True)


def _cell(column: str, value: Any) -> str:
    if column == "lr":
        return format_learning_rate(value)
    if column == "loss":
        return f"{value:.4f}"
    return f"{value:.1f}" if column == "wall_time_s" else str(value)


def _power(x: float) -> str:
    return f"2^{x:.2f}" if math.isfinite(x) else "−∞" if x < 0 else "∞"


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
