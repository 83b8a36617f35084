"""What a pack says of itself while it trains and when it ends. Without torch, for those who only listen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mup_tpu.training.pack import Pack


@dataclass(frozen=True)
class Report:
    """How a pack stands."""

    step: int
    steps: int
    losses: tuple[float, ...]
    """Last training loss of each member, nat per token; nan where it has ended."""
    validation_losses: tuple[float, ...] | None
    """Held-out loss of each member where this step evaluated."""
    statuses: tuple[str, ...]
    """"running", or how each member has ended."""
    tokens_per_second: float
    """Training tokens of all live members, since the last report."""


@dataclass(frozen=True)
class PackResult:
    """What a pack leaves: rows and curve points for the store, and the pack itself for export."""

    rows: list[dict[str, Any]]
    curves: list[dict[str, Any]]
    pack: Pack | None
    input_wait_fraction: float
    """Share of the training time in which the step waited for its batch."""


@dataclass(frozen=True)
class PackSplit:
    """A pack that did not fit in memory: its trials go on in smaller ones."""

    packs: list[int]
    """Their indices in the plan."""
    reason: str
