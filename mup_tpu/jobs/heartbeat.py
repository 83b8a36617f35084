"""Silence of workers, by which hung ones are found.

Each report of a job is a sign of life. A timer thread would go on in a process with a hung job.
"""

from __future__ import annotations

import time
from typing import Any

_LONGEST_LOOK_S = 5.0
"""Silence counted between two looks at most; pools wait up to a second for a report."""


class Heartbeats:
    """Silence of each busy worker; more than `limit` seconds of it mean that the worker hangs.

    Time counts only while the driver listens: after a suspension (its workers with it), or long work on rows,
    all workers would seem to hang.
    """

    def __init__(self, limit: float) -> None:
        self._looked_at = time.monotonic()
        self._limit, self.sentence = limit, f"no report within the heartbeat of {limit:g} s"
        # One look never spends a short limit: it may have followed a suspension.
        self._longest_look = min(_LONGEST_LOOK_S, limit / 3)
        self._silence: dict[Any, float | None] = {}
        """Seconds; None for a worker heard since the last look."""

    def heard(self, worker: Any) -> None:
        """Note that a worker got a job or has reported."""
        self._silence[worker] = None

    def forget(self, worker: Any) -> None:
        """Note that a worker is idle."""
        self._silence.pop(worker, None)

    def hung(self) -> list[Any]:
        """Workers that count as hung. Call it often, after reading all reports."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, self._longest_look), now
        self._silence = {w: 0.0 if s is None else s + passed for w, s in self._silence.items()}
        return [w for w, s in self._silence.items() if s is not None and s > self._limit]
