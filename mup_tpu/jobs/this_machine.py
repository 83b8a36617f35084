"""What this machine has room for, and the server that processes for packs are forked from.

The server imports torch once, which takes seconds; nothing here imports it, so that it can be started before
anything else is.
"""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import ConfigError, reason
from mup_tpu.files.leftovers import mark
from mup_tpu.jobs.plan import threads_per_pack

_STARTS = 3
"""Tries to start a process."""

_PAUSE_S = 0.5
"""Seconds after which a server that died is known to be dead."""

_CAN_FORK = "forkserver" in multiprocessing.get_all_start_methods()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_cpu(options: RunOptions) -> bool:
    """Whether packs train on the CPU, as far as can be told without torch: here it is not to be imported."""
    return options.device == "cpu" or (options.device == "auto" and not glob.glob("/dev/nvidia[0-9]*"))


def room(trials: int, options: RunOptions) -> tuple[int, int]:
    """Packs that run at once on this machine, and CPU threads of each, so that so many use it all."""
    if not _CAN_FORK or not is_cpu(options):
        return 1, options.threads or cores()
    threads = options.threads or threads_per_pack(trials, cores())
    return max(1, cores() // threads), threads


def start_server(where: SweepOptions, options: RunOptions) -> None:
    """Start the server if a sweep would use it; returns at once, while it imports on a core of its own."""
    if not where.on_ray and room(cores(), options)[0] > 1:
        _ensure_server()


def start_process(target: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    """A process forked from the server; it ends when this one does.

    Raises:
        ConfigError: the server died each time that it was started.
    """
    for attempt in range(_STARTS):
        if attempt:
            time.sleep(_PAUSE_S)
        _ensure_server()
        process = multiprocessing.get_context("forkserver").Process(
            target=target, args=arguments, daemon=True
        )
        try:
            with _without_main():
                process.start()
            return process
        except (EOFError, OSError) as error:  # it died before it had forked: the next one may live
            why = reason(error)
    raise ConfigError(
        f"the server that processes are forked from died as it started, {_STARTS} times ({why}); is memory "
        "short on this machine?"
    )


def _ensure_server() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["mup_tpu.training.loop", "mup_tpu.training.host_log"]
    )
    resource_tracker.ensure_running()  # which the server starts else, and which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:  # Ctrl-C reaches the server too, which ignores it once it has imported what it is to
        mark(Path(util.get_temp_dir()))  # where the server's socket will lie
        with _without_main():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Have processes start without the caller's script, which they do not need and which may lack a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
