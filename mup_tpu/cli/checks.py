"""Commands that check: layers that blow up (coord-check), and what this machine lacks (doctor)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mup_tpu.cli.console import console as make_console
from mup_tpu.config import Trial, require_above_zero
from mup_tpu.errors import ConfigError, StoreError, reason

if TYPE_CHECKING:
    import pandas as pd


def coord_check(
    results: str = "results/coord_check",
    trial: Trial = Trial(),
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024),
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
) -> None:
    """Train a few steps at several widths; plot each layer's activation and update size against width.

    In μP no slope is above 0 by much; in SP some are: those layers blow up as the model grows.

    Args:
        results: Folder for the table and the figures; what is stored there is not measured again.
        trial: What to train at each width; its width, parametrization and schedule are not used.
        widths: Widths to compare.
        parametrizations: Parametrizations to compare.
        num_seeds: Seeds to average over.
        check_steps: Optimizer steps, at a constant learning rate.
    """
    coord_checks(results, [trial], widths, parametrizations, num_seeds, check_steps)


def coord_checks(
    results: str,
    trials: Sequence[Trial],
    widths: tuple[int, ...],
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
) -> None:
    """`coord_check` of several trials into one table, each of its own optimizer or tying; drawn once."""
    from mup_tpu.cli import replay

    require_above_zero("num_seeds", num_seeds)
    if not widths or not parametrizations:
        raise ConfigError(f"{'parametrizations' if widths else 'widths'} is empty: give at least one")
    for trial in trials:
        _coord_check(results, trial, widths, parametrizations, num_seeds, check_steps)
    replay.plot(results)


def _coord_check(
    results: str,
    trial: Trial,
    widths: tuple[int, ...],
    parametrizations: tuple[str, ...],
    num_seeds: int,
    check_steps: int,
) -> None:
    """Measure what is missing of one, store it, and print its slopes."""
    import pandas as pd
    import pyarrow as pa

    from mup_tpu import data
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
            dataset = data.load(trial.data)
            for table in measure(trial, dataset, widths, parametrizations, num_seeds, stored, status.update):
                if len(table):
                    with folder.writing(name) as file:
                        table.to_parquet(file, index=False)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"results folder {results} cannot be used: {reason(error)}") from None
    own = analysis.setting_name(trial.optimizer.optimizer, trial.model.tied)
    _print_slopes(console, analysis.slopes(analysis.by_setting(table)[own]), own)


def _print_slopes(console: Console, slopes: pd.DataFrame, setting: str) -> None:
    """A row a layer; then, for each parametrization, the layer that grows fastest with width."""
    rows: list[dict[Any, Any]] = slopes.to_dict("records")
    cells = {
        (r["layer"], r["parametrization"], r["quantity"]): f"{r['slope']:+.2f} ± {r['high'] - r['slope']:.2f}"
        for r in rows
    }
    columns = list(dict.fromkeys((p, quantity) for _, p, quantity in cells))
    shown = Table("layer", title=f"{setting}: exponent of width (95 %)")
    for parametrization, quantity in columns:
        shown.add_column(f"{parametrization} {quantity}", justify="right")
    for layer in dict.fromkeys(r["layer"] for r in rows):
        shown.add_row(layer, *(cells[layer, *column] for column in columns))
    console.print(shown)
    for parametrization in dict.fromkeys(p for p, _ in columns):
        known = [r for r in rows if r["parametrization"] == parametrization and not math.isnan(r["slope"])]
        if not known:
            continue
        top = max(known, key=lambda r: r["slope"])
        what = f"{top['quantity']} of {top['layer']} ∝ width^{top['slope']:.2f}"
        console.print(f"{parametrization}: fastest growing is the {what}", style="bold", highlight=False)


def doctor(results: str = "results", tpu: str | None = None) -> None:
    """Say what this machine has for training, and what will not work and how to mend it.

    Args:
        results: Results folder (or fsspec URL) that is to be written.
        tpu: Compile packs for a TPU of this type (such as v4-8, or all of them: all) instead, on this
            machine and with the TPU's own compiler: memory, collectives and estimated cycles of each.
    """
    from mup_tpu.doctor import examine, examine_tpu

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
