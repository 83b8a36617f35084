"""TPUs through torch_xla: one process a host drives all devices by SPMD over a mesh ('trial', 'data').

The trial axis gives each device its own members, and nothing passes between devices. The data axis splits
every batch, for packs of fewer members than devices. With PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4 the same
program runs on four virtual devices.

On a slice of several hosts, each runs the same program on the same pack over the mesh of all devices. Every
host has whole tensors and batches in memory, and sends its own devices their parts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mup_tpu.devices.base import Device, Execution, Repeated, Step
from mup_tpu.devices.cpu import CpuDevice
from mup_tpu.devices.mesh import ONE_DEVICE, MeshShape, choose_mesh
from mup_tpu.devices.tpus import device_files
from mup_tpu.devices.xla_loop import XlaLoop
from mup_tpu.devices.xla_memory import HELD
from mup_tpu.errors import ConfigError, reason
from mup_tpu.files import cache_root
from mup_tpu.internals import torch_xla as private
from mup_tpu.internals.torch import tree_flatten, tree_unflatten

_STRETCH = 100
"""Most steps of a stretch."""

_STRETCH_BYTES = 64 * 2**20
"""Most bytes of a stretch's batches, on the host and on each device."""


@dataclass(frozen=True)
class XlaDevice(Device):
    """All XLA devices of this process."""

    name: str
    torch_device: torch.device
    count: int
    """Number of devices."""
    mesh: MeshShape = ONE_DEVICE
    execution: Execution = "vmap"
    reads_cheaply: bool = False
    compiles: bool = True
    _mesh: Any = field(default=None, repr=False, compare=False)

    def arrange(self, members: int, batch_size: int, mesh: str = "auto") -> XlaDevice:
        """This device with a mesh for a pack.

        Raises:
            ConfigError: the mesh asked for does not fit the devices or the batch.
        """
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
        """Stacked tensor with its members spread over the trial axis."""
        return self._send(tensor, ("trial", *(None,) * (tensor.dim() - 1)))

    def longest_stretch(self, batch_bytes: int) -> int:
        """Steps of a stretch: 100, which the host hands over as fast as one; fewer if batches are large."""
        return min(_STRETCH, max(1, _STRETCH_BYTES // batch_bytes))

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        """Items (S, ...) spread over an axis of the mesh, padded with zeros to `length` items."""
        if missing := length - len(stack):
            stack = torch.cat([stack, stack.new_zeros(missing, *stack.shape[1:])])
        if stack.dtype == torch.int64:  # TPUs compose 64-bit integers of two
            stack = stack.int()
        return self._send(stack, (None, axis, *(None,) * (stack.dim() - 2)))

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        """Step in a loop: one program for any number of items."""
        return XlaLoop(step, lambda tensor: self._send(tensor, ()))

    def read(self, tensor: Tensor) -> Tensor:
        """Tensor on the CPU, joined from its shards there: gathering them on the devices is one more program.

        If another host has some of the shards, this program runs on all hosts.
        """
        import torch_xla
        from torch_xla import runtime
        from torch_xla.distributed.spmd import XLAShardedTensor

        torch_xla.sync(wait=True)
        sharding = private.sharding_spec(tensor)
        if self._mesh is None or runtime.process_count() > 1 or not sharding.startswith("{devices"):
            return tensor.cpu()
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in XLAShardedTensor(tensor).local_shards:
            whole[tuple(shard.indices)] = shard.unpadded_data
        return whole

    def per_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Function of stacks and a batch that runs on each device's parts of them.

        Left to itself, XLA reduces each gradient alone and gathers whole batches for attention, since its
        matrix products take members and sequences as one axis. Here each device runs its members on its
        sequences, and one all-reduce averages all results (gradients, losses).
        """
        if self.mesh.data == 1:
            return function

        def call(*stacks_and_batch: Any) -> Any:
            *stacks, tokens = stacks_and_batch
            if len(tokens) % self.mesh.data:  # the last, shorter held-out batch
                return function(*stacks, tokens)
            parts = [{name: self._part_of(t, "trial") for name, t in stack.items()} for stack in stacks]
            found, structure = tree_flatten(function(*parts, self._part_of(tokens, "data")))
            joined_KN = torch.cat([t.reshape(len(t), -1) for t in found], 1)
            # Copies: a view of the losses would keep all gradients alive, and a write into a view would write
            # the whole tensor.
            sizes = [t[0].numel() for t in found]
            whole = [part.clone() for part in self._whole_of(joined_KN).mean(0).split(sizes, 1)]
            shaped = [t.reshape(-1, *part.shape[1:]) for t, part in zip(whole, found, strict=True)]
            return tree_unflatten(shaped, structure)

        return call

    def _part_of(self, tensor: Tensor, axis: str) -> Tensor:
        """Part of each device of a tensor that is cut along its first dimension."""
        from torch_xla.distributed import spmd

        columns = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
        spec = (axis, *(None,) * (columns.dim() - 1))
        part = spmd.enable_manual_sharding(columns, spec, mesh=self._mesh).global_tensor
        return part.squeeze(1) if tensor.dim() == 1 else part

    def _whole_of(self, part_KN: Tensor) -> Tensor:
        """Parts (members of a device, N) as one tensor (data, K, N)."""
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
        HELD.add(sent[0], tensor.nbytes // ways)
        return sent[0]

    def end_step(self) -> None:
        """Hand all operations since the last call to the device as one program, without waiting for it."""
        import torch_xla

        torch_xla.sync()

    def synchronize(self) -> None:
        """Hand over all operations, and wait for them."""
        import torch_xla

        torch_xla.sync(wait=True)

    def free_memory_bytes(self) -> int:
        """Free memory of each device beside this process's tensors; on the CPU client, an equal share."""
        if self.name == "xla:CPU":
            return CpuDevice().free_memory_bytes() // self.count
        return HELD.free()

    def peak_memory_bytes(self) -> int:
        """Most bytes placed at once on each device, without a step's temporaries; on the CPU client, all."""
        return CpuDevice().peak_memory_bytes() if self.name == "xla:CPU" else HELD.peak


def report() -> dict[str, float]:
    """Counters of torch_xla in this process.

    Compilations and their seconds (compile_s), executions, transfers_to_host, and fallbacks: operations that
    XLA lacks and the host ran.
    """
    from torch_xla.debug import metrics

    def total(*names: str) -> tuple[int, float]:
        found = [data for data in map(metrics.metric_data, names) if data]
        return sum(data[0] for data in found), sum(data[1] for data in found) / 1e9

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


def create() -> XlaDevice:
    """XLA devices of this process, found by torch_xla or named by PJRT_DEVICE.

    Raises:
        ConfigError: torch_xla or libtpu is missing or does not fit; there is no device; or there is only the
            CPU, and PJRT_DEVICE does not name it.
    """
    asked = os.environ.get("PJRT_DEVICE")
    try:
        import torch_xla
        from torch_xla import runtime

        kind = str(runtime.device_type())  # sets PJRT_DEVICE if it is not set
        if kind == "CPU" and asked != "CPU":
            del os.environ["PJRT_DEVICE"]
            raise ConfigError(
                "device 'xla' found no TPU here and would train on the CPU; set PJRT_DEVICE=CPU to do so; "
                "mup-tpu doctor names the fault"
            )
        if kind == "TPU":
            if not private.tpu_chips() and not device_files():  # libtpu would wait without end
                raise ConfigError(
                    "PJRT_DEVICE=TPU, but there is no TPU chip here: run on a TPU VM, or set PJRT_DEVICE=CPU "
                    "to run XLA on the CPU"
                )
            _keep_programs()
        if not runtime.is_spmd():
            runtime.use_spmd()
        return XlaDevice(f"xla:{kind}", torch_xla.device(), runtime.global_runtime_device_count())
    except ImportError as error:
        raise ConfigError(
            f"device 'xla' is not available: torch_xla cannot be imported ({reason(error)}); "
            "install mup_tpu[tpu]"
        ) from None
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"device 'xla' is not available on PJRT_DEVICE={os.environ.get('PJRT_DEVICE')}: {reason(error)}; "
            "mup-tpu doctor names the fault"
        ) from None


def _keep_programs() -> None:
    """Keep compiled programs in the user's cache folder, so that workers and restarts compile a shape once.

    XLA's CPU client cannot keep any.
    """
    from torch_xla import runtime

    if "XLA_PERSISTENT_CACHE_PATH" not in os.environ:  # the user's, or set by an earlier call
        folder = cache_root() / "xla"
        folder.mkdir(parents=True, exist_ok=True)
        runtime.initialize_cache(str(folder))
