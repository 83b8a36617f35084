"""Members of a pack on the device: their loss, and their steps in turns or stacked as one program.

In turns, each member makes its step alone by torch's fused functions, which is fast on CPUs. Stacked, a step
(gradients, clipping, update) is one function of tensors under `torch.func.vmap`, which is fast on
accelerators: a device may trace it once and repeat it. Its arguments are all that changes from step to step.
Tests compare both forms of each update with `torch.optim`.

Shapes: R rows of the stack, S steps, N evaluation batches, B sequences, T tokens, V vocabulary, P parameters,
X numbers of a step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from mup_tpu.config import Trial
from mup_tpu.devices import Device
from mup_tpu.devices.base import BY_XLA
from mup_tpu.internals.torch import tree_flatten, tree_unflatten
from mup_tpu.models import Parameter
from mup_tpu.models.layers import AT_ONCE
from mup_tpu.optimizers import Group, StackedParameter, UpdateRule, constants, update_rule_of
from mup_tpu.rules.parametrization import Scaling
from mup_tpu.training import schedule_factor

State = dict[str, dict[str, Tensor]]  # Optimizer state: slot ("exp_avg", ...) -> parameter -> stacked tensor


MemberLoss = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], Tensor]
"""Mean cross-entropy in nat per token, from a member's parameters, its buffers and tokens_BT1.

Its gradient has the terms that a network adds to the loss, its value has not: losses of networks with and
without such terms compare.
"""


def member_loss(
    network: nn.Module, vocab_size: int, precision: str, device: torch.device, in_parts: bool = False
) -> MemberLoss:
    """Return the loss of one member, by a network without weights (`Architecture.network`).

    `in_parts` never has more than `AT_ONCE` logits in memory.
    """
    bf16, by_xla = precision == "bf16", device.type in BY_XLA

    def of_logits(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
        logits_NV, targets_N = logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten()
        logits_NV = logits_NV.float() if bf16 else logits_NV
        if not by_xla:
            return functional.cross_entropy(logits_NV, targets_N)
        # With class indices, TPU compilers gather the targets of all members on every chip.
        vocabulary_V = torch.arange(vocab_size, device=targets_N.device, dtype=targets_N.dtype)
        is_target_NV = targets_N[:, None] == vocabulary_V
        return -functional.log_softmax(logits_NV, -1).where(is_target_NV, 0.0).sum(-1).mean()

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], tokens_BT1: Tensor) -> Tensor:
        added: deque[Tensor] = deque()  # hooks of `fully_shard` copy lists
        inputs: list[Any] = [tokens_BT1[:, :-1], added]
        is_large = in_parts and vocab_size * inputs[0].numel() > AT_ONCE
        if is_large:
            inputs.append(tokens_BT1[:, 1:])
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            value = functional_call(network, parameters | buffers, tuple(inputs), tie_weights=True)
        if not is_large:
            value = of_logits(value, tokens_BT1)
        for term in added:
            value = value + (term - term.detach())
        return value

    return loss


def micro_batches(tokens_BT1: Tensor, count: int) -> Iterator[tuple[Tensor, float]]:
    """Yield parts of a batch, each with its share of the sequences; at most one part per sequence."""
    for part in tokens_BT1.tensor_split(min(count, len(tokens_BT1))):
        yield part, len(part) / len(tokens_BT1)


def over_micro_batches(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Wrap a function whose last argument is a batch, to take parts of the batch and average results."""
    if count == 1:
        return function

    def call(*arguments: Any) -> Any:
        *others, tokens_BT1 = arguments
        means: list[Tensor] = []
        for part, share in micro_batches(tokens_BT1, count):
            values, structure = tree_flatten(function(*others, part))
            if means:
                for mean, value in zip(means, values, strict=True):
                    mean.add_(value, alpha=share)
            else:
                means = [value.mul_(share) for value in values]
            del values  # frees this part's results before the next part's are computed
        return tree_unflatten(means, structure)

    return call


def backward_in_this_thread() -> torch.autograd.set_multithreading_enabled:
    # XLA's thread for backward holds a gradient for a moment after backward has returned. Every live tensor
    # is an output of the program that is handed over, so another program would be compiled: up to three times
    # in 50 steps on a busy host.
    return torch.autograd.set_multithreading_enabled(False)


def backward_by_parts(
    loss: Callable[..., Tensor], given: tuple[Any, ...], tokens_BT1: Tensor, parts: int
) -> Tensor:
    """Add the gradients of a batch's mean loss to its leaves, part by part; return the loss."""
    losses = []
    for part, share in micro_batches(tokens_BT1, parts):
        # A gradient of `share` as the argument of `backward` would do as well, but imports sympy: a second.
        value = loss(*given, part) * share
        with backward_in_this_thread():
            value.backward()
        losses.append(value.detach())
        del value  # frees its graph before the next part's is built
    return torch.stack(losses).sum()


def state_slots(trial: Trial, parameters: Mapping[str, Parameter]) -> dict[str, list[str]]:
    slots: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        for slot in update_rule_of(trial.optimizer, parameter).slots(trial.optimizer):
            slots.setdefault(slot, []).append(name)
    return slots


