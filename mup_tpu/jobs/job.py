"""Jobs, as their workers run them, and the events by which a worker tells of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mup_tpu.errors import MupTpuError, PackTooLarge, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Surroundings:
    """The process that runs a job, as far as the job needs to know it."""

    in_driver: bool = False
    """Whether it is the driver's own process, whose terminal the user sees."""
    handles_sigterm: bool = False
    """Whether SIGTERM reaches the job, which then checkpoints and ends."""
    writes: bool = True
    """Whether it writes checkpoints: one process does, where several run a job together."""
    _memory: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Value for a key, made for the first job that asks and kept for later ones."""
        if key not in self._memory:
            self._memory[key] = make()
        value: T = self._memory[key]
        return value


class WorkerLost(Exception):
    """A process that a job needs was killed: the job is tried again, on another worker."""


class Job(ABC):
    """Work that one worker does from start to result. It is pickled on its way to another process.

    `str` of a job names it in log lines, as "a pack of 3 trials".
    """

    @abstractmethod
    def run(self, here: Surroundings) -> Generator[Any, None, Any]:
        """Do the work: yield reports on the way, each of them a sign of life, and return the result.

        Raises:
            PackTooLarge: the job needs more memory than there is; parts of it may fit.
            MupTpuError: an error that the user can mend.
            WorkerLost: a process of the job's own was killed.
            Exception: any other error fails this job alone.
        """

    def was_preempted(self, result: Any) -> bool:
        """Whether SIGTERM cut the job short, so that its result is not final."""
        return False

    def split(self, fits: int) -> Sequence[Job]:
        """Smaller jobs in place of this one, which needs too much memory; none if it cannot be split.

        Args:
            fits: most members of a part, from `PackTooLarge`.
        """
        return ()


@dataclass(frozen=True)
class Started:
    """A job has gone to a worker."""


@dataclass(frozen=True)
class Preparing:
    """A job has not reported yet."""

    doing: str
    """What it waits for, such as "importing torch"."""


@dataclass(frozen=True)
class Split:
    """A job needs too much memory; its parts run in its place."""

    parts: Sequence[Job]
    reason: str


class Ended:
    """An attempt at a job has ended: base of the last event of each."""


@dataclass(frozen=True)
class Finished(Ended):
    """A job has returned its result."""

    result: Any
    preempted: bool = False
    """Whether SIGTERM cut it short."""


@dataclass(frozen=True)
class Failed(Ended):
    """A job has raised an error, or its workers were lost too often."""

    reason: str


@dataclass(frozen=True)
class TooLarge(Ended):
    """A job needs more memory than there is."""

    reason: str
    fits: int
    """Most members of a part of it."""


@dataclass(frozen=True)
class Refused(Ended):
    """A job has met an error that the user can mend, and that other jobs would meet too."""

    error: MupTpuError


@dataclass(frozen=True)
class Lost(Ended):
    """A worker has died or hangs, and its job with it."""

    reason: str


def perform(job: Job, here: Surroundings) -> Generator[Any]:
    """Run a job in this process: its reports, then the event that it ended by."""
    ended: Ended
    try:
        result = yield from job.run(here)
        ended = Finished(result, job.was_preempted(result))
    except PackTooLarge as error:  # only its words: its traceback holds the memory that is missing
        ended = TooLarge(str(error), error.fits)
    except WorkerLost as error:
        ended = Lost(str(error))
    except MupTpuError as error:
        ended = Refused(error)
    except Exception as error:
        ended = Failed(first_line(error))
    yield ended
