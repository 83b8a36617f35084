"""Pools on this machine: the driver's own process, and forked ones, each with a pipe to the driver.

Ray would take many seconds to start.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Self

from mup_tpu.errors import first_line
from mup_tpu.jobs.job import Ended, Failed, Job, Lost, Pool, Question, Surroundings, Worker, perform
from mup_tpu.jobs.this_machine import PACK_MODULES, killed_for_memory, start_process
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
        return self._busy is None

    def hand(self, job: Job) -> _Here:
        self._busy = _Here(perform(job, self._surroundings))
        return self._busy

    def hear(self) -> Iterator[tuple[_Here, Any]]:
        """Yield the next event, after any time."""
        if (here := self._busy) is not None:
            event, here.answer = here.events.send(here.answer), None
            if isinstance(event, Ended):
                self._busy = None
            yield here, event

    def answer(self, worker: _Here, answer: Any) -> None:
        worker.answer = answer

    def end(self, worker: _Here) -> None:
        worker.events.close()
        self._busy = None


_LAST_LOG_S = 30.0  # seconds for all workers at the end to upload the rest of their logs to a bucket

_log = logging.getLogger(__name__)


class _Process(Worker):
    """Process, with the driver's end of its pipe, and its part of the machine as environment variables."""

    def __init__(self, results: str | None, preload: Sequence[str], part: Mapping[str, str]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.part = part
        self.process = start_process(_work, (theirs, results, {**os.environ, **part}), preload)
        theirs.close()  # otherwise the end of the process would not close the pipe

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Forked(Pool[_Process]):
    """Processes forked from a server that has imported the jobs' modules.

    Args:
        count: jobs at once.
        results: folder or fsspec URL of the workers' logs; None keeps none.
        preload: modules for a new server to import.
        parts: environment variables of each of the `count` processes, such as the GPU that it may see.
    """

    passes_sigterm_on = True

    def __init__(
        self,
        count: int,
        results: str | None,
        preload: Sequence[str] = PACK_MODULES,
        parts: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._count, self._results, self._preload = count, results, preload
        self._free = [*parts] or [{}] * count
        # The server imports the modules before it forks the first process.
        self.waits_for = "importing torch" if preload else ""
        self._killed_here = killed_for_memory()
        self._idle: list[_Process] = []
        self._busy: dict[Any, _Process] = {}

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:
            worker.connection.close()  # it uploads the rest of its log, and ends
        deadline = time.monotonic() + _LAST_LOG_S
        for worker in self._idle:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        if late := sum(worker.process.is_alive() for worker in self._idle):
            _log.warning(
                "the last lines of %d workers' logs are lost: %s did not take them within %g s",
                late, self._results, _LAST_LOG_S,
            )  # fmt: skip
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()

    @property
    def has_room(self) -> bool:
        return len(self._busy) < self._count

    def hand(self, job: Job) -> _Process:
        """Hand a job to an idle process, or to a new one."""
        worker = self._idle.pop() if self._idle else _Process(self._results, self._preload, self._free.pop(0))
        self._busy[worker.connection] = worker
        with contextlib.suppress(OSError):  # it died while idle: `hear` reports it
            worker.connection.send(job)
        return worker

    def hear(self) -> Iterator[tuple[_Process, Any]]:
        """Yield events of busy processes, after waiting up to a second for one."""
        for connection in wait(list(self._busy), timeout=1.0):
            worker = self._busy[connection]
            try:
                event = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.kill()
                worker.process.join()
                event = Lost(
                    f"its process died (exit code {worker.process.exitcode})", self._for_memory(worker)
                )
            if isinstance(event, Ended) and not isinstance(event, Lost):
                self._idle.append(self._busy.pop(connection))
            yield worker, event

    def _for_memory(self, worker: _Process) -> Literal["no", "perhaps", "surely"]:
        """Return whether a process that died was killed because memory was short."""
        if worker.process.exitcode != -signal.SIGKILL:
            return "no"
        before, self._killed_here = self._killed_here, killed_for_memory()
        return "surely" if self._killed_here > before else "perhaps"

    def answer(self, worker: _Process, answer: Any) -> None:
        with contextlib.suppress(OSError):  # it died: `hear` reports it
            worker.connection.send(answer)

    def end(self, worker: _Process) -> None:
        del self._busy[worker.connection]
        worker.end()
        self._free.append(worker.part)

    def terminate(self, worker: _Process) -> None:
        worker.process.terminate()


def _work(connection: Connection, results: str | None, environment: dict[str, str]) -> None:
    """Run jobs that come in, and send their events."""
    os.environ.update(environment)  # the server's is older
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the driver too, and the driver ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    with contextlib.suppress(OSError):  # where memory is short, Linux kills a worker, not its driver
        Path("/proc/self/oom_score_adj").write_text("500")
    here = Surroundings(handles_sigterm=True)
    with host_log(results, capture_warnings=True):
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            except Exception as error:  # the job needs a module that cannot be imported here
                connection.send(Failed(first_line(error)))
                continue
            events, event = perform(job, here), None
            while not isinstance(event, Ended):
                event = events.send(connection.recv() if isinstance(event, Question) else None)
                connection.send(event)


def _end_with_driver() -> None:
    """End this process after any end of the driver."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)
