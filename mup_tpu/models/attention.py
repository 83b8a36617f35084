"""Causal attention in several forms, equal up to rounding, each fastest in some place.

Each form takes query, key and value side by side (B, T, 3·D), the head size d and a factor, and returns
(B, T, D). Logits are factor/√d times query times key.

Shapes: B sequences, T tokens, H heads, N = B·H, d head size, D width, X = 3·D; of a block, R rows and S keys.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten

AttentionFunction = Callable[[Tensor, int, Tensor], Tensor]

# Longest sequence, in tokens, with weights kept under vmap. Recomputed, a pack of width 256 at 1024 tokens
# takes 2.6 GiB instead of 7.0, and three quarters of the cycles, by TPU v4's compiler.
_LONG = 256

_LARGE_BLOCK = 128  # rows of a recomputed block: the size of accelerators' matrix units


def choose_form(vmapped: bool, sequence_length: int) -> str:
    if vmapped:
        return "recomputed" if sequence_length > _LONG else "matmul"
    return "fused"


def _fused(qkv_BTX: Tensor, head_size: int, factor: Tensor) -> Tensor:
    # On CPUs the kernel's backward pass takes three times as long in bf16 as in float32 (torch 2.15).
    is_slow = qkv_BTX.device.type == "cpu" and qkv_BTX.dtype == torch.bfloat16
    with torch.autocast("cpu", enabled=False) if is_slow else contextlib.nullcontext():
        query_BHTd, key_BHTd, value_BHTd = _qkv_by_head(qkv_BTX.float() if is_slow else qkv_BTX, head_size)
        out_BHTd = functional.scaled_dot_product_attention(
            query_BHTd * factor, key_BHTd, value_BHTd, is_causal=True
        )
    return out_BHTd.to(qkv_BTX.dtype).transpose(1, 2).flatten(-2)


def _matmul(qkv_BTX: Tensor, head_size: int, factor: Tensor) -> Tensor:
    # For vmap: torch's fused kernels have no batching rule.
    query_BHTd, key_BHTd, value_BHTd = _qkv_by_head(qkv_BTX, head_size)
    t = query_BHTd.shape[-2]
    logits_BHTT = (query_BHTd * (factor * head_size**-0.5)) @ key_BHTd.mT
    future_TT = torch.ones(t, t, dtype=torch.bool, device=logits_BHTT.device).triu(1)
    logits_BHTT = logits_BHTT.masked_fill(future_TT, -math.inf)
    weights_BHTT = logits_BHTT.to(torch.promote_types(logits_BHTT.dtype, torch.float32)).softmax(-1)
    out_BHTd = weights_BHTT.to(value_BHTd.dtype) @ value_BHTd
    return out_BHTd.transpose(1, 2).flatten(-2)


def _folded(qkv_BTX: Tensor, head_size: int, factor: Tensor) -> Tensor:
    query_BHTd, key_BHTd, value_BHTd = _qkv_by_head(qkv_BTX, head_size)
    query_BHTd = (query_BHTd * factor).to(key_BHTd.dtype)
    if not kernel_for(query_BHTd):
        return _matmul(qkv_BTX, head_size, factor)
    out_BHTd, *_ = _Fused.apply(query_BHTd, key_BHTd, value_BHTd, head_size**-0.5)
    return out_BHTd.transpose(1, 2).flatten(-2)


def _recomputed(qkv_BTX: Tensor, head_size: int, factor: Tensor) -> Tensor:
    query_BHTd, key_BHTd, value_BHTd = _qkv_by_head(qkv_BTX, head_size)
    out_BHTd, _ = _RecomputedAttention.apply(query_BHTd * (factor * head_size**-0.5), key_BHTd, value_BHTd)
    return out_BHTd.transpose(1, 2).flatten(-2)


class _RecomputedAttention(torch.autograd.Function):
    """Attention that keeps the logarithm of the sum of each row of weights instead of the row.

    After Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4, with whole rows in blocks large enough for
    large products. Memory grows with T instead of T².
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query_BHTd: Tensor, key_BHTd: Tensor, value_BHTd: Tensor) -> tuple[Tensor, Tensor]:
        """Return output_BHTd and the logarithm of each row's sum_BHT; the query has the factor on logits."""
        parts: list[Tensor] = []
        sums: list[Tensor] = []
        for rows in _rows(query_BHTd.shape[-2], _LARGE_BLOCK):
            query_BHRd = _after(parts, query_BHTd[..., rows, :])
            logits_BHRS = _causal_logits(query_BHRd, key_BHTd, rows)
            sums.append(logits_BHRS.logsumexp(-1))
            weights_BHRS = (logits_BHRS - sums[-1][..., None]).exp().to(value_BHTd.dtype)
            parts.append(weights_BHRS @ value_BHTd[..., : rows.stop, :])
        return torch.cat(parts, -2), torch.cat(sums, -1)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx, gradient_BHTd: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_BHTd, key_BHTd, value_BHTd, out_BHTd, sums_BHT = ctx.saved_tensors
        t = query_BHTd.shape[-2]
        mean_BHT1 = (gradient_BHTd * out_BHTd).to(sums_BHT.dtype).sum(-1, keepdim=True)  # appendix B.2
        to_query: list[Tensor] = []
        to_key, to_value = torch.zeros_like(key_BHTd), torch.zeros_like(value_BHTd)
        for rows in _rows(t, _LARGE_BLOCK):
            query_BHRd = _after(to_query, query_BHTd[..., rows, :])
            part_BHRd = _after(to_query, gradient_BHTd[..., rows, :])
            key_BHSd, value_BHSd = (x_BHTd[..., : rows.stop, :] for x_BHTd in (key_BHTd, value_BHTd))
            logits_BHRS = _causal_logits(query_BHRd, key_BHTd, rows)
            weights_BHRS = (logits_BHRS - sums_BHT[..., rows, None]).exp()
            to_weights_BHRS = (part_BHRd @ value_BHSd.mT).to(weights_BHRS.dtype)
            to_logits_BHRS = weights_BHRS * (to_weights_BHRS - mean_BHT1[..., rows, :])
            to_logits_BHRS = to_logits_BHRS.to(query_BHTd.dtype)
            to_query.append(to_logits_BHRS @ key_BHSd)
            later = (0, 0, 0, t - rows.stop)
            to_key = to_key + functional.pad(to_logits_BHRS.mT @ query_BHRd, later)
            to_value = to_value + functional.pad(weights_BHRS.to(value_BHSd.dtype).mT @ part_BHRd, later)
        return torch.cat(to_query, -2), to_key, to_value


