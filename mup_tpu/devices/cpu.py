"""The CPU: members take turns. Even a narrow model's matrices fill a core, and vmap was 2x slower."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch

from mup_tpu.devices.base import Device, Execution

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

# Type of file system -> files of limits, file of the memory in use, entries of `memory.stat` for the cache
# of files. The cache counts as used, but Linux drops it when memory is needed.
_CONTROL_GROUPS = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "cgroup": (
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
}  # fmt: skip


@dataclass(frozen=True)
class CpuDevice(Device):
    """All cores of this process, as many as `torch.set_num_threads` says."""

    name: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    execution: Execution = "loop"
    compiles: bool = False

    def free_memory_bytes(self) -> int:
        """Return the memory left to this process and its control groups, by the share of cores it uses."""
        # No other process can use memory that malloc keeps, and in pieces it does not serve every purpose.
        _glibc("malloc_trim")(0)
        cores = os.cpu_count() or 1
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
        a_core = min(psutil.virtual_memory().available / cores, memory_left_by_groups() / allowed)
        return int(a_core * min(torch.get_num_threads(), allowed))

    def peak_memory_bytes(self) -> int:
        """Return the peak resident set of this process, in bytes."""
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@functools.cache
def create() -> CpuDevice:
    """Return the CPU, after glibc was told to keep memory that a step frees for the next step.

    By default glibc keeps twice the largest block that was ever freed, less than a step's activations, and
    the next step faults its memory in anew.
    """
    mallopt = _glibc("mallopt")
    mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # glibc's upper limit, which its adaptation would reach
    return CpuDevice()


def _glibc(name: str) -> Callable[..., Any]:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return function or (lambda *arguments: None)


def memory_left_by_groups(process: Path = Path("/proc/self")) -> float:
    """Return the least memory left under any limit of a process's control groups; inf without a limit.

    Containers, batch systems and systemd set their limits there. A process is in a group of each hierarchy,
    and every group from it up to the root may have a limit. Both versions are read: version 2, and version
    1's controller `memory`.
    """
    return min((_left(group, kind) for group, kind in _groups(process)), default=float("inf"))


def _groups(process: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of a process's groups and of all above them, each with its type of file system."""
    try:
        lines = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return
    paths = {}
    for number, controllers, path in lines:
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for fields in mounts:
        root, mount_point, kind = fields[3], Path(fields[4]), fields[fields.index("-") + 1]
        if kind not in paths or (kind == "cgroup" and "memory" not in fields[-1].split(",")):
            continue
        # A container may see its group alone, mounted as if it were the root.
        group = PurePosixPath(paths[kind])
        below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        if ".." not in below.parts:
            yield from ((mount_point / part, kind) for part in (below, *below.parents))


def _left(group: Path, kind: str) -> float:
    limit_files, used_file, cache_entries = _CONTROL_GROUPS[kind]
    # A missing file, or one that says "max", sets no limit.
    texts = [_text(group / name).strip() for name in limit_files]
    limit = min(int(text) if text.isdigit() else float("inf") for text in texts)
    in_use = _text(group / used_file).strip()
    if limit == float("inf") or not in_use.isdigit():
        return limit
    entries = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
    cache = sum(int(size) for name, _, size in entries if name in cache_entries and size.isdigit())
    return max(0.0, limit - max(0.0, int(in_use) - cache))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
