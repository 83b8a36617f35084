"""Pools of packs: the driver's own process, forked ones with a pipe each, or Ray actors (`cluster.py`).

Ray would take many seconds to start, so that it is not used on this machine alone.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.internals.processes import end_descendants, end_with_parent, environment_of_shell
from mup_tpu.jobs import this_machine
from mup_tpu.jobs.driver import Ended, Failed, Job, JobContext, Lost, Pool, Request, Worker, perform
from mup_tpu.training.process import host_log

if TYPE_CHECKING:
    from rich.console import Console


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
        self._surroundings = JobContext(in_driver=True, handles_sigterm=True)
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


_LAST_LOG_S = 30.0  # seconds that all workers together have to upload the ends of their logs

_log = logging.getLogger(__name__)


class _Process(Worker):
    """Process, with the driver's end of its pipe, and its part of the machine as environment variables."""

    def __init__(self, results: str | None, preload: Sequence[str], part: Mapping[str, str]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.part = part
        environment = {**environment_of_shell(), **part}
        self.process = this_machine.start_process(_work, (theirs, results, environment, os.getcwd()), preload)
        theirs.close()  # otherwise the end of the process would not close the pipe

    def end(self) -> None:
        end_descendants(self.process.pid or 0)
        self.process.kill()
        self.process.join()
        self.connection.close()


class Forked(Pool[_Process]):
    """Processes forked from a server that has imported the jobs' modules."""

    passes_sigterm_on = True

    def __init__(
        self,
        count: int,
        results: str | None,  # folder or fsspec URL of the workers' logs
        preload: Sequence[str] = this_machine.PACK_MODULES,
        parts: Sequence[Mapping[str, str]] = (),  # environment of each process, such as its GPU
    ) -> None:
        self._count, self._results, self._preload = count, results, preload
        self._free = [*parts] or [{}] * count
        # The server imports the modules before it forks the first process.
        self.waits_for = "importing torch" if preload else ""
        self._killed_here = this_machine.killed_for_memory()
        self._idle: list[_Process] = []
        self._busy: dict[Any, _Process] = {}

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:
            worker.connection.close()  # the worker then uploads the rest of its log and ends
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
        worker = self._idle.pop() if self._idle else _Process(self._results, self._preload, self._free.pop(0))
        self._busy[worker.connection] = worker
        with contextlib.suppress(OSError):  # it died while idle: `hear` reports it
            worker.connection.send(job)
        return worker

    def hear(self) -> Iterator[tuple[_Process, Any]]:
        for connection in wait(list(self._busy), timeout=1.0):
            worker = self._busy[connection]
            try:
                event = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.kill()
                worker.process.join()
                why = f"its process died (exit code {worker.process.exitcode})"
                event = Lost(why, self._for_memory(worker))
            if isinstance(event, Ended) and not isinstance(event, Lost):
                self._idle.append(self._busy.pop(connection))
            yield worker, event

    def _for_memory(self, worker: _Process) -> Literal["no", "perhaps", "surely"]:
        if worker.process.exitcode != -signal.SIGKILL:
            return "no"
        before, self._killed_here = self._killed_here, this_machine.killed_for_memory()
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


def _work(connection: Connection, results: str | None, environment: dict[str, str], folder: str) -> None:
    os.environ.clear()  # the server's is older
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    # Ctrl-C reaches the driver too, and the driver ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    with contextlib.suppress(OSError):  # when memory is short, Linux shall kill a worker, not the driver
        Path("/proc/self/oom_score_adj").write_text("500")
    here = JobContext(handles_sigterm=True, private=(connection.fileno(),))
    with host_log(results, capture_warnings=True):
        while True:
            try:
                job = connection.recv()
            except (EOFError, ConnectionError):  # the driver has ended
                return
            except Exception as error:  # the job needs a module that cannot be imported here
                connection.send(Failed(first_line(error)))
                continue
            events, event = perform(job, here), None
            try:
                while not isinstance(event, Ended):
                    event = events.send(connection.recv() if isinstance(event, Request) else None)
                    connection.send(event)
            except (EOFError, ConnectionError):  # the driver has ended, in the middle of a job
                events.close()
                return


@dataclass(frozen=True)
class Place:
    """Pool of packs, and how they run there."""

    pool: Pool[Any]
    workers: int  # number of packs at once, at the start
    execution: str  # execution of a pack's members: "loop" or "vmap"
    run: RunOptions  # options of each pack, with its number of threads
    gpu: str = ""  # name of the GPU that each pack trains on; "" on other devices and on a Ray cluster


class Pools:
    """The open pool of a run, replaced if another is needed.

    `results` is the folder or fsspec URL of the workers' logs; None keeps none.
    """

    def __init__(self, options: SweepOptions, results: str | None, console: Console) -> None:
        self._options, self._results, self._console = options, results, console
        self._asked: tuple[Any, ...] = ()
        self._pool, self._cluster = contextlib.ExitStack(), contextlib.ExitStack()
        self._open: Pool[Any] | None = None

    def close(self) -> None:
        with self._cluster, self._pool:
            self._open = None

    def place(self, trials: int, run: RunOptions, at_most: int = sys.maxsize) -> Place:
        """Return the place for this number of trials; `at_most` limits packs at once."""
        trials = min(trials, at_most)
        if (address := self._options.address) is not None:
            with self._console.status("importing ray"):
                from mup_tpu.jobs import cluster

            if self._open is None:
                self._cluster.enter_context(cluster.ray_cluster(address, self._console))
            run = replace(run, threads=run.threads or cluster.threads(trials))
            room = cluster.slots(run)
            pool = self._kept(room.key, lambda: cluster.RayActors(lambda: cluster.slots(run), self._results))
            assert isinstance(pool, cluster.RayActors)
            pool.at_most = at_most
            if run.device == "auto":
                # By the cluster's GPUs: this machine may have none, and workers without one from Ray would
                # all take the same GPU that Ray does not know of.
                run = replace(run, device="cpu" if room.execution == "loop" else "cuda")
            execution = room.execution if run.execution == "auto" else run.execution
            return Place(pool, min(room.count, at_most), execution, run)
        if run.placement != "host":
            raise ConfigError(f"placement {run.placement!r} needs Ray: add --address ADDRESS")
        with self._console.status("looking for the device"):  # torch is imported to find an accelerator
            workers, threads = this_machine.room(trials, run)
            workers = min(workers, at_most)
            execution, gpu = this_machine.execution(run), this_machine.gpu(run)
            if run.split_over > 1:  # one trial after another, each over all GPUs
                pool = self._kept((1,), lambda: InProcess(self._results))
                return Place(pool, 1, "loop", run)
        # A GPU that fails is lost to its process, so even a single pack runs in a process of its own.
        forks = this_machine.CAN_FORK and (workers > 1 or gpu != "")

        def make() -> Pool[Any]:
            if note := this_machine.unused_gpus(run):
                self._console.print(note, style="yellow")
            parts = this_machine.gpus(run)[:workers]
            return Forked(workers, self._results, parts=parts) if forks else InProcess(self._results)

        pool = self._kept((workers,), make)
        return Place(pool, workers, execution, replace(run, threads=threads), gpu)

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Pool[Any]]) -> Pool[Any]:
        if self._open is None or key != self._asked:
            self._pool.close()
            self._open, self._asked = self._pool.enter_context(make()), key
        return self._open
