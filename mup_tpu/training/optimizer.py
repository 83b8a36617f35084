"""AdamW and SGD whose learning rate, decay and schedule differ by member and by parameter.

Two forms of one rule: torch's own fused optimizers over one member's parameters (members in turns), and the
same arithmetic over stacked parameters (members as one program). Tests hold both to `torch.optim`.

Shapes: K members, leading on every stacked tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mup_tpu.config import OptimizerConfig, Trial
from mup_tpu.parametrization import Scaling
from mup_tpu.training.schedule import schedule_factor

State = dict[str, dict[str, Tensor]]
"""Optimizer state: slot name ("exp_avg", ...) -> parameter name -> stacked tensor."""


def state_slots(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the per-parameter state, as torch.optim has them."""
    if config.optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def step_size(trial: Trial, step: int) -> tuple[float, float]:
    """(learning rate, weight decay) of a trial's unscaled parameters at a step.

    A step shrinks a weight by their product. Coupled: lr_t·λ. Independent (Loshchilov & Hutter 2019; Wortsman
    et al. 2023, section 3.2.2): schedule·λ, so the decay handed on is divided by the peak learning rate.
    """
    config = trial.optimizer
    learning_rate = config.learning_rate * schedule_factor(trial.train, step)
    decay = (
        config.weight_decay if config.decay_mode == "coupled" else config.weight_decay / config.learning_rate
    )
    return learning_rate, decay


def decay_factor(config: OptimizerConfig, scaling: Scaling) -> float:
    """× weight decay of one parameter, such that its learning-rate factor times this is as the mode says.

    Coupled takes the table's. Independent shrinks every matrix alike whatever its learning rate, so its
    factor undoes the learning rate's.
    """
    if scaling.weight_decay == 0:
        return 0.0
    return scaling.weight_decay if config.decay_mode == "coupled" else 1 / scaling.learning_rate


