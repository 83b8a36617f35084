"""Norms, activations and rotary positions, in forms for different devices, with their gradients.

Shapes: B sequences, T tokens, N = B·T, R rows of any number, D width, I width between an MLP's layers, H
heads, G key-value heads, d head size, h = d/2, X = 3·D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.models.llama import EPS, ROTARY_BASE

_TWO_C = 2 * math.sqrt(2 / math.pi)
_GELU_BLOCK = 2**18  # elements of a block: in float32 a MiB, which stays in the caches between operations

# Elements of a block of the other functions: in float32 four such tensors fit into a core's second cache
_BLOCK = 2**16


class OnePassLayerNorm(nn.LayerNorm):
    """Layer norm as elementary operations. torch_xla's own merges the axes of members and tokens; XLA cannot
    split them again, and every norm would gather all members on every device.
    """

    def forward(self, x_ND: Tensor) -> Tensor:
        return _LayerNorm.apply(x_ND, self.weight, self.bias, self.eps)[0]


class _LayerNorm(torch.autograd.Function):
    """Layer norm that reads its input once for both moments, and in backward once for all four sums.

    Autograd of the single operations reads it seven times: a fifth of a narrow step, by the TPUs' compilers.
    The variance is the mean square less the squared mean, in float32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return output_ND, and each row's mean_N1 and inverse standard deviation_N1."""
        mean_N1 = x_ND.mean(-1, keepdim=True)
        variance_N1 = (x_ND.square().mean(-1, keepdim=True) - mean_N1.square()).clamp(min=0.0)
        inverse_N1 = (variance_N1 + eps).rsqrt()
        return (x_ND - mean_N1) * inverse_N1 * weight_D + bias_D, mean_N1, inverse_N1

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx, gradient_ND: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_ND, weight_D, mean_N1, inverse_N1 = ctx.saved_tensors
        normed_ND = (x_ND - mean_N1) * inverse_N1
        scaled_ND = gradient_ND * weight_D
        shift_N1 = scaled_ND.mean(-1, keepdim=True)
        stretch_N1 = (scaled_ND * normed_ND).mean(-1, keepdim=True)
        to_x_ND = inverse_N1 * (scaled_ND - shift_N1 - normed_ND * stretch_N1)
        return to_x_ND, (gradient_ND * normed_ND).sum(0), gradient_ND.sum(0), None


class RMSNorm(nn.Module):
    """Division by the root mean square of the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        # Projections in bf16 return bf16, too coarse for the mean square.
        return functional.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, EPS)


class OnePassRMSNorm(RMSNorm):
    """RMS norm under vmap, which reads its input once, and in backward once for both sums."""

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x.to(self.weight.dtype), self.weight)[0]


class _RMSNorm(torch.autograd.Function):
    """One operation: autograd of the single ones keeps three tensors, and reads each several times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and each row's inverse root mean square."""
        # ε times the width: gradient clipping has the constant ε too, and XLA cannot take one constant both
        # inside and outside of the part of the program that each device runs by itself.
        width = x.shape[-1]
        inverse = (x.square().sum(-1, keepdim=True) + width * EPS).rsqrt() * width**0.5
        return x * inverse * weight_D, inverse

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_D, inverse = ctx.saved_tensors
        normed = x * inverse
        scaled = gradient * weight_D
        stretch = (scaled * normed).mean(-1, keepdim=True)
        # Axis by axis: merged with the tokens' axis, the members' could not be split over devices.
        to_weight_D = (gradient * normed).sum(tuple(range(x.dim() - 1)))
        return inverse * (scaled - normed * stretch), to_weight_D


class BlockRMSNorm(RMSNorm):
    """RMS norm for CPUs, some rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return _BlockRMSNorm.apply(x.to(self.weight.dtype), self.weight)


class _BlockRMSNorm(torch.autograd.Function):
    """torch has no RMS norm kernel for CPUs; its single operations take 5 passes over memory and 12 in
    backward. Here the layer norm kernel, given a mean of 0, does most of backward.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight_D: Tensor) -> Tensor:
        x_RD = x.reshape(-1, x.shape[-1])
        out_RD = torch.empty_like(x_RD)
        inverse_R1 = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True).square_()
        inverse_R1.div_(x_RD.shape[1]).add_(EPS).rsqrt_()
        rows = max(1, _BLOCK // x_RD.shape[1])
        for part_RD, inverse, out in zip(*(y.split(rows) for y in (x_RD, inverse_R1, out_RD)), strict=True):
            torch.mul(part_RD, inverse, out=out).mul_(weight_D)
        ctx.save_for_backward(x_RD, weight_D, inverse_R1)
        return out_RD.view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x_RD, weight_D, inverse_R1 = ctx.saved_tensors
        g_RD = gradient.reshape(x_RD.shape)
        to_x_RD, to_weight_D, _ = torch.ops.aten.native_layer_norm_backward(
            g_RD, x_RD, weight_D.shape, torch.zeros_like(inverse_R1), inverse_R1, weight_D, None,
            (True, True, False),
        )  # fmt: skip
        # Layer norm's gradient subtracts a row's mean; RMS norm's does not.
        shift_R1 = torch.mv(g_RD, weight_D)[:, None].div_(x_RD.shape[1]).mul_(inverse_R1)
        return to_x_RD.add_(shift_R1).view(gradient.shape), to_weight_D


def in_blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.reshape(-1).split(size) for x in tensors), strict=True)


