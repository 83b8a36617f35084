"""How fast a pack trains: tokens per second, model FLOP/s utilisation, input wait, time left."""

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
"""An interval counts for 1/e of itself in the smoothed rates after so many seconds."""


@dataclass
class _Sums:
    """What some stretch of training took and gave."""

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
    """Takes the time of a pack's training from its construction on, in laps from one report to the next.

    All the time of a lap counts, evaluation and the copying of a checkpoint too.

    Args:
        tokens_per_step: training tokens of one member in one step.
        flops_per_token: of one member, as its architecture declares it.
        devices: how many the pack is spread over.
        peak_flops: of one device, in FLOP/s; nan where it is not known.
        clock: seconds.
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
        self._recent, self._all = _Sums(), _Sums()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The step waits for its batch."""
        began = self._clock()
        yield
        self._waited += self._clock() - began

    def seconds_a_step(self, mfu: float) -> float:
        """What a step of one member takes at a given share of the devices' peak; nan if it is unknown."""
        return self._tokens_per_step * self._flops_per_token / (self._devices * self._peak_flops * mfu)

    def lap(self, steps: int, live_members: int) -> float:
        """End a lap of so many steps, by the members that trained in it; return its seconds."""
        now = self._clock()
        seconds = now - self._lap_began
        lap = _Sums(seconds, self._waited, steps, steps * live_members)
        self._recent.add(lap, keep=math.exp(-seconds / HORIZON_S))
        self._all.add(lap, keep=1.0)
        self._lap_began, self._waited = now, 0.0
        return seconds

    def rates(self, steps_left: int) -> Rates:
        """Smoothed over the last half minute or so."""
        return self._rates(self._recent, steps_left)

    def overall(self) -> Rates:
        """Over all laps."""
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
    """A meter of a pack, from now on.

    Args:
        pack: about to train.
        tokens_per_step: training tokens of one member in one step.
    """
    first, mesh = pack.trials[0], pack.device.mesh
    arithmetic = pack.declaration.flops_per_token(pack.vocab_size, first.data.sequence_length)
    peak = peak_flops(pack.device, first.train.precision)
    return Meter(tokens_per_step, arithmetic, mesh.trial * mesh.data, peak)
