"""The CPU: members take turns. Even a narrow model's matrices fill a core, and vmap was 2x slower."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from mup_tpu.devices.base import Device, Execution
from mup_tpu.internals.processes import cores, memory_left

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class CpuDevice(Device):
    """All cores of this process, as many as `torch.set_num_threads` says."""

    name: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    execution: Execution = "loop"
    compiles: bool = False

    def free_memory_bytes(self) -> int:
        """Return the memory left to this process and its control groups, by the share of cores it uses."""
        # Other processes cannot use memory that malloc keeps, and its pieces may be too small for a tensor.
        _glibc("malloc_trim")(0)
        a_core = min(psutil.virtual_memory().available / (os.cpu_count() or 1), memory_left() / cores())
        return int(a_core * min(torch.get_num_threads(), cores()))


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


def return_freed_memory() -> None:
    """Have glibc return every freed block of 1 MiB to the system.

    Processes of a split trial gather and free parameters at each block. Kept, they took as much as the rest.
    """
    for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        _glibc("mallopt")(threshold, 2**20)


def _glibc(name: str) -> Callable[..., Any]:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return function or (lambda *arguments: None)