def _after(blocks: list[Tensor], tensor: Tensor) -> Tensor:
    # XLA would compute all blocks at once and hold all of their memory, so each waits for the one before.
    return tensor + 0 * blocks[-1][..., :1, :1] if blocks else tensor


def _causal_logits(query_BHRd: Tensor, key_BHTd: Tensor, rows: slice) -> Tensor:
    logits_BHRS = query_BHRd @ key_BHTd[..., : rows.stop, :].mT
    shape = logits_BHRS.shape[-2:]
    future_RS = torch.ones(shape, dtype=torch.bool, device=logits_BHRS.device).triu(1 + rows.start)
    logits_BHRS = logits_BHRS.to(torch.promote_types(logits_BHRS.dtype, torch.float32))
    return logits_BHRS.masked_fill(future_RS, -math.inf)


def _qkv_by_head(qkv_BTX: Tensor, head_size: int) -> tuple[Tensor, ...]:
    parts = qkv_BTX.chunk(3, -1)
    return tuple(x_BTD.view(*x_BTD.shape[:-1], -1, head_size).transpose(1, 2) for x_BTD in parts)


def _rows(t: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, t)) for start in range(0, t, block)]


# Torch's `scaled_dot_product_attention` has no batching rule for its backward: vmap would call it once a
# member. From here on torch's private kernels (`torch.ops.aten._scaled_dot_product_*`, torch 2.9 to 2.15) get
# one, forward and backward: members are folded into the batch axis, B has the sequences of all.


def kernel_for(query_BHTd: Tensor) -> str:
    """Return the kernel for such queries, "flash" or "efficient"; "" for none.

    Flash attention takes bf16, from compute capability 8.0 on; before, no kernel does. The memory-efficient
    one takes float32.
    """
    size = query_BHTd.shape[-1]
    if query_BHTd.device.type != "cuda" or size % 8 or size > 256:
        return ""
    if query_BHTd.dtype == torch.bfloat16:
        return "flash" if torch.cuda.get_device_capability(query_BHTd.device) >= (8, 0) else ""
    return "efficient" if query_BHTd.dtype == torch.float32 else ""


class _Folded(torch.autograd.Function):
    """A function of tensors and a scale, which come last; vmap folds members into the first axis."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
        *tensors, scale = given
        folded = [_fold(x, dim, info.batch_size) for x, dim in zip(tensors, in_dims, strict=False)]
        outputs = cls.apply(*folded, scale)
        dims = tuple(0 if out.dim() > 1 else None for out in outputs)
        unfolded = (out.unflatten(0, (info.batch_size, -1)) if out.dim() > 1 else out for out in outputs)
        return tuple(unfolded), dims


class _Fused(_Folded):
    """The kernel's output, and what its backward pass needs."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
        if kernel_for(query) == "flash":
            out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, True, False, scale=scale
            )
            return out, lse, seed, offset
        kernel = aten._scaled_dot_product_efficient_attention
        return tuple(kernel(query, key, value, None, True, 0.0, True, scale=scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        return (*_FusedBackward.apply(gradient, *ctx.saved_tensors, ctx.scale), None)


class _FusedBackward(_Folded):
    """The backward kernel; not differentiable itself."""

    @staticmethod
    def forward(gradient: Tensor, *kept_and_scale: Any) -> tuple[Tensor, ...]:
        *of_forward, seed, offset, scale = kept_and_scale
        query, gradient = of_forward[0], gradient.contiguous()
        if kernel_for(query) == "flash":
            lengths = (None, None, query.shape[-2], query.shape[-2])
            kernel = aten._scaled_dot_product_flash_attention_backward
            return tuple(kernel(gradient, *of_forward, *lengths, 0.0, True, seed, offset, scale=scale))
        *qkv, out, lse = of_forward
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            gradient, *qkv, None, out, lse, seed, offset, 0.0, [True, True, True, False], True, scale=scale
        )
        return tuple(gradients[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass


def _fold(tensor: Tensor, dim: int | None, members: int) -> Tensor:
    """Join the members' axis with the tensor's first; without one, the tensor is every member's."""
    if tensor.dim() - (dim is not None) == 0:  # unused random state of a kernel
        return tensor if dim is None else tensor.select(dim, 0)
    whole = tensor.expand(members, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return whole.reshape(-1, *whole.shape[2:])


# The forms by name
ATTENTION: dict[str, AttentionFunction] = {
    "fused": _fused, "matmul": _matmul, "recomputed": _recomputed, "folded": _folded,
}  # fmt: skip
