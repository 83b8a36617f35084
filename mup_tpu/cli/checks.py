"""Commands that check: layers that blow up (coord-check), and what this machine lacks (doctor)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mup_tpu.cli.console import console as make_console
from mup_tpu.config import Axis, Trial, require_above_zero
from mup_tpu.config.columns import label
from mup_tpu.config.toml import parse_axis
from mup_tpu.errors import ConfigError, StoreError, reason

if TYPE_CHECKING:
    import pandas as pd


WIDTHS = Axis("width", (64, 128, 256, 512, 1024))


def coord_check(
    results: str | None = None,
    trial: Trial = Trial(),
    scale: str | None = None,
    widths: tuple[int, ...] | None = None,
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
) -> None:
    """Train a few steps at several widths; plot each layer's activation and update size against width.

    In μP no slope is above 0 by much; in SP some are: those layers blow up as the model grows. Along another
    scale, such as --scale depth=2,4,8,16, the same against that.

    Args:
        results: Folder for the table and the figures; what is stored there is not measured again. By default
            results/coord_check, or results/coord_check_depth and so on.
        trial: What to train at each point of the scale; its own value along it, parametrization and
            schedule are not used. Where it has no base along the scale, the smallest value is the base.
        scale: Another way of growing, any number of a trial: depth=2,4,8,16,32,64.
        widths: Widths to compare, by default 64 to 1024; short for --scale width=...
        parametrizations: Parametrizations to compare.
        num_seeds: Seeds to average over.
        check_steps: Optimizer steps, at a constant learning rate.
    """
    axis = scale_of_check(scale, widths, WIDTHS)
    coord_checks(results or default_results(axis), [trial], axis, parametrizations, num_seeds, check_steps)


def scale_of_check(scale: str | None, widths: tuple[int, ...] | None, usual: Axis) -> Axis:
    """The scale that was asked for; the usual one where none was.

    Raises:
        ConfigError: the short form and the long one were both given, or the scale is not one.
    """
    if scale is not None and widths is not None:
        raise ConfigError("scale and widths were both given: widths is short for one")
    if widths == ():
        raise ConfigError("widths is empty: give at least one")
    if widths is not None:
        return Axis("width", widths)
    return usual if scale is None else parse_axis(scale, "scale")


def default_results(scale: Axis) -> str:
    """Folder of the checks along a scale: a table holds one."""
    return "results/coord_check" + ("" if scale.field == "width" else f"_{scale.field}")


def coord_checks(
    results: str,
    trials: Sequence[Trial],
    scale: Axis,
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
) -> None:
    """`coord_check` of several trials into one table, each of its own optimizer or tying; drawn once."""
    from mup_tpu.cli import replay

    require_above_zero("num_seeds", num_seeds)
    if not parametrizations:
        raise ConfigError("parametrizations is empty: give at least one")
    for trial in trials:
        _coord_check(results, trial, scale, parametrizations, num_seeds, check_steps)
    replay.plot(results)


def _coord_check(
    results: str,
    trial: Trial,
    scale: Axis,
    parametrizations: tuple[str, ...],
    num_seeds: int,
    check_steps: int,
) -> None:
    """Measure what is missing of one, store it, and print its slopes."""
    import pandas as pd
    import pyarrow as pa

    from mup_tpu.analysis import coord_check as analysis
    from mup_tpu.files import Folder
    from mup_tpu.training.coord_check import measure

    if "://" in results:
        raise ConfigError(f"results {results} of a coordinate check is a URL: give a local folder")
    console = make_console()
    trial = trial.replace(steps=check_steps, warmup=0.0, schedule="constant")
    folder, name = Folder(results), "coord_check.parquet"
    try:
        stored = pd.read_parquet(Path(results) / name) if name in folder.names() else None
        with console.status("measuring") as status:
            for table in measure(trial, scale, parametrizations, num_seeds, stored, status.update):
                if len(table):
                    with folder.writing(name) as file:
                        table.to_parquet(file, index=False)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"results folder {results} cannot be used: {reason(error)}") from None
    own = analysis.setting_name(trial.optimizer.optimizer, trial.model.tied)
    _print_slopes(console, analysis.by_setting(table)[own], own)


def _print_slopes(console: Console, table: pd.DataFrame, setting: str) -> None:
    """A row a layer; then, for each parametrization, what its slopes come to."""
    from mup_tpu.analysis.coord_check import SIZES, scale_of, sentences, slopes

    rows: list[dict[Any, Any]] = slopes(table).to_dict("records")
    cells = {
        (r["layer"], r["parametrization"], r["quantity"]): f"{r['slope']:+.2f} ± {r['high'] - r['slope']:.2f}"
        for r in rows
    }
    quantities = [q for q in dict.fromkeys(r["quantity"] for r in rows) if q in SIZES]
    title = f"{setting}: exponent of {label(scale_of(table))} (95 %)"
    parametrizations = list(dict.fromkeys(r["parametrization"] for r in rows))
    for i in range(0, len(parametrizations), 2):  # more would not fit beside each other
        columns = [(p, q) for p in parametrizations[i : i + 2] for q in quantities]
        shown = Table("layer", title=title)
        for parametrization, quantity in columns:
            shown.add_column(f"{parametrization} {quantity}", justify="right")
        for layer in dict.fromkeys(r["layer"] for r in rows):
            shown.add_row(layer, *(cells.get((layer, *column), "") for column in columns))
        console.print(shown)
    for sentence in sentences(table):
        console.print(sentence, style="bold", highlight=False, soft_wrap=True)


def doctor(results: str = "results", tpu: str | None = None) -> None:
    """Say what this machine has for training, and what will not work and how to mend it.

    Args:
        results: Results folder (or fsspec URL) that is to be written.
        tpu: Compile packs for a TPU of this type (such as v4-8, or all of them: all) instead, on this
            machine and with the TPU's own compiler: memory, collectives and estimated cycles of each.
    """
    from mup_tpu.cli.doctor import examine, examine_tpu

    console = make_console()
    doing, found = ("looking", examine(results)) if tpu is None else ("compiling", examine_tpu(tpu))
    findings = []
    with console.status(doing) as status:
        for finding in found:
            findings.append(finding)
            status.update(f"{doing} ({len(findings)} done)")
    for finding in findings:
        console.print(
            f"{finding.subject:>20}  {finding.found}", markup=False, highlight=False, soft_wrap=True
        )
    problems = [finding.problem for finding in findings if finding.problem]
    for problem in problems:
        console.print(f"- {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not problems:
        console.print("nothing is missing" if tpu is None else "all as promised", style="green")
