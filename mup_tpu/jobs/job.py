"""Jobs, the events that a worker sends about one, and the interface of pools of workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Self, TypeVar

from mup_tpu.errors import DeviceFailed, MupTpuError, PackTooLarge, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Surroundings:
    """Facts about the process that runs a job."""

    in_driver: bool = False  # whether it is the driver's own process, with the user's terminal
    handles_sigterm: bool = False  # whether SIGTERM reaches the job; the job then checkpoints and ends
    writes: bool = True  # whether it writes checkpoints: of several processes with one job, one does
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

    `run` yields reports, which are signs of life, and returns the result. `yield Question(...)` waits, and
    its value is the driver's answer. It raises PackTooLarge where parts of the job may fit in memory,
    WorkerLost or DeviceFailed where another process may do it, and a MupTpuError for what the user can mend.
    Any other error fails this job alone. `split` returns jobs of at most `fits` members in place of this one,
    or none.
    """

    members = 1  # trials of the job: one of several can be split
    values = ""  # values of the job's only trial, in words; "" for a pack
    kept = "its checkpoints are kept"  # state of a preempted job, in words

    @abstractmethod
    def run(self, here: Surroundings) -> Generator[Any, None, Any]: ...

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
class Question:
    """A job waits for an answer of the driver, such as whether to train on."""

    content: Any


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
    """A job has met an error that the user can mend; other jobs would meet it too."""

    error: MupTpuError


@dataclass(frozen=True)
class Lost(Ended):
    """A worker has died or hangs, and its job with it, perhaps killed because memory was short."""

    reason: str
    for_memory: Literal["no", "perhaps", "surely"] = "no"


def perform(job: Job, here: Surroundings) -> Generator[Any, Any]:
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
    job with a `Question` waits for `answer`. A worker is idle again after the end of its job. `end` ends a
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
