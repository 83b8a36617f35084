"""Workers that are lost: those that die, and those that hang, which only their silence shows.

A sign of life is an event of the pack (`mup_tpu.training.report`). A timer thread would be none: it goes
on where the pack hangs.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from mup_tpu.config import Trial
from mup_tpu.training.report import PackFailure

MAX_ATTEMPTS = 3
"""Times a pack is started, where its worker is lost, before its trials count as failed."""

_LONGEST_LOOK_S = 5.0

_log = logging.getLogger(__name__)


class Heartbeats:
    """How long each worker that has a pack has been silent.

    Only time in which the driver listens counts. A driver that was suspended, or was busy storing, would take
    all of its workers for hung, which may have been suspended with it.

    Args:
        limit: seconds of silence after which a worker counts as hung.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._looked_at = limit, time.monotonic()
        self._silence: dict[Any, float | None] = {}
        """Seconds; None where it was heard since the last look."""

    def heard(self, worker: Any) -> None:
        """A worker was given a pack, or has said something."""
        self._silence[worker] = None

    def forget(self, worker: Any) -> None:
        """A worker has no pack any more."""
        self._silence.pop(worker, None)

    def hung(self) -> list[Any]:
        """Workers that count as hung; look often, and after reading what there is."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        self._silence = {w: 0.0 if s is None else s + passed for w, s in self._silence.items()}
        return [w for w, s in self._silence.items() if s is not None and s > self._limit]

    def lost(self, where: str = "") -> Lost:
        """What has become of one of those."""
        return Lost(f"hung{where}: no report within the heartbeat of {self._limit:g} s")


@dataclass(frozen=True)
class Lost:
    """A worker died or hung before its pack ended."""

    reason: str

    def outcome(self, pack: list[Trial], attempt: int) -> PackFailure | None:
        """What becomes of its pack after so many attempts; None to try it again, which is logged."""
        if attempt >= MAX_ATTEMPTS:
            return PackFailure(f"{self.reason}, the last of {MAX_ATTEMPTS} attempts")
        _log.warning("a pack of %d trials is tried again (%s)", len(pack), self.reason)
        return None
