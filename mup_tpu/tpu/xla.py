"""TPUs through torch_xla: one process a host drives all devices by SPMD over a mesh ('trial', 'data').

The trial axis gives each device its own members, and nothing passes between devices. The data axis splits
every batch, for packs of fewer members than devices. With PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4 the same
program runs on four virtual devices.

On a slice of several hosts, each runs the same program on the same pack over the mesh of all devices. Every
host has whole tensors and batches in memory, and sends its own devices their parts.

Private parts of torch_xla are those of 2.9, its last release.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mup_tpu.devices.base import (
    ONE_DEVICE,
    Device,
    Execution,
    MeshShape,
    Repeated,
    Step,
    choose_mesh,
    padded,
)  # fmt: skip
from mup_tpu.devices.cpu import CpuDevice
from mup_tpu.devices.peak import GENERATIONS, tpu_device_files, tpu_generation
from mup_tpu.errors import ConfigError, reason
from mup_tpu.files import cache_root
from mup_tpu.internals.torch import tree_flatten, tree_unflatten
from mup_tpu.tpu.xla_loop import XlaLoop, scan_flat

_USABLE = 0.95  # share of a TPU's memory that programs can use; the runtime takes the rest


class PlacedBytes:
    """Bytes that this process has placed on each device and not dropped.

    They are counted here, since torch_xla 2.9 cannot ask a TPU (pytorch/xla 9022).
    """

    def __init__(self) -> None:
        self._bytes: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._lock = threading.Lock()  # another thread places batches

    def add(self, tensor: Tensor, size: int) -> None:
        with self._lock:
            self._bytes[tensor] = size

    def free(self) -> int:
        """Return the bytes left on each device; a TPU of unknown type has the least of all generations."""
        kind = os.environ.get("TPU_ACCELERATOR_TYPE")
        if kind is None:
            with contextlib.suppress(Exception):  # any failure of the request to the VM's metadata server
                from torch_xla._internal import tpu

                kind = tpu.get_tpu_env()["ACCELERATOR_TYPE"]
        known = tpu_generation(kind or "")
        capacity = min(g.device_hbm_bytes for g in ([known] if known else GENERATIONS.values()))
        with self._lock:
            return int(_USABLE * capacity) - sum(self._bytes.values())


_PLACED = PlacedBytes()


@dataclass(frozen=True)
class XlaDevice(Device):
    """All XLA devices of this process."""

    name: str
    torch_device: torch.device
    count: int  # Number of devices
    mesh: MeshShape = ONE_DEVICE
    execution: Execution = "vmap"
    reads_cheaply: bool = False
    compiles: bool = True
    scan: Callable[..., Any] = scan_flat
    _mesh: Any = field(default=None, repr=False, compare=False)

    def arrange(self, members: int, batch_size: int, mesh: str = "auto") -> XlaDevice:
        """Return this device with a mesh for a pack."""
        shape = choose_mesh(self.count, members, batch_size) if mesh == "auto" else MeshShape.parse(mesh)
        if shape.trial * shape.data != self.count:
            raise ConfigError(
                f"mesh {mesh!r} has {shape.trial * shape.data} places, but there are {self.count} devices"
            )
        if batch_size % shape.data:
            raise ConfigError(
                f"batch_size {batch_size} does not split over data={shape.data} of mesh {mesh!r}"
            )
        if self.count == 1:
            return replace(self, mesh=shape)
        from torch_xla.distributed import spmd

        devices = np.arange(self.count)
        return replace(
            self, mesh=shape, _mesh=spmd.Mesh(devices, (shape.trial, shape.data), ("trial", "data"))
        )

    def place_members(self, tensor: Tensor) -> Tensor:
        return self._send(tensor, ("trial", *(None,) * (tensor.dim() - 1)))

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        stack = padded(stack, length)
        if stack.dtype == torch.int64:  # TPUs compose 64-bit integers of two
            stack = stack.int()
        return self._send(stack, (None, axis, *(None,) * (stack.dim() - 2)))

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        return XlaLoop(step, lambda tensor: self._send(tensor, ()))

    def read(self, tensor: Tensor) -> Tensor:
        """Join a tensor from its shards on the CPU: gathering them on the devices is one more program.

        If another host has some of the shards, this program runs on all hosts.
        """
        import torch_xla
        from torch_xla import runtime
        from torch_xla.distributed.spmd import XLAShardedTensor

        torch_xla.sync(wait=True)
        sharding = str(torch_xla._XLAC._get_xla_sharding_spec(tensor))  # no public function has it
        if self._mesh is None or runtime.process_count() > 1 or not sharding.startswith("{devices"):
            return tensor.cpu()
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in XLAShardedTensor(tensor).local_shards:
            whole[tuple(shard.indices)] = shard.unpadded_data
        return whole

    def per_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function of stacks and a batch on each device's parts of them.

        Left to itself, XLA reduces each gradient alone and gathers whole batches for attention, since its
        matrix products take members and sequences as one axis. Here each device runs a part of the members
        on a part of the sequences, and one all-reduce averages all results (gradients, losses).
        """
        if self.mesh.data == 1:
            return function

        def call(*stacks_and_batch: Any) -> Any:
            *stacks, tokens = stacks_and_batch
            if len(tokens) % self.mesh.data:  # the last, shorter held-out batch
                return function(*stacks, tokens)
            parts = [{name: self._part_of(t, "trial") for name, t in stack.items()} for stack in stacks]
            results, structure = tree_flatten(function(*parts, self._part_of(tokens, "data")))
            joined_KN = torch.cat([t.reshape(len(t), -1) for t in results], 1)
            # Copies: a view of the losses would keep all gradients alive, and a write into a view would write
            # the whole tensor.
            sizes = [t[0].numel() for t in results]
            whole = [part.clone() for part in self._whole_of(joined_KN).mean(0).split(sizes, 1)]
            shaped = [t.reshape(-1, *part.shape[1:]) for t, part in zip(whole, results, strict=True)]
            return tree_unflatten(shaped, structure)

        return call

    def _part_of(self, tensor: Tensor, axis: str) -> Tensor:
        """Return each device's part of a tensor that is cut along its first dimension."""
        from torch_xla.distributed import spmd

        columns = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
        spec = (axis, *(None,) * (columns.dim() - 1))
        part = spmd.enable_manual_sharding(columns, spec, mesh=self._mesh).global_tensor
        return part.squeeze(1) if tensor.dim() == 1 else part

    def _whole_of(self, part_KN: Tensor) -> Tensor:
        """Join parts (members of a device, N) to one tensor (data, K, N)."""
        from torch_xla.distributed import spmd

        members, n = part_KN.shape
        shape = torch.Size((self.mesh.data, members * self.mesh.trial, n))
        spec = ("data", "trial", None)
        return spmd.disable_manual_sharding(part_KN[None], spec, shape, mesh=self._mesh).global_tensor

    def _send(self, tensor: Tensor, axes: tuple[str | None, ...]) -> Tensor:
        from torch_xla.core import xla_model
        from torch_xla.distributed import spmd

        sharding = None
        if self._mesh is not None:
            # torch_xla 2.9 cannot cut a vector over one of two axes; vectors are short: one copy a device.
            cut = {i: axis for i, axis in enumerate(axes) if axis is not None}
            whole = tensor.dim() < 2 or any(tensor.shape[i] % getattr(self.mesh, a) for i, a in cut.items())
            sharding = spmd.ShardingSpec(self._mesh, (None,) * tensor.dim() if whole else axes)
        sent: Any = xla_model.send_cpu_data_to_device([tensor.cpu()], self.torch_device, sharding)
        ways = 1 if sharding is None or whole else math.prod(getattr(self.mesh, a) for a in cut.values())
        _PLACED.add(sent[0], tensor.nbytes // ways)
        return sent[0]

    def end_step(self) -> None:
        import torch_xla

        torch_xla.sync()

    def synchronize(self) -> None:
        import torch_xla

        torch_xla.sync(wait=True)

    def free_memory_bytes(self) -> int:
        # On the CPU client devices share the memory.
        if self.name == "xla:CPU":
            return CpuDevice().free_memory_bytes() // self.count
        return _PLACED.free()


def report() -> dict[str, float]:
    """Return counters of torch_xla in this process.

    Compilations and their seconds (compile_s), executions, transfers_to_host, and fallbacks: operations that
    XLA lacks and the host ran.
    """
    from torch_xla.debug import metrics

    def total(*names: str) -> tuple[int, float]:
        values = [data for data in map(metrics.metric_data, names) if data]
        return sum(data[0] for data in values), sum(data[1] for data in values) / 1e9

    compilations, seconds = total("CompileTime")
    fallbacks = sum(
        metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")
    )
    return {
        "compilations": compilations,
        "compile_s": seconds,
        "executions": total("ExecuteTime", "ExecuteReplicatedTime")[0],
        "transfers_to_host": total("TransferFromDeviceTime")[0],
        "fallbacks": fallbacks,
    }


def dump_programs(folder: str) -> None:
    """Have XLA write each program to a folder, as text; call it before the first device is created."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):  # XLA in torch_xla, and in the TPU's library
        os.environ[name] = f"{os.environ.get(name, '')} {flags}".strip()


def create() -> XlaDevice:
    """Return the XLA devices of this process, which torch_xla finds or PJRT_DEVICE names."""
    named = os.environ.get("PJRT_DEVICE")
    try:
        import torch_xla
        from torch_xla import runtime
        from torch_xla._internal import tpu

        kind = str(runtime.device_type())  # sets PJRT_DEVICE if it is not set
        if kind == "CPU" and named != "CPU":
            del os.environ["PJRT_DEVICE"]
            raise ConfigError(
                "device 'xla' found no TPU here and would train on the CPU; set PJRT_DEVICE=CPU to do so; "
                "mup-tpu doctor names the fault"
            )
        if kind == "TPU":
            if not tpu.num_available_chips() and not tpu_device_files():  # libtpu would wait without end
                raise ConfigError(
                    "PJRT_DEVICE=TPU, but there is no TPU chip here: run on a TPU VM, or set PJRT_DEVICE=CPU "
                    "to run XLA on the CPU"
                )
            if "XLA_PERSISTENT_CACHE_PATH" not in os.environ:  # the user's, or set by an earlier call
                # Workers and restarts compile a shape once. XLA's CPU client cannot keep programs.
                folder = cache_root() / "xla"
                folder.mkdir(parents=True, exist_ok=True)
                runtime.initialize_cache(str(folder))
        if not runtime.is_spmd():
            runtime.use_spmd()
        return XlaDevice(f"xla:{kind}", torch_xla.device(), runtime.global_runtime_device_count())
    except ImportError as error:
        raise ConfigError(
            f"device 'xla' is not available: torch_xla cannot be imported ({reason(error)}); "
            "pip install '.[xla]'"
        ) from None
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"device 'xla' is not available on PJRT_DEVICE={os.environ.get('PJRT_DEVICE')}: {reason(error)}; "
            "mup-tpu doctor names the fault"
        ) from None
