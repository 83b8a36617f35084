"""One CUDA GPU: members are stacked, since kernel launches and narrow matrices cost most.

The stacked step is compiled and recorded as one CUDA graph (`graphs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mup_tpu.devices.base import Device, Execution, Repeated, Step, padded, why_no_gpu
from mup_tpu.devices.graphs import CudaRecorder, GraphSteps, as_traced, inductor, without_advice_on_tf32
from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class CudaDevice(Device):
    """The current CUDA device."""

    name: str
    torch_device: torch.device
    execution: Execution = "vmap"
    compiles: bool = True
    recorder: CudaRecorder = field(default_factory=CudaRecorder)

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        stack = padded(stack, length)  # graphs have one shape
        return stack.pin_memory().to(self.torch_device, non_blocking=True)

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        return GraphSteps(step, self.recorder, inductor() if compile else as_traced)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_memory_bytes(self) -> int:
        # What the caching allocator holds unused is free too.
        device = self.torch_device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused


def create() -> CudaDevice:
    """Return the current CUDA device."""
    if (why := why_no_gpu()) is not None:
        why = f" ({why})" if why else ""
        raise ConfigError(
            f"device 'cuda' is not available: torch sees no CUDA GPU here{why}; use --device cpu"
        )
    with without_advice_on_tf32():
        torch.set_float32_matmul_precision("highest")  # NVIDIA's containers switch TF32 on
    index = torch.cuda.current_device()
    return CudaDevice(torch.cuda.get_device_name(index), torch.device("cuda", index))
