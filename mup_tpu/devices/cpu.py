"""The CPU: members take turns. Even a narrow model's matrices fill a core, and vmap was 2x slower."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from mup_tpu.devices import control_groups
from mup_tpu.devices.base import Device, Execution


@dataclass(frozen=True)
class CpuDevice(Device):
    """All cores of this process, as many as `torch.set_num_threads` says."""

    name: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    execution: Execution = "loop"
    compiles: bool = False

    def free_memory_bytes(self) -> int:
        """Memory available to this process and its control groups, by the share of the cores that it uses.

        Memory that malloc keeps is handed back first: no other process can use it, and in pieces it does not
        serve every purpose.
        """
        _of_glibc("malloc_trim")(0)
        cores = os.cpu_count() or 1
        own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
        a_core = min(psutil.virtual_memory().available / cores, control_groups.free_bytes() / own)
        return int(a_core * min(torch.get_num_threads(), own))

    def peak_memory_bytes(self) -> int:
        """Peak resident set of this process, in bytes (Linux counts in KiB, macOS in bytes)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def create() -> CpuDevice:
    """The CPU."""
    _keep_freed_memory()
    return CpuDevice()


@functools.cache
def _keep_freed_memory() -> None:
    """Have glibc keep memory that a step frees for the next step, instead of faulting it in anew.

    By default glibc keeps twice the largest block that was ever freed, less than a step's activations.
    """
    mallopt = _of_glibc("mallopt")
    mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # glibc's upper limit, which its own adaptation would reach


def _of_glibc(name: str) -> Callable[..., Any]:
    """A function of glibc; with another C library, one that does nothing."""
    found = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return found or (lambda *arguments: None)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
