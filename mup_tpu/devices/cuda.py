"""One CUDA GPU: members are stacked, since kernel launches and narrow matrices cost most.

The stacked step is compiled, and a chunk of steps is replays of one graph: the host hands over each step with
one call. A step of stacked members is some hundreds of kernels behind Python's vmap: several milliseconds of
host time for a tenth of a millisecond of a narrow model's arithmetic. So the step is traced to plain
operations once (`make_fx`), fused by inductor if there is a compiler, and recorded as one graph. Tokens and
per-step numbers lie in buffers that never move. A counter on the device selects the item that a replay reads
and the place of its losses. Nothing waits for the host inside a chunk.

Shapes: S steps of a chunk.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx.passes.split_module import split_module

from mup_tpu.devices.base import Device, Execution, Repeated, Step, padded, why_no_gpu
from mup_tpu.errors import ConfigError, raised_as, reason
from mup_tpu.internals.torch import (
    GraphMemory,
    changed_by,
    compile_function,
    compiler_error,
    compiler_lacks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

_log = logging.getLogger(__name__)

_WARM_UPS = 2  # steps before recording: the first may still compile, the next still allocate


class CudaRecorder:
    """CUDA graphs. They share memory: one is replayed at a time, and its results lie elsewhere.

    Warm-ups take the same memory and stream: workspaces that CUDA's libraries keep for the stream are then
    outside of captures.
    """

    @property
    def _stream(self) -> torch.cuda.Stream:
        return _stream_of_captures(torch.cuda.current_device())

    @cached_property
    def _memory(self) -> GraphMemory:
        return GraphMemory()

    def warm_up(self, act: Callable[[], None]) -> None:
        torch.cuda.empty_cache()  # torch does not while it takes memory from a pool
        with self._aside(), self._memory.taken():
            act()

    def record(self, act: Callable[[], None]) -> Callable[[], None]:
        """Record the function without running it; return the replay. Other threads may place batches."""
        graph = torch.cuda.CUDAGraph()
        of_thread: dict[str, Any] = {"capture_error_mode": "thread_local"}
        captured = torch.cuda.graph(graph, self._memory.handle, self._stream, **of_thread)
        try:
            with self._aside(), captured:
                act()
        except RuntimeError:
            self._memory.end_failed_capture()
            del self._memory
            raise
        return graph.replay

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Use the stream of captures in the block; then the caller's, even if torch leaves another."""
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)


@functools.cache
def _stream_of_captures(device: int) -> torch.cuda.Stream:
    # One for all recorders of a process: cuBLAS keeps 32 MiB for each stream.
    return torch.cuda.Stream(device)


Compiler = Callable[[torch.fx.GraphModule], Callable[..., Any]]  # compiles a traced function


def as_traced(traced: torch.fx.GraphModule) -> Callable[..., Any]:
    return traced


class GraphSteps:
    """A repeated step, as `Device.repeated` returns it; the step itself is called once, to be traced."""

    def __init__(self, step: Step, recorder: CudaRecorder, compile: Compiler = as_traced) -> None:
        self._step, self._recorder, self._compile = step, recorder, compile
        self._made: _Recording | None = None
        self._key: tuple[list[Any], ...] = ()

    def __call__(self, changed: Any, fixed: Any, stacks: Any, count: int) -> Tensor:
        """Make `count` steps on the first items of the stacks; return their results, stacked (S, ...)."""
        tensors = [tree_leaves(group) for group in (changed, fixed, stacks)]
        # A recording is for the same memory, and for stacks of one shape.
        memory = [t.data_ptr() for t in (*tensors[0], *tensors[1])]
        key = memory, [(stack.shape, stack.dtype) for stack in tensors[2]]
        if self._made is None or key != self._key:
            self._key = key
            traced = trace(self._step, changed, fixed, stacks)
            self._made = _Recording(self._compile(traced), self._recorder, *tensors)
        return self._made.run(tensors[2], count)


class _Recording:
    """One step, recorded for certain tensors, and buffers for its stacks."""

    def __init__(
        self,
        step: Callable[..., Any],
        recorder: CudaRecorder,
        changed: list[Tensor],
        fixed: list[Tensor],
        stacks: list[Tensor],
    ) -> None:
        self._step, self._changed, self._fixed, self._recorder = step, changed, fixed, recorder
        self._stacks = [torch.empty_like(stack) for stack in stacks]
        self._index = torch.zeros(1, dtype=torch.int64, device=stacks[0].device)
        self._losses: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        self._warm_ups = 0

    def run(self, stacks: list[Tensor], count: int) -> Tensor:
        """Make steps on the first items of stacks."""
        for buffer, stack in zip(self._stacks, stacks, strict=True):
            buffer.copy_(stack, non_blocking=True)
        self._index.zero_()
        for _ in range(count):
            if self._replay is not None:
                self._replay()
            elif self._warm_ups < _WARM_UPS:
                self._recorder.warm_up(self._one)
                self._warm_ups += 1
            else:
                self._replay = self._record()
                self._replay()
        assert self._losses is not None
        return self._losses.clone()

    def _one(self) -> None:
        items = [stack.index_select(0, self._index).squeeze(0) for stack in self._stacks]
        out = self._step(*self._changed, *self._fixed, *items)
        if self._losses is None:
            self._losses = out.new_zeros(len(self._stacks[0]), *out.shape)
        self._losses.index_copy_(0, self._index, out[None])
        self._index.add_(1)

    def _record(self) -> Callable[[], None]:
        try:
            return self._recorder.record(self._one)
        except RuntimeError as error:
            _log.warning("steps are called one by one, since recording them failed: %s", reason(error))
            return self._one


