"""The scheduler: jobs on the workers of a pool, with attempts, heartbeats, splits and the end of a run.

It serves every kind of job and every pool.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

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


def run_jobs(
    jobs: Any,
    pool: Pool[Any],
    heartbeat: float,
    decide: Callable[[Any, Any], Any] = lambda job, question: None,
) -> Generator[tuple[Any, Any]]:
    """Run jobs, yielding (job, event) as events come; close the generator to end running jobs.

    Events are `Started`, `Preparing`, a job's own reports, and last `Finished`, `Failed` or `Split`. A job
    with a lost worker starts again, in parts if its worker was killed for want of memory. Parts of a split
    job follow as separate jobs.

    Jobs come in the order of their start, from a list or from a search, which makes each when a worker is
    free; their length is a limit. The pool stays open. A worker counts as hung after `heartbeat` seconds
    without a report. `decide` answers the content of a job's `Question`.

    Raises:
        Preempted: SIGTERM ended the run before all jobs had ended.
        ConfigError: workers do not start.
        MupTpuError: a job met an error that the user can mend.
    """
    new, left = iter(jobs), len(jobs)
    waiting = deque[Job]()  # jobs that start before new ones: parts, and those that lost a worker
    busy: dict[Worker, Job] = {}
    started: Counter[Job] = Counter()
    killed: set[Job] = set()  # jobs that a worker was lost with, perhaps for want of memory
    at_end: list[tuple[Job, Finished]] = []
    beats, is_ending = Heartbeats(heartbeat), False

    def end(number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        for worker in busy:
            pool.terminate(worker)

    def heard() -> Iterator[tuple[Worker, Any]]:
        yield from pool.hear()
        yield from ((worker, Lost(f"hung{worker.where}: {beats.sentence}")) for worker in beats.hung())

    try:
        with handling({signal.SIGTERM: end} if pool.passes_sigterm_on else {}):
            while True:
                if not is_ending and (waiting or left):
                    pool.fill(len(waiting) + left + len(busy))
                while not is_ending and (waiting or left) and pool.has_room:
                    if waiting:
                        job = waiting.popleft()
                    elif (drawn := next(new, None)) is None:
                        left = 0
                        break
                    else:
                        job, left = drawn, left - 1
                    started[job] += 1
                    yield job, Started()
                    if pool.waits_for:
                        yield job, Preparing(pool.waits_for)
                    worker = pool.hand(job)
                    busy[worker] = job
                    beats.heard(worker)
                    if is_ending:  # the signal came before this worker was known
                        pool.terminate(worker)
                if not busy and (is_ending or not (waiting or left)):
                    break
                for worker, event in heard():
                    job = busy[worker]
                    if isinstance(event, Question):  # answered at once: the job's device is idle until then
                        beats.heard(worker)
                        pool.answer(worker, decide(job, event.content))
                        continue
                    if not isinstance(event, Ended):
                        beats.heard(worker)
                        yield job, event
                        continue
                    if isinstance(event, Lost):
                        pool.end(worker)
                    del busy[worker]
                    beats.forget(worker)
                    if isinstance(event, Lost):
                        # After a second kill of unknown cause, the job counts as short of memory.
                        cause = event.for_memory
                        is_large = cause == "surely" or (cause == "perhaps" and job in killed)
                        if cause == "perhaps":
                            killed.add(job)
                        if is_large and job.members > 1 and not is_ending:
                            why = f"{event.reason}, as when memory is short"
                            event = TooLarge(why, job.members // 2)
                        elif started[job] >= MAX_ATTEMPTS and not is_ending:
                            event = Failed(f"{event.reason}, the last of {MAX_ATTEMPTS} attempts")
                        else:
                            if not is_ending:
                                _log.warning("%s is tried again (%s)", job, event.reason)
                            waiting.appendleft(job)
                            continue
                    match event:
                        case TooLarge(reason, fits):
                            parts = job.split(fits)
                            waiting.extendleft(reversed(parts))
                            yield job, Split(parts, reason) if parts else Failed(reason)
                        case Refused(error):
                            raise error
                        case Finished() if is_ending:
                            at_end.append((job, event))
                        case _:
                            yield job, event
            # Finished results first: the caller may stop at the first preempted one.
            yield from sorted(at_end, key=lambda ended: ended[1].preempted)
            if waiting or left:
                raise Preempted("preempted with trials left; the same command goes on")
    finally:
        for worker in busy:
            pool.end(worker)


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
        self._silence: dict[Any, float | None] = {}  # seconds; None for a worker heard since the last look

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
