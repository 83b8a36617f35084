"""Norms, activations and rotary positions, in forms for different devices, with their gradients.

Shapes: B sequences, T tokens, N = B·T, R rows of any number, D width, I width between an MLP's layers, H
heads, G key-value heads, d head size, h = d/2, X = 3·D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.models.llama import EPS, ROTARY_BASE


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


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    # Shazeer 2020, arXiv:2002.05202
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
