"""Packs on this machine alone: on a CPU side by side in processes of their own, else one by one in this one.

Processes with a pipe each: a Ray cluster of one machine takes many seconds to start.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from mup_tpu import data
from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.errors import MupTpuError, PackTooLarge, Preempted, first_line
from mup_tpu.jobs.heartbeat import Heartbeats, Lost
from mup_tpu.jobs.pack_events import pack_events
from mup_tpu.jobs.plan import split_pack
from mup_tpu.jobs.this_machine import is_cpu, start_process
from mup_tpu.training.report import (
    PackEvent,
    PackFailure,
    PackPreparing,
    PackResult,
    PackSplit,
    PackStarted,
    Report,
)
from mup_tpu.training.signals import handling


def execution(options: RunOptions) -> str:
    """How members of a pack train here: "loop" or "vmap".

    Raises:
        ConfigError: the device is not there.
    """
    if options.execution != "auto":
        return options.execution
    if is_cpu(options):
        return "loop"
    from mup_tpu.devices import get_device

    return get_device(options.device).execution


def run_packs(
    packs: list[list[Trial]],
    options: RunOptions,
    workers: int,
    checkpoints: Callable[[list[Trial]], str | None],
    results: str | None,
    heartbeat: float = SweepOptions.heartbeat,
) -> Generator[tuple[int, PackEvent]]:
    """Run packs, yielding (pack index, event) as events come.

    Args:
        packs: in the order to start them; the parts of those that do not fit in memory are added.
        options: how each is run, threads included.
        workers: packs at once; with 1 they run in this process.
        checkpoints: the folder or fsspec URL of a pack's checkpoints, or None.
        results: the folder or fsspec URL whose logs they keep theirs in; None keeps none.
        heartbeat: seconds without a report after which a worker counts as hung; not in this process.

    Raises:
        Preempted: SIGTERM came, and no pack is left that could say so.
        MupTpuError: a pack met what is the user's to mend.
    """
    if workers == 1:
        return _in_this_process(packs, options, checkpoints, results)
    return _side_by_side(packs, options, workers, checkpoints, results, heartbeat)


def _in_this_process(
    packs: list[list[Trial]],
    options: RunOptions,
    checkpoints: Callable[[list[Trial]], str | None],
    results: str | None,
) -> Generator[tuple[int, PackEvent]]:
    from mup_tpu.training.host_log import host_log

    waiting = list(range(len(packs)))
    load = functools.cache(data.load)
    with host_log(results):
        while waiting:
            index = waiting.pop(0)
            yield index, PackStarted()
            pack = packs[index]
            try:
                for event in pack_events(pack, load, options, checkpoints(pack), preemptible=True):
                    yield index, event
            except PackTooLarge as error:
                parts = split_pack(packs, index, error)
                waiting[:0] = parts
                yield index, PackSplit(parts, str(error))
            except MupTpuError:
                raise
            except Exception as error:  # as in a process of its own: the others go on
                yield index, PackFailure(first_line(error))


_LAST_LOG_S = 30.0
"""Seconds that all workers have at the end for what is left of their logs, where these go to a bucket."""

_log = logging.getLogger(__name__)


class _Worker:
    """A process that runs packs one after another."""

    def __init__(self, options: RunOptions, results: str | None) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = start_process(_work, (theirs, options, results, dict(os.environ)))
        theirs.close()  # or its end would not be noticed

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Crew:
    """Workers, each with a pack or waiting for one; ended with the block."""

    def __init__(self, options: RunOptions, results: str | None, heartbeat: float) -> None:
        self._options, self._results = options, results
        self._heartbeats = Heartbeats(heartbeat)
        self._idle: list[_Worker] = []
        self._busy: dict[Any, tuple[int, _Worker]] = {}

    def __enter__(self) -> _Crew:
        return self

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
        for worker in [*self._idle, *(worker for _, worker in self._busy.values())]:
            worker.end()

    @property
    def busy(self) -> int:
        """Workers that have a pack."""
        return len(self._busy)

    def start(self, index: int, pack: list[Trial], checkpoints: str | None) -> None:
        """Hand a pack to a worker that waits, or to a new one."""
        worker = self._idle.pop() if self._idle else _Worker(self._options, self._results)
        self._busy[worker.connection] = (index, worker)
        self._heartbeats.heard(worker.connection)
        with contextlib.suppress(OSError):  # its process died while it waited: `events` will hear of it
            worker.connection.send((pack, checkpoints))

    def events(self) -> Iterator[tuple[int, PackEvent | MupTpuError | Lost]]:
        """What workers have to say, waiting up to a second for it, and which of them are lost."""
        for connection in wait(list(self._busy), timeout=1.0):
            index, worker = self._busy[connection]
            try:
                event = worker.connection.recv()
            except (EOFError, OSError):
                self._end(connection)
                event = Lost(f"its process died (exit code {worker.process.exitcode})")
            else:
                self._heartbeats.heard(connection)
                if not isinstance(event, PackPreparing | Report):
                    self._forget(connection)
                    self._idle.append(worker)
            yield index, event
        for connection in self._heartbeats.hung():
            index, _ = self._busy[connection]
            self._end(connection)
            yield index, self._heartbeats.lost()

    def _end(self, connection: Any) -> None:
        self._forget(connection).end()

    def _forget(self, connection: Any) -> _Worker:
        """A worker that has no pack any more."""
        self._heartbeats.forget(connection)
        return self._busy.pop(connection)[1]

    def terminate(self) -> None:
        """SIGTERM to all that have a pack."""
        for _, worker in self._busy.values():
            worker.process.terminate()


def _work(
    connection: Connection, options: RunOptions, results: str | None, environment: dict[str, str]
) -> None:
    """The worker's process: packs come in, events go out."""
    os.environ.update(environment)  # the server's is that of the first sweep
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver too, which ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    from mup_tpu.training.host_log import host_log

    load = functools.cache(functools.partial(data.load, progress=False))
    with contextlib.suppress(EOFError), host_log(results, capture_warnings=True):
        while True:
            pack, checkpoints = connection.recv()
            try:
                for event in pack_events(pack, load, options, checkpoints, preemptible=True):
                    connection.send(event)
            except MupTpuError as error:
                connection.send(error)
            except Exception as error:
                connection.send(PackFailure(first_line(error)))


