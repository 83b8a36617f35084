"""Zero-shot transfer: the best trials of a search at a small scale, and the same ones at the target.

μP transfers learning rate, schedule, init and multipliers across width. It does not transfer regularisation
(weight decay, dropout), which depends on model and data size: Yang et al. 2022 (Tensor Programs V), table 2.
Other parametrizations name the scales along which their optimum stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mup_tpu.config import MOST_TRIALS, Trial
from mup_tpu.config.toml import stored_trial
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.store import load_axes, load_runs

SOURCE = "Yang et al. 2022, Tensor Programs V, table 2"
_MOVES = {
    "width": "without a rule for width the best learning rate falls with it",
    "depth": "a rule for width says nothing of depth",
    "steps": "training time moves the optimum, by less in μP than in SP, but it moves",
    "batch_size": "the best learning rate depends on the batch size, and μP says nothing of it",
    "sequence_length": "the sequence length changes the batch in tokens",
    "corpus": "another corpus may have another optimum",
}


_SCALE_OF = {"steps": "tokens"}
"""Names of scales that differ from their field's."""


@dataclass(frozen=True)
class Found:
    """Trial of a search, and its loss (nat per token)."""

    trial: Trial
    loss: float


def best_trials(results: str, count: int = 1) -> list[Found]:
    """Finished trials of least loss in a results folder.

    Raises:
        StoreError: the folder holds no finished trial.
    """
    runs = load_runs(results)
    finished = runs[runs["status"] == "finished"].nsmallest(count, "loss")
    if finished.empty:
        raise StoreError(f"results folder {results} holds no finished trial to transfer from")
    return [
        Found(stored_trial(json.loads(config)), float(loss))
        for config, loss in zip(finished["config"], finished["loss"], strict=True)
    ]


def target_trials(
    found: Sequence[Found],
    target: Mapping[str, Any],
    parametrizations: Sequence[str],
    num_seeds: int = 1,
    **changes: int | str | None,
) -> list[Trial]:
    """Trials with the same hyperparameters at the target.

    Args:
        found: trials to transfer from.
        target: fields that grow, with their values there, such as {"width": 256} or {"depth": 8}.
        parametrizations: "mup" for the transfer; others, with the same hyperparameters, to compare it with.
        num_seeds: seeds of each trial.
        changes: other fields to change; None changes nothing.

    Raises:
        ConfigError: the target is not larger than the source, or not allowed.
    """
    for name, value in target.items():
        found[0].trial.replace(**{name: value})  # checks name and value
        small = max(f.trial.flat()[name] for f in found)
        if not value > small:
            raise ConfigError(f"{name} {value} is not above the search's {name} {small}; give the target's")
    if (count := len(found) * len(parametrizations) * num_seeds) > MOST_TRIALS:
        raise ConfigError(
            f"num_seeds {num_seeds} makes {count:,} trials; at most {MOST_TRIALS:,} are planned"
        )
    changed = {name: value for name, value in changes.items() if value is not None}
    return [
        f.trial.replace(parametrization=p, seed=seed, **_bases(f.trial, p), **changed, **target)
        for f in found
        for p in parametrizations
        for seed in range(num_seeds)
    ]


def _bases(source: Trial, parametrization: str) -> dict[str, int]:
    """Depth, batch size and steps of the source as bases, where it has none and rules follow them.

    Without them the target would be its own base, and nothing would be scaled.
    """
    fields, rules = source.flat(), source.optimizer.rules
    follows = {
        "base_depth": "depth" in PARAMETRIZATIONS[parametrization].follows,
        "base_batch_size": rules.decay == "timescale",
        "base_steps": rules.decay == "timescale",
    }
    own = {"base_depth": "depth", "base_batch_size": "batch_size", "base_steps": "steps"}
    return {base: fields[own[base]] for base, has in follows.items() if has and not fields[base]}


def transfer_warnings(source: Trial, target: Trial) -> list[str]:
    """Sentences on changes from source to target that the parametrization does not cover, with reasons."""
    warnings = []
    rule = PARAMETRIZATIONS[source.model.parametrization]
    if not rule.transfers:
        warnings.append(
            f"the search was in {source.model.parametrization}: only μP keeps the optimum in place"
        )
    if target.optimizer.weight_decay > 0:
        warnings.append(
            f"weight_decay {target.optimizer.weight_decay:g} is regularisation: its best value depends on "
            f"model and data size, and μP does not transfer it ({SOURCE})"
        )
    before_all, after_all = source.flat(), target.flat()
    stays = {*rule.transfers}
    stays |= {"batch_size"} if target.optimizer.batch_rule != "none" else set()
    stays |= {"tokens"} if target.optimizer.token_rule != "none" else set()
    for name, why in _MOVES.items():
        before, after = before_all[name], after_all[name]
        is_said = not rule.transfers and name == "width"
        if before != after and _SCALE_OF.get(name, name) not in stays and not is_said:
            warnings.append(f"{name} {before} became {after}: {why} ({SOURCE})")
    return warnings


def regret_against_sweep(runs: pd.DataFrame, sweep: str) -> list[dict[Any, Any]]:
    """Regret of transferred trials: loss minus the best of a sweep at the same scale and parametrization.

    Args:
        runs: rows of transferred trials.
        sweep: results folder of the sweep.

    Returns:
        A row for each parametrization of the sweep at that scale: loss, best and regret (nat per token).

    Raises:
        StoreError: the folder holds no sweep.
    """
    best = best_of_sweep(sweep)
    reached = runs.groupby(list(best.index.names))["loss"].mean()
    table = pd.DataFrame({"loss": reached}).join(best.rename("best"), how="inner")
    return table.assign(regret=table["loss"] - table["best"]).reset_index().to_dict("records")


def best_of_sweep(sweep: str) -> pd.Series:
    """Mean loss at the best tuned value of a sweep (nat per token), by parametrization and scale.

    Raises:
        StoreError: the folder holds no sweep, or no finished run.
    """
    known, axes = load_runs(sweep), load_axes(sweep)
    cell = ["parametrization", axes.scale.column]
    finished = known[known["status"] == "finished"]
    if finished.empty:
        raise StoreError(f"results folder {sweep} holds no finished trial to compare with")
    return finished.groupby([*cell, axes.tune.column])["loss"].mean().groupby(cell).min()
