"""Processes: limits of Linux's control groups, and multiprocessing's fork server, started early.

A process is in a group of each hierarchy, and every group from it up to the root may limit memory and cores.
Both versions are read: version 2, and version 1's controllers `memory` and `cpu`.

The fork server must import torch before the first process is needed, and runs no script of the caller, which
may lack the guard `if __name__ == "__main__"`. So it is started by undocumented parts of `multiprocessing`,
as they are in Python 3.11 to 3.14: `ensure_running` of `forkserver` and `resource_tracker`,
`sys.modules["__main__"]`, and `current_process()._config`, since a process that ends with its parent may
start none by `multiprocessing`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

SELF = Path("/proc/self")

_LAUNCHERS = frozenset({"srun", "docker", "podman", "kubectl", "ssh", "mpirun"})
_LAUNCHERS_END_WITHIN_S = 5.0
_MOST_LOOKS = 1000  # for processes to end, 5 ms apart: one in the kernel may never

# Type of file system -> files of limits, file of the memory in use, entries of `memory.stat` for the cache
# of files. The cache counts as used, but Linux drops it when memory is needed.
_MEMORY = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "cgroup": (
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
}  # fmt: skip


def memory_left(process: Path = SELF) -> float:
    return min((_left(group, kind) for group, kind in _groups(process, "memory")), default=math.inf)


def cores(process: Path = SELF) -> int:
    """Return the CPU cores that a process may use, by its affinity and the quotas of its groups."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min((_quota(group) for group, _ in _groups(process, "cpu")), default=math.inf)
    return bound if quota == math.inf else max(1, min(bound, math.floor(quota + 0.01)))


def _groups(process: Path, controller: str) -> Iterator[tuple[Path, str]]:
    try:
        lines = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return
    paths = {}
    for number, controllers, path in lines:
        if number == "0" or controller in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for fields in mounts:
        root, mount_point, kind = fields[3], Path(fields[4]), fields[fields.index("-") + 1]
        if kind not in paths or (kind == "cgroup" and controller not in fields[-1].split(",")):
            continue
        # A container may see its group alone, mounted as if it were the root.
        group = PurePosixPath(paths[kind])
        below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        if ".." not in below.parts:
            yield from ((mount_point / part, kind) for part in (below, *below.parents))


def _left(group: Path, kind: str) -> float:
    limit_files, used_file, cache_entries = _MEMORY[kind]
    limit = min(_number(group / name) for name in limit_files)
    in_use = _text(group / used_file).strip()
    if limit == math.inf or not in_use.isdigit():
        return limit
    entries = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
    cache = sum(int(size) for name, _, size in entries if name in cache_entries and size.isdigit())
    return max(0.0, limit - max(0.0, int(in_use) - cache))


def _quota(group: Path) -> float:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return int(quota) / max(1, int(period))
    return _number(group / "cpu.cfs_quota_us") / max(1.0, _number(group / "cpu.cfs_period_us", 100_000))


def _number(file: Path, default: float = math.inf) -> float:
    text = _text(file).strip()
    return int(text) if text.isdigit() else default


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules without Python's search for cycles, a fifth of torch's import, now or later.

    Processes that are forked afterwards share more memory: a search writes to what it looks at.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def ensure_server(preload: Sequence[str]) -> None:
    """Start the server, unless it runs, without waiting for its imports of the modules `preload`."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # otherwise the server starts it; it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:  # Ctrl-C reaches the server too, and is ignored there only after the imports
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


def end_with_parent() -> None:
    """Let this forked process end at once, with all that it has started, when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        end_descendants(os.getpid())
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def end_descendants(process: int) -> None:
    """Kill all processes below one, which adopts their orphans.

    Programs whose work runs elsewhere, as under Slurm's daemon or a container's, get SIGTERM first: killed,
    they would leave it behind.
    """
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process)
        launchers = [p for p in root.children(recursive=True) if p.name() in _LAUNCHERS]
        for launcher in launchers:
            with contextlib.suppress(psutil.Error):
                launcher.terminate()
        deadline = time.monotonic() + _LAUNCHERS_END_WITHIN_S
        while any(_is_alive(p) for p in launchers) and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(_MOST_LOOKS):
            living = [p for p in root.children(recursive=True) if _is_alive(p)]
            for descendant in living:
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
            if not living:
                return
            time.sleep(0.005)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def environment_of_shell() -> dict[str, str]:
    """Return this process's environment, without a locale that Python has set at its start (PEP 538)."""
    environment = dict(os.environ)
    if environment.get("LC_CTYPE", "").lower() in ("c.utf-8", "c.utf8", "utf-8"):
        with contextlib.suppress(OSError):  # no Linux
            at_start = (SELF / "environ").read_bytes().split(b"\0")
            if not any(entry.startswith(b"LC_CTYPE=") for entry in at_start):
                del environment["LC_CTYPE"]
    return environment


def allow_children() -> None:
    # Loaders of data do.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
