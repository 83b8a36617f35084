"""Layers that architectures share, and the loss.

Layers replace torch's, which draw their init, which on the meta device imports torch's compiler (3 to 6 s).

Cross-entropy takes tokens some rows at a time, with the gradients of their hidden vectors and of the readout:
the products are those of a backward pass, but only one part's logits are in memory.

Shapes: B sequences, T tokens, N = B·T, R of them at a time, D width, V vocabulary; a layer's I inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.models.architectures import EPS


class Scale(nn.Module):
    """Multiplication by a factor, a buffer that may differ between members of a pack."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Linear(nn.Module):
    """x·Wᵀ with W (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self.weight)


class Conv1D(nn.Module):
    """x·W + b with W (inputs, outputs), GPT-2's form of hidden matrices: the transpose of nn.Linear's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x_NI: Tensor) -> Tensor:
        return torch.addmm(self.bias, x_NI, self.weight)


def embedding(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


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
    """RMS norm under vmap that reads its input once, and once in backward for both sums."""

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


class Readout(nn.Module):
    """Logits of the vocabulary; the weight (V, D) may be the embedding's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_ND: Tensor) -> Tensor:
        return functional.linear(hidden_ND, self.weight)


class ScaledNetwork(nn.Module):
    """A network with factors on attention logits, residual branches and logits.

    Factors are buffers, which may differ between members of a pack. The trunk, whose parameters begin with
    `name`, takes tokens_BT, the factors of attention and branches, and a queue for terms of the loss. It
    returns hidden_ND.
    """

    attention_factor: Tensor
    residual_factor: Tensor
    logit_factor: Tensor

    def __init__(self, name: str, trunk: nn.Module, embedding_VD: Tensor, tied: bool) -> None:
        super().__init__()
        self.add_module(name, trunk)
        self._trunk = name
        self.lm_head = Readout(embedding_VD if tied else nn.Parameter(torch.empty_like(embedding_VD)))
        for factor in ("attention_factor", "residual_factor", "logit_factor"):
            self.register_buffer(factor, torch.ones(()))

    def forward(
        self, tokens_BT: Tensor, added: deque[Tensor] | None = None, targets_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits_BTV of the token after each of `tokens_BT`, or with targets their mean cross-entropy.

        `added` takes terms added to the loss.
        """
        trunk, added = self.get_submodule(self._trunk), deque[Tensor]() if added is None else added
        hidden_ND = trunk(tokens_BT, self.attention_factor, self.residual_factor, added) * self.logit_factor
        if targets_BT is not None:
            return cross_entropy(hidden_ND, self.lm_head.weight, targets_BT.flatten())
        return self.lm_head(hidden_ND).view(*tokens_BT.shape, -1)


AT_ONCE = 2**24  # logits in memory, 64 MiB in float32


def rows_at_once(vocab_size: int) -> int:
    return max(128, AT_ONCE // vocab_size)


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets, in nat, by the readout's weight."""
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden_ND, weight_VD, targets_N)[0]
    parts = _parts(hidden_ND, weight_VD, targets_N)
    losses = [-_log_probabilities(h_RD, weight_VD).gather(-1, to_R1) for h_RD, to_R1 in parts]
    return torch.cat(losses).mean()


def _parts(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = rows_at_once(len(weight_VD))
    return zip(hidden_ND.split(rows), targets_N[:, None].split(rows), strict=True)


def _log_probabilities(hidden_RD: Tensor, weight_VD: Tensor) -> Tensor:
    logits_RV = functional.linear(hidden_RD, weight_VD)
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(-1)


class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and its gradients by both tensors."""
        losses, to_hidden, to_weight_VD = [], [], torch.zeros_like(weight_VD)
        for hidden_RD, to_R1 in _parts(hidden_ND, weight_VD, targets_N):
            log_RV = _log_probabilities(hidden_RD, weight_VD)
            losses.append(-log_RV.gather(-1, to_R1))
            slope_RV = log_RV.exp_().scatter_add_(-1, to_R1, torch.full_like(losses[-1], -1.0))
            to_hidden.append((slope_RV @ weight_VD).to(hidden_ND.dtype))
            to_weight_VD += slope_RV.mT @ hidden_RD
        return torch.cat(losses).mean(), torch.cat(to_hidden), to_weight_VD

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        to_hidden_ND, to_weight_VD = ctx.saved_tensors
        share = gradient / len(to_hidden_ND)
        return share * to_hidden_ND, share * to_weight_VD, None
