"""Fused attention of stacked members: torch's kernels under vmap, members folded into the batch axis.

torch's `scaled_dot_product_attention` has no batching rule: vmap would call it once a member. These functions
add one to its private kernels (`torch.ops.aten._scaled_dot_product_*`, torch 2.9 to 2.15), forward and
backward. `attention` multiplies matrices if no kernel takes the queries (float64 on CUDA, a head size that is
no multiple of 8).

Shapes: B sequences (of all members once folded), H heads, T tokens, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """A fused kernel of causal attention, and its gradient."""

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, ...]]
    """Query, key and value (B, H, T, d) and the factor on logits -> output, and tensors for backward."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Gradient of the output, query, key, value, factor and forward's results -> gradients of the inputs."""


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, False, scale=scale
    )
    return out, lse, seed, offset


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, *kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, seed, offset = kept
    t = query.shape[-2]
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse, None, None, t, t, 0.0, True, seed, offset, scale=scale
    )


def _efficient(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True, scale=scale)


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, *kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, seed, offset = kept
    to_query, to_key, to_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, None, out, lse, seed, offset, 0.0, [True, True, True, False], True,
        scale=scale,
    )  # fmt: skip
    return to_query, to_key, to_value


def _for_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)


def _for_cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, *kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, *kept, 0.0, True, scale=scale
    )


_FLASH = Kernel(_flash, _flash_backward)
_EFFICIENT = Kernel(_efficient, _efficient_backward)
_CPU = Kernel(_for_cpu, _for_cpu_backward)


def kernel_for(query_BHTd: Tensor) -> Kernel | None:
    """The kernel for such queries, or None.

    Flash attention takes bf16, from compute capability 8.0 on; before, no kernel does. The memory-efficient
    one takes float32.
    """
    kind, dtype = query_BHTd.device.type, query_BHTd.dtype
    if kind == "cpu":
        return _CPU
    if kind != "cuda" or not has_kernel(query_BHTd.shape[-1]):
        return None
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(query_BHTd.device) >= (8, 0):
        return _FLASH
    return _EFFICIENT if dtype == torch.float32 else None


def has_kernel(head_size: int) -> bool:
    """Whether CUDA's kernels take heads of this size."""
    return head_size % 8 == 0 and head_size <= 256


def fused_attention(query_BHTd: Tensor, key_BHTd: Tensor, value_BHTd: Tensor, scale: float) -> Tensor:
    """Output_BHTd of causal attention, fused under vmap too; `kernel_for` must have one."""
    return _Fused.apply(query_BHTd, key_BHTd, value_BHTd, scale)[0]


class _Fused(torch.autograd.Function):
    """The forward kernel."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
        kernel = kernel_for(query)
        assert kernel is not None
        return tuple(kernel.forward(query, key, value, scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        return (*_FusedBackward.apply(gradient, ctx.scale, *ctx.saved_tensors), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
        *tensors, scale = given
        folded = [_fold(x, dim, info.batch_size) for x, dim in zip(tensors, in_dims, strict=False)]
        return _unfold(_Fused.apply(*folded, scale), info.batch_size)


class _FusedBackward(torch.autograd.Function):
    """The backward kernel; not differentiable itself."""

    @staticmethod
    def forward(gradient: Tensor, scale: float, *kept: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *rest = kept
        kernel = kernel_for(query)
        assert kernel is not None
        return tuple(kernel.backward(gradient.contiguous(), query, key, value, scale, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("fused attention is differentiable once")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], gradient: Tensor, scale: float, *kept: Tensor) -> Any:
        dims = (in_dims[0], *in_dims[2:])
        folded = [_fold(x, dim, info.batch_size) for x, dim in zip((gradient, *kept), dims, strict=True)]
        return _unfold(_FusedBackward.apply(folded[0], scale, *folded[1:]), info.batch_size)


def _fold(tensor: Tensor, dim: int | None, members: int) -> Tensor:
    """Members' axis joined with the tensor's first; without one, the tensor is every member's."""
    if tensor.dim() - (dim is not None) == 0:  # the random state of a kernel, unused
        return tensor if dim is None else tensor.select(dim, 0)
    whole = tensor.expand(members, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return whole.reshape(-1, *whole.shape[2:])


def _unfold(outputs: tuple[Tensor, ...], members: int) -> tuple[Any, ...]:
    """Outputs with their members' axis, and the place of that axis."""
    has_members = [out.dim() > 1 for out in outputs]
    parts = [x.unflatten(0, (members, -1)) if has else x for x, has in zip(outputs, has_members, strict=True)]
    return tuple(parts), tuple(0 if has else None for has in has_members)
