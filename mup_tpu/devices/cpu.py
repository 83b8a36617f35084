"""The CPU: members take turns, since even a narrow model's matrices fill a core and vmap was 2x slower."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field

import torch

from mup_tpu.devices.base import Way


@dataclass(frozen=True)
class CpuDevice:
    """All cores of this process, as many as `torch.set_num_threads` says."""

    name: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    way: Way = "loop"

    def synchronize(self) -> None:
        """Nothing to wait for: CPU operations return when they are done."""

    def peak_memory_bytes(self) -> int:
        """Peak resident set of this process, in bytes (Linux counts in KiB, macOS in bytes)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def create() -> CpuDevice:
    """The CPU."""
    return CpuDevice()