def _factors(trial: Trial, rule: UpdateRule, parameter: Parameter, scaling: Scaling) -> tuple[float, ...]:
    decay = rule.weight_decay(trial.optimizer, parameter, scaling)
    return scaling.learning_rate, decay, trial.optimizer.eps * scaling.eps


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
        names_by_factors: dict[tuple[Any, ...], list[str]] = {}
        for name in leaves:
            rule = update_rule_of(trial.optimizer, parameters[name])
            factors = _factors(trial, rule, parameters[name], scaling[name])
            names_by_factors.setdefault((rule, *factors), []).append(name)
        self.groups: list[tuple[UpdateRule, Group]] = []
        for (rule, *of_group), names in names_by_factors.items():
            slots = {slot: [state[slot][name] for name in names] for slot in rule.slots(trial.optimizer)}
            updates = [torch.tensor(float(steps_done), device=leaves[name].device) for name in names]
            declared, values = [parameters[name] for name in names], [leaves[name] for name in names]
            self.groups.append((rule, Group(declared, values, slots, updates, *of_group)))
        self._constants = constants(trial, (rule for rule, _ in self.groups))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Apply the leaves' gradients with this step's learning rate, and drop the gradients."""
        share = schedule_factor(self.trial.train, step)
        for rule, group in self.groups:
            self.apply(rule, group, rule.learning_rate(self.trial.optimizer) * share)
            for leaf in group.leaves:
                leaf.grad = None

    def apply(self, rule: UpdateRule, group: Group, learning_rate: float) -> None:
        rule.update_member(group, self._constants[rule.name], learning_rate)


class StackedOptimizer:
    """The same updates over stacked parameters, all members at once.

    Members share the update rule and its constants, not learning rate or decay. `place` sends a CPU tensor
    (R, ...) to the parameters' device, in their dtype.
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
        self.factors_RP3 = place(torch.tensor(factors, dtype=torch.float64))
        """Factor on the learning rate, weight decay, and ε of each of P parameters."""

    def step_numbers(self, steps: range) -> Tensor:
        """Return numbers of updates that change with the step (S, R, X), float64 on the CPU, for `update`.

        In a tensor, since Python's numbers would be constants of the program.
        """
        numbers = [[sum(self._numbers(trial, step).values(), ()) for trial in self._trials] for step in steps]
        return torch.tensor(numbers, dtype=torch.float64)

    def _numbers(self, trial: Trial, step: int) -> dict[str, tuple[float, ...]]:
        share, numbers = schedule_factor(trial.train, step), {}
        for rule in self._rules.values():
            peak = rule.learning_rate(trial.optimizer)
            numbers[rule.name] = rule.step_numbers(self._constants[rule.name], step, peak * share)
        return numbers

    def update(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        clips_R: Tensor,
        state: Mapping[str, Mapping[str, Tensor]],
        factors_RP3: Tensor,
        numbers_RX: Tensor,
    ) -> None:
        """Update stacked parameters in place with the learning rates of one item of `step_numbers`.

        `clips_R` are factors on the members' gradients. `factors_RP3` is `self.factors_RP3`, or its stand-in
        while a step is traced.
        """
        numbers_R = iter(numbers_RX.unbind(1))
        counts = {name: len(numbers) for name, numbers in self._numbers(self._trials[0], 0).items()}
        numbers = {name: [next(numbers_R) for _ in range(count)] for name, count in counts.items()}
        for (name, p), factors_R3 in zip(parameters.items(), factors_RP3.unbind(1), strict=True):
            rule = self._rules[name]
            over = (-1,) + (1,) * (p.dim() - 1)
            stack = StackedParameter(
                self._parameters[name],
                p,
                gradients[name] * clips_R.view(over),
                {slot: tensors[name] for slot, tensors in state.items() if name in tensors},
                tuple(x_R.view(over) for x_R in numbers[rule.name]),
                *(x_R.view(over) for x_R in factors_R3.unbind(1)),
            )
            rule.update_stack(stack, self._constants[rule.name])


def clip_factors(gradients: Mapping[str, Tensor], limits_R: Tensor) -> Tensor:
    """Return factors (R,) that clip each member's gradient norm to its limit, as torch's clip_grad_norm_."""
    matrices = [g.flatten(1) for g in gradients.values() if g.dim() > 2]
    vectors = torch.cat([g for g in gradients.values() if g.dim() == 2], 1)  # one sum for all
    squares = [g.square().sum(1) for g in (*matrices, vectors)]
    norms_R = torch.stack(squares).sum(0).sqrt()
    return (limits_R / (norms_R + 1e-6)).clamp(max=1.0)


