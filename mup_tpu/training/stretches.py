"""Stretches of steps that the device gets at once: losses are read only between two of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_LONGEST_S = 10.0
"""Most estimated seconds of a stretch: SIGTERM takes effect after it, 30 s before a machine is taken away."""


def falls_on(every: int, step: int) -> bool:
    """Whether a step ends a period of `every` steps; 0 is never."""
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class Looks:
    """Steps after which losses are read."""

    every: tuple[int, ...]
    """Periods, in steps; 0 is never."""
    at: Collection[int]
    """Single steps, the last one among them."""

    def falls_on(self, step: int) -> bool:
        """Whether losses are read after this step."""
        return step in self.at or any(falls_on(every, step) for every in self.every)

    def stretches(self, start: int, end: int, longest: int, step_s: float) -> list[range]:
        """Stretches of at most `longest` steps from `start` to before `end`.

        A step takes about `step_s` seconds; nan if unknown.
        """
        if step_s * longest > _LONGEST_S:
            longest = max(1, int(_LONGEST_S / step_s))
        stretches, begun = [], start
        for done in range(start + 1, end + 1):
            if done - begun == longest or self.falls_on(done):
                stretches.append(range(begun, done))
                begun = done
        return stretches
