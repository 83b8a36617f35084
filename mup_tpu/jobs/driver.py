"""Jobs, what a worker sends about one, the interface of pools of workers, and the driver, which schedules.

The driver has attempts, heartbeats, splits and the end of a run. It serves every kind of job and every pool.
"""

from __future__ import annotations

import logging
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Self, TypeVar

from mup_tpu.errors import DeviceFailed, MupTpuError, PackTooLarge, Preempted, first_line
from mup_tpu.training.process import handling

T = TypeVar("T")


@dataclass(frozen=True)
class JobContext:
    """Facts about the process that runs a job."""

    in_driver: bool = False  # whether it is the driver's own process, with the user's terminal
    handles_sigterm: bool = False  # whether SIGTERM reaches the job; the job then checkpoints and ends
    writes: bool = True  # whether it writes checkpoints: one of several processes with one job does
    private: Sequence[int] = ()  # file descriptors that processes forked from it close
    _memory: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value for a key, made for the first job that needs it and kept for later ones."""
        if key not in self._memory:
            self._memory[key] = make()
        value: T = self._memory[key]
        return value


class WorkerLost(Exception):
    """A process that a job needs was killed: the job is tried again, on another worker."""


class Job(ABC):
    """Work of one worker from start to result, pickled on its way to another process.

    `str` of a job is its name in log lines, such as "a pack of 3 trials".

    `run` yields reports, which are signs of life, and returns the result. `yield Request(...)` waits, and
    its value is the driver's answer. It raises PackTooLarge where parts of the job may fit in memory,
    WorkerLost or DeviceFailed where another process may do it, and a MupTpuError for what the user can mend.
    Any other error fails this job alone. `split` returns jobs of at most `fits` members in place of this one,
    or none.
    """

    members = 1  # trials of the job: one of several can be split
    values = ""  # values of the job's only trial, in words; "" for a pack
    kept = "its checkpoints are kept"  # state of a preempted job, in words

    @abstractmethod
    def run(self, here: JobContext) -> Generator[Any, None, Any]: ...

    def was_preempted(self, result: Any) -> bool:
        return False

    def split(self, fits: int) -> Sequence[Job]:
        return ()


@dataclass(frozen=True)
class Started:
    """A job has gone to a worker."""


@dataclass(frozen=True)
class Preparing:
    """A job has not reported yet; it does work such as "importing torch"."""

    doing: str


@dataclass(frozen=True)
class Request:
    """A job waits for an answer of the driver: which of its trials are hopeless?

    The answer is the trial_ids of those that stop.
    """

    points: Mapping[str, Sequence[tuple[int, float]]]
    """Losses of trials that train, by trial_id, each with its step; only those since the last request."""
    steps: int = 0  # steps of a whole trial; 0 if they are not known


@dataclass(frozen=True)
class Split:
    """A job needs too much memory; its parts run instead."""

    parts: Sequence[Job]
    reason: str


class Ended:
    """Base of an attempt's last event."""


@dataclass(frozen=True)
class Finished(Ended):
    """A job has returned its result."""

    result: Any
    preempted: bool = False  # whether SIGTERM ended it early


@dataclass(frozen=True)
class Failed(Ended):
    """A job has raised an error, or has lost too many workers."""

    reason: str


@dataclass(frozen=True)
class TooLarge(Ended):
    """A job needs more memory than there is; parts of `fits` members at most may fit."""

    reason: str
    fits: int


@dataclass(frozen=True)
class Refused(Ended):
    """A job has met an error that the user can mend and that other jobs would meet too."""

    error: MupTpuError


@dataclass(frozen=True)
class Lost(Ended):
    """A worker has died or hangs, perhaps because memory was short; its job has stopped."""

    reason: str
    for_memory: Literal["no", "perhaps", "surely"] = "no"


def perform(job: Job, here: JobContext) -> Generator[Any, Any]:
    """Run a job in this process, yielding its reports, its questions and its last event.

    The answer to a question is sent into the generator.
    """
    ended: Ended
    try:
        result = yield from job.run(here)
        ended = Finished(result, job.was_preempted(result))
    except PackTooLarge as error:  # only its text: its traceback holds the missing memory
        ended = TooLarge(str(error), error.fits)
    except (DeviceFailed, WorkerLost) as error:
        ended = Lost(str(error))
    except MupTpuError as error:
        ended = Refused(error)
    except Exception as error:
        ended = Failed(first_line(error))
    yield ended