def trace(step: Step, changed: Any, fixed: Any, stacks: Any) -> torch.fx.GraphModule:
    """Trace a step to plain operations on flat tensors, without functorch, autograd or autocast.

    Raises:
        ConfigError: torch cannot write its cache folder.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    groups = [tree_flatten(group) for group in (changed, fixed, stacks)]
    tensors = [*groups[0][0], *groups[1][0], *(stack[0] for stack in groups[2][0])]

    def flat(*given: Tensor) -> Tensor:
        rest = iter(given)
        parts = ([*itertools.islice(rest, len(of_group))] for of_group, _ in groups)
        return step(*(tree_unflatten(part, spec) for part, (_, spec) in zip(parts, groups, strict=True)))

    # Fake tensors compute nothing and take no memory.
    with raised_as(ConfigError, "torch needs a cache folder (TORCHINDUCTOR_CACHE_DIR) that can be written"):
        traced = make_fx(flat, tracing_mode="fake")(*tensors)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _cut(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Split a traced function into modules: the gradients of each micro-batch, clipping, and the update.

    Inductor (torch 2.11) frees a result of an argument only after that argument's change, and mixes
    micro-batches: in one piece, all activations would live until the update.
    """
    part, sums, updates = 0, False, False

    def part_of(node: torch.fx.Node) -> int:
        nonlocal part, sums, updates
        changed = changed_by(node)
        begins_update = not updates and any(argument.op == "placeholder" for argument in changed)
        if begins_update or (sums and not changed and not updates):
            part += 1
        updates, sums = updates or begins_update, bool(changed)
        return part

    return split_module(traced, traced, part_of)


@functools.cache
def inductor() -> Compiler:
    if lacking := compiler_lacks():
        _log.warning("steps are not compiled, and slower, without %s", lacking)
        return as_traced
    return compiled


@contextlib.contextmanager
def without_advice_on_tf32() -> Iterator[None]:
    # They report that TF32 is off or that its setter is deprecated. The new way to set it fails beside
    # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE ("mix of the legacy and new APIs").
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        yield


def compiled(traced: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a traced function; where that fails, as with a full cache folder, call it as it is."""
    parts = _cut(traced)
    for part in parts.children():
        part.forward = compile_function(part.forward)
    call: Callable[..., Any] = parts

    def compiled_or_traced(*given: Tensor) -> Any:
        nonlocal call
        try:
            with without_advice_on_tf32():
                return call(*given)
        except (compiler_error(), OSError) as error:  # raised before any tensor changes
            _log.warning("steps are not compiled, since torch's compiler failed: %s", reason(error))
            call = traced
            return call(*given)

    return compiled_or_traced


@dataclass(frozen=True)
class CudaDevice(Device):
    """The current CUDA device."""

    name: str
    torch_device: torch.device
    execution: Execution = "vmap"
    compiles: bool = True
    recorder: CudaRecorder = field(default_factory=CudaRecorder)

    def place_stack(self, stack: Tensor, axis: str, length: int) -> Tensor:
        stack = padded(stack, length)  # graphs have one shape
        return stack.pin_memory().to(self.torch_device, non_blocking=True)

    def repeated(self, step: Step, compile: bool = False) -> Repeated:
        return GraphSteps(step, self.recorder, inductor() if compile else as_traced)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_memory_bytes(self) -> int:
        # What the caching allocator holds unused is free too.
        device = self.torch_device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused


def create() -> CudaDevice:
    """Return the current CUDA device."""
    if (why := why_no_gpu()) is not None:
        why = f" ({why})" if why else ""
        raise ConfigError(f"device 'cuda' is not available: torch sees no GPU here{why}; use --device cpu")
    with without_advice_on_tf32():
        torch.set_float32_matmul_precision("highest")  # NVIDIA's containers switch TF32 on
    index = torch.cuda.current_device()
    return CudaDevice(torch.cuda.get_device_name(index), torch.device("cuda", index))
