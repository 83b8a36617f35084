"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalised momentum, for hidden matrices.

A step subtracts learning rate × scale × O. O is the momentum with its singular values brought near 1 by a few
Newton-Schulz steps. The scale is one of two conventions (`OptimizerConfig.muon_scale`):

- "spectral", √(out/in): a step changes an output in proportion to its input, at any width (Yang et al. 2023,
  arXiv:2310.17813, Condition 1). Jordan's own √max(1, out/in) makes larger updates of matrices with fewer
  outputs than inputs.
- "match_rms_adamw", 0.2·√max(out, in): entries have AdamW's root mean square of 0.2 (Liu et al. 2025,
  arXiv:2502.16982, section 2.2), and learning rates are AdamW's.

Parametrizations multiply either by their factors (`mup_tpu.rules.parametrization`). Each matrix of a fused
parameter (queries, keys and values) or of a stack (experts) is orthogonalised alone.

Shapes: K members, S slices of equal shape, N matrices, R rows, C columns; ... experts, in stacks of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mup_tpu.config import OptimizerConfig
from mup_tpu.optimizers.base import Group, StackedParameter, UpdateRule, matrices_of
from mup_tpu.rules.parametrization import Parameter

if TYPE_CHECKING:
    from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Of x, x³ and x⁵ in a Newton-Schulz step (Jordan et al. 2024)
_LEAST_NORM = 1e-7  # Least divisor of a momentum's norm: a gradient of zeros changes nothing


class MuonConstants(NamedTuple):
    """Constants that members of a pack share."""

    momentum: float
    nesterov: bool
    scale: str
    steps: int  # Newton-Schulz steps
    dtype: str  # Precision of the Newton-Schulz steps


class Muon(UpdateRule):
    """Muon; reads learning_rate, weight_decay, and fields named muon_… and newton_schulz_…."""

    name = "muon"
    is_elementwise = False

    def __init__(self, scale: str = "") -> None:
        self._scale = scale

    def slots(self, config: OptimizerConfig) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def scaled_as(self, config: OptimizerConfig) -> str:
        # Updates grow differently with width by the two conventions.
        return self.name if config.muon_scale == "spectral" else f"{self.name}_{config.muon_scale}"

    def takes(self, parameter: Parameter) -> bool:
        return parameter.role == "hidden"

    def constants(self, config: OptimizerConfig, moments: float) -> MuonConstants:
        """Return momentum and Newton-Schulz steps. Rules for Adam's β do not change the momentum."""
        return MuonConstants(
            float(config.muon_momentum),
            config.muon_nesterov,
            self._scale or config.muon_scale,
            config.newton_schulz_steps,
            config.newton_schulz_dtype,
        )

    def update_member(self, group: Group, constants: MuonConstants, learning_rate: float) -> None:
        """Update in torch.optim.Muon's order of operations; torch's has no slices."""
        rate = learning_rate * group.lr_factor
        parts: list[Tensor] = []
        directions: list[Tensor] = []
        scales: list[float] = []
        for parameter, leaf, buffer in zip(
            group.parameters, group.leaves, group.slots["momentum_buffer"], strict=True
        ):
            assert leaf.grad is not None
            directions += matrices_of(parameter, _direction(leaf.grad, buffer, constants))
            of_leaf = matrices_of(parameter, leaf.detach().mul_(1 - rate * group.weight_decay))
            axis = parameter.sliced_axis
            scales += [scale_of(parameter, part.shape[axis], constants.scale) for part in of_leaf]
            parts += of_leaf
        orthogonal = orthogonalised(directions, constants.steps, constants.dtype)
        for part, update, scale in zip(parts, orthogonal, scales, strict=True):
            part.add_(update, alpha=-(rate * scale))

    def update_stack(self, stack: StackedParameter, constants: MuonConstants) -> None:
        import torch

        (lr,), p, axis = stack.numbers, stack.values, stack.parameter.sliced_axis
        rate = lr * stack.lr_factor
        direction = _direction(stack.gradient, stack.slots["momentum_buffer"], constants)
        parts = matrices_of(stack.parameter, direction)
        updates = [
            scale_of(stack.parameter, part.shape[axis], constants.scale) * update.to(p.dtype)
            for part, update in zip(
                parts, orthogonalised(parts, constants.steps, constants.dtype), strict=True
            )
        ]
        p.mul_(1 - rate * stack.weight_decay)
        p.sub_(rate * (updates[0] if len(updates) == 1 else torch.cat(updates, axis)))


def _direction(gradient: Tensor, buffer: Tensor, constants: MuonConstants) -> Tensor:
    buffer.lerp_(gradient, 1 - constants.momentum)
    return gradient.lerp(buffer, constants.momentum) if constants.nesterov else buffer


def orthogonalised(matrices: Sequence[Tensor], steps: int, dtype: str) -> list[Tensor]:
    """Return for each matrix (..., R, C) the nearest one with singular values of 1, to about ±0.3.

    By a quintic Newton-Schulz iteration, in "bfloat16", as torch.optim.Muon, or in the matrices' own dtype.
    Five steps bring singular values of a hundredth of the norm near 1. All matrices of one shape, or of its
    transpose, are one batch of products.
    """
    import torch

    a, b, c = _COEFFICIENTS
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        *outer, rows, columns = matrix.shape
        alike.setdefault((*outer, *sorted((rows, columns))), []).append(i)
    results = [*matrices]
    for places in alike.values():
        wide = [_wide(matrices[i]) for i in places]
        # Members stay the first axis, so that chips have whole members of a batch and exchange nothing.
        stacked = torch.stack(wide, -3)
        x = stacked.to(torch.bfloat16 if dtype == "bfloat16" else stacked.dtype).flatten(0, -3)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        # With `clamp`, XLA's propagation of shardings would end the process if batches are split.
        x = x / norm.maximum(torch.full_like(norm, _LEAST_NORM))
        for _ in range(steps):
            square = x @ x.mT
            polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        for i, part in zip(places, x.view(stacked.shape).unbind(-3), strict=True):
            results[i] = _wide(part, matrices[i].shape)
    return results


def _wide(matrix: Tensor, like: Sequence[int] | None = None) -> Tensor:
    # The smaller of x·xᵀ and xᵀ·x; or back, for a matrix whose shape was tall.
    rows, columns = (like or matrix.shape)[-2:]
    return matrix.mT if rows > columns else matrix


def scale_of(parameter: Parameter, size: int, convention: str) -> float:
    """Return the factor on an orthogonalised matrix of a parameter, stored (in, out) or (out, in).

    `size` is the matrix's along the axis of slices.
    """
    fan_in, fan_out = parameter.fan_in, parameter.fan_out
    if parameter.shape[parameter.sliced_axis] == fan_out:
        fan_out = size
    else:
        fan_in = size
    if convention == "spectral":
        return math.sqrt(fan_out / fan_in)
    return 0.2 * math.sqrt(max(fan_out, fan_in))
