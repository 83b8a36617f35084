"""Pools: processes in which the scheduler has jobs run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from mup_tpu.jobs.job import Job


class Worker(Hashable, Protocol):
    """A process that runs jobs one after another."""

    @property
    def where(self) -> str:
        """Its place, for a sentence: " on host-3 (10.0.0.7)"; "" if that is this machine."""


W = TypeVar("W", bound=Worker)


class Pool(Protocol[W]):
    """Workers, started and ended for the scheduler; all are ended with the `with` block.

    A worker that reports the end of its job is idle again. A worker that was lost is not: the scheduler ends
    it with `end`.
    """

    passes_sigterm_on: bool
    """Whether jobs checkpoint at SIGTERM and the driver has to pass it on (`terminate`)."""
    waits_for: str
    """What the start of a worker waits for, in words for the terminal; "" if that is nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def fill(self, wanted: int) -> None:
        """Start workers, as many as there is room for, up to this number in all."""

    @property
    def has_room(self) -> bool:
        """Whether `hand` can take a job now."""

    def hand(self, job: Job) -> W:
        """Hand a job to an idle worker."""

    def hear(self) -> Iterable[tuple[W, Any]]:
        """Events of workers that have a job, after waiting up to a second for one.

        Reports come as the job yields them, its end as an `Ended`. A worker that has died is `Lost`.

        Raises:
            ConfigError: workers do not start.
        """

    def end(self, worker: W) -> None:
        """End a worker that has a job or was lost, whatever it is doing."""

    def terminate(self, worker: W) -> None:
        """Send SIGTERM to a worker that has a job."""
