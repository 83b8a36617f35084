"""Meter of a pack in training: tokens per second, model FLOP/s utilisation, input wait, time left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mup_tpu.devices.peak import peak_flops
from mup_tpu.training.report import Rates

if TYPE_CHECKING:
    from mup_tpu.training.pack import Pack

HORIZON_S = 30.0
"""Seconds after which an interval has the weight 1/e in the smoothed rates."""


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
    left leave out the time until a step was `prepared`. Tokens and FLOP are of one
    member, peak_flops (FLOP/s; nan if unknown) of one device.
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
        """Block in which the step waits for its batch."""
        began = self._clock()
        yield
        self._waited += self._clock() - began

    def prepared(self) -> None:
        """Say that the lap so far was spent on tracing and compiling a step."""
        self._preparing = _Sums(self._clock() - self._lap_began, self._waited)

    def seconds_a_step(self, mfu: float) -> float:
        """Seconds of a step of one member at a given share of the devices' peak; nan if unknown."""
        return self._tokens_per_step * self._flops_per_token / (self._devices * self._peak_flops * mfu)

    def lap(self, steps: int, live_members: int) -> float:
        """End a lap of some steps of the members that trained in it; return its seconds."""
        now = self._clock()
        seconds = now - self._lap_began
        lap = _Sums(seconds, self._waited, steps, steps * live_members)
        self._all.add(lap, keep=1.0)
        lap.seconds -= self._preparing.seconds
        lap.waited -= self._preparing.waited
        self._recent.add(lap, keep=math.exp(-lap.seconds / HORIZON_S))
        self._lap_began, self._waited, self._preparing = now, 0.0, _Sums()
        return seconds

    def rates(self, steps_left: int) -> Rates:
        """Rates smoothed over about the last half minute."""
        return self._rates(self._recent, steps_left)

    def overall(self) -> Rates:
        """Rates over the whole run so far."""
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


def start_meter(pack: Pack, tokens_per_step: int) -> Meter:
    """Meter of a pack that is about to train."""
    first, mesh = pack.trials[0], pack.device.mesh
    arithmetic = pack.declaration.flops_per_token(pack.vocab_size, first.data.sequence_length)
    peak = peak_flops(pack.device, first.train.precision)
    return Meter(tokens_per_step, arithmetic, mesh.trial * mesh.data, peak)
