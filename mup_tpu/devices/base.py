"""Devices of the training loop, and a device by its name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mup_tpu.config import DEVICES
from mup_tpu.config.fields import require_one_of
from mup_tpu.devices.gpus import why_no_gpu
from mup_tpu.devices.mesh import ONE_DEVICE, MeshShape
from mup_tpu.errors import ConfigError

Execution = Literal["loop", "vmap"]
"""How members go through a step: in turns through one module, or stacked as one program."""

Step = Callable[[Any, Any, Any], Tensor]
"""One step: changes the tensors of its first argument in place, reads the tensors of the second and one item
of each stack in the third, and returns one tensor."""

Repeated = Callable[[Any, Any, Any, int], Tensor]
"""Repeated step: takes stacks of items and a number of steps; returns a stack of results."""


class Device(ABC):
    """Interface of a device for the training loop; its defaults hold every pack whole, and run it eagerly."""

    name: str
    """Name in the store: "cpu", or the accelerator's model."""
    torch_device: torch.device
    execution: Execution
    """Faster execution on this kind of device, as measured."""
    mesh: MeshShape = ONE_DEVICE
    reads_cheaply: bool = True
    """Whether losses are read at every log point; otherwise, at evaluations."""
    compiles: bool
    """Whether `repeated` compiles steps; otherwise, torch.compile may around their parts."""

    def arrange(self, members: int, batch_size: int, mesh: str = "auto") -> Device:
        """This device, ready for packs of this number of members; they are padded to fill `mesh.trial`.

        Raises:
            ConfigError: the mesh does not fit the device.
        """
        if mesh != "auto" and MeshShape.parse(mesh) != ONE_DEVICE:
            kind = self.torch_device.type
            raise ConfigError(f"mesh {mesh!r} needs device 'xla'; device {kind!r} is one device")
        return self

    def place_members(self, tensor: Tensor) -> Tensor:
        """A stacked tensor (K, ...) on the device, its members spread over the mesh's trial axis."""
        return tensor.to(self.torch_device)

    def longest_stretch(self, batch_bytes: int) -> int:
        """Most steps to hand over at once, by a batch's bytes; losses are read between stretches only.

        By default 1, so that an interrupt takes effect after each step.
        """
        return 1

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        """Items (S, ...) on the device, each spread by its first dimension over an axis of the mesh.

        `stack` is on the CPU, `axis` is "trial" or "data". `repeated` has room for `length` items: missing
        ones may be made up.
        """
        return stack.to(self.torch_device)

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        """A step, repeated for one item of the stacks after the other; XLA compiles it in any case."""
        return one_by_one(step)

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor's values on the CPU, whole; waits for them."""
        return tensor.detach().cpu()

    def per_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of stacks (K, ...) and a batch, last, run by every device on its part of them.

        Its results (tensors (K, ...) that are means over the batch) are put together again.
        """
        return function

    def end_step(self) -> None:  # noqa: B027 (nothing to do where operations run at once)
        """All operations of a step have been called."""

    def synchronize(self) -> None:  # noqa: B027 (likewise)
        """Wait until all work handed to the device is done."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Free memory for a pack on each device; on a CPU, the share of this process's threads."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory held at once so far: the process's on a CPU, the allocator's on an accelerator."""


def one_by_one(step: Step) -> Repeated:
    """A step repeated by calling it."""

    def steps(changed: Any, fixed: Any, stacks: tuple[Tensor, ...], count: int) -> Tensor:
        return torch.stack([step(changed, fixed, tuple(stack[i] for stack in stacks)) for i in range(count)])

    return steps


def get_device(name: str = "auto") -> Device:
    """The device called `name`; "auto" takes CUDA if there is a GPU, else the CPU.

    Raises:
        ConfigError: no such device, or none here.
    """
    require_one_of("device", name, ("auto", *DEVICES))
    if name == "auto":
        name = "cuda" if why_no_gpu() is None else "cpu"
    device: Device = importlib.import_module(f"mup_tpu.devices.{name}").create()
    return device
