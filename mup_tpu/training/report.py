"""Events of a pack in training, and its rates. Without torch, so that drivers can import it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mup_tpu.config import format_learning_rate
from mup_tpu.config.values import counted, write_time

if TYPE_CHECKING:
    from mup_tpu.training.pack import Pack


@dataclass(frozen=True)
class Rates:
    """Rates of a pack in training, without work for members that have ended."""

    tokens: int
    """Training tokens of all members together since this process took up the pack."""
    tokens_per_second: float
    """Tokens of all members together, over about the last half minute."""
    overall_tokens_per_second: float
    """The same since this process took up the pack."""
    devices: int
    """Devices of the pack."""
    mfu: float
    """Model FLOP/s utilisation: the model's arithmetic over the devices' peak; nan if unknown."""
    input_wait: float
    """Share of the time in which the step waited for its batch."""
    seconds_left: float

    def __str__(self) -> str:
        rate, overall = self.tokens_per_second, self.overall_tokens_per_second
        details = [f"{overall:,.0f} overall"] if rate != overall else []
        details += [f"{rate / self.devices:,.0f} a device"] if self.devices > 1 else []
        parts = [
            f"{rate:,.0f} tokens/s" + (f" ({', '.join(details)})" if details else ""),
            *([] if math.isnan(self.mfu) else [f"MFU {self.mfu:.1%}"]),
            f"input wait {self.input_wait:.1%}",
            *([f"{write_time(self.seconds_left)} left"] if self.seconds_left else []),
        ]
        return " · ".join(parts)


@dataclass(frozen=True)
class Report:
    """Progress of a pack."""

    step: int
    steps: int
    losses: tuple[float, ...]
    """Last training loss of each member, nat per token; nan for a member that has ended."""
    validation_losses: tuple[float, ...] | None
    """Held-out loss of each member; None if this step had no evaluation."""
    learning_rates: tuple[float, ...]
    """Learning rate of each member at this step, before the parametrization's factors."""
    statuses: tuple[str, ...]
    """"running", or the end of each member."""
    rates: Rates

    def __str__(self) -> str:
        """One line for a log, with the losses of the member of least training loss."""
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
    rates: Rates | None
    """Rates of all training in this process; None without training."""


def count_statuses(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Number of trials by how they ended."""
    return Counter(row["status"] for row in rows)


def summary(rows: Sequence[Mapping[str, Any]], rates: Rates) -> str:
    """One line about the end of a pack: statuses, best loss, tokens, and overall rates."""
    parts = [counted(sorted(count_statuses(rows).items()))]
    losses = [row["loss"] for row in rows if math.isfinite(row["loss"])]
    if losses:
        parts.append(f"best loss {min(losses):.4f}")
    parts.append(f"{sum(row['tokens'] for row in rows):,} tokens")
    return " · ".join([*parts, str(rates)])
