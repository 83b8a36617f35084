"""From the best of a search at a small width to the target width, zero-shot.

What μP transfers across width: learning rate, schedule, init, multipliers. What it does not: regularisation
(weight decay, dropout), which depends on model and data size. Yang et al. 2022 (Tensor Programs V), table 2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mup_tpu.config import Trial
from mup_tpu.config_io import from_dict
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import load_runs

SOURCE = "Yang et al. 2022, Tensor Programs V, table 2"
_UNMOVED = {
    "steps": "training time moves the optimum, by less in μP than in SP, but it moves",
    "batch_size": "the best learning rate depends on the batch size, and μP says nothing of it",
    "sequence_length": "the sequence length changes the batch in tokens",
    "corpus": "another corpus may have another optimum",
}


@dataclass(frozen=True)
class Found:
    """A trial of a search, and what it reached."""

    trial: Trial
    loss: float


def best_trials(results: str, count: int = 1) -> list[Found]:
    """The finished trials of least loss in a results folder.

    Raises:
        StoreError: the folder holds no finished trial.
    """
    runs = load_runs(results)
    finished = runs[runs["status"] == "finished"].nsmallest(count, "loss")
    if finished.empty:
        raise StoreError(f"results folder {results} holds no finished trial to transfer from")
    return [
        Found(from_dict(Trial, json.loads(config)), float(loss))
        for config, loss in zip(finished["config"], finished["loss"], strict=True)
    ]


def target_trials(
    found: Sequence[Found],
    width: int,
    parametrizations: Sequence[str],
    num_seeds: int = 1,
    **changes: int | str | None,
) -> list[Trial]:
    """The same hyperparameters at the target width.

    Args:
        found: trials to transfer from.
        width: target width.
        parametrizations: "mup" is the transfer; others, with the same hyperparameters, are for comparison.
        num_seeds: seeds of each.
        changes: fields of the trial that are to differ (None leaves one as it is).

    Raises:
        ConfigError: the target is not wider, or not allowed.
    """
    small = max(f.trial.model.width for f in found)
    if width <= small:
        raise ConfigError(f"width {width} is not above the search's width {small}; give the target's")
    changed = {name: value for name, value in changes.items() if value is not None}
    return [
        f.trial.replace(width=width, parametrization=p, seed=seed, **changed)
        for f in found
        for p in parametrizations
        for seed in range(num_seeds)
    ]


def transfer_warnings(source: Trial, target: Trial) -> list[str]:
    """What of the step from source to target μP does not vouch for, each with its reason."""
    warnings = []
    if source.model.parametrization != "mup":
        warnings.append(
            f"the search was in {source.model.parametrization}: only μP keeps the optimum in place"
        )
    if target.optimizer.weight_decay > 0:
        warnings.append(
            f"weight_decay {target.optimizer.weight_decay:g} is regularisation: its best value depends on "
            f"model and data size, and μP does not transfer it ({SOURCE})"
        )
    before_all, after_all = source.flat(), target.flat()
    for name, why in _UNMOVED.items():
        before, after = before_all[name], after_all[name]
        if before != after:
            warnings.append(f"{name} {before} became {after}: {why} ({SOURCE})")
    return warnings


def regret_against_sweep(runs: pd.DataFrame, sweep: str) -> list[dict[Any, Any]]:
    """Loss of transferred trials over the best of a sweep at the same width and parametrization.

    Args:
        runs: rows of transferred trials.
        sweep: results folder of the sweep.

    Returns:
        One row a parametrization that the sweep has at that width: loss, best and regret (nat per token).

    Raises:
        StoreError: no such sweep.
    """
    known = load_runs(sweep)
    best = known[known["status"] == "finished"].groupby(["parametrization", "width", "lr"])["loss"].mean()
    best = best.groupby(["parametrization", "width"]).min()
    reached = runs.groupby(["parametrization", "width"])["loss"].mean()
    table = pd.DataFrame({"loss": reached}).join(best.rename("best"), how="inner")
    return table.assign(regret=table["loss"] - table["best"]).reset_index().to_dict("records")