def _end_with_driver() -> None:
    """End this process when the driver does, however it does."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


def _side_by_side(
    packs: list[list[Trial]],
    options: RunOptions,
    count: int,
    checkpoints: Callable[[list[Trial]], str | None],
    results: str | None,
    heartbeat: float,
) -> Generator[tuple[int, PackEvent]]:
    waiting = list(range(len(packs)))
    attempts: Counter[int] = Counter()
    at_end: list[tuple[int, PackResult]] = []
    ending: list[int] = []

    def end(number: int, frame: object) -> None:
        """SIGTERM goes on to the workers, whose packs checkpoint."""
        ending.append(number)
        crew.terminate()

    with _Crew(options, results, heartbeat) as crew, handling({signal.SIGTERM: end}):
        while crew.busy or (waiting and not ending):
            while waiting and crew.busy < count and not ending:
                index = waiting.pop(0)
                attempts[index] += 1
                yield index, PackStarted()
                # A new process is there once the server that it is forked from has imported torch.
                yield index, PackPreparing("importing torch")
                crew.start(index, packs[index], checkpoints(packs[index]))
            for index, event in crew.events():
                if isinstance(event, Lost):
                    failure = None if ending else event.outcome(packs[index], attempts[index])
                    if failure:
                        yield index, failure
                    else:
                        waiting.insert(0, index)
                elif isinstance(event, PackTooLarge):
                    parts = split_pack(packs, index, event)
                    waiting[:0] = parts
                    yield index, PackSplit(parts, str(event))
                elif isinstance(event, MupTpuError):
                    raise event
                elif ending and isinstance(event, PackResult):
                    at_end.append((index, event))
                else:
                    yield index, event
        # What has finished first: the caller ends at the first that was preempted.
        yield from sorted(at_end, key=lambda end: any(r["status"] == "preempted" for r in end[1].rows))
        if waiting:
            raise Preempted("preempted between packs; the same command goes on")
