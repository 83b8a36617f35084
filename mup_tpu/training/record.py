"""Records of a pack's members, events of its training, and the meter of its rates.

Without torch until a pack trains, since drivers write the rows of trials that fail and show reports.

Shapes: K members, S steps.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mup_tpu.config import Trial, format_learning_rate
from mup_tpu.config.columns import configured
from mup_tpu.config.values import counted, write_time
from mup_tpu.data import TokenDataset
from mup_tpu.models import declare, parameter_scalings, sizes
from mup_tpu.optimizers import constants, update_rule_of

if TYPE_CHECKING:
    from torch import Tensor

    from mup_tpu.training.pack import Pack

# Packages that decide numbers.
_VERSIONED = ("mup_tpu", "torch", "torch_xla", "transformers", "mup", "ray")


@dataclass
class MemberRecord:
    """Status of a member in training, or after its end."""

    trial: Trial
    status: str = "running"
    ended_at: int = 0  # Number of steps trained; 0 while it runs
    reason: str = ""
    validation: list[dict[str, Any]] = field(default_factory=list)  # Points of the held-out curve

    @property
    def runs(self) -> bool:
        return self.status == "running"

    def end(self, status: str, step: int, reason: str = "") -> None:
        self.status, self.ended_at, self.reason = status, step, reason

    def loss(self, trained: list[float], final: float) -> float:
        """Return the loss of the row, nat per token; a stopped member's is its last known of the same kind.

        `trained` are the training losses of its steps, `final` its held-out loss after the last one.
        """
        if self.status == "diverged":
            return math.inf
        if self.trial.train.loss_kind == "train_mean":
            return math.fsum(trained) / len(trained) if trained else math.nan
        if self.status in ("stopped", "preempted"):
            return self.validation[-1]["loss"] if self.validation else math.nan
        return final


class Records:
    """Training losses of all members, and the record of each."""

    def __init__(self, trials: Sequence[Trial], dataset: TokenDataset) -> None:
        import torch

        self._dataset = dataset
        self.losses_SK = torch.full((trials[0].train.steps, len(trials)), math.nan, dtype=torch.float64)
        self.members = [MemberRecord(trial) for trial in trials]

    @property
    def statuses(self) -> tuple[str, ...]:
        return tuple(member.status for member in self.members)

    def trial_ids(self) -> list[str]:
        return [member.trial.trial_id(self._dataset.fingerprint) for member in self.members]

    def end_diverged(self, done: int) -> list[int]:
        """End members with a loss that is not finite, at the first such step; return their numbers."""
        bad_SK = ~self.losses_SK[:done].isfinite()
        diverged = [k for k, member in enumerate(self.members) if member.runs and bad_SK[:, k].any()]
        for k in diverged:
            first = int(bad_SK[:, k].nonzero()[0])
            self.members[k].end("diverged", first, f"loss not finite at step {first}")
        return diverged

    def end_all(self, done: int, final: Sequence[float]) -> None:
        for member, loss in zip(self.members, final, strict=True):
            if member.runs and math.isfinite(loss):
                member.end("finished", done)
            elif member.runs:
                member.end("diverged", done, f"loss not finite at step {done}")

    def ended(self, status: str, done: int) -> Records:
        ended = copy.copy(self)
        ended.members = [
            dataclasses.replace(m, status=status, ended_at=done) if m.runs else m for m in self.members
        ]
        return ended

    def evaluated(self, done: int, losses: Sequence[float]) -> None:
        tokens = done * self._dataset.tokens_per_step
        for member, loss in zip(self.members, losses, strict=True):
            if member.runs:
                point = {"step": done, "tokens": tokens, "split": "validation", "loss": loss}
                member.validation.append(point)

    def results(
        self, final: Sequence[float], every: int, wall_time: float, device: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return rows of the run table, and points of the learning curves, one for `every` steps.

        `final` are held-out losses after the last step, `wall_time` the seconds of the pack.
        """
        import torch

        rows, curves, count = [], [], len(self.members)
        outcome: dict[str, Any] = {"wall_time_s": wall_time / count, "device": device, "pack_size": count}
        outcome["threads"] = torch.get_num_threads()
        for k, member in enumerate(self.members):
            trained = self.losses_SK[: member.ended_at, k].tolist()
            outcome |= {"steps_done": member.ended_at, "loss": member.loss(trained, final[k])}
            outcome |= {"status": member.status, "reason": member.reason}
            row = run_row(member.trial, self._dataset, **outcome)
            rows.append(row)
            points = []
            for start in range(0, len(trained), every):
                part = trained[start : start + every]
                tokens = (start + len(part)) * self._dataset.tokens_per_step
                mean = math.fsum(part) / len(part) if all(map(math.isfinite, part)) else math.nan
                points.append({"step": start + len(part), "tokens": tokens, "split": "train", "loss": mean})
            curves += [{"trial_id": row["trial_id"], **point} for point in points + member.validation]
        return rows, curves

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the losses are a tensor beside them."""
        return {
            "trial_ids": self.trial_ids(),
            "records": [{k: v for k, v in vars(m).items() if k != "trial"} for m in self.members],
        }

    def load(self, state: Mapping[str, Any], losses_SK: Tensor) -> None:
        """Go on from the `state` and losses of a checkpoint."""
        self.losses_SK.copy_(losses_SK)
        pairs = zip(self.members, state["records"], strict=True)
        self.members = [MemberRecord(member.trial, **record) for member, record in pairs]


def run_row(trial: Trial, dataset: TokenDataset, **outcome: Any) -> dict[str, Any]:
    """Return a row of the run table: the trial's configuration, and `outcome`, the columns of its result.

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
        "versions": _versions(),
        "git_commit": _git_commit(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **outcome,
    }


