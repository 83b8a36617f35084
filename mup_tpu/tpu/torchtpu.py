"""TPUs through TorchTPU (the package torch_tpu): one process a chip, and a chunk of steps as one program.

A pack's step is traced to plain operations (`devices/cuda.py`), so that torch's compiler meets neither vmap
nor gradients, and repeated by `scan`, which TorchTPU writes as one loop of XLA. The number of steps is data:
chunks of any length are one program. On XLA's CPU plugin (`tools/tpu_on_cpu`) the same programs have values.

Shapes: L items that the stacks of a program hold.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mup_tpu.devices.base import Device, Execution, Repeated, Step, padded
from mup_tpu.devices.cpu import CpuDevice
from mup_tpu.devices.cuda import trace
from mup_tpu.devices.peak import GENERATIONS
from mup_tpu.errors import ConfigError, reason
from mup_tpu.internals.torch import tree_leaves

ON_CPU = "tpu:CPU"
_USABLE = 0.95  # share of a TPU's memory that programs can use; the runtime takes the rest

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
        stack = padded(stack, length)
        if stack.dtype == torch.int64:  # TPUs compose 64-bit integers of two
            stack = stack.int()
        return stack.to(self.torch_device)

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
        return int(_USABLE * GENERATIONS[self.name.removeprefix("tpu:")].device_hbm_bytes)


class Chunks:
    """A step that one program makes for each item of its stacks, as `Device.repeated` returns it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._program: Callable[..., Any] | None = None

    def __call__(self, changed: Any, fixed: Any, stacks: Any, steps: int) -> Tensor:
        """Make `steps` steps; return results (L, ...), meaningless after the first `steps`."""
        tensors = [tree_leaves(group) for group in (changed, fixed, stacks)]
        limit = torch.tensor(steps, dtype=torch.int32).to(tensors[2][0].device)
        began = None if self._program else time.perf_counter()
        if self._program is None:
            given = [*tensors[:2], [stack[0] for stack in tensors[2]]]
            self._program = _compiled(_without_changes(trace(self._step, changed, fixed, stacks), given))
        with torch.no_grad():
            new, out = self._program(*tensors, limit)
            for tensor, value in zip(tensors[0], new, strict=True):
                tensor.copy_(value)
        if began is not None:
            _COUNTS["compilations"] += 1
            _COUNTS["compile_s"] += time.perf_counter() - began
        _COUNTS["executions"] += 1
        return out


def _without_changes(traced: Callable[..., Any], tensors: list[list[Tensor]]) -> Callable[..., Any]:
    """Return the traced step as a pure function: new values of its first tensors, then its result."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def pure(*given: Tensor) -> tuple[Tensor, ...]:
        new = [tensor.clone() for tensor in given[: len(tensors[0])]]
        out = traced(*new, *given[len(new) :])
        return *new, out

    flat = [tensor for group in tensors for tensor in group]
    return make_fx(torch.func.functionalize(pure), tracing_mode="fake")(*flat)


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled loop over a step that changes none of its tensors."""
    from torch._higher_order_ops.scan import scan  # private, as all loops of torch are

    def loop(
        changed: list[Tensor], fixed: list[Tensor], stacks: list[Tensor], limit: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        def body(carry: Sequence[Tensor], items: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
            counter, *old = carry
            *new, out = step(*old, *fixed, *items)
            goes_on = counter < limit
            return [counter + 1, *(torch.where(goes_on, *both) for both in zip(new, old, strict=True))], out

        (_, *new), out = scan(body, [torch.zeros_like(limit), *changed], stacks)
        return new, out

    options: dict[str, Any] = {} if _dump is None else {"debug_callback": _write_program}
    return torch.compile(loop, backend="tpu", fullgraph=True, dynamic=False, options=options)


def _write_program(compiled: Any) -> None:
    assert _dump is not None
    for text in compiled.stablehlo_forward_text:
        (_dump / f"program-{len(list(_dump.iterdir()))}.mlir").write_text(text, encoding="utf-8")


def report() -> dict[str, float]:
    return dict(_COUNTS)


def dump_programs(folder: str) -> None:
    global _dump
    _dump = Path(folder)
    _dump.mkdir(parents=True, exist_ok=True)


def create() -> TpuDevice:
    """Return the chip of this process."""
    try:
        import torch_tpu  # noqa: F401 (gives torch its device "tpu")

        torch.device("tpu")
    except ImportError as error:
        raise ConfigError(
            f"device 'tpu' is not available: torch_tpu cannot be imported ({reason(error)}); "
            "scripts/tpu/setup installs it, in an environment of its own"
        ) from None
    except RuntimeError:
        raise ConfigError("device 'tpu' found no TPU here; mup-tpu doctor names the fault") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "get_device_name is experimental"
        kind = torch.tpu.get_device_name().removeprefix("TPU").strip()  # type: ignore[attr-defined]
    return TpuDevice(f"tpu:{kind}" if kind else ON_CPU)
