"""Values for hollow GPUs: the CPU computes torch's operations in the GPU's memory, which is the host's.

Importing this module in a process with hollow GPUs does it. What a stream captures is computed when its graph
is replayed, in the memory that torch's allocator gave it. Kernels that inductor compiles compute nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
SHAPED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


def attention(query: Any, key: Any, value: Any, *_: Any, scale: float | None = None) -> Any:
    """Causal attention, as both kernels of CUDA are asked for it."""
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)


def backward(g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float | None) -> Any:
    lse = lse[..., : q.shape[-2]]  # one of the kernels pads it
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, lse, 0.0, True, scale=scale
    )


def flash_backward(*given: Any, scale: float | None = None) -> Any:
    return backward(*given[:6], scale)


def efficient_backward(
    g: Any, q: Any, k: Any, v: Any, bias: Any, *rest: Any, scale: float | None = None
) -> Any:
    return backward(g, q, k, v, *rest[:2], scale)


ON_CPU: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: attention,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
"""Operations that the CPU has by other names."""


def on_host(x: Any) -> Any:
    """A tensor of the CPU in the memory of a GPU's, the CPU for a GPU, and other arguments as they are."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if not isinstance(x, Tensor) or not x.is_cuda:
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty(x.shape, dtype=x.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    shared = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(shared, x.storage_offset(), x.size(), x.stride())


def is_on_gpu(x: Any) -> bool:
    return (isinstance(x, Tensor) and x.is_cuda) or (isinstance(x, torch.device) and x.type == "cuda")


def computes_nothing(operation: Any) -> bool:
    """Whether it makes a view, or memory without values."""
    aliased = [result.alias_info for result in operation._schema.returns if result.alias_info]
    is_view = bool(aliased) and not any(alias.is_write for alias in aliased)
    return is_view or "empty" in operation.overloadpacket.__name__


def is_shaped_by_values(operation: Any, args: tuple[Any, ...]) -> bool:
    name = operation.overloadpacket.__name__
    masks = [
        x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
    ]
    return name in SHAPED_BY_VALUES or (name == "index" and bool(masks))


class Filled(TorchDispatchMode):
    """Operations on a GPU's tensors, computed at once or when the capture of this moment is replayed."""

    capture: list[Callable[[], None]] | None = None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        named = kwargs or {}
        if not any(map(is_on_gpu, tree_leaves((args, named)))) or computes_nothing(operation):
            return operation(*args, **named)
        if is_shaped_by_values(operation, args):
            torch.cuda.synchronize()  # as CUDA does, and a capture refuses
            with _disable_current_modes():
                found = operation(*tree_map(on_host, args), **tree_map(on_host, named))
                return tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, found)
        result = operation(*args, **named)
        if any(isinstance(x, FakeTensor) for x in tree_leaves((args, named, result))):
            return result
        with _disable_current_modes():  # a step may be traced
            given, given_named, made = tree_map(on_host, (args, named, result))

        def compute() -> Any:
            found = ON_CPU.get(operation, operation)(*given, **given_named)
            for x, y in zip(tree_leaves(made), tree_leaves(found), strict=False):
                if (
                    isinstance(x, Tensor)
                    and isinstance(y, Tensor)
                    and x.numel()
                    and x.data_ptr() != y.data_ptr()
                ):
                    (x[..., : y.shape[-1]] if x.shape != y.shape else x).copy_(y)
            return found

        if self.capture is not None and torch.cuda.is_current_stream_capturing():
            self.capture.append(compute)
            return result
        with _disable_current_modes():
            found = compute()
        return found if isinstance(found, (bool, int, float)) else result


FILLED = Filled()


class FilledGraph(torch.cuda.CUDAGraph):
    """A graph whose replay computes."""

    def capture_begin(self, *given: Any, **named: Any) -> None:
        FILLED.capture = []
        super().capture_begin(*given, **named)

    def capture_end(self) -> None:
        self.captured, FILLED.capture = FILLED.capture or [], None
        super().capture_end()

    def replay(self) -> None:
        super().replay()
        with _disable_current_modes(), torch.no_grad():
            for compute in self.captured:
                compute()


torch.cuda.CUDAGraph = FilledGraph
FILLED.__enter__()
