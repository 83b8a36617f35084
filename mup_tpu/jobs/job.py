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

    in_driver: bool = False
    """Whether it is the driver's own process, with the user's terminal."""
    handles_sigterm: bool = False
    """Whether SIGTERM reaches the job; the job then checkpoints and ends."""
    writes: bool = True
    """Whether it writes checkpoints: of several processes with one job, one does."""
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
    """

    members = 1
    """Trials of the job: one of several can be split."""
    kept = "its checkpoints are kept"
    """State of a preempted job, in words."""

    @abstractmethod
    def run(self, here: Surroundings) -> Generator[Any, None, Any]:
        """Do the work: yield reports, which are signs of life, and return the result.

        `yield Question(...)` waits, and its value is the driver's answer.

        Raises:
            PackTooLarge: the job needs more memory than there is; parts of it may fit.
            MupTpuError: an error that the user can mend.
            WorkerLost: a process of the job's own was killed.
            DeviceFailed: this process can use its GPU no longer.
            Exception: any other error fails this job alone.
        """

    def was_preempted(self, result: Any) -> bool:
        """Return whether SIGTERM ended the job early, so that its result is not final."""
        return False

    def split(self, fits: int) -> Sequence[Job]:
        """Return jobs of at most `fits` members in place of this one; none if it cannot be split."""
        return ()


@dataclass(frozen=True)
class Started:
    """A job has gone to a worker."""


@dataclass(frozen=True)
class Preparing:
    """A job has not reported yet."""

    doing: str
    """Current work, such as "importing torch"."""


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
    preempted: bool = False
    """Whether SIGTERM ended it early."""


@dataclass(frozen=True)
class Failed(Ended):
    """A job has raised an error, or has lost too many workers."""

    reason: str


@dataclass(frozen=True)
class TooLarge(Ended):
    """A job needs more memory than there is."""

    reason: str
    fits: int
    """Most members of a part."""


@dataclass(frozen=True)
class Refused(Ended):
    """A job has met an error that the user can mend; other jobs would meet it too."""

    error: MupTpuError


@dataclass(frozen=True)
class Lost(Ended):
    """A worker has died or hangs, and its job with it."""

    reason: str
    for_memory: Literal["no", "perhaps", "surely"] = "no"
    """Whether the system killed it because memory was short."""


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

    where = ""
    """Place, for a sentence: " on host-3 (10.0.0.7)"; "" for this machine."""


W = TypeVar("W", bound=Worker)


class Pool(ABC, Generic[W]):
    """Workers, started and ended for the scheduler; the end of the `with` block ends all of them.

    A worker is idle again after the end of its job. The scheduler ends lost workers.
    """

    passes_sigterm_on = False
    """Whether the driver passes SIGTERM on to jobs, which then checkpoint (`terminate`)."""
    waits_for = ""
    """Work at the start of a worker, in words for the terminal."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether a worker can take a job now."""

    @abstractmethod
    def hand(self, job: Job) -> W:
        """Hand a job to an idle worker, or to a new one."""

    @abstractmethod
    def hear(self) -> Iterable[tuple[W, Any]]:
        """Yield events of busy workers, after waiting up to a second for one.

        Reports come as the job yields them, its end as an `Ended`. A worker that has died is `Lost`. A job
        with a `Question` waits for `answer`.

        Raises:
            ConfigError: workers do not start.
        """

    @abstractmethod
    def answer(self, worker: W, answer: Any) -> None:
        """Answer the question of a worker's job, which then goes on."""

    @abstractmethod
    def end(self, worker: W) -> None:
        """End a busy or lost worker at once."""

    def fill(self, wanted: int) -> None:  # noqa: B027 (a pool may start workers when it hands them jobs)
        """Start workers as far as there is room, up to this number in all."""

    def terminate(self, worker: W) -> None:  # noqa: B027 (called only where SIGTERM is passed on)
        """Send SIGTERM to a busy worker."""
