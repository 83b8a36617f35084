"""Layers that architectures share, in forms for different devices.

Own classes: torch's layers draw their init, which on the meta device imports torch's compiler (3 to 6 s).

Shapes: B sequences, T tokens, N = B·T, D width, V vocabulary; a layer's I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Scale(nn.Module):
    """Multiplication by a factor, a buffer that may differ between members of a pack."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input, multiplied."""
        return x * self.factor


def in_blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of contiguous tensors, some elements at a time."""
    return zip(*(x.reshape(-1).split(size) for x in tensors), strict=True)


class FastGelu(nn.Module):
    """`_SigmoidGelu` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """GELU of each element."""
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


_TWO_C = 2 * math.sqrt(2 / math.pi)
_GELU_BLOCK = 2**18
"""Elements of a block: in float32 a MiB, which stays in the caches between operations."""


class OnePassLayerNorm(nn.LayerNorm):
    """Layer norm as elementary operations. torch_xla's own merges the axes of members and tokens; XLA cannot
    split them again, and every norm would gather all members on every device.
    """

    def forward(self, x_ND: Tensor) -> Tensor:
        """Rows with mean 0 and variance 1, times gain, plus bias."""
        return _LayerNorm.apply(x_ND, self.weight, self.bias, self.eps)[0]


class _LayerNorm(torch.autograd.Function):
    """Layer norm that reads its input once for both moments, and in backward once for all four sums.

    Autograd of the single operations reads it seven times: a fifth of a narrow step, by the TPUs' compilers.
    The variance is the mean square less the squared mean, in float32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Output_ND, and each row's mean_N1 and inverse standard deviation_N1."""
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


class Conv1D(nn.Module):
    """x·W + b with W (inputs, outputs), GPT-2's form of hidden matrices: the transpose of nn.Linear's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x_NI: Tensor) -> Tensor:
        """Output (N, outputs)."""
        return torch.addmm(self.bias, x_NI, self.weight)


def embedding(rows: int, width: int) -> nn.Embedding:
    """Embedding table without an init."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class Readout(nn.Module):
    """Logits of the vocabulary; the weight (V, D) may be the embedding's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V)."""
        return functional.linear(hidden_ND, self.weight)


class ScaledNetwork(nn.Module):
    """A network with factors on attention logits, residual branches and logits.

    Factors are buffers, which may differ between members of a pack. The trunk, whose parameters begin with
    `name`, takes tokens_BT, the factors of attention and branches, and a list for terms added to the loss. It
    returns hidden_ND.
    """

    attention_factor: Tensor
    residual_factor: Tensor | None
    logit_factor: Tensor

    def __init__(
        self, name: str, trunk: nn.Module, embedding_VD: Tensor, tied: bool, scaled_branches: bool
    ) -> None:
        super().__init__()
        self.add_module(name, trunk)
        self._trunk = name
        self.lm_head = Readout(embedding_VD if tied else nn.Parameter(torch.empty_like(embedding_VD)))
        self.register_buffer("attention_factor", torch.ones(()))
        self.register_buffer("residual_factor", torch.ones(()) if scaled_branches else None)
        self.register_buffer("logit_factor", torch.ones(()))

    def forward(self, tokens_BT: Tensor, added: list[Tensor] | None = None) -> Tensor:
        """Logits_BTV of the token after each of `tokens_BT`; `added` takes terms added to the loss."""
        trunk, added = self.get_submodule(self._trunk), [] if added is None else added
        hidden_ND = trunk(tokens_BT, self.attention_factor, self.residual_factor, added)
        return self.lm_head(hidden_ND * self.logit_factor).view(*tokens_BT.shape, -1)


def join_stream(stream_ND: Tensor, branch_ND: Tensor, factor: Tensor | None) -> Tensor:
    """Sum of residual stream and branch; without a factor, backward saves a multiplication."""
    return stream_ND + branch_ND if factor is None else torch.addcmul(stream_ND, branch_ND, factor)
