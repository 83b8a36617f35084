"""TPUs through TorchTPU (the package torch_tpu): one process per chip, and a chunk of steps as one program.

A pack's step is traced to plain operations (`devices/cuda.py`), so that torch's compiler meets neither vmap
nor gradients, and repeated by `scan`, which TorchTPU writes as one loop of XLA. The number of steps is data:
chunks of any length are one program. On XLA's CPU plugin (`tools/tpu_on_cpu`) the same programs have values.

Shapes: L items that the stacks of a program hold.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mup_tpu.devices.base import CpuDevice, Device, Execution, Repeated, Step, padded
from mup_tpu.devices.cuda import trace
from mup_tpu.devices.peak import GENERATIONS, tpu_device_files
from mup_tpu.errors import ConfigError, reason
from mup_tpu.internals import load_backend
from mup_tpu.internals.torch import tree_leaves

ON_CPU = "tpu:CPU"
_COUNTS = {"compilations": 0, "compile_s": 0.0, "executions": 0, "transfers_to_host": 0, "fallbacks": 0}
_dump: Path | None = None


@dataclass(frozen=True)
class TpuDevice(Device):
    """The chip of this process, or XLA's CPU plugin in its place."""

    name: str
    torch_device: torch.device = field(default_factory=lambda: torch.device("tpu"))
    execution: Execution = "vmap"
    reads_cheaply: bool = False
    compiles: bool = True

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        return padded(stack, length, by_xla=True).to(self.torch_device)

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        return Chunks(step)

    def read(self, tensor: Tensor) -> Tensor:
        _COUNTS["transfers_to_host"] += 1
        return tensor.cpu()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def free_memory_bytes(self) -> int:
        if self.name == ON_CPU:
            return CpuDevice().free_memory_bytes()
        return GENERATIONS[self.name.removeprefix("tpu:")].usable_bytes


class Chunks:
    """A step that one program makes for each item of its stacks, as `Device.repeated` returns it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._programs: dict[Any, Callable[..., Any]] = {}  # shapes of the stacks -> program

    def __call__(self, changed: Any, fixed: Any, stacks: Any, steps: int) -> Tensor:
        """Make `steps` steps; return results (L, ...), meaningless after the first `steps`."""
        tensors = [tree_leaves(group) for group in (changed, fixed, stacks)]
        limit = torch.tensor(steps, dtype=torch.int32).to(tensors[2][0].device)
        given = [limit, *tensors[0], *tensors[1], *tensors[2]]
        began, shapes = time.perf_counter(), tuple(stack.shape for stack in tensors[2])
        is_new = shapes not in self._programs
        if is_new:
            loop = _loop(trace(self._step, changed, fixed, stacks), *tensors)
            self._programs[shapes] = compiled(loop, given, range(1, 1 + len(tensors[0])))
        *new, out = self._programs[shapes](*given)
        for tensor, value in zip(tensors[0], new, strict=True):
            tensor.data = value  # the program wrote over the old values' memory
        if is_new:
            _COUNTS["compilations"] += 1
            _COUNTS["compile_s"] += time.perf_counter() - began
        _COUNTS["executions"] += 1
        return out


def _loop(
    step: Callable[..., Any], changed: list[Tensor], fixed: list[Tensor], stacks: list[Tensor]
) -> torch.fx.GraphModule:
    """Trace the loop over a step: a limit and all tensors -> new values of the changed ones, then results."""
    from torch._higher_order_ops.scan import scan_op  # torch has no public loop
    from torch.fx.experimental.proxy_tensor import make_fx

    some, more = len(changed), len(changed) + len(fixed)

    def body(counter: Tensor, *given: Tensor) -> list[Tensor]:
        # In the order of `scan_op`: carry, items, other inputs.
        old, items, (limit, *others) = (
            given[:some], given[some : some + len(stacks)], given[some + len(stacks) :]
        )  # fmt: skip
        *new, out = pure(*old, *others, *items)
        goes_on = counter < limit
        return [counter + 1, *(torch.where(goes_on, *both) for both in zip(new, old, strict=True)), out]

    def changing(*given: Tensor) -> tuple[Tensor, ...]:
        new = [tensor.clone() for tensor in given[:some]]
        out = step(*new, *given[some:])
        return *new, out

    pure = torch.func.functionalize(changing)

    def loop(limit: Tensor, *given: Tensor) -> list[Tensor]:
        begin = [torch.zeros_like(limit), *given[:some]]
        _, *results = scan_op(body, begin, list(given[more:]), [limit, *given[some:more]])
        return results

    limit = torch.zeros((), dtype=torch.int32, device=stacks[0].device)
    return make_fx(loop, tracing_mode="fake")(limit, *changed, *fixed, *stacks)


def compiled(
    graph: torch.fx.GraphModule, given: Sequence[Tensor], donated: Sequence[int]
) -> Callable[..., Any]:
    """Compile a traced function for the chip; it may write its results over the donated arguments.

    By TorchTPU's own compiler: its backend of `torch.compile` donates nothing, so that parameters and their
    state would be in memory twice.
    """
    from torch_tpu._internal.compile import compiler, debug

    texts = debug.TpuCompileDebug() if _dump is not None else None
    program: Callable[..., Any] = compiler.StaticCompiler(debug=texts)(graph, given, donated_inputs=donated)
    if texts is not None and _dump is not None:
        for text in texts.stablehlo_forward_text:
            path = _dump / f"program-{len(list(_dump.iterdir()))}.mlir"
            path.with_suffix(".partial").write_text(text, encoding="utf-8")
            path.with_suffix(".partial").rename(path)  # a reader that waits for the path finds all of it
    return program


def report() -> dict[str, float]:
    return dict(_COUNTS)


def dump_programs(folder: str) -> None:
    global _dump
    _dump = Path(folder)
    _dump.mkdir(parents=True, exist_ok=True)


def create() -> TpuDevice:
    """Return the chip of this process."""
    is_loaded = "torch_tpu" in sys.modules
    if importlib.util.find_spec("torch_tpu") and not is_loaded and not tpu_device_files():
        raise ConfigError("device 'tpu' found no TPU here: run on a TPU VM, or take another --device")
    try:
        import torch_tpu  # noqa: F401

        if not is_loaded:
            load_backend("torch_tpu")  # gives torch its device "tpu"
        torch.device("tpu")
    except ImportError as error:
        raise ConfigError(
            f"device 'tpu' is not available: torch_tpu cannot be imported ({reason(error)}); "
            "EXTRAS=tpu scripts/tpu/setup installs it, in an environment of its own"
        ) from None
    except RuntimeError as error:
        fault = f"{reason(error)}; mup-tpu doctor may name the fault"
        why = fault if tpu_device_files() else "run on a TPU VM, or take another --device"
        raise ConfigError(f"device 'tpu' found no TPU here: {why}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "get_device_name is experimental"
        kind = torch.tpu.get_device_name().removeprefix("TPU").strip()  # type: ignore[attr-defined]
    return TpuDevice(f"tpu:{kind}" if kind else ON_CPU)
