"""The scheduler: jobs on the workers of a pool, with attempts, heartbeats, splits and the end of a run.

It serves every kind of job and every pool.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from mup_tpu.errors import Preempted
from mup_tpu.jobs.job import (
    Ended,
    Failed,
    Finished,
    Job,
    Lost,
    Pool,
    Preparing,
    Question,
    Refused,
    Split,
    Started,
    TooLarge,
    Worker,
)
from mup_tpu.training.process import handling

MAX_ATTEMPTS = 3  # lost workers after which a job has failed

_log = logging.getLogger(__name__)


class Jobs(Protocol):
    """Jobs in the order of their start: a list, or a search that makes each one when a worker is free."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int:
        """Number of jobs, at most."""


def run_jobs(
    jobs: Jobs,
    pool: Pool[Any],
    heartbeat: float,
    decide: Callable[[Any, Any], Any] = lambda job, question: None,
    attempts: int = MAX_ATTEMPTS,
) -> Generator[tuple[Any, Any]]:
    """Run jobs, yielding (job, event) as events come; close the generator to end running jobs.

    Events are `Started`, `Preparing`, a job's own reports, and last `Finished`, `Failed` or `Split`. A job
    with a lost worker starts again, in parts if its worker was killed for want of memory. Parts of a split
    job follow as separate jobs.

    Args:
        jobs: each is drawn when a worker is free.
        pool: an open pool, which stays open.
        heartbeat: seconds without a report after which a worker counts as hung.
        decide: function from a job and the content of its `Question` to the answer.
        attempts: lost workers after which a job has failed.

    Raises:
        Preempted: SIGTERM ended the run before all jobs had ended.
        ConfigError: workers do not start.
        MupTpuError: a job met an error that the user can mend.
    """
    return _Run(jobs, pool, heartbeat, decide, attempts).events()


class _Run:
    """State of one run of jobs."""

    def __init__(
        self,
        jobs: Jobs,
        pool: Pool[Any],
        heartbeat: float,
        decide: Callable[[Any, Any], Any],
        attempts: int,
    ) -> None:
        self._pool, self._heartbeats = pool, Heartbeats(heartbeat)
        self._decide, self._attempts = decide, attempts
        self._new, self._number_of_new = iter(jobs), len(jobs)
        self._waiting = deque[Job]()
        """Jobs that start before new ones: parts, and those that lost a worker."""
        self._busy: dict[Worker, Job] = {}
        self._started: Counter[Job] = Counter()
        self._killed: set[Job] = set()
        """Jobs that a worker was lost with, perhaps for want of memory."""
        self._is_ending = False
        self._at_end: list[tuple[Job, Finished]] = []

    def events(self) -> Generator[tuple[Job, Any]]:
        signals = {signal.SIGTERM: self._end} if self._pool.passes_sigterm_on else {}
        try:
            with handling(signals):
                while True:
                    yield from self._start()
                    if not self._busy and (self._is_ending or not self._left()):
                        break
                    for worker, event in self._heard():
                        yield from self._take(worker, event)
                # Finished results first: the caller may stop at the first preempted one.
                yield from sorted(self._at_end, key=lambda ended: ended[1].preempted)
                if self._left():
                    raise Preempted("preempted with trials left; the same command goes on")
        finally:
            for worker in self._busy:
                self._pool.end(worker)

    def _left(self) -> int:
        return len(self._waiting) + self._number_of_new

    def _end(self, number: int, frame: object) -> None:
        self._is_ending = True
        for worker in self._busy:
            self._pool.terminate(worker)

    def _start(self) -> Iterator[tuple[Job, Any]]:
        if self._is_ending or not self._left():
            return
        self._pool.fill(self._left() + len(self._busy))
        while self._left() and self._pool.has_room and not self._is_ending:
            if self._waiting:
                job = self._waiting.popleft()
            else:
                drawn = next(self._new, None)
                self._number_of_new = self._number_of_new - 1 if drawn is not None else 0
                if drawn is None:
                    return
                job = drawn
            self._started[job] += 1
            yield job, Started()
            if self._pool.waits_for:
                yield job, Preparing(self._pool.waits_for)
            worker = self._pool.hand(job)
            self._busy[worker] = job
            self._heartbeats.heard(worker)
            if self._is_ending:  # the signal came before this worker was known
                self._pool.terminate(worker)

    def _heard(self) -> Iterator[tuple[Worker, Any]]:
        yield from self._pool.hear()
        for worker in self._heartbeats.hung():
            yield worker, Lost(f"hung{worker.where}: {self._heartbeats.sentence}")

    def _take(self, worker: Worker, event: Any) -> Iterator[tuple[Job, Any]]:
        job = self._busy[worker]
        if isinstance(event, Question):  # answered at once: the job's device is idle until then
            self._heartbeats.heard(worker)
            self._pool.answer(worker, self._decide(job, event.content))
            return
        if not isinstance(event, Ended):
            self._heartbeats.heard(worker)
            yield job, event
            return
        if isinstance(event, Lost):
            self._pool.end(worker)
        del self._busy[worker]
        self._heartbeats.forget(worker)
        match event:
            case Lost(reason, for_memory):
                yield from self._lost(job, reason, for_memory)
            case TooLarge(reason, fits):
                yield from self._split(job, reason, fits)
            case Refused(error):
                raise error
            case Finished() if self._is_ending:
                self._at_end.append((job, event))
            case _:
                yield job, event

    def _lost(self, job: Job, reason: str, for_memory: str) -> Iterator[tuple[Job, Split | Failed]]:
        # After a second kill of unknown cause, the job counts as short of memory.
        is_large = for_memory == "surely" or (for_memory == "perhaps" and job in self._killed)
        if for_memory == "perhaps":
            self._killed.add(job)
        if is_large and job.members > 1 and not self._is_ending:
            yield from self._split(job, f"{reason}, as when memory is short", job.members // 2)
            return
        if not self._is_ending and self._started[job] >= self._attempts:
            last = f", the last of {self._attempts} attempts" if self._attempts > 1 else ""
            yield job, Failed(reason + last)
            return
        if not self._is_ending:
            _log.warning("%s is tried again (%s)", job, reason)
        self._waiting.appendleft(job)

    def _split(self, job: Job, reason: str, fits: int) -> Iterator[tuple[Job, Split | Failed]]:
        parts = job.split(fits)
        self._waiting.extendleft(reversed(parts))
        yield job, Split(parts, reason) if parts else Failed(reason)


_LONGEST_LOOK_S = 5.0  # silence counted between two looks at most; pools wait up to a second for a report


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
        self._silence[worker] = None

    def forget(self, worker: Any) -> None:
        self._silence.pop(worker, None)

    def hung(self) -> list[Any]:
        """Return workers that count as hung. Call it often, after reading all reports."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, self._longest_look), now
        self._silence = {w: 0.0 if s is None else s + passed for w, s in self._silence.items()}
        return [w for w, s in self._silence.items() if s is not None and s > self._limit]
