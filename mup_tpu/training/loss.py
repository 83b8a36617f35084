"""The loss of one member, as a function of tensors, and the same over micro-batches.

Shapes: B sequences, T tokens, N = B·T, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from mup_tpu.internals.torch import tree_flatten, tree_unflatten

MemberLoss = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], Tensor]
"""Mean cross-entropy in nat per token, from a member's parameters, its buffers and tokens_BT1.

Its gradient has the terms that a network adds to the loss, its value has not: losses of networks with and
without such terms compare.
"""


def member_loss(network: nn.Module, vocab_size: int, precision: str, device: torch.device) -> MemberLoss:
    """Loss of one member, by a network without weights (`Architecture.network`)."""
    bf16, by_xla = precision == "bf16", device.type == "xla"

    def cross_entropy(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
        logits_NV, targets_N = logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten()
        logits_NV = logits_NV.float() if bf16 else logits_NV
        if not by_xla:
            return functional.cross_entropy(logits_NV, targets_N)
        # With class indices, TPU compilers gather the targets of all members on every chip.
        vocabulary_V = torch.arange(vocab_size, device=targets_N.device, dtype=targets_N.dtype)
        is_target_NV = targets_N[:, None] == vocabulary_V
        return -functional.log_softmax(logits_NV, -1).where(is_target_NV, 0.0).sum(-1).mean()

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], tokens_BT1: Tensor) -> Tensor:
        added: list[Tensor] = []
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            logits_BTV = functional_call(
                network, parameters | buffers, (tokens_BT1[:, :-1], added), tie_weights=True
            )
        value = cross_entropy(logits_BTV, tokens_BT1)
        for term in added:
            value = value + (term - term.detach())
        return value

    return loss


def micro_batches(tokens_BT1: Tensor, count: int) -> Iterator[tuple[Tensor, float]]:
    """Parts of a batch, each with its share of the sequences; at most one part per sequence."""
    for part in tokens_BT1.tensor_split(min(count, len(tokens_BT1))):
        yield part, len(part) / len(tokens_BT1)


def over_micro_batches(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A function of a batch, its last argument, computed part by part; results are means over the batch."""
    if count == 1:
        return function

    def call(*given: Any) -> Any:
        *others, tokens_BT1 = given
        means: list[Tensor] = []
        for part, share in micro_batches(tokens_BT1, count):
            found, structure = tree_flatten(function(*others, part))
            if means:
                for mean, value in zip(means, found, strict=True):
                    mean.add_(value, alpha=share)
            else:
                means = [value.mul_(share) for value in found]
            del found  # frees this part's results before the next part's are computed
        return tree_unflatten(means, structure)

    return call


def backward_in_this_thread() -> torch.autograd.set_multithreading_enabled:
    """Run backward in the calling thread.

    XLA's thread for backward holds a gradient for a moment after backward has returned. Every live tensor is
    an output of the program that is handed over, so another program would be compiled: up to three times in
    50 steps on a busy host.
    """
    return torch.autograd.set_multithreading_enabled(False)
