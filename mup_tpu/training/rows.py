"""A trained member as a row of the run table, and its learning curve."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mup_tpu.config import Trial
from mup_tpu.config.columns import configured
from mup_tpu.data import TokenDataset
from mup_tpu.models import declare, parameter_scalings, sizes
from mup_tpu.optimizers import constants, update_rule_of

_VERSIONED = ("mup_tpu", "torch", "torch_xla", "transformers", "mup", "ray")


@functools.cache
def versions() -> str:
    """Versions of Python and of the packages that decide numbers, as JSON."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return json.dumps(found, sort_keys=True)


@functools.cache
def git_commit() -> str:
    """Commit of this package's checkout, with "+" if changed since; "" outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def run_row(trial: Trial, dataset: TokenDataset, **outcome: Any) -> dict[str, Any]:
    """One row of the run table: the trial's configuration, and `outcome`, the columns of its result.

    A divergence has loss = +inf.
    """
    return {
        **configured(trial),
        "trial_id": trial.trial_id(dataset.fingerprint),
        "dataset": dataset.name,
        "data_fingerprint": dataset.fingerprint,
        **sizes(trial, dataset.vocab_size),
        **applied(trial, dataset.vocab_size),
        "tokens": outcome["steps_done"] * trial.data.batch_size * trial.data.sequence_length,
        "versions": versions(),
        "git_commit": git_commit(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **outcome,
    }


def applied(trial: Trial, vocab_size: int) -> dict[str, float]:
    """Columns of hyperparameters with the factors of all rules, for hidden matrices, which share them.

    Hyperparameters that the update rule lacks (β of SGD) have no column.
    """
    config, length = trial.optimizer, trial.data.sequence_length
    parameters = declare(trial.model, vocab_size, length).parameters
    name, parameter = next((n, p) for n, p in parameters.items() if p.role == "hidden")
    scaling, rule = parameter_scalings(trial, vocab_size, length)[name], update_rule_of(config, parameter)
    values = {
        "lr": rule.learning_rate(config) * scaling.learning_rate,
        "weight_decay": rule.weight_decay(config, parameter, scaling),
        **rule.applied(config, constants(trial, [rule])[rule.name], scaling),
    }
    return {f"applied_{name}": value for name, value in values.items()}


def failed_row(trial: Trial, dataset: TokenDataset, reason: str, **outcome: Any) -> dict[str, Any]:
    """Row of a trial without a result, with the reason; the next call tries it again."""
    usual = {"steps_done": 0, "loss": math.nan, "pack_size": 1}
    return run_row(trial, dataset, status="failed", reason=reason, **usual | outcome)


def train_curve(losses: list[float], every: int, tokens_per_step: int) -> list[dict[str, Any]]:
    """Points of a training curve: mean losses of `every` steps each (nan once diverged)."""
    points = []
    for start in range(0, len(losses), every):
        stretch = losses[start : start + every]
        done = start + len(stretch)
        mean = math.fsum(stretch) / len(stretch) if all(map(math.isfinite, stretch)) else math.nan
        points.append({"step": done, "tokens": done * tokens_per_step, "split": "train", "loss": mean})
    return points
