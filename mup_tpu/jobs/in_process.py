"""Pool of one worker: this process itself."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, Self

from mup_tpu.jobs.job import Ended, Job, Surroundings, perform
from mup_tpu.jobs.pool import Pool, Worker
from mup_tpu.training.process import host_log


class _Here(Worker):
    """This process, with one job."""

    def __init__(self, events: Generator[Any, Any]) -> None:
        self.events, self.answer = events, None


class InProcess(Pool[_Here]):
    """Jobs one after another in the driver's process, without a check for a job that hangs.

    The running job handles SIGTERM; before and after a job, it ends the command. `results` is the folder or
    fsspec URL of the log; None keeps none.
    """

    def __init__(self, results: str | None) -> None:
        self._results, self._at_end = results, contextlib.ExitStack()
        self._surroundings = Surroundings(in_driver=True, handles_sigterm=True)
        self._busy: _Here | None = None

    def __enter__(self) -> Self:
        self._at_end.enter_context(host_log(self._results))
        return self

    def __exit__(self, *error: object) -> None:
        self._at_end.close()

    @property
    def has_room(self) -> bool:
        """Whether no job runs."""
        return self._busy is None

    def hand(self, job: Job) -> _Here:
        """Prepare a job; reading its events advances it."""
        self._busy = _Here(perform(job, self._surroundings))
        return self._busy

    def hear(self) -> Iterator[tuple[_Here, Any]]:
        """The next event, after any time."""
        if (here := self._busy) is not None:
            event, here.answer = here.events.send(here.answer), None
            if isinstance(event, Ended):
                self._busy = None
            yield here, event

    def answer(self, worker: _Here, answer: Any) -> None:
        """Keep the answer for the next `hear`."""
        worker.answer = answer

    def end(self, worker: _Here) -> None:
        """Close the job."""
        worker.events.close()
        self._busy = None
