"""Record of one member of a pack: its status, its held-out losses, its row in the store."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from mup_tpu.config import Trial
from mup_tpu.data import TokenDataset
from mup_tpu.training.rows import run_row, train_curve

RUNNING = "running"


@dataclass
class MemberRecord:
    """Status of a member, and its end once it has one."""

    trial: Trial
    status: str = RUNNING
    ended_at: int = 0
    """Steps trained; 0 while it runs."""
    reason: str = ""
    validation: list[dict[str, Any]] = field(default_factory=list)
    """Points of the held-out curve."""

    @property
    def runs(self) -> bool:
        """Whether it still trains."""
        return self.status == RUNNING

    def end(self, status: str, step: int, reason: str = "") -> None:
        """End it after a step."""
        self.status, self.ended_at, self.reason = status, step, reason

    def ended(self, status: str, step: int) -> MemberRecord:
        """The record as it would be if the member, should it still run, ended now."""
        return dataclasses.replace(self, status=status, ended_at=step) if self.runs else self

    def loss(self, trained: list[float], final: float) -> float:
        """Loss of the row, nat per token; a stopped member's is its last known of the same kind.

        Args:
            trained: training loss of each step.
            final: held-out loss after the last step.
        """
        if self.status == "diverged":
            return math.inf
        if self.trial.train.loss_kind == "train_mean":
            return math.fsum(trained) / len(trained) if trained else math.nan
        if self.status in ("stopped", "preempted"):
            return self.validation[-1]["loss"] if self.validation else math.nan
        return final

    def row_and_curve(
        self, dataset: TokenDataset, trained: list[float], final: float, every: int, **outcome: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Row of the run table, and points of the learning curve.

        Args:
            dataset: what it was trained on.
            trained: training loss of each step.
            final: held-out loss after the last step.
            every: steps a point of the training curve.
            outcome: further columns of the row.
        """
        row = run_row(
            self.trial, dataset, steps_done=self.ended_at, loss=self.loss(trained, final), status=self.status,
            reason=self.reason, **outcome,
        )  # fmt: skip
        points = train_curve(trained, every, dataset.tokens_per_step) + self.validation
        return row, [{"trial_id": row["trial_id"], **point} for point in points]
