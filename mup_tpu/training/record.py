"""Records of a pack's members: losses, ends, and rows for the store.

Shapes: K members, S steps.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mup_tpu.config import Trial
from mup_tpu.data import TokenDataset
from mup_tpu.training.halving import RECENT, behind_best
from mup_tpu.training.rows import run_row, train_curve


@dataclass
class MemberRecord:
    """Status of a member, and its end once it has one."""

    trial: Trial
    status: str = "running"
    ended_at: int = 0
    """Steps trained; 0 while it runs."""
    reason: str = ""
    validation: list[dict[str, Any]] = field(default_factory=list)
    """Points of the held-out curve."""

    @property
    def runs(self) -> bool:
        """Whether the member still trains."""
        return self.status == "running"

    def end(self, status: str, step: int, reason: str = "") -> None:
        """End the member after this number of steps."""
        self.status, self.ended_at, self.reason = status, step, reason

    def loss(self, trained: list[float], final: float) -> float:
        """Loss of the row, nat per token; a stopped member's is its last known of the same kind.

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
        self._dataset = dataset
        self.losses_SK = torch.full((trials[0].train.steps, len(trials)), math.nan, dtype=torch.float64)
        self.members = [MemberRecord(trial) for trial in trials]

    @property
    def statuses(self) -> tuple[str, ...]:
        """Status of each member."""
        return tuple(member.status for member in self.members)

    def trial_ids(self) -> list[str]:
        """trial_id of each member."""
        return [member.trial.trial_id(self._dataset.fingerprint) for member in self.members]

    def end_diverged(self, done: int) -> list[int]:
        """End members with a loss that is not finite, at the first such step; return their numbers."""
        bad_SK = ~self.losses_SK[:done].isfinite()
        lost = [k for k, member in enumerate(self.members) if member.runs and bad_SK[:, k].any()]
        for k in lost:
            first = int(bad_SK[:, k].nonzero()[0])
            self.members[k].end("diverged", first, f"loss not finite at step {first}")
        return lost

    def end_hopeless(self, done: int, limit: float, tuned: Sequence[str]) -> list[int]:
        """End members more than `limit` nat behind the best of their group; return their numbers.

        Members of a group differ only in tuned fields and seed.
        """
        recent = max(1, int(RECENT * len(self.losses_SK)))
        first = self.members[0].trial.flat()
        alike = {name: first[name] for name in (*tuned, "seed")}
        groups = [member.trial.replace(**alike) for member in self.members]
        gaps_K = behind_best(self.losses_SK[max(0, done - recent) : done].numpy(), groups)
        hopeless = [k for k, member in enumerate(self.members) if member.runs and gaps_K[k] > limit]
        for k in hopeless:
            reason = f"halving: {gaps_K[k]:.2f} nat behind the best at step {done}"
            self.members[k].end("stopped", done, reason)
        return hopeless

    def end_all(self, done: int, final: Sequence[float]) -> None:
        """End members that still run, by their held-out losses after the last step."""
        for member, loss in zip(self.members, final, strict=True):
            if member.runs and math.isfinite(loss):
                member.end("finished", done)
            elif member.runs:
                member.end("diverged", done, f"loss not finite at step {done}")

    def ended(self, status: str, done: int) -> Records:
        """A copy in which members that still run have ended."""
        found = copy.copy(self)
        found.members = [
            dataclasses.replace(m, status=status, ended_at=done) if m.runs else m for m in self.members
        ]
        return found

    def evaluated(self, done: int, losses: Sequence[float]) -> None:
        """Note held-out losses after a step."""
        tokens = done * self._dataset.tokens_per_step
        for member, loss in zip(self.members, losses, strict=True):
            if member.runs:
                point = {"step": done, "tokens": tokens, "split": "validation", "loss": loss}
                member.validation.append(point)

    def results(
        self, final: Sequence[float], every: int, wall_time: float, device: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of the run table, and points of the learning curves, one for `every` steps.

        `final` are held-out losses after the last step, `wall_time` the seconds of the pack.
        """
        rows, curves = [], []
        for k, member in enumerate(self.members):
            trained = self.losses_SK[: member.ended_at, k].tolist()
            row = run_row(
                member.trial,
                self._dataset,
                steps_done=member.ended_at,
                loss=member.loss(trained, final[k]),
                status=member.status,
                reason=member.reason,
                wall_time_s=wall_time / len(self.members),
                device=device,
                pack_size=len(self.members),
                threads=torch.get_num_threads(),
            )
            points = train_curve(trained, every, self._dataset.tokens_per_step) + member.validation
            rows.append(row)
            curves += [{"trial_id": row["trial_id"], **point} for point in points]
        return rows, curves

    def state(self) -> dict[str, Any]:
        """Plain values of a checkpoint; the losses are a tensor beside them."""
        return {
            "trial_ids": self.trial_ids(),
            "statuses": list(self.statuses),
            "ended_at": [member.ended_at for member in self.members],
            "reasons": [member.reason for member in self.members],
            "validation": [
                {"member": k, **point} for k, member in enumerate(self.members) for point in member.validation
            ],
        }

    def load(self, state: Mapping[str, Any], losses_SK: Tensor) -> None:
        """Go on from the `state` and losses of a checkpoint."""
        self.losses_SK.copy_(losses_SK)
        lists = (state[name] for name in ("statuses", "ended_at", "reasons"))
        for member, *end in zip(self.members, *lists, strict=True):
            member.end(*end)
        for point in state["validation"]:
            point |= {"step": int(point["step"]), "loss": float(point["loss"])}
            self.members[point.pop("member")].validation.append(point)
