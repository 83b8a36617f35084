"""Trials before and after a run: their data, precision "auto", and finished ones of a results folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.console import Console

from mup_tpu import data
from mup_tpu.config import DataConfig, RunOptions, Sweep, Trial, field_column
from mup_tpu.config.toml import stored_trial
from mup_tpu.devices.peak import bfloat16_units
from mup_tpu.errors import StoreError, raised_as
from mup_tpu.jobs.this_machine import is_cpu
from mup_tpu.store import load_precisions, load_runs


class Corpora:
    """Datasets of trials, which may differ in batches or in text; each is loaded once.

    Data of the given trials is loaded at once, so that errors come first.
    """

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self._datasets: dict[DataConfig, data.TokenDataset] = {}
        for trial in trials:
            self.of(trial)

    def of(self, trial: Trial) -> data.TokenDataset:
        if trial.data not in self._datasets:
            self._datasets[trial.data] = data.load(trial.data)
        return self._datasets[trial.data]

    def trial_id(self, trial: Trial) -> str:
        return trial.trial_id(self.of(trial).fingerprint)


def with_precision(trial: Trial, results: str | None, run: RunOptions, console: Console) -> Trial:
    """Return the trial with a precision in place of "auto", and print the precision and the reason.

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


def sweep_with_precision(sweep: Sweep, results: str, run: RunOptions, console: Console) -> Sweep:
    """Return the sweep with a precision in place of "auto"; one that compares precisions stays."""
    if any("precision" in axis.fields for axis in sweep.axes):
        return sweep
    return replace(sweep, base=with_precision(sweep.base, results, run, console))


def precision_of(run: RunOptions) -> tuple[str, str]:
    """Return the precision that "auto" means on this machine's device, and why."""
    has, why = bfloat16_units("xla" if run.device == "xla" else "cpu" if is_cpu(run) else "cuda")
    return ("bf16" if has else "float32"), why


@dataclass(frozen=True)
class KnownTrial:
    """Trial of a search, and its loss (nat per token)."""

    trial: Trial
    loss: float


def finished_runs(results: str) -> pd.DataFrame:
    """Return the rows of finished trials in a results folder.

    Raises:
        StoreError: there are none.
    """
    runs = load_runs(results)
    finished = runs[runs["status"] == "finished"]
    if finished.empty:
        raise StoreError(f"results folder {results} holds no finished trial to transfer from")
    return finished


def best_trials(results: str, count: int = 1, rule: str | None = None) -> list[KnownTrial]:
    """Return finished trials of least loss in a results folder, of one rule if the folder has any of it."""
    finished = finished_runs(results)
    of_rule = finished[finished[field_column("parametrization")] == rule]
    best = (finished if of_rule.empty else of_rule).nsmallest(count, "loss")
    return [known_trial(row, results) for row in best.to_dict("records")]


def known_trial(row: Mapping[Any, Any], results: str) -> KnownTrial:
    misfit = f"results folder {results} has a row whose config is no JSON of a trial"
    with raised_as(StoreError, misfit, (TypeError, ValueError)):
        return KnownTrial(stored_trial(json.loads(row["config"])), float(row["loss"]))
