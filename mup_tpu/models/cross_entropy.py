"""Cross-entropy over a large vocabulary without all logits at once.

Tokens are taken some rows at a time, with the gradients of their hidden vectors and of the readout: the
products are those of a backward pass, but only one part's logits are in memory (`benchmarks/vocabulary.py`).

Shapes: N tokens, R of them at a time, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

AT_ONCE = 2**24  # logits in memory: 64 MiB in float32; a narrow model's are fewer than that


def rows_at_once(vocab_size: int) -> int:
    return max(128, AT_ONCE // vocab_size)


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets, in nat, by the readout's weight."""
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden_ND, weight_VD, targets_N)[0]
    losses = [
        -_log_probabilities(hidden_RD, weight_VD).gather(-1, to_R1)
        for hidden_RD, to_R1 in _parts(hidden_ND, weight_VD, targets_N)
    ]
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
