"""The missing trials of a sweep, printed in place of being run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mup_tpu.cli.console import Console
from mup_tpu.cli.grid import SweepRun
from mup_tpu.config import Sweep, Trial
from mup_tpu.config.table import Table
from mup_tpu.config.values import write_time

if TYPE_CHECKING:
    from mup_tpu.tuning.forecast import Machine, SizeForecast


def say_what_would_run(sweep: Sweep, folder: str, how: SweepRun) -> None:
    """Print the missing trials of a sweep by size, with arithmetic, memory and time."""
    from mup_tpu.tuning import forecast
    from mup_tpu.tuning.precision import decided_sweep
    from mup_tpu.tuning.sweep import what_is_missing

    console = Console()
    run = replace(how.run, device="xla") if how.dry.dry_run_on else how.run
    sweep = decided_sweep(sweep, folder, run, console)
    total = len(sweep.trials())
    missing, corpora = what_is_missing(sweep, folder)
    console.print(f"{sweep.experiment}: {total} trials, {total - len(missing)} stored in {folder}")
    if not missing:
        return
    machine = _machine(missing, how)
    sizes = forecast.forecast(
        missing,
        sweep.scale_axis.fields,
        lambda trial: corpora.of(trial).vocab_size,
        machine,
        how.dry.mfu,
        how.where,
        how.run.micro_batches,
    )
    console.print(_table(sizes, machine))
    seconds = sum(row.seconds for row in sizes)
    flops = sum(row.flops * row.trials for row in sizes)
    within = f"the peak of {machine.name} in {missing[0].train.precision} is not known, nor the time"
    if not math.isnan(seconds):
        within = (
            f"about {write_time(seconds)} on {machine.name}, at {how.dry.mfu:.0%} of "
            f"{machine.flops / 1e12:.3g} TFLOP/s (--mfu), without start-up, compilation and evaluation"
        )
    console.print(f"in all {len(missing)} trials, {flops:.2g} FLOP: {within}")
    if how.until.until_settled:
        console.print("--until-settled buys a part of these trials, look by look, and may buy more seeds")


def _machine(missing: Sequence[Trial], how: SweepRun) -> Machine:
    from mup_tpu.tuning import forecast

    if how.dry.dry_run_on is None:
        return forecast.this_machine(missing, how.run)
    from mup_tpu.devices.peak import tpu_type

    return forecast.tpu(tpu_type(how.dry.dry_run_on))


def _table(sizes: Sequence[SizeForecast], machine: Machine) -> Table:
    each = " on each device" if machine.devices > 1 else ""
    headings = ("size", "trials", "packs", "FLOP a trial", f"a pack's memory{each}", "time of all")
    rows = []
    for row in sizes:
        needed = f"{row.memory_bytes / 2**20:,.0f} MiB"
        if row.memory_bytes > machine.memory_bytes:
            needed += f", {machine.memory_bytes / 2**20:,.0f} are there: the pack would be split"
        took = "?" if math.isnan(row.seconds) else write_time(row.seconds)
        counts = map(str, (row.size, row.trials, row.packs))
        rows.append((*counts, f"{row.flops:.2g}", needed, took))
    return Table(headings, rows, left=("size",))