class MemberOptimizer:
    """torch.optim's fused updates of one member's parameters, together where they share both factors.

    Their functions, not their classes: these import torch's compiler, another 5 s of start-up.

    Args:
        trial: the member.
        leaves: its parameters by name, views into the pack's stack.
        scaling: factors by parameter name.
        state: its optimizer state, views into the pack's stack.
        steps_done: updates already made (after a resume).
    """

    def __init__(
        self,
        trial: Trial,
        leaves: Mapping[str, Tensor],
        scaling: Mapping[str, Scaling],
        state: Mapping[str, Mapping[str, Tensor]],
        steps_done: int,
    ) -> None:
        self.trial = trial
        names_by_factors: dict[tuple[float, float], list[str]] = {}
        for name in leaves:
            factors = (scaling[name].learning_rate, decay_factor(trial.optimizer, scaling[name]))
            names_by_factors.setdefault(factors, []).append(name)
        self._groups = [
            _Group(
                *factors,
                [leaves[name] for name in names],
                {slot: [tensors[name] for name in names] for slot, tensors in state.items()},
                [torch.tensor(float(steps_done), device=leaves[name].device) for name in names],
            )
            for factors, names in names_by_factors.items()
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Apply the leaves' gradients with this step's learning rate, and drop the gradients."""
        learning_rate, decay = step_size(self.trial, step)
        for group in self._groups:
            self._update(group, learning_rate * group.lr_factor, decay * group.decay_factor)
            for leaf in group.leaves:
                leaf.grad = None

    def _update(self, group: _Group, learning_rate: float, decay: float) -> None:
        config = self.trial.optimizer
        gradients = [gradient for leaf in group.leaves if (gradient := leaf.grad) is not None]
        if config.optimizer == "adamw":
            adamw(
                group.leaves, gradients, group.slots["exp_avg"], group.slots["exp_avg_sq"], [], group.updates,
                fused=True, amsgrad=False, maximize=False,
                beta1=config.beta1, beta2=config.beta2, eps=config.eps, lr=learning_rate, weight_decay=decay,
            )  # fmt: skip
        else:
            buffers: list[Tensor | None] = [*group.slots.get("momentum_buffer", [None] * len(gradients))]
            sgd(
                group.leaves, gradients, buffers, fused=True, nesterov=False, maximize=False, dampening=0.0,
                momentum=config.momentum, lr=learning_rate, weight_decay=decay,
            )  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """Parameters of one member that share both factors, as torch.optim's functions take them."""

    lr_factor: float
    decay_factor: float
    leaves: list[Tensor]
    slots: dict[str, list[Tensor]]
    updates: list[Tensor]
    """How many each has had, which AdamW counts."""


class StackedOptimizer:
    """The same updates over stacked parameters, all members at once.

    Args:
        trials: the K members; they share the update rule, not its learning rate or decay.
        scalings: factors by parameter name, one mapping a member.
        place: puts a CPU tensor (K, ...) where the parameters are, in their dtype.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        scalings: Sequence[Mapping[str, Scaling]],
        place: Callable[[Tensor], Tensor],
    ) -> None:
        self.trials = trials
        factors = [
            [
                (scaling.learning_rate, decay_factor(trial.optimizer, scaling), trial.optimizer.eps)
                for scaling in by_name.values()
            ]
            for trial, by_name in zip(trials, scalings, strict=True)
        ]
        self.factors_KP3 = place(torch.tensor(factors, dtype=torch.float64))
        """Of each of P parameters: × learning rate, × weight decay, and ε."""

    def step_sizes(self, steps: range) -> Tensor:
        """All of the updates that changes with the step (S, K, 4), float64 on the CPU, for `update`.

        As numbers of a tensor, they change while the program stays: Python numbers would be part of it.
        """
        config, sizes = self.trials[0].optimizer, []
        for step in steps:
            first, second = (
                (1 - beta ** (step + 1) if config.optimizer == "adamw" else 1.0)
                for beta in (config.beta1, config.beta2)
            )
            rates = [step_size(trial, step) for trial in self.trials]
            sizes.append([(lr, decay, lr / first, second**0.5) for lr, decay in rates])
        return torch.tensor(sizes, dtype=torch.float64)

    def update(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Tensor]],
        factors_KP3: Tensor,
        sizes_K4: Tensor,
    ) -> None:
        """Apply stacked gradients in place with a step's learning rates.

        Args:
            parameters: stacked, by name.
            gradients: likewise.
            state: likewise, by slot.
            factors_KP3: `self.factors_KP3`, or what stands for it while a step is traced.
            sizes_K4: one of `step_sizes`.
        """
        config = self.trials[0].optimizer
        lr_K, decay_K, corrected_lr_K, root_K = sizes_K4.unbind(1)
        for (name, p), factors_K3 in zip(parameters.items(), factors_KP3.unbind(1), strict=True):
            lr_factor_K, decay_factor_K, eps_K = factors_K3.unbind(1)
            over = (-1,) + (1,) * (p.dim() - 1)
            lr = (lr_K * lr_factor_K).view(over)
            decay = (decay_K * decay_factor_K).view(over)
            slots = {slot: tensors[name] for slot, tensors in state.items()}
            if config.optimizer == "adamw":
                corrected = (corrected_lr_K * lr_factor_K).view(over)
                root, eps = root_K.view(over), eps_K.view(over)
                _adamw_(p, gradients[name], slots, lr, decay, corrected, root, eps, config)
            else:
                _sgd_(p, gradients[name], slots, lr, decay, config)


def _adamw_(
    p: Tensor, g: Tensor, slots: Mapping[str, Tensor], lr: Tensor, decay: Tensor, corrected_lr: Tensor,
    root: Tensor, eps: Tensor, config: OptimizerConfig,
) -> None:  # fmt: skip
    """Loshchilov & Hutter 2019, algorithm 2, in the order of torch.optim.AdamW.

    At update t, `corrected_lr` is lr/(1 - β₁ᵗ) and `root` is √(1 - β₂ᵗ).
    """
    p.mul_(1 - lr * decay)
    slots["exp_avg"].lerp_(g, 1 - config.beta1)
    slots["exp_avg_sq"].mul_(config.beta2).addcmul_(g, g, value=1 - config.beta2)
    denominator = (slots["exp_avg_sq"].sqrt() / root).add_(eps)
    p.sub_(corrected_lr * slots["exp_avg"] / denominator)


def _sgd_(
    p: Tensor, g: Tensor, slots: Mapping[str, Tensor], lr: Tensor, decay: Tensor, config: OptimizerConfig
) -> None:
    """Momentum SGD as in torch.optim.SGD: decay joins the gradient, which is also the first buffer."""
    g = g + decay * p
    if config.momentum:
        g = slots["momentum_buffer"].mul_(config.momentum).add_(g)  # the first is 0, so that g is left
    p.sub_(lr * g)


def clip_factors(gradients: Mapping[str, Tensor], limits_K: Tensor) -> Tensor:
    """Factor (K,) that brings each member's gradient to its limit at most, as torch's clip_grad_norm_."""
    matrices = [g.flatten(1) for g in gradients.values() if g.dim() > 2]
    vectors = torch.cat([g for g in gradients.values() if g.dim() == 2], 1)  # one sum for all of them
    squares = [g.square().sum(1) for g in (*matrices, vectors)]
    norms_K = torch.stack(squares).sum(0).sqrt()
    return (limits_K / (norms_K + 1e-6)).clamp(max=1.0)
