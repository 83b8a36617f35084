"""The device protocol, and a device by its name."""

from __future__ import annotations

import importlib
from typing import Literal, Protocol

import torch

from mup_tpu.errors import ConfigError

Way = Literal["loop", "vmap"]
"""How members go through a step: in turns through one module, or stacked as one program."""

NAMES = ("cpu", "cuda")


class Device(Protocol):
    """What the training loop asks of a device."""

    name: str
    """For the store: "cpu", or the accelerator's model."""
    torch_device: torch.device
    way: Way
    """The way that was measured to be the faster one on this kind of device."""

    def synchronize(self) -> None:
        """Wait until all work handed to the device is done."""

    def peak_memory_bytes(self) -> int:
        """Most memory held at once so far: the process's on a CPU, the allocator's on an accelerator."""


def get_device(name: str = "auto") -> Device:
    """The device called `name`; "auto" takes CUDA where there is one, else the CPU.

    Raises:
        ConfigError: no such device, or none here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in NAMES:
        raise ConfigError(f"device {name!r} is not one of {', '.join(map(repr, ('auto', *NAMES)))}")
    return importlib.import_module(f"mup_tpu.devices.{name}").create()
