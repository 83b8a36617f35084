"""The device protocol, and a device by its name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mup_tpu.config import DEVICES
from mup_tpu.errors import ConfigError

Execution = Literal["loop", "vmap"]
"""How members go through a step: in turns through one module, or stacked as one program."""

Step = Callable[[Any, Any, Any], Tensor]
"""Changes the tensors of its first argument in place, reads those of the second and an item of each stack in
the third; returns one tensor."""

Repeated = Callable[[Any, Any, Any, int], Tensor]
"""The same with stacks of items, and how many steps to make; returns a stack of what they returned."""


@dataclass(frozen=True)
class MeshShape:
    """How many ways a pack's members, and its batches, are split over devices."""

    trial: int = 1
    data: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """From `trial=4,data=2`.

        Raises:
            ConfigError: the text is something else.
        """
        match = re.fullmatch(r"trial=([1-9]\d*),data=([1-9]\d*)", text)
        if not match:
            raise ConfigError(f"mesh {text!r} is not understood; write auto, or for example trial=4,data=2")
        return cls(int(match[1]), int(match[2]))


ONE_DEVICE = MeshShape()


class Device(Protocol):
    """What the training loop asks of a device."""

    name: str
    """For the store: "cpu", or the accelerator's model."""
    torch_device: torch.device
    execution: Execution
    """The one that was measured to be faster on this kind of device."""
    mesh: MeshShape
    reads_cheaply: bool
    """Whether losses may be read at every log point; where not, they are read at evaluations."""
    compiles: bool
    """Whether the step of each shape is compiled before it runs for the first time."""

    def arrange(self, members: int, batch_size: int, mesh: str = "auto") -> Device:
        """This device, made ready for packs of so many members; they are padded to fill `mesh.trial`."""

    def place_members(self, tensor: Tensor) -> Tensor:
        """A stacked tensor (K, ...) on the device, its members spread over the mesh's trial axis."""

    def longest_stretch(self, batch_bytes: int) -> int:
        """Most steps that are best handed over at once; between two of them losses can be read.

        Args:
            batch_bytes: size of a batch's tokens.
        """

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        """Items (S, ...) on the device, each of them spread by its first dimension over an axis of the mesh.

        Args:
            stack: on the CPU.
            axis: "trial" or "data".
            length: items that `repeated` is to find room for; what is missing of them may be made up.
        """

    def repeated(self, step: Step) -> Repeated:
        """A step, made for items of stacks one after the other."""

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor's values on the CPU, whole; waits for them."""

    def per_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of stacks (K, ...) and a batch, last, as every device runs it on its part of them.

        What it returns (tensors (K, ...) that are means over the batch) is put together again.
        """

    def end_step(self) -> None:
        """All operations of a step have been called."""

    def synchronize(self) -> None:
        """Wait until all work handed to the device is done."""

    def free_memory_bytes(self) -> int:
        """Memory that a pack may take now on each device; a CPU process's share of all by its threads."""

    def peak_memory_bytes(self) -> int:
        """Most memory held at once so far: the process's on a CPU, the allocator's on an accelerator."""


def one_by_one(step: Step) -> Repeated:
    """A step repeated by calling it, for devices that run operations as they are called."""

    def steps(changed: Any, fixed: Any, stacks: tuple[Tensor, ...], count: int) -> Tensor:
        return torch.stack([step(changed, fixed, tuple(stack[i] for stack in stacks)) for i in range(count)])

    return steps


def get_device(name: str = "auto") -> Device:
    """The device called `name`; "auto" takes CUDA where there is one, else the CPU.

    Raises:
        ConfigError: no such device, or none here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in DEVICES:
        raise ConfigError(f"device {name!r} is not one of {', '.join(map(repr, ('auto', *DEVICES)))}")
    return importlib.import_module(f"mup_tpu.devices.{name}").create()
