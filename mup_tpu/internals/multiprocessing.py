"""Multiprocessing's fork server, started early and without the caller's script.

Undocumented parts of `multiprocessing`, as they are in Python 3.11 to 3.14:

- `forkserver.ensure_running` and `resource_tracker.ensure_running`: the server must import torch before the
  first process is needed, and `set_forkserver_preload` starts nothing.
- `util.get_temp_dir`: the folder of the socket of the server gets a mark by which leftovers are found.
- `current_process()._config`: a process that ends with its parent may start none by `multiprocessing`; a
  process that is killed with its group may.
- `sys.modules["__main__"]`: a new process would run the script of the caller, which may lack the guard
  `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mup_tpu.files.local import for_sockets, mark, safe_path


def ensure_server(preload: Sequence[str]) -> None:
    """Start the server, unless it runs, without waiting for its imports of the modules `preload`."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    with safe_path():
        resource_tracker.ensure_running()  # otherwise the server starts it; it unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # Ctrl-C reaches the server too, and is ignored there only after the imports
            with for_sockets():
                mark(Path(util.get_temp_dir()))
            with _without_main():
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(target: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    """Start a process forked from the server; it ends when this process does.

    Raises:
        EOFError, OSError: the server died before it forked.
    """
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=True)
    with _without_main():
        process.start()
    return process


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def allow_children() -> None:
    # Loaders of data do.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
