"""Members in turns: each makes its step alone, by torch's fused functions; fast on CPUs.

Shapes: R rows of the stack, S steps, N evaluation batches, B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mup_tpu.training.loss import backward_in_this_thread, micro_batches, over_micro_batches
from mup_tpu.training.members import Members
from mup_tpu.training.optimizer import MemberOptimizer


class InTurns(Members):
    """Members in turns, without members that have ended."""

    def __post_init__(self) -> None:
        self._bf16 = self.trials[0].train.precision == "bf16"
        self._loss = self.compiled(self.loss)
        self._whole_loss = over_micro_batches(self._loss, self.micro_batches)
        rows = range(len(self.trials))
        self._leaves = [
            {name: p[r].detach().requires_grad_() for name, p in self.parameters.items()} for r in rows
        ]
        self._buffers = [{name: b[r] for name, b in self.buffers.items()} for r in rows]
        self._optimizers = [
            MemberOptimizer(
                self.trials[r],
                self.declared,
                self._leaves[r],
                self.scalings[r],
                {slot: {name: t[r] for name, t in tensors.items()} for slot, tensors in self.state.items()},
                self.steps_done,
            )
            for r in rows
        ]
        first = next(iter(self.parameters.values()))
        self._device_type = first.device.type
        self._no_losses_R = first.new_full((len(first),), math.nan)

    def train(self, tokens_SBT1: Tensor, steps: range, live: Sequence[int]) -> Tensor:
        """Losses_SR of live rows before each update; nan for the others."""
        batches = tokens_SBT1[: len(steps)]
        return torch.stack(
            [self._step(tokens_BT1, step, live) for tokens_BT1, step in zip(batches, steps, strict=True)]
        )

    def _step(self, tokens_BT1: Tensor, step: int, live: Sequence[int]) -> Tensor:
        losses_R = self._no_losses_R.clone()
        for r in live:
            leaves, optimizer, losses = self._leaves[r], self._optimizers[r], []
            with self._weights_cast_once():
                for part, share in micro_batches(tokens_BT1, self.micro_batches):
                    loss = self._loss(leaves, self._buffers[r], part)
                    with backward_in_this_thread():
                        loss.backward(torch.full_like(loss, share))
                    losses.append(loss.detach() * share)
                    del loss  # frees its graph before the next part's is built
            if optimizer.trial.optimizer.grad_clip:
                torch.nn.utils.clip_grad_norm_(list(leaves.values()), optimizer.trial.optimizer.grad_clip)
            optimizer.update(step)
            losses_R[r] = torch.stack(losses).sum()
        return losses_R

    def _weights_cast_once(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which autocast, off here and on in the loss, keeps its bf16 copies of weights."""
        return torch.autocast(self._device_type, enabled=False) if self._bf16 else contextlib.nullcontext()

    def evaluate(self, tokens_NBT1: Tensor, live: Sequence[int]) -> Tensor:
        """Mean losses_R of live rows; nan for the others."""
        losses_R = self._no_losses_R.clone()
        for r in live:
            own = self._leaves[r], self._buffers[r]
            with self._weights_cast_once():
                losses = [self._whole_loss(*own, tokens_BT1) for tokens_BT1 in tokens_NBT1]
            losses_R[r] = torch.stack(losses).mean()
        return losses_R
