"""SGD with momentum, as torch.optim.SGD: decay is added to the gradient, and the first buffer is that sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mup_tpu.config import OptimizerConfig
from mup_tpu.optimizers.base import Group, StackedParameter, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor


class SGD(UpdateRule):
    """SGD; reads learning_rate, weight_decay and momentum."""

    name = "sgd"

    def slots(self, config: OptimizerConfig) -> tuple[str, ...]:
        return ("momentum_buffer",) if config.momentum else ()

    def constants(self, config: OptimizerConfig, moments: float) -> float:
        return config.momentum

    def update_member(self, group: Group, constants: float, learning_rate: float) -> None:
        from torch.optim.sgd import sgd

        gradients = [gradient for leaf in group.leaves if (gradient := leaf.grad) is not None]
        buffers: list[Tensor | None] = [*group.slots.get("momentum_buffer", [None] * len(gradients))]
        sgd(
            group.leaves, gradients, buffers, fused=True, nesterov=False, maximize=False, dampening=0.0,
            momentum=constants, lr=learning_rate * group.lr_factor, weight_decay=group.weight_decay,
        )  # fmt: skip

    def update_stack(self, stack: StackedParameter, constants: float) -> None:
        """Update in torch.optim.SGD's order of operations."""
        (lr,) = stack.numbers
        gradient = stack.gradient + stack.weight_decay * stack.values
        if constants:  # the buffer starts at 0: the first update is the gradient
            gradient = stack.slots["momentum_buffer"].mul_(constants).add_(gradient)
        stack.values.sub_(lr * stack.lr_factor * gradient)
