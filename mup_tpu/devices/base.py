"""Devices of the training loop: their interface, meshes, the CPU, and a device by its name."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from mup_tpu.config import DEVICES
from mup_tpu.config.values import require_one_of
from mup_tpu.errors import ConfigError
from mup_tpu.internals.processes import cores, memory_left

# Module of each device, with a function `create`. Modules are imported by these names, at first use, since
# the room of TPUs stands above this one.
MODULES = {
    "cpu": "mup_tpu.devices.base",
    "cuda": "mup_tpu.devices.cuda",
    "xla": "mup_tpu.tpu.xla",
    "tpu": "mup_tpu.tpu.torchtpu",
}

# Types of torch devices whose programs XLA compiles
BY_XLA = ("xla", "tpu")

# How members go through a step: in turns through one module, or stacked as one program
Execution = Literal["loop", "vmap"]

# One step: changes the tensors of its first argument in place, reads the tensors of the second and one item
# of each stack in the third, and returns one tensor
Step = Callable[[Any, Any, Any], Tensor]

# Repeated step: takes stacks of items and a number of steps; returns a stack of results
Repeated = Callable[[Any, Any, Any, int], Tensor]


@dataclass(frozen=True)
class MeshShape:
    """Number of parts that members (`trial`) and batches (`data`) are split into."""

    trial: int = 1
    data: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        match = re.fullmatch(r"trial=([1-9]\d*),data=([1-9]\d*)", text)
        if not match:
            raise ConfigError(f"mesh {text!r} is not understood; write auto, or for example trial=4,data=2")
        return cls(int(match[1]), int(match[2]))


ONE_DEVICE = MeshShape()


def choose_mesh(devices: int, members: int, batch_size: int) -> MeshShape:
    """Choose the longest trial axis that pads members by at most a third; the rest splits the batch.

    Width does not matter: memory, too, is split along the trial axis. A pack that does not fit needs fewer
    members, and the data axis then takes more devices.
    """
    for trial in sorted((d for d in range(1, devices + 1) if devices % d == 0), reverse=True):
        padded = -(-members // trial) * trial
        if 3 * padded <= 4 * members and batch_size % (devices // trial) == 0:
            return MeshShape(trial, devices // trial)
    return MeshShape(devices, 1)


def mesh_of(
    devices: int, members: int, batch_size: int, mesh: str = "auto", split_over: int = 1
) -> MeshShape:
    """Return the mesh of a pack over XLA devices; raise ConfigError if it does not fit them or the batch."""
    if split_over > 1:
        mesh = f"trial=1,data={split_over}"
    shape = choose_mesh(devices, members, batch_size) if mesh == "auto" else MeshShape.parse(mesh)
    if shape.trial * shape.data != devices:
        raise ConfigError(
            f"mesh {mesh!r} has {shape.trial * shape.data} places, but there are {devices} devices"
        )
    if batch_size % shape.data:
        raise ConfigError(f"batch_size {batch_size} does not split over data={shape.data} of mesh {mesh!r}")
    return shape


_CHUNK, _CHUNK_BYTES = 100, 64 * 2**20


def padded(stack: Tensor, length: int, by_xla: bool = False) -> Tensor:
    if by_xla and stack.dtype == torch.int64:  # TPUs compute with pairs of 32-bit integers
        stack = stack.int()
    missing = length - len(stack)
    return torch.cat([stack, stack.new_zeros(missing, *stack.shape[1:])]) if missing else stack


class Device(ABC):
    """Interface of a device for the training loop. By default, packs are whole and run eagerly."""

    name: str  # Name in the store: "cpu", or the accelerator's model
    torch_device: torch.device
    execution: Execution  # Faster execution on this kind of device, as measured
    mesh: MeshShape = ONE_DEVICE
    reads_cheaply: bool = True  # Whether losses are read at every log point; otherwise, at evaluations
    compiles: bool  # Whether `repeated` compiles steps

    def arrange(self, members: int, batch_size: int, mesh: str = "auto", split_over: int = 1) -> Device:
        """Return this device ready for packs of this many members; they are padded to fill `mesh.trial`.

        `split_over` is as in `RunOptions`, for devices that one process drives.
        """
        if mesh != "auto" and MeshShape.parse(mesh) != ONE_DEVICE:
            kind = self.torch_device.type
            raise ConfigError(f"mesh {mesh!r} needs device 'xla'; device {kind!r} is one device")
        return self

    def place_members(self, tensor: Tensor) -> Tensor:
        """Place a stacked tensor (K, ...), its members spread over the mesh's trial axis."""
        return tensor.to(self.torch_device)

    def longest_chunk(self, batch_bytes: int) -> int:
        """Return the most steps to hand over at once, by a batch's bytes; losses are read between chunks.

        An accelerator gets 100, as fast as one, of 64 MiB on the host and on the device; where operations run
        at once, an interrupt takes effect after each step.
        """
        return min(_CHUNK, max(1, _CHUNK_BYTES // batch_bytes)) if self.compiles else 1

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        """Place items (S, ...), each spread by its first dimension over an axis of the mesh.

        `stack` is on the CPU, `axis` is "trial" or "data". `repeated` has room for `length` items: missing
        ones may be made up.
        """
        return stack.to(self.torch_device)

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        """Return a step that runs for one item of the stacks after the other; XLA compiles it in any case."""
        return one_by_one(step)

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    def per_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have each device run a function on its part of stacks (K, ...) and of a batch, the last argument.

        Results (tensors (K, ...) that are means over the batch) are put together again.
        """
        return function

    def end_step(self) -> None: ...  # noqa: B027 (nothing to do where operations run at once)

    def synchronize(self) -> None: ...  # noqa: B027 (likewise)

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the free memory for a pack on each device; on a CPU, the share of this process's threads."""


def one_by_one(step: Step) -> Repeated:
    def steps(changed: Any, fixed: Any, stacks: tuple[Tensor, ...], count: int) -> Tensor:
        return torch.stack([step(changed, fixed, tuple(stack[i] for stack in stacks)) for i in range(count)])

    return steps


def get_device(name: str = "auto") -> Device:
    require_one_of("device", name, ("auto", *DEVICES))
    if name == "auto":
        name = "cuda" if why_no_gpu() is None else "cpu"
    device: Device = importlib.import_module(MODULES[name]).create()
    return device


@functools.cache
def why_no_gpu() -> str | None:
    """Return why torch sees no GPU, "" if the reason is not known; None if torch sees one.

    Torch gives its reason once, as a warning: "CUDA initialization: The NVIDIA driver is too old. Update ..."
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            # If torch has no kernels for a GPU, torch only warns, and then fails at the first kernel.
            capability = torch.cuda.get_device_capability(0)
            arches = torch.cuda.get_arch_list()
            known = [int(name.removeprefix("sm_")) for name in arches if name[3:].isdigit()]
            if not known or 10 * capability[0] + capability[1] >= min(known):
                return None
            name, has = torch.cuda.get_device_name(0), ".".join(map(str, capability))
            return (
                f"torch {torch.__version__} needs compute capability {min(known) / 10}, and {name} has {has}"
            )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is for CPUs"
    for message in (str(warning.message) for warning in caught):
        if message.startswith("CUDA initialization: "):
            return message.removeprefix("CUDA initialization: ").partition(". ")[0].rstrip(".")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r}"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class CpuDevice(Device):
    """All cores of this process, as many as `torch.set_num_threads` says: members take turns.

    Even a narrow model's matrices fill a core, and vmap was 2x slower.
    """

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
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # The most that glibc would raise it to by itself
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
