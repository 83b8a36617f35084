"""Silence of workers, by which those that hang are found.

Each report of a job is a sign of life. A timer thread would not do: it goes on in a process whose job hangs.
"""

from __future__ import annotations

import time
from typing import Any

_LONGEST_LOOK_S = 5.0


class Heartbeats:
    """How long each worker that has a job has been silent.

    Time counts only while the driver listens. A driver that was suspended (its workers with it), or was busy
    storing rows, would otherwise take all of its workers for hung.

    Args:
        limit: seconds of silence after which a worker counts as hung.
    """

    def __init__(self, limit: float) -> None:
        self._looked_at = time.monotonic()
        self._limit, self.sentence = limit, f"no report within the heartbeat of {limit:g} s"
        self._silence: dict[Any, float | None] = {}
        """Seconds; None for a worker that was heard since the last look."""

    def heard(self, worker: Any) -> None:
        """Note that a worker was given a job or has reported."""
        self._silence[worker] = None

    def forget(self, worker: Any) -> None:
        """Note that a worker has no job any more."""
        self._silence.pop(worker, None)

    def hung(self) -> list[Any]:
        """Workers that count as hung. Call it often, and after reading all reports that are there."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        self._silence = {w: 0.0 if s is None else s + passed for w, s in self._silence.items()}
        return [w for w, s in self._silence.items() if s is not None and s > self._limit]
