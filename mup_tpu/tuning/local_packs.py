"""Packs on this machine alone: on a CPU side by side in processes of their own, else one by one in this one.

The processes are forked from a server that has imported torch and transformers once, so that one starts in an
instant; nothing else is started, which saves the many seconds that a Ray cluster of one machine takes.
"""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mup_tpu import data
from mup_tpu.config import RunOptions, Trial
from mup_tpu.errors import MupTpuError, PackTooLarge, Preempted, first_line
from mup_tpu.training.report import PackEvent, PackFailure, PackResult, PackSplit, Report
from mup_tpu.tuning.plan import MAX_ATTEMPTS, split_pack

_CAN_FORK = "forkserver" in multiprocessing.get_all_start_methods()


def room(trials: int, options: RunOptions) -> tuple[int, int]:
    """Packs that run at once on this machine, and CPU threads of each, such that so many trials use it all.

    One thread each where there are trials for all cores: two packs of one thread do more than one of two
    (measured: 119 k against 105 k tokens/s at width 64, 14.0 k against 12.6 k at width 256, on 2 cores).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not _CAN_FORK or not _is_cpu(options):
        return 1, options.threads or cores
    threads = options.threads or max(1, cores // trials)
    return max(1, cores // threads), threads


def _is_cpu(options: RunOptions) -> bool:
    """Whether packs train on the CPU, as far as can be told without torch: here it is not to be imported."""
    return options.device == "cpu" or (options.device == "auto" and not glob.glob("/dev/nvidia[0-9]*"))


def way(options: RunOptions) -> str:
    """Which way packs train here.

    Raises:
        ConfigError: the device is not there.
    """
    if options.way != "auto":
        return options.way
    if _is_cpu(options):
        return "loop"
    from mup_tpu.devices import get_device

    return get_device(options.device).way


def run_packs(
    packs: list[list[Trial]],
    options: RunOptions,
    workers: int,
    checkpoints: Callable[[list[Trial]], str | None],
    results: str | None,
) -> Generator[tuple[int, PackEvent | None]]:
    """Run packs, yielding (pack index, event) as events come; None says that it has started.

    Args:
        packs: on the same data, in the order to start them; the parts of those that do not fit in memory are
            added.
        options: how each is run, threads included.
        workers: packs at once; with 1 they run in this process.
        checkpoints: the folder or fsspec URL of a pack's checkpoints, or None.
        results: the folder or fsspec URL whose logs they keep theirs in; None keeps none.

    Raises:
        Preempted: SIGTERM came, and no pack is left that could say so.
        MupTpuError: a pack met what is the user's to mend.
    """
    if workers == 1:
        return _in_this_process(packs, options, checkpoints, results)
    return _side_by_side(packs, options, workers, checkpoints, results)


def _in_this_process(
    packs: list[list[Trial]],
    options: RunOptions,
    checkpoints: Callable[[list[Trial]], str | None],
    results: str | None,
) -> Generator[tuple[int, PackEvent | None]]:
    from mup_tpu.training.host_log import host_log

    waiting = list(range(len(packs)))
    dataset = data.load(packs[0][0].data)
    with host_log(results):
        while waiting:
            index = waiting.pop(0)
            yield index, None
            try:
                for event in _train(packs[index], dataset, checkpoints(packs[index]), options):
                    yield index, event
            except PackTooLarge as error:
                parts = split_pack(packs, index, error)
                waiting[:0] = parts
                yield index, PackSplit(parts, str(error))


def _train(
    pack: list[Trial], dataset: data.TokenDataset, checkpoints: str | None, options: RunOptions
) -> Iterator[Report | PackResult]:
    """One pack's events, the last without its tensors: their memory must be free before the next pack's."""
    from mup_tpu.training.loop import PackRun

    training = PackRun(pack, dataset, options, checkpoints, None)
    with training.preemptible():
        for event in training.steps():
            yield replace(event, pack=None) if isinstance(event, PackResult) else event


class _Worker:
    """A process that runs packs one after another."""

    def __init__(self, options: RunOptions, results: str | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mup_tpu.training.loop", "mup_tpu.training.host_log"])
        self.connection, theirs = context.Pipe()
        arguments = (theirs, options, results, dict(os.environ))
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        with _without_main():
            self.process.start()
        theirs.close()  # or its end would not be noticed

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Have processes start without the caller's script, which they do not need and which may lack a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(
    connection: Connection, options: RunOptions, results: str | None, environment: dict[str, str]
) -> None:
    """The worker's process: packs come in, events go out."""
    os.environ.update(environment)  # the server's is that of the first sweep
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver too, which ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    from mup_tpu.training.host_log import host_log

    with contextlib.suppress(EOFError), host_log(results, capture_warnings=True):
        while True:
            pack, checkpoints = connection.recv()
            try:
                dataset = data.load(pack[0].data, progress=False)
                for event in _train(pack, dataset, checkpoints, options):
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
) -> Generator[tuple[int, PackEvent | None]]:
    waiting = list(range(len(packs)))
    attempts: Counter[int] = Counter()
    idle: list[_Worker] = []
    busy: dict[Any, tuple[int, _Worker]] = {}
    at_end: list[tuple[int, PackResult]] = []
    with _sigterm_passed_on(lambda: [worker for _, worker in busy.values()]) as told:
        try:
            while busy or (waiting and not told):
                while waiting and len(busy) < count and not told:
                    index, worker = waiting.pop(0), idle.pop() if idle else _Worker(options, results)
                    attempts[index] += 1
                    worker.connection.send((packs[index], checkpoints(packs[index])))
                    busy[worker.connection] = (index, worker)
                    yield index, None
                for connection in wait(list(busy), timeout=1.0):
                    index, worker = busy[connection]
                    try:
                        event = worker.connection.recv()
                    except (EOFError, OSError):
                        del busy[connection]
                        worker.end()
                        if attempts[index] < MAX_ATTEMPTS or told:
                            waiting.insert(0, index)
                        else:
                            died = f"its process died {MAX_ATTEMPTS} times"
                            yield index, PackFailure(f"{died} (exit code {worker.process.exitcode})")
                        continue
                    if isinstance(event, PackTooLarge):
                        parts = split_pack(packs, index, event)
                        waiting[:0] = parts
                        event = PackSplit(parts, str(event))
                    if isinstance(event, MupTpuError):
                        raise event
                    if not isinstance(event, Report):
                        del busy[connection]
                        idle.append(worker)
                    if told and isinstance(event, PackResult):
                        at_end.append((index, event))
                    else:
                        yield index, event
            # What has finished first: the caller ends at the first that was preempted.
            yield from sorted(at_end, key=lambda end: any(r["status"] == "preempted" for r in end[1].rows))
            if waiting:
                raise Preempted("preempted between packs; the same command goes on")
        finally:
            for worker in [*idle, *(worker for _, worker in busy.values())]:
                worker.end()


@contextlib.contextmanager
def _sigterm_passed_on(workers: Callable[[], Collection[_Worker]]) -> Iterator[list[int]]:
    """SIGTERM goes on to the workers, whose packs checkpoint; the list that is yielded then holds it."""
    told: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        for worker in workers():
            worker.process.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield told  # only the main thread hears signals
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
