"""Members stacked along a leading axis and trained as one program by `torch.func.vmap`; fast on accelerators.

A step (gradients, clipping, update) is one function of tensors that a device may trace once and repeat: its
arguments are all that changes from step to step, and the rest is constant.

Shapes: R rows of the stack, S steps, N evaluation batches, B sequences, T tokens, P parameters, X numbers of
a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from mup_tpu.training.loss import backward_in_this_thread, over_micro_batches
from mup_tpu.training.members import Members
from mup_tpu.training.optimizer import StackedOptimizer, clip_factors


class Stacked(Members):
    """Members as one program; all rows train, live or not."""

    is_stacked = True

    def __post_init__(self) -> None:
        device = self.device
        self._dtype = next(iter(self.parameters.values())).dtype
        limits = [trial.optimizer.grad_clip or math.inf for trial in self.trials]
        self._clip_limits_R = device.place_members(torch.tensor(limits, dtype=self._dtype))
        self._optimizer = StackedOptimizer(
            self.trials, self.declared, self.scalings, lambda t: device.place_members(t.to(self._dtype))
        )
        compiled = self.compiled if not device.compiles else lambda function: function
        self.gradients_and_losses, self._losses = (
            device.per_shard(
                over_micro_batches(compiled(vmap(function, in_dims=(0, 0, None))), self.micro_batches)
            )
            for function in (grad_and_value(self.loss), self.loss)
        )
        self._steps = device.repeated(self.step, self.compile)
        self._evaluations = device.repeated(self._evaluation)

    def train(self, tokens_SBT1: Tensor, steps: range, live: Sequence[int]) -> Tensor:
        """Train on a stretch; losses (S, R) before each update."""
        numbers_SRX = self._optimizer.step_numbers(steps).to(self._dtype)
        return self._steps(
            (self.parameters, self.state),
            (self.buffers, self._clip_limits_R, self._optimizer.factors_KP3),
            (tokens_SBT1, self.device.place_stack(numbers_SRX, "trial", len(tokens_SBT1))),
            len(steps),
        )

    def step(self, changed: Any, fixed: Any, batch: Any) -> Tensor:
        """One step of all rows, for `Device.repeated`; returns losses_R before the update."""
        parameters, state = changed
        buffers, clip_limits_R, factors_RP3 = fixed
        tokens_BT1, numbers_RX = batch
        with backward_in_this_thread():
            gradients, losses_R = self.gradients_and_losses(parameters, buffers, tokens_BT1)
        with torch.no_grad():
            clips_R = clip_factors(gradients, clip_limits_R)
            self._optimizer.update(parameters, gradients, clips_R, state, factors_RP3, numbers_RX)
        return losses_R

    def evaluate(self, tokens_NBT1: Tensor, live: Sequence[int]) -> Tensor:
        """Mean held-out loss of each row (R)."""
        fixed, batches = (self.parameters, self.buffers), (tokens_NBT1,)
        return self._evaluations((), fixed, batches, len(tokens_NBT1)).mean(0)

    def _evaluation(self, changed: Any, fixed: Any, batch: Any) -> Tensor:
        return self._losses(*fixed, *batch)
