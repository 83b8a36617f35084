"""AdamW and SGD, in torch's form.

AdamW: Loshchilov & Hutter 2019, algorithm 2, p -= lr·(update + λ·p). SGD with momentum: decay is added to the
gradient, and the first buffer is that sum.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from mup_tpu.config import OptimizerConfig
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers.base import Group, StackedParameter, UpdateRule
from mup_tpu.rules.parametrization import Scaling

if TYPE_CHECKING:
    from torch import Tensor


class Betas(NamedTuple):
    """Decay of the first and of the second moment, as applied."""

    first: float
    second: float


class AdamW(UpdateRule):
    """AdamW; reads learning_rate, weight_decay, beta1, beta2, eps, and beside another rule adamw_lr_ratio."""

    name = "adamw"

    def slots(self, config: OptimizerConfig) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def learning_rate(self, config: OptimizerConfig) -> float:
        ratio = 1.0 if config.optimizer == self.name else config.adamw_lr_ratio
        return config.learning_rate * ratio

    def constants(self, config: OptimizerConfig, moments: float) -> Betas:
        return Betas(_scaled(config, "beta1", moments), _scaled(config, "beta2", moments))

    def applied(self, config: OptimizerConfig, constants: Betas, scaling: Scaling) -> dict[str, float]:
        return {"beta1": constants.first, "beta2": constants.second, "eps": config.eps * scaling.eps}

    def update_member(self, group: Group, constants: Betas, learning_rate: float) -> None:
        """Update by torch's fused function; its class would import torch's compiler, 5 s at the start."""
        from torch.optim.adamw import adamw

        gradients = [gradient for leaf in group.leaves if (gradient := leaf.grad) is not None]
        adamw(
            group.leaves, gradients, group.slots["exp_avg"], group.slots["exp_avg_sq"], [], group.updates,
            fused=True, amsgrad=False, maximize=False, beta1=constants.first, beta2=constants.second,
            eps=group.eps, lr=learning_rate * group.lr_factor, weight_decay=group.weight_decay,
        )  # fmt: skip

    def step_numbers(self, constants: Betas, step: int, learning_rate: float) -> tuple[float, ...]:
        # η, η/(1 - β₁ᵗ) and √(1 - β₂ᵗ), at update t = step + 1
        first, second = (1 - beta ** (step + 1) for beta in constants)
        return learning_rate, learning_rate / first, second**0.5

    def update_stack(self, stack: StackedParameter, constants: Betas) -> None:
        (lr, corrected_lr, root), gradient = stack.numbers, stack.gradient
        mean, mean_square = stack.slots["exp_avg"], stack.slots["exp_avg_sq"]
        stack.values.mul_(1 - lr * stack.lr_factor * stack.weight_decay)
        mean.lerp_(gradient, 1 - constants.first)
        mean_square.mul_(constants.second).addcmul_(gradient, gradient, value=1 - constants.second)
        denominator = (mean_square.sqrt() / root).add_(stack.eps)
        stack.values.sub_(corrected_lr * stack.lr_factor * mean / denominator)


def _scaled(config: OptimizerConfig, name: str, factor: float) -> float:
    """Return β with 1 - β multiplied by a factor; for a factor of 1, β itself to the last bit."""
    beta: float = getattr(config, name)
    scaled = beta if factor == 1 else 1 - (1 - beta) * factor
    if scaled < 0:
        raise ConfigError(
            f"{name} {beta:g} would be {scaled:.3g} by batch_rule {config.batch_rule!r} and token_rule "
            f"{config.token_rule!r}, which multiply 1 - {name} by {factor:g} here; it must not fall below 0: "
            f"take {name} {math.ceil(1e4 * (1 - 1 / factor)) / 1e4:g} or more"
        )
    return scaled


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
