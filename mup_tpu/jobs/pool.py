"""Pools of workers for the scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, Self, TypeVar

from mup_tpu.jobs.job import Job


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
