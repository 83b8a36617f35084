"""One CUDA GPU: members are stacked, since kernel launches and narrow matrices are the cost there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mup_tpu.devices.base import Way
from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class CudaDevice:
    """The current CUDA device."""

    name: str
    torch_device: torch.device
    way: Way = "vmap"

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.synchronize(self.torch_device)

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