def failed_row(trial: Trial, dataset: TokenDataset, reason: str, **outcome: Any) -> dict[str, Any]:
    defaults = {"steps_done": 0, "loss": math.nan, "pack_size": 1}
    return run_row(trial, dataset, status="failed", reason=reason, **defaults | outcome)


def applied(trial: Trial, vocab_size: int) -> dict[str, float]:
    """Return columns of hyperparameters with the factors of all rules, for hidden matrices, which share them.

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


@functools.cache
def _versions() -> str:
    versions = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return json.dumps(versions, sort_keys=True)


@functools.cache
def _git_commit() -> str:
    """Return the commit of this package's checkout, with "+" if changed since; "" outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


HORIZON_S = 30.0  # Seconds after which an interval has the weight 1/e in the smoothed rates


@dataclass(frozen=True)
class Rates:
    """Rates of a pack in training, without work for members that have ended."""

    tokens: int  # Training tokens of all members together since this process took up the pack
    tokens_per_second: float  # Tokens of all members together, over about the last half minute
    overall_tokens_per_second: float  # Tokens of all members, since this process took up the pack
    devices: int  # Devices of the pack
    mfu: float  # Model FLOP/s utilisation: the model's arithmetic over the devices' peak; nan if unknown
    input_wait: float  # Share of the time in which the step waited for its batch
    seconds_left: float

    def __str__(self) -> str:
        rate, overall = self.tokens_per_second, self.overall_tokens_per_second
        details = [f"{overall:,.0f} overall"] if rate != overall else []
        details += [f"{rate / self.devices:,.0f} a device"] if self.devices > 1 else []
        parts = [  # the time first: terminals cut long lines
            *([f"{write_time(self.seconds_left)} left"] if self.seconds_left else []),
            f"{rate:,.0f} tokens/s" + (f" ({', '.join(details)})" if details else ""),
            *([] if math.isnan(self.mfu) else [f"MFU {self.mfu:.1%}"]),
            f"input wait {self.input_wait:.1%}",
        ]
        return " · ".join(parts)


