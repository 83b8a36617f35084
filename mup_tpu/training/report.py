"""Events of a pack in training, and the meter of its rates. Without torch, so that drivers can import it."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mup_tpu.config import format_learning_rate
from mup_tpu.config.values import counted, write_time

if TYPE_CHECKING:
    from mup_tpu.training.pack import Pack

HORIZON_S = 30.0
"""Seconds after which an interval has the weight 1/e in the smoothed rates."""


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

    @staticmethod
    def note(reports: Sequence[Report]) -> str:
        """Return the rate of several running packs, in a few words."""
        return f"{sum(report.rates.tokens_per_second for report in reports) / 1000:.0f}k tokens/s"

    def __str__(self) -> str:
        # Losses are those of the member of least training loss.
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
    return Counter(row["status"] for row in rows)


def summary(rows: Sequence[Mapping[str, Any]], rates: Rates) -> str:
    """Return one line about the end of a pack: statuses, best loss, tokens, and overall rates."""
    parts = [counted(sorted(count_statuses(rows).items()))]
    losses = [row["loss"] for row in rows if math.isfinite(row["loss"])]
    if losses:
        parts.append(f"best loss {min(losses):.4f}")
    parts.append(f"{sum(row['tokens'] for row in rows):,} tokens")
    return " · ".join([*parts, str(rates)])


@dataclass
class _Sums:
    """Time and steps of some training."""

    seconds: float = 0.0
    waited: float = 0.0
    steps: float = 0.0
    member_steps: float = 0.0

    def add(self, lap: _Sums, keep: float) -> None:
        self.seconds = keep * self.seconds + lap.seconds
        self.waited = keep * self.waited + lap.waited
        self.steps = keep * self.steps + lap.steps
        self.member_steps = keep * self.member_steps + lap.member_steps


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
        self._recent, self._all, self._preparing = _Sums(), _Sums(), _Sums()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for a batch."""
        began = self._clock()
        yield
        self._waited += self._clock() - began

    def prepared(self, steps: int, live_members: int) -> None:
        """Mark the lap so far as spent on tracing and compiling a step, and on the first steps."""
        seconds = self._clock() - self._lap_began
        self._preparing = _Sums(seconds, self._waited, steps, steps * live_members)

    def seconds_a_step(self, mfu: float) -> float:
        """Return the seconds of a member's step at a given share of the devices' peak; nan if unknown."""
        return self._tokens_per_step * self._flops_per_token / (self._devices * self._peak_flops * mfu)

    def lap(self, steps: int, live_members: int) -> float:
        """End a lap of some steps of the members that trained in it; return its seconds."""
        now = self._clock()
        seconds = now - self._lap_began
        lap = _Sums(seconds, self._waited, steps, steps * live_members)
        self._all.add(lap, keep=1.0)
        lap.seconds -= self._preparing.seconds
        lap.waited -= self._preparing.waited
        lap.steps -= self._preparing.steps
        lap.member_steps -= self._preparing.member_steps
        self._recent.add(lap, keep=math.exp(-lap.seconds / HORIZON_S))
        self._lap_began, self._waited, self._preparing = now, 0.0, _Sums()
        return seconds

    def rates(self, steps_left: int) -> Rates:
        return self._rates(self._recent if self._recent.steps else self._all, steps_left)

    def overall(self) -> Rates:
        return self._rates(self._all, 0)

    def _rates(self, over: _Sums, steps_left: int) -> Rates:
        seconds = max(over.seconds, 1e-9)
        rate = over.member_steps * self._tokens_per_step / seconds
        tokens = round(self._all.member_steps) * self._tokens_per_step
        return Rates(
            tokens=tokens,
            tokens_per_second=rate,
            overall_tokens_per_second=tokens / max(self._all.seconds, 1e-9),
            devices=self._devices,
            mfu=rate * self._flops_per_token / (self._devices * self._peak_flops),
            input_wait=over.waited / seconds,
            seconds_left=steps_left * seconds / max(over.steps, 1e-9),
        )
