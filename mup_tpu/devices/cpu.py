"""The CPU: members take turns, since even a narrow model's matrices fill a core and vmap was 2x slower."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mup_tpu.devices.base import MeshShape, Way
from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class CpuDevice:
    """All cores of this process, as many as `torch.set_num_threads` says."""

    name: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    way: Way = "loop"
    mesh: MeshShape = MeshShape()
    reads_cheaply: bool = True

    def arrange(self, members: int, batch_size: int, mesh: str = "auto") -> CpuDevice:
        """Itself: one device holds every pack.

        Raises:
            ConfigError: a mesh of more than one device is asked for.
        """
        if mesh != "auto" and MeshShape.parse(mesh) != MeshShape():
            raise ConfigError(f"mesh {mesh!r} needs device 'xla'; device 'cpu' is one device")
        return self

    def place_members(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self.torch_device)

    def place_batch(self, tokens: Tensor) -> Tensor:
        """The batch on the device."""
        return tokens.to(self.torch_device)

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor's values on the CPU."""
        return tensor.detach().cpu()

    def on_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself: one device holds it all."""
        return function

    def end_step(self) -> None:
        """Nothing to do: operations run as they are called."""

    def synchronize(self) -> None:
        """Nothing to wait for: CPU operations return when they are done."""

    def peak_memory_bytes(self) -> int:
        """Peak resident set of this process, in bytes (Linux counts in KiB, macOS in bytes)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def create() -> CpuDevice:
    """The CPU."""
    return CpuDevice()