@dataclass(frozen=True)
class PackProgress:
    """Progress of a pack."""

    step: int
    steps: int
    losses: tuple[float, ...]  # Last training loss of each member, nat per token; nan after its end
    validation_losses: tuple[float, ...] | None  # Held-out loss of each member; None without an evaluation
    learning_rates: tuple[float, ...]  # Rate of each member at this step, without factors of rules
    statuses: tuple[str, ...]  # "running", or the end of each member
    rates: Rates

    @staticmethod
    def note(reports: Sequence[PackProgress]) -> str:
        return f"{sum(report.rates.tokens_per_second for report in reports) / 1000:.0f}k tokens/s"

    def __str__(self) -> str:
        # The losses of the member with the least training loss are written.
        running = [k for k, status in enumerate(self.statuses) if status == "running"]
        line = f"step {self.step}/{self.steps}"
        if running:
            best = min(running, key=lambda k: self.losses[k])
            line += f" · loss {self.losses[best]:.4f}"
            if self.validation_losses:
                line += f" · held-out {self.validation_losses[best]:.4f}"
            line += f" · lr {format_learning_rate(self.learning_rates[best])}"
        if len(self.statuses) > 1:
            line += f" · best of {len(running)} running of {len(self.statuses)}"
        return f"{line} · {self.rates}"


@dataclass(frozen=True)
class PackResult:
    """Result of a pack: rows and curve points for the store, and the pack itself for export."""

    rows: list[dict[str, Any]]
    curves: list[dict[str, Any]]
    pack: Pack | None
    rates: Rates | None  # Rates of all training in this process; None without training


def count_statuses(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(row["status"] for row in rows)


def summary(rows: Sequence[Mapping[str, Any]], rates: Rates) -> str:
    """Return one line about the end of a pack: statuses, best loss, tokens, and overall rates."""
    parts = [counted(sorted(count_statuses(rows).items()))]
    losses = [row["loss"] for row in rows if math.isfinite(row["loss"])]
    if losses:
        parts.append(f"best loss {min(losses):.4f}")
    parts.append(f"{sum(row['tokens'] for row in rows):,} tokens")
    return " · ".join([*parts, str(rates)])


class Meter:
    """Stopwatch of a pack's training, in laps from one report to the next.

    All the time of a lap counts, evaluations and copies for checkpoints too; the smoothed rates and the time
    left leave out the steps that were `prepared`, and their time. Tokens and FLOP are of one member,
    peak_flops (FLOP/s; nan if unknown) of one device.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        devices: int,
        peak_flops: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._devices, self._peak_flops = devices, peak_flops
        self._clock = clock
        self._lap_began = clock()
        self._waited = 0.0
        # Sums: seconds, seconds of waiting, steps, and steps times live members
        self._recent, self._all, self._preparing = np.zeros(4), np.zeros(4), np.zeros(4)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._waited += self._clock() - began

    def _lap(self, steps: int, live_members: int) -> np.ndarray:
        return np.array([self._clock() - self._lap_began, self._waited, steps, steps * live_members])

    def prepared(self, steps: int, live_members: int) -> None:
        # The lap so far: tracing and compiling a step, and the first steps
        self._preparing = self._lap(steps, live_members)

    def seconds_a_step(self, mfu: float) -> float:
        """Return the seconds of a member's step at a given share of the devices' peak; nan if unknown."""
        return self._tokens_per_step * self._flops_per_token / (self._devices * self._peak_flops * mfu)

    def lap(self, steps: int, live_members: int) -> float:
        """End a lap of some steps of the members that trained in it; return its seconds."""
        lap = self._lap(steps, live_members)
        self._all += lap
        trained = lap - self._preparing
        self._recent = math.exp(-trained[0] / HORIZON_S) * self._recent + trained
        self._lap_began += lap[0]
        self._waited, self._preparing = 0.0, np.zeros(4)
        return float(lap[0])

    def rates(self, steps_left: int) -> Rates:
        return self._rates(self._recent if self._recent[2] else self._all, steps_left)

    def overall(self) -> Rates:
        return self._rates(self._all, 0)

    def _rates(self, sums: np.ndarray, steps_left: int) -> Rates:
        seconds, waited, steps, member_steps = sums.tolist()
        seconds, rate = max(seconds, 1e-9), member_steps * self._tokens_per_step / max(seconds, 1e-9)
        tokens = round(float(self._all[3])) * self._tokens_per_step
        return Rates(
            tokens=tokens,
            tokens_per_second=rate,
            overall_tokens_per_second=tokens / max(float(self._all[0]), 1e-9),
            devices=self._devices,
            mfu=rate * self._flops_per_token / (self._devices * self._peak_flops),
            input_wait=waited / seconds,
            seconds_left=steps_left * seconds / max(steps, 1e-9),
        )
