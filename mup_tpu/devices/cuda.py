"""One CUDA GPU: members are stacked, since kernel launches and narrow matrices are the cost there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mup_tpu.devices.base import Execution, MeshShape, Repeated, Step, one_by_one
from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class CudaDevice:
    """The current CUDA device."""

    name: str
    torch_device: torch.device
    execution: Execution = "vmap"
    mesh: MeshShape = MeshShape()
    reads_cheaply: bool = True
    compiles: bool = False

    def arrange(self, members: int, batch_size: int, mesh: str = "auto") -> CudaDevice:
        """Itself: one device holds every pack.

        Raises:
            ConfigError: a mesh of more than one device is asked for.
        """
        if mesh != "auto" and MeshShape.parse(mesh) != MeshShape():
            raise ConfigError(f"mesh {mesh!r} needs device 'xla'; device 'cuda' is one device")
        return self

    def place_members(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self.torch_device)

    def longest_stretch(self, batch_bytes: int) -> int:
        """1: steps are handed over one at a time, so that an interrupt takes effect after each."""
        return 1

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        """The stack on the device."""
        return stack.to(self.torch_device, non_blocking=True)

    def repeated(self, step: Step) -> Repeated:
        """The step, called once for each item."""
        return one_by_one(step)

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor's values on the CPU."""
        return tensor.detach().cpu()

    def per_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself: one device holds it all."""
        return function

    def end_step(self) -> None:
        """Nothing to do: operations run as they are called."""

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.synchronize(self.torch_device)

    def free_memory_bytes(self) -> int:
        """What the driver has free, and what the caching allocator holds unused."""
        held = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + held

    def peak_memory_bytes(self) -> int:
        """Peak of the caching allocator, in bytes."""
        return torch.cuda.max_memory_allocated(self.torch_device)


def create() -> CudaDevice:
    """The current CUDA device.

    Raises:
        ConfigError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda' is not available: torch sees no CUDA GPU here; use --device cpu")
    index = torch.cuda.current_device()
    return CudaDevice(torch.cuda.get_device_name(index), torch.device("cuda", index))
