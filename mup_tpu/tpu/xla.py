"""TPUs through torch_xla: one process per host drives all devices by SPMD over a mesh ('trial', 'data').

The trial axis gives each device its own members, and nothing passes between devices. The data axis splits
every batch, for packs of fewer members than devices. With PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4 the same
program runs on four virtual devices. On a slice of several hosts, each runs the same program on the same pack
over the mesh of all devices; it has whole tensors and batches in memory, and sends its own devices their
parts.

torch_xla traces operations anew at every call: 36 ms of the host for a step at depth 2, 200 ms at depth 12. A
chip computes such a step in one or two. Here a step is traced once, into the body of a while loop
(`XlaLoop`). The number of steps is data, so chunks of any length are one program. Private parts of torch_xla
are those of 2.9, its last release.

Shapes: L items that the stacks of a program hold.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mup_tpu.devices.base import (
    ONE_DEVICE,
    CpuDevice,
    Device,
    Execution,
    MeshShape,
    Repeated,
    Step,
    mesh_of,
    padded,
)  # fmt: skip
from mup_tpu.devices.peak import GENERATIONS, tpu_device_files, tpu_generation
from mup_tpu.errors import ConfigError, reason
from mup_tpu.files import cache_root
from mup_tpu.internals.torch import tree_flatten, tree_leaves, tree_unflatten


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
        capacity = min(g.usable_bytes for g in ([known] if known else GENERATIONS.values()))
        with self._lock:
            return capacity - sum(self._bytes.values())


_PLACED = PlacedBytes()


class XlaLoop:
    """A step that one program makes any number of times.

    The step is called once, with tensors that hold no values. `place` sends a CPU tensor to the device, whole
    to each part of a mesh.
    """

    def __init__(self, step: Step, place: Callable[[Tensor], Tensor]) -> None:
        self._step, self._place = step, place
        self._program: _Program | None = None

    def __call__(self, changed: Any, fixed: Any, stacks: Any, steps: int) -> Tensor:
        """Make `steps` steps, which read `fixed` and write `changed`; return results (L, ...), then zeros.

        `stacks` hold L items: step i gets item i.
        """
        import torch_xla

        if self._program is None:
            self._program = _Program(self._step, changed, fixed, stacks)
        program = self._program
        groups = [tree_leaves(group) for group in (changed, fixed, stacks)]
        device = groups[2][0].device
        counters = [self._place(torch.tensor(number)) for number in (0, steps)]
        out = torch.zeros(program.out_shape, dtype=program.out_dtype, device=device)
        given = [*counters, *groups[0], *groups[1], *groups[2], out]
        results = torch_xla._XLAC._xla_user_computation("mup_tpu::loop", given, program.computation)
        _, new, _, _, (out,) = program.parts(results)
        with torch.no_grad():
            for tensor, value in zip(groups[0], new, strict=True):
                tensor.copy_(value)  # in place: XLA may write over the old values
        return out


class _Program:
    """The computation of a loop.

    Its parameters are its results too: counter and limit; changed tensors; read tensors; stacks; and the
    steps' results, stacked.
    """

    def __init__(self, step: Step, changed: Any, fixed: Any, stacks: Any) -> None:
        import torch_xla
        from torch_xla.core import xla_builder

        real, structures = zip(*map(tree_flatten, (changed, fixed, stacks)), strict=True)
        shapes = [[t.shape for t in real[0]], [t.shape for t in real[1]], [t.shape[1:] for t in real[2]]]
        arguments = [
            [xla_builder.create_placeholder_tensor(shape, t.dtype) for shape, t in zip(*group, strict=True)]
            for group in zip(shapes, real, strict=True)
        ]
        # Times 1: marking a sharding on a tensor with data replaces the data, and torch_xla would no longer
        # find the argument.
        inside = [[t * 1 for t in group] for group in arguments]
        out = step(*map(tree_unflatten, inside, structures))
        # The public `xla_builder` builds programs of its operations alone.
        context = torch_xla._XLAC.lowering.LoweringContext("step")
        context.set_name_string("step")
        context.build([*inside[0], out])
        self._step = xla_builder.computation_from_module_proto("step", context.hlo())
        self.out_shape, self.out_dtype = (len(real[2][0]), *out.shape), out.dtype

        # Tracing numbers parameters in the order of their use: arguments and Python's numbers.
        flat = [t for group in arguments for t in group]
        met = {context.tensor_parameter_id(t): i for i, t in enumerate(flat)}
        mapping = context.device_parameter_id_tensor_mapping()
        self._arguments = {number: i for number, i in met.items() if number != -1}
        self._constants = {number: t.cpu() for number, t in mapping.items() if number not in met}

        self._counts = [2, *map(len, arguments), 1]
        given = [*(torch.tensor(0) for _ in range(2)), *real[0], *real[1], *real[2]]
        given.append(torch.empty(self.out_shape, dtype=self.out_dtype, device="meta"))
        builder = xla_builder.create_builder("loop")
        kind, shape = xla_builder.Op.from_torch_type, xla_builder.mkshape
        made = [shape(kind(t.dtype), t.shape) for t in given]
        parameters = [xla_builder.mkparam(builder, i, of) for i, of in enumerate(made)]
        loop = xla_builder.Op.mkwhile(parameters, lambda counter, limit, *rest: counter < limit, self._body)
        self.computation = loop.build("loop")

    def parts(self, values: Sequence[Any]) -> list[list[Any]]:
        rest, groups = list(values), []
        for count in self._counts:
            groups.append(rest[:count])
            rest = rest[count:]
        return groups

    def _body(self, *values: Any) -> tuple[Any, ...]:
        from torch_xla.core.xla_builder import Op

        (counter, limit), changed, fixed, stacks, (out,) = self.parts(values)
        builder = counter.builder()
        given = [*changed, *fixed, *(_item(stack, counter) for stack in stacks)]
        called = {number: given[i] for number, i in self._arguments.items()}
        called |= {number: Op.constant(builder, value) for number, value in self._constants.items()}
        result = Op.call(self._step, [called[number] for number in range(len(called))])
        *changed, returned = (result.get_tuple_element(i) for i in range(len(changed) + 1))
        out = out.dynamic_update_slice(returned.broadcast([1]), _at(out, counter))
        one = Op.scalar(builder, 1, dtype=counter.shape().dtype)
        return counter + one, limit, *changed, *fixed, *stacks, out


def _at(stack: Any, counter: Any) -> list[Any]:
    return [counter, *(counter.zeros_like() for _ in range(stack.shape().rank - 1))]


def _item(stack: Any, counter: Any) -> Any:
    sizes = list(stack.shape().sizes)
    return stack.dynamic_slice(_at(stack, counter), [1, *sizes[1:]]).reshape(sizes[1:])


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
    cuts: bool = False  # Whether matrices, and their state, are cut over the mesh's data axis
    _mesh: Any = field(default=None, repr=False, compare=False)

    def arrange(self, members: int, batch_size: int, mesh: str = "auto", split_over: int = 1) -> XlaDevice:
        """Return this device with a mesh for a pack."""
        shape = mesh_of(self.count, members, batch_size, mesh, split_over)
        if self.count == 1:
            return replace(self, mesh=shape)
        from torch_xla.distributed import spmd

        devices = np.arange(self.count)
        places = spmd.Mesh(devices, (shape.trial, shape.data), ("trial", "data"))
        return replace(self, mesh=shape, cuts=split_over > 1, _mesh=places)

    def place_members(self, tensor: Tensor) -> Tensor:
        axes: list[str | None] = ["trial", *(None,) * (tensor.dim() - 1)]
        if self.cuts and tensor.dim() > 2:  # XLA gathers each before its use, and cuts the update
            fits = [i for i in range(1, tensor.dim()) if tensor.shape[i] % self.mesh.data == 0]
            for i in fits[:1]:
                axes[i] = "data"
        return self._send(tensor, tuple(axes))

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        axes = (None, axis, *(None,) * (stack.dim() - 2))
        return self._send(padded(stack, length, by_xla=True), axes)

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
    counters = metrics.counter_names()
    fallbacks = sum(metrics.counter_value(name) for name in counters if name.startswith("aten::"))
    return {
        "compilations": compilations,
        "compile_s": seconds,
        "executions": total("ExecuteTime", "ExecuteReplicatedTime")[0],
        "transfers_to_host": total("TransferFromDeviceTime")[0],
        "fallbacks": fallbacks,
    }


def dump_programs(folder: str) -> None:
    """Have XLA write each program to a folder, as text; call it before the first device is created.

    The TPU's library reads XLA_FLAGS too; in LIBTPU_INIT_ARGS these flags are unknown, and end the process.
    """
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


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
            if "XLA_PERSISTENT_CACHE_PATH" not in os.environ:  # the user or an earlier call may have set it
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