@dataclass
class Members(ABC):
    """Rows of members on the device, and how they go through a step: in turns, or stacked."""

    device: Device
    loss: MemberLoss
    declared: Mapping[str, Parameter]
    compile: bool  # Whether a GPU compiles its traced step
    micro_batches: int
    trials: Sequence[Trial]  # Trial of each row; the last ones may be padding
    scalings: Sequence[Mapping[str, Scaling]]  # Factors by parameter name, one mapping a row
    parameters: dict[str, Tensor]  # Tensors (R, ...), which training changes in place
    state: State  # Optimizer state, changed in place too
    buffers: dict[str, Tensor]  # Forward factors
    steps_done: int  # Updates already made when the rows were placed

    is_stacked = False  # Whether all rows are one program that takes several steps at once

    @abstractmethod
    def __post_init__(self) -> None: ...

    @abstractmethod
    def train(self, tokens_SBT1: Tensor, steps: range, live: Sequence[int]) -> Tensor:
        """Train `live` rows on the first batches of a stack; return losses_SR before each update.

        `steps` are their numbers, for schedules. Other rows may train too. Losses after the last step are
        meaningless.
        """

    @abstractmethod
    def evaluate(self, tokens_NBT1: Tensor, live: Sequence[int]) -> Tensor:
        """Return mean losses_R over N batches, without training."""


class InTurns(Members):
    """Members that make their steps one after another; losses of those that have ended are nan."""

    def __post_init__(self) -> None:
        self._bf16 = self.trials[0].train.precision == "bf16"
        self._whole_loss = over_micro_batches(self.loss, self.micro_batches)
        self._given, self._optimizers = [], []  # arguments of the loss (leaves and buffers)
        for r, trial in enumerate(self.trials):
            leaves = {name: p[r].detach().requires_grad_() for name, p in self.parameters.items()}
            state = {slot: {n: t[r] for n, t in tensors.items()} for slot, tensors in self.state.items()}
            of_trial = trial, self.declared, leaves, self.scalings[r], state
            optimizer = MemberOptimizer(*of_trial, self.steps_done)
            self._given.append((leaves, {name: b[r] for name, b in self.buffers.items()}))
            self._optimizers.append(optimizer)
        first = next(iter(self.parameters.values()))
        self._device_type = first.device.type
        self._no_losses_R = first.new_full((len(first),), math.nan)

    def train(self, tokens_SBT1: Tensor, steps: range, live: Sequence[int]) -> Tensor:
        losses_SR = self._no_losses_R.repeat(len(steps), 1)
        for (i, step), r in itertools.product(enumerate(steps), live):
            given, optimizer = self._given[r], self._optimizers[r]
            with self._weights_cast_once():
                losses_SR[i, r] = backward_by_parts(self.loss, given, tokens_SBT1[i], self.micro_batches)
            if optimizer.trial.optimizer.grad_clip:
                torch.nn.utils.clip_grad_norm_(list(given[0].values()), optimizer.trial.optimizer.grad_clip)
            optimizer.update(step)
        return losses_SR

    def _weights_cast_once(self) -> contextlib.AbstractContextManager[Any]:
        # Autocast, off here and on in the loss, keeps its bf16 copies of weights for the whole block.
        return torch.autocast(self._device_type, enabled=False) if self._bf16 else contextlib.nullcontext()

    def evaluate(self, tokens_NBT1: Tensor, live: Sequence[int]) -> Tensor:
        losses_R = self._no_losses_R.clone()
        for r in live:
            with self._weights_cast_once():
                losses = [self._whole_loss(*self._given[r], tokens_BT1) for tokens_BT1 in tokens_NBT1]
            losses_R[r] = torch.stack(losses).mean()
        return losses_R


class Stacked(Members):
    """Members that are one program; all rows train, live or not."""

    is_stacked = True

    def __post_init__(self) -> None:
        device = self.device
        self._dtype = next(iter(self.parameters.values())).dtype
        limits = [trial.optimizer.grad_clip or math.inf for trial in self.trials]
        self._clip_limits_R = device.place_members(torch.tensor(limits, dtype=self._dtype))
        self._optimizer = StackedOptimizer(
            self.trials, self.declared, self.scalings, lambda t: device.place_members(t.to(self._dtype))
        )
        self.gradients_and_losses, self._losses = (
            device.per_shard(over_micro_batches(vmap(function, in_dims=(0, 0, None)), self.micro_batches))
            for function in (grad_and_value(self.loss), self.loss)
        )
        self._steps = device.repeated(self.step, self.compile)
        self._evaluations = device.repeated(lambda changed, fixed, batch: self._losses(*fixed, *batch))

    def train(self, tokens_SBT1: Tensor, steps: range, live: Sequence[int]) -> Tensor:
        numbers_SRX = self._optimizer.step_numbers(steps).to(self._dtype)
        return self._steps(
            (self.parameters, self.state),
            (self.buffers, self._clip_limits_R, self._optimizer.factors_RP3),
            (tokens_SBT1, self.device.place_stack(numbers_SRX, "trial", len(tokens_SBT1))),
            len(steps),
        )

    def step(self, changed: Any, fixed: Any, batch: Any) -> Tensor:
        """Make one step of all rows, for `Device.repeated`; return losses_R before the update."""
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
        fixed, batches = (self.parameters, self.buffers), (tokens_NBT1,)
        return self._evaluations((), fixed, batches, len(tokens_NBT1)).mean(0)