class Worker:
    """Process that runs jobs one after another."""

    where = ""  # place, for a sentence: " on host-3 (10.0.0.7)"; "" for this machine


W = TypeVar("W", bound=Worker)


class Pool(ABC, Generic[W]):
    """Workers, started and ended for the scheduler; the end of the `with` block ends all of them.

    `fill` starts workers as far as there is room, up to a number in all. `hand` gives a job to an idle
    worker, or to a new one. `hear` waits up to a second for events of busy workers: reports as the job yields
    them, its end as an `Ended`, a dead worker as `Lost`; it raises ConfigError where workers do not start. A
    job with a `Request` waits for `answer`. A worker is idle again after the end of its job. `end` ends a
    busy or lost worker at once, `terminate` sends it SIGTERM.
    """

    passes_sigterm_on = False
    """Whether the driver passes SIGTERM on to jobs, which then checkpoint (`terminate`)."""
    waits_for = ""  # work at the start of a worker, in words for the terminal

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @property
    @abstractmethod
    def has_room(self) -> bool: ...

    @abstractmethod
    def hand(self, job: Job) -> W: ...

    @abstractmethod
    def hear(self) -> Iterable[tuple[W, Any]]: ...

    @abstractmethod
    def answer(self, worker: W, answer: Any) -> None: ...

    @abstractmethod
    def end(self, worker: W) -> None: ...

    def fill(self, wanted: int) -> None:  # noqa: B027 (a pool may start workers when it hands them jobs)
        pass

    def terminate(self, worker: W) -> None:  # noqa: B027 (called only where SIGTERM is passed on)
        pass


MAX_ATTEMPTS = 3  # lost workers after which a job has failed

_log = logging.getLogger(__name__)


def run_jobs(
    jobs: Any,
    pool: Pool[Any],
    heartbeat: float,
    decide: Callable[[Any, Request], Collection[str]] = lambda job, request: (),
) -> Generator[tuple[Any, Any]]:
    """Run jobs, yielding (job, event) as events come; close the generator to end running jobs.

    Events are `Started`, `Preparing`, a job's own reports, and last `Finished`, `Failed` or `Split`. A job
    with a lost worker starts again, in parts if its worker was killed for want of memory. Parts of a split
    job follow as separate jobs.

    Jobs come in the order of their start, from a list or from a search, which makes each when a worker is
    free; their length is a limit. The pool stays open. A worker counts as hung after `heartbeat` seconds
    without a report. `decide` answers a job's `Request`.

    Raises:
        Preempted: SIGTERM ended the run before all jobs had ended.
        ConfigError: workers do not start.
        MupTpuError: a job met an error that the user can mend.
    """
    new, left = iter(jobs), len(jobs)
    waiting = deque[Job]()  # jobs that start before new ones: parts, and those that lost a worker
    busy: dict[Worker, Job] = {}
    started: Counter[Job] = Counter()
    killed: set[Job] = set()  # jobs whose worker was lost, perhaps because memory was short
    at_end: list[tuple[Job, Finished]] = []
    beats, is_ending = Heartbeats(heartbeat), False

    def end(number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        for worker in busy:
            pool.terminate(worker)

    def heard() -> Iterator[tuple[Worker, Any]]:
        yield from pool.hear()
        for worker in beats.hung():
            yield worker, Lost(f"hung{worker.where}: no report within the heartbeat of {heartbeat:g} s")

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
                    if isinstance(event, Request):  # answered at once, since the job's device waits
                        beats.heard(worker)
                        pool.answer(worker, decide(job, event))
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


_LONGEST_LOOK_S = 5.0  # most seconds of silence between two looks; pools wait up to one for a report


class Heartbeats:
    """Silence of each busy worker; a worker hangs if it is silent for more than `limit` seconds.

    Time counts only while the driver listens: after a suspension (its workers with it), or long work on rows,
    all workers would seem to hang.
    """

    def __init__(self, limit: float) -> None:
        self._looked_at = time.monotonic()
        self._limit = limit
        # One look never uses up a short limit, since the driver may have been suspended before it.
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
