"""Hyperball (Wen et al. 2025): matrices of constant norm, turned by steps of constant size.

W ← R·V/‖V‖ with V = W - η·R·u/‖u‖, where u is the update of Adam (AdamH) or Muon (MuonH), R = ‖W‖ the norm at
init, and norms are Frobenius's. So η is the angle of a step. There is no weight decay.

Sources: the authors' post, "From Weight Decay to Hyperball Optimization (Part 1)"
(whenwen.github.io/wd_blog/public/hyperball-part-1.html; github.com/WhenWen/WhenWen.github.io, 2e4b57a), and
levanter's AdamH and MuonH (github.com/marin-community/marin, 0084342). As there, R is read off the present
weights: no step changes it. AdamW trains embeddings, norms and biases, and, unlike there, an untied readout.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mup_tpu.config import OptimizerConfig
from mup_tpu.optimizers.base import Group, StackedParameter, UpdateRule, matrices_of
from mup_tpu.rules.parametrization import Parameter, Scaling

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_NORM = 1e-10  # Least divisor, levanter's: an update of zeros changes nothing


class Hyperball(UpdateRule):
    """Steps of constant size in the direction of another rule, on matrices of constant norm."""

    is_elementwise = False

    def __init__(self, name: str, inner: UpdateRule) -> None:
        self.name = name
        self._inner = inner

    def slots(self, config: OptimizerConfig) -> tuple[str, ...]:
        return self._inner.slots(config)

    def takes(self, parameter: Parameter) -> bool:
        return parameter.role == "hidden"

    def weight_decay(self, config: OptimizerConfig, parameter: Parameter, scaling: Scaling) -> float:
        return 0.0

    def constants(self, config: OptimizerConfig, moments: float) -> Any:
        return self._inner.constants(config, moments)

    def applied(self, config: OptimizerConfig, constants: Any, scaling: Scaling) -> dict[str, float]:
        return self._inner.applied(config, constants, scaling)

    def update_member(self, group: Group, constants: Any, learning_rate: float) -> None:
        """Update by the inner rule's steps from 0, at learning rate 1."""
        import torch

        steps = [torch.zeros_like(leaf) for leaf in group.leaves]
        for step, leaf in zip(steps, group.leaves, strict=True):
            step.grad = leaf.grad
        from_zero = dataclasses.replace(group, leaves=steps, lr_factor=1.0, weight_decay=0.0)
        self._inner.update_member(from_zero, constants, 1.0)
        angle = learning_rate * group.lr_factor
        for parameter, leaf, step in zip(group.parameters, group.leaves, steps, strict=True):
            leaf.copy_(_turned(parameter, leaf, step, angle))

    def step_numbers(self, constants: Any, step: int, learning_rate: float) -> tuple[float, ...]:
        return learning_rate, *self._inner.step_numbers(constants, step, 1.0)

    def update_stack(self, stack: StackedParameter, constants: Any) -> None:
        import torch

        angle, *numbers = stack.numbers
        step, one = torch.zeros_like(stack.values), torch.ones_like(stack.lr_factor)
        from_zero = dataclasses.replace(
            stack, values=step, numbers=tuple(numbers), lr_factor=one, weight_decay=torch.zeros_like(one)
        )
        self._inner.update_stack(from_zero, constants)
        stack.values.copy_(_turned(stack.parameter, stack.values, step, angle * stack.lr_factor))


def _turned(parameter: Parameter, values: Tensor, steps: Tensor, angle: float | Tensor) -> Tensor:
    """Move matrices along `steps` by `angle` times their norm, and bring them back to that norm."""
    import torch

    turned = []
    for matrix, step in zip(matrices_of(parameter, values), matrices_of(parameter, steps), strict=True):
        radius = _norm(matrix)
        moved = matrix + angle * radius / _norm(step) * step
        turned.append(moved * (radius / _norm(moved)))
    return turned[0] if len(turned) == 1 else torch.cat(turned, parameter.sliced_axis)


def _norm(matrices: Tensor) -> Tensor:
    import torch

    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    return norm.maximum(torch.full_like(norm, _LEAST_NORM))
