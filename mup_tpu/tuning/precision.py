"""Precision "auto": the results folder's; in a new folder bf16, if the device has units for it.

It is decided once, by the driver, before trials have their ids: rows and ids hold float32 or bf16.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from mup_tpu.config import RunOptions, Sweep, Trial
from mup_tpu.devices.peak import bfloat16_units
from mup_tpu.jobs.this_machine import is_cpu
from mup_tpu.store import load_precisions


def decided(trial: Trial, results: str | None, run: RunOptions, console: Console) -> Trial:
    """The trial with a precision in place of "auto"; prints the precision and the reason.

    Raises:
        StoreError: the results folder cannot be read.
    """
    if trial.train.precision != "auto":
        return trial
    stored = load_precisions(results) if results is not None else ()
    if len(stored) == 1:
        precision, why = stored[0], f"as the runs in {results}"
    else:
        precision, why = precision_of(run)
    console.print(f"precision {precision}: {why}")
    return trial.replace(precision=precision)


def decided_sweep(sweep: Sweep, results: str, run: RunOptions, console: Console) -> Sweep:
    """The sweep with a precision in place of "auto", as `decided`; one that compares precisions stays."""
    if any("precision" in axis.fields for axis in sweep.axes):
        return sweep
    return replace(sweep, base=decided(sweep.base, results, run, console))


def precision_of(run: RunOptions) -> tuple[str, str]:
    """Precision that "auto" means on this machine's device, and why."""
    has, why = bfloat16_units("xla" if run.device == "xla" else "cpu" if is_cpu(run) else "cuda")
    return ("bf16" if has else "float32"), why
