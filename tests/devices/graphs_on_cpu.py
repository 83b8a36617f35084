"""CUDA graphs on the CPU, stricter than CUDA's: `pytest --device graphs` trains by them.

A recording is a list of operations on fixed memory, and has no effect itself. Repeating it calls no Python of
the step, so what the step read from the host stays as it was. Operations that no graph can have are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mup_tpu.devices import cpu
from mup_tpu.devices.base import Repeated, Step
from mup_tpu.devices.cuda import CudaDevice
from mup_tpu.devices.graphs import GraphSteps, Recorder

FROM_HOST = {"lift_fresh", "lift_fresh_copy", "_pin_memory"}
"""Operations by which a step takes numbers from the host."""
TO_HOST = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "multinomial",
}  # fmt: skip
"""Operations that wait for a value, or for a shape that values decide."""


class Refused(AssertionError):
    """Refusal of an operation; no RuntimeError, after which steps would be called one by one."""


def refuse(operation: Any, given: tuple[Any, ...]) -> None:
    """Refuse an operation that CUDA cannot capture.

    Raises:
        Refused: it waits for the host, or takes its numbers.
    """
    name = operation.overloadpacket.__name__
    if name in FROM_HOST:
        raise Refused(f"{operation} takes numbers from the host")
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    by_mask = name.startswith("index") and any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:2])
    if name in TO_HOST or by_mask:
        raise Refused(f"{operation} waits for the device")
    if len({x.device for x in tensors}) > 1:
        raise Refused(f"{operation} takes tensors of {sorted({str(x.device) for x in tensors})}")


def memory(tensor: Tensor) -> int:
    """Identity of a tensor's memory."""
    return tensor.untyped_storage()._cdata


def written(operation: Any, given: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    """Tensors that an operation changes."""
    places = [i for i, a in enumerate(operation._schema.arguments) if a.alias_info and a.alias_info.is_write]
    names = [operation._schema.arguments[i].name for i in places]
    found = [given[i] for i in places if i < len(given)] + [named[n] for n in names if n in named]
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]


class Operations(TorchDispatchMode):
    """Operations that a function calls, and the memory that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        """Operation, its arguments, and its results in memory of their own."""
        self.made: dict[int, Tensor] = {}
        self.used: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory that was there and is changed, with a copy."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        named = kwargs or {}
        given = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        refuse(operation, (args, named))
        for x in given:
            if memory(x) not in self.made:
                self.used[memory(x)] = x
        changed = written(operation, args, named)
        for x in changed:
            if memory(x) not in self.made and memory(x) not in self.before:
                whole = x.untyped_storage()
                self.before[memory(x)] = (x, whole.clone())
        result = operation(*args, **named)
        taken = {memory(x) for x in given}
        fresh = [x for x in tree_leaves(result) if isinstance(x, Tensor) and memory(x) not in taken]
        self.made |= {memory(x): x for x in fresh}
        if fresh or changed:  # no view
            self.calls.append((operation, args, named, fresh))
        return result

    def undo(self) -> None:
        """Bring back the memory that was there, and spoil the rest: another graph may use it."""
        for x, whole in self.before.values():
            x.untyped_storage().copy_(whole)
        self.before.clear()
        self.spoil()

    def spoil(self) -> None:
        for *_, fresh in self.calls:
            for x in fresh:
                if x.is_floating_point():
                    x.fill_(torch.nan)

    @torch.no_grad()
    def repeat(self) -> None:
        """The same operations on the same memory."""
        for operation, args, named, fresh in self.calls:
            again = [x for x in tree_leaves(operation(*args, **named)) if isinstance(x, Tensor)]
            kept = {memory(x) for x in fresh}
            if kept:
                for x, y in zip(fresh, again, strict=True):
                    x.copy_(y)
        self.spoil()


class StrictRecorder(Recorder):
    """Recorder of operations, which are refused where CUDA's capture would fail; it counts."""

    def __init__(self) -> None:
        self.warm_ups = self.recorded = self.repeated = 0
        self._used: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        """Memory of the last warm-up, by the object whose step it was."""

    def warm_up(self, act: Callable[[], None]) -> None:
        """Note which memory the function uses."""
        self.warm_ups += 1
        with Operations() as operations:
            act()
        self._used[act.__self__] = set(operations.used)

    def record(self, act: Callable[[], None]) -> Callable[[], None]:
        """The function's operations, repeated; the function itself is not called again.

        Raises:
            Refused: an operation, or memory that lies elsewhere at each call.
        """
        with Operations() as operations:
            act()
        if strange := operations.used.keys() - self._used[act.__self__]:
            shapes = [tuple(operations.used[x].shape) for x in strange]
            raise Refused(f"tensors of shapes {shapes} lie elsewhere at each call")
        operations.undo()
        self.recorded += 1

        def repeat() -> None:
            self.repeated += 1
            operations.repeat()

        return repeat


def without_constants(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The traced step, whose tensors are all arguments.

    Raises:
        Refused: it holds a tensor, which was there when it was traced.
    """
    held = [n.target for n in traced.graph.nodes if n.op == "get_attr"]
    if held:
        raise Refused(f"the traced step holds tensors: {held}")
    return traced


@dataclass(frozen=True)
class GraphsOnCpu(CudaDevice):
    """The CPU in place of a GPU."""

    name: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    recorder: StrictRecorder = field(default_factory=StrictRecorder)

    def repeated(self, step: Step) -> Repeated:
        """The step as graphs; tensors that it makes without a word of their device are elsewhere."""

        def on_device(*given: Any) -> Tensor:
            with torch.device("meta"):
                return step(*given)

        return GraphSteps(on_device, self.recorder, without_constants)

    synchronize = cpu.CpuDevice.synchronize
    free_memory_bytes = cpu.CpuDevice.free_memory_bytes
    peak_memory_bytes = cpu.CpuDevice.peak_memory_bytes