class FastGelu(nn.Module):
    """`_SigmoidGelu` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return _SigmoidGelu.apply(x)


class _SigmoidGelu(torch.autograd.Function):
    """GELU with tanh as x·σ(2u), u = √(2/π)(x + 0.044715 x³): the same function, since ½(1 + tanh u) = σ(2u).

    torch's own takes 2.6 times as long on a CPU, because of its tanh: a sixth of a narrow model's step. In
    bf16 each element is computed in float32 and rounded once: x³ in bf16 is too coarse.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out, slope = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        exact = torch.promote_types(x.dtype, torch.float32)
        # 0-d tensors, with which torch multiplies and adds in one pass over memory.
        two_c, one = x.new_tensor(_TWO_C, dtype=exact), x.new_ones((), dtype=exact)
        for part, to_out, to_slope in in_blocks(_GELU_BLOCK, x, out, slope):
            part = part.to(exact)
            share = torch.addcmul(two_c, part, part, value=0.044715 * _TWO_C).mul_(part).sigmoid_()
            if ctx.needs_input_grad[0]:
                # d/dx xσ(2u) = σ·(1 + x·2u'·(1 - σ)), while all is in the cache: one tensor for backward.
                rise = torch.addcmul(two_c, part, part, value=3 * 0.044715 * _TWO_C)
                torch.addcmul(one, part, rise, out=rise)
                to_slope.copy_(torch.lerp(rise, one, share, out=rise).mul_(share))
            to_out.copy_(share.mul_(part))
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return slope * gradient


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Return silu(gate)·up (Shazeer 2020, arXiv:2002.05202)."""
    return functional.silu(gate_NI) * up_NI


def one_pass_swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    return _SwiGLU.apply(gate_NI, up_NI)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that keeps only its inputs; autograd would keep silu(gate) too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        return swiglu(gate_NI, up_NI)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient_NI: Tensor) -> tuple[Tensor, Tensor]:
        gate_NI, up_NI = ctx.saved_tensors
        share_NI = gate_NI.sigmoid()
        slope_NI = share_NI * (1 + gate_NI * (1 - share_NI))
        return gradient_NI * up_NI * slope_NI, gradient_NI * gate_NI * share_NI


def block_swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    return _BlockSwiGLU.apply(gate_NI, up_NI)


class _BlockSwiGLU(torch.autograd.Function):
    """SwiGLU that computes both slopes while all is in the cache, and keeps them in place of its inputs.

    Backward is one product for each input. In bf16 each element is computed in float32 and rounded once.
    """

    @staticmethod
    def forward(ctx, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        out, to_gate, to_up = (torch.empty_like(gate_NI) for _ in range(3))
        exact = torch.promote_types(gate_NI.dtype, torch.float32)
        one = gate_NI.new_ones((), dtype=exact)
        for gate, up, *results in in_blocks(_BLOCK, gate_NI, up_NI, out, to_gate, to_up):
            gate, up = gate.to(exact), up.to(exact)
            part, rise, silu = (x if x.dtype == exact else torch.empty_like(gate) for x in results)
            share = torch.sigmoid(gate, out=part)
            torch.mul(gate, share, out=silu)
            torch.lerp(silu, one, share, out=rise).mul_(up)  # d/dx xσ(x) = σ + xσ·(1 - σ)
            torch.mul(silu, up, out=part)
            if part is not results[0]:
                torch._foreach_copy_(results, [part, rise, silu])
        ctx.save_for_backward(to_gate, to_up)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        to_gate, to_up = ctx.saved_tensors
        return to_gate * gradient, to_up * gradient


class Rotary(NamedTuple):
    """Cosines and sines of the angles of rotary positions."""

    cos_T1h: Tensor
    sin_T1h: Tensor


def rotary(positions: int, head_size: int, like: Tensor) -> Rotary:
    """Compute the angles of rotary positions (Su et al. 2021, arXiv:2104.09864), for activations like these.

    In float32 for any precision, as in transformers. No buffer, which each member of a pack would have.
    """
    steps_h = torch.arange(0, head_size, 2, dtype=torch.float32, device=like.device)
    positions_T = torch.arange(positions, dtype=torch.float32, device=like.device)
    angles_T1h = positions_T[:, None, None] * (1.0 / ROTARY_BASE ** (steps_h / head_size))
    return Rotary(angles_T1h.cos().to(like.dtype), angles_T1h.sin().to(like.dtype))


def rotate_and_join(query_NHd: Tensor, key_NGd: Tensor, value_NGd: Tensor, rotary: Rotary) -> Tensor:
    """Join rotated queries and keys, and values (B, T, 3·D): keys and values once a query head.

    Dimensions i and i + d/2 of a head rotate together, as in transformers; in the paper, neighbours.
    """
    t, heads = len(rotary.cos_T1h), query_NHd.shape[-2]

    def turned(x_NYd: Tensor) -> Tensor:
        first, second = x_NYd.unflatten(0, (-1, t)).chunk(2, -1)
        cos, sin = rotary
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(value_NGd.dtype)

    def for_each_query(x_BTGd: Tensor) -> Tensor:
        group = heads // x_BTGd.shape[-2]
        return x_BTGd.unsqueeze(-2).expand(*x_BTGd.shape[:-1], group, -1).flatten(-3, -2)

    value_BTGd = value_NGd.unflatten(0, (-1, t))
    parts = (turned(query_NHd), for_each_query(turned(key_NGd)), for_each_query(value_BTGd))
    return torch.cat([x_BTHd.flatten(-2) for x_BTHd in parts], -1)


def block_rotate_and_join(query_NHd: Tensor, key_NGd: Tensor, value_NGd: Tensor, rotary: Rotary) -> Tensor:
    return _BlockRotateAndJoin.apply(query_NHd, key_NGd, value_NGd, *rotary)


class _BlockRotateAndJoin(torch.autograd.Function):
    """Results written where attention reads them, in 3 operations for queries and keys instead of 8.

    In bf16 angles are float32, and each result is rounded once.
    """

    @staticmethod
    def forward(
        ctx, query_NHd: Tensor, key_NGd: Tensor, value_NGd: Tensor, cos_T1h: Tensor, sin_T1h: Tensor
    ) -> Tensor:
        t, (heads, d) = len(cos_T1h), query_NHd.shape[1:]
        ctx.groups, ctx.dtype = key_NGd.shape[1], query_NHd.dtype
        ctx.save_for_backward(cos_T1h, sin_T1h)
        query_BTHd, key_BTGd, value_BTGd = (
            x_NYd.unflatten(0, (-1, t)) for x_NYd in (query_NHd, key_NGd, value_NGd)
        )
        out_BTX = value_NGd.new_empty(len(query_BTHd), t, 3 * heads * d)
        for query, key, value, out in _sequence_blocks(query_BTHd, key_BTGd, value_BTGd, out_BTX):
            to_query, to_key, to_value = (x.unflatten(-1, (-1, d)) for x in out.chunk(3, -1))
            _turn(query, cos_T1h, sin_T1h, to_query)
            by_group = (ctx.groups, heads // ctx.groups)
            _turn(
                key.unsqueeze(-2),
                cos_T1h[..., None, :],
                sin_T1h[..., None, :],
                to_key.unflatten(-2, by_group),
            )
            to_value.unflatten(-2, by_group).copy_(value.unsqueeze(-2))
        return out_BTX

    @staticmethod
    def backward(ctx, gradient_BTX: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        cos_T1h, sin_T1h = ctx.saved_tensors
        query_BTHd, key_BTHd, value_BTHd = (
            x.unflatten(-1, (-1, 2 * cos_T1h.shape[-1])) for x in gradient_BTX.chunk(3, -1)
        )
        key_BTGd, value_BTGd = (_sum_of_group(x, ctx.groups) for x in (key_BTHd, value_BTHd))
        to_query, to_key = (torch.empty_like(x, dtype=ctx.dtype) for x in (query_BTHd, key_BTGd))
        for query, key, for_query, for_key in _sequence_blocks(query_BTHd, key_BTGd, to_query, to_key):
            _turn(query, cos_T1h, -sin_T1h, for_query)
            _turn(key, cos_T1h, -sin_T1h, for_key)
        return to_query.flatten(0, 1), to_key.flatten(0, 1), value_BTGd.flatten(0, 1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write the rotated last axis into another tensor, expanding `x` to its shape."""
    half, x = cos.shape[-1], x.to(cos.dtype)
    turned = out if out.dtype == cos.dtype else torch.empty_like(out, dtype=cos.dtype)
    torch.mul(x.expand(out.shape), torch.cat((cos, cos), -1), out=turned)
    turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin)
    if turned is not out:
        out.copy_(turned)


def _sum_of_group(x_BTHd: Tensor, groups: int) -> Tensor:
    return x_BTHd if x_BTHd.shape[-2] == groups else x_BTHd.unflatten(-2, (groups, -1)).sum(-2)


def _sequence_blocks(*tensors_BTY: Tensor) -> zip:
    sequences = max(1, _BLOCK // tensors_BTY[0][0].numel())
    return zip(*(x.split(sequences) for x in tensors_BTY), strict=True)
