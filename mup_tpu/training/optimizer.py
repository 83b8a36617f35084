"""Update rules on the members of a pack: learning rate, decay and schedule differ by member and parameter.

Two forms of one update: torch's fused functions over one member's parameters (members in turns), and the same
arithmetic over stacked parameters (members as one program). Tests compare both with `torch.optim`.

Shapes: K members, leading on every stacked tensor, S steps, P parameters, X numbers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mup_tpu.config import Trial
from mup_tpu.optimizers import Group, StackedParameter, UpdateRule, constants, update_rule_of
from mup_tpu.rules.parameter import Parameter
from mup_tpu.rules.parametrization import Scaling
from mup_tpu.training.trials import schedule_factor

State = dict[str, dict[str, Tensor]]
"""Optimizer state: slot name ("exp_avg", ...) -> parameter name -> stacked tensor."""


def state_slots(trial: Trial, parameters: Mapping[str, Parameter]) -> dict[str, list[str]]:
    """Return the names of the parameters with each slot, by its name."""
    slots: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        for slot in update_rule_of(trial.optimizer, parameter).slots(trial.optimizer):
            slots.setdefault(slot, []).append(name)
    return slots


def _factors(
    trial: Trial, rule: UpdateRule, parameter: Parameter, scaling: Scaling
) -> tuple[float, float, float]:
    config = trial.optimizer
    decay = rule.weight_decay(config, parameter, scaling)
    return scaling.learning_rate, decay, config.eps * scaling.eps


class MemberOptimizer:
    """Updates of one member's parameters, in groups that share a rule and all factors.

    `leaves` and `state` are views into the pack's stack; `steps_done` updates have been made before.
    """

    def __init__(
        self,
        trial: Trial,
        parameters: Mapping[str, Parameter],
        leaves: Mapping[str, Tensor],
        scaling: Mapping[str, Scaling],
        state: Mapping[str, Mapping[str, Tensor]],
        steps_done: int,
    ) -> None:
        self.trial = trial
        names_by_factors: dict[tuple[UpdateRule, float, float, float], list[str]] = {}
        for name in leaves:
            rule = update_rule_of(trial.optimizer, parameters[name])
            factors = _factors(trial, rule, parameters[name], scaling[name])
            names_by_factors.setdefault((rule, *factors), []).append(name)
        self._groups = [
            (
                rule,
                Group(
                    [parameters[name] for name in names],
                    [leaves[name] for name in names],
                    {slot: [state[slot][name] for name in names] for slot in rule.slots(trial.optimizer)},
                    [torch.tensor(float(steps_done), device=leaves[name].device) for name in names],
                    *factors,
                ),
            )
            for (rule, *factors), names in names_by_factors.items()
        ]
        self._constants = constants(trial, (rule for rule, _ in self._groups))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Apply the leaves' gradients with this step's learning rate, and drop the gradients."""
        share = schedule_factor(self.trial.train, step)
        for rule, group in self._groups:
            peak = rule.learning_rate(self.trial.optimizer)
            rule.update_member(group, self._constants[rule.name], peak * share)
            for leaf in group.leaves:
                leaf.grad = None


class StackedOptimizer:
    """The same updates over stacked parameters, all members at once.

    Members share the update rule and its constants, not learning rate or decay. `place` sends a CPU tensor
    (K, ...) to the parameters' device, in their dtype.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        parameters: Mapping[str, Parameter],
        scalings: Sequence[Mapping[str, Scaling]],
        place: Callable[[Tensor], Tensor],
    ) -> None:
        self._trials = trials
        self._parameters = parameters
        self._rules = {name: update_rule_of(trials[0].optimizer, p) for name, p in parameters.items()}
        self._constants = constants(trials[0], self._rules.values())
        factors = [
            [_factors(trial, rule, parameters[name], scaling[name]) for name, rule in self._rules.items()]
            for trial, scaling in zip(trials, scalings, strict=True)
        ]
        self.factors_KP3 = place(torch.tensor(factors, dtype=torch.float64))
        """Factor on the learning rate, weight decay, and ε of each of P parameters."""

    def step_numbers(self, steps: range) -> Tensor:
        """Return numbers of updates that change with the step (S, K, X), float64 on the CPU, for `update`.

        In a tensor, since Python's numbers would be constants of the program.
        """
        return torch.tensor(
            [
                [
                    [x for numbers in self._numbers(trial, step).values() for x in numbers]
                    for trial in self._trials
                ]
                for step in steps
            ],
            dtype=torch.float64,
        )

    def _numbers(self, trial: Trial, step: int) -> dict[str, tuple[float, ...]]:
        share = schedule_factor(trial.train, step)
        return {
            rule.name: rule.step_numbers(
                self._constants[rule.name], step, rule.learning_rate(trial.optimizer) * share
            )
            for rule in self._rules.values()
        }

    def update(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        clips_K: Tensor,
        state: Mapping[str, Mapping[str, Tensor]],
        factors_KP3: Tensor,
        numbers_KX: Tensor,
    ) -> None:
        """Update stacked parameters in place with the learning rates of one item of `step_numbers`.

        `clips_K` are factors on the members' gradients. `factors_KP3` is `self.factors_KP3`, or its stand-in
        while a step is traced.
        """
        numbers_K = iter(numbers_KX.unbind(1))
        counts = {name: len(numbers) for name, numbers in self._numbers(self._trials[0], 0).items()}
        numbers = {name: [next(numbers_K) for _ in range(count)] for name, count in counts.items()}
        for (name, p), factors_K3 in zip(parameters.items(), factors_KP3.unbind(1), strict=True):
            rule = self._rules[name]
            over = (-1,) + (1,) * (p.dim() - 1)
            stack = StackedParameter(
                self._parameters[name],
                p,
                gradients[name] * clips_K.view(over),
                {slot: tensors[name] for slot, tensors in state.items() if name in tensors},
                tuple(x_K.view(over) for x_K in numbers[rule.name]),
                *(x_K.view(over) for x_K in factors_K3.unbind(1)),
            )
            rule.update_stack(stack, self._constants[rule.name])


def clip_factors(gradients: Mapping[str, Tensor], limits_K: Tensor) -> Tensor:
    """Return factors (K,) that clip each member's gradient norm to its limit, as torch's clip_grad_norm_."""
    matrices = [g.flatten(1) for g in gradients.values() if g.dim() > 2]
    vectors = torch.cat([g for g in gradients.values() if g.dim() == 2], 1)  # one sum for all
    squares = [g.square().sum(1) for g in (*matrices, vectors)]
    norms_K = torch.stack(squares).sum(0).sqrt()
    return (limits_K / (norms_K + 1e-6)).clamp(max=1.0)
