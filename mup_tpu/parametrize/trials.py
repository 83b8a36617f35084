"""The linter's check of our networks: a trial's network with its update rule is a module like anybody's."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mup_tpu import data
from mup_tpu.config import Trial, field_column
from mup_tpu.config.grid import Axis
from mup_tpu.errors import ConfigError
from mup_tpu.models import Forms, architecture_of, declare, forward_factors, parameter_scalings
from mup_tpu.models.networks import init_parameters
from mup_tpu.optimizers import Group, UpdateRule
from mup_tpu.parametrize.check import CoordinateCheck, check_sizes
from mup_tpu.parametrize.measure import Progress, Trained
from mup_tpu.parametrize.roles import parameters_of
from mup_tpu.training.members import MemberOptimizer, member_loss, state_slots


class _Updates:
    """Parameters of one update rule of a trial, as an optimizer of torch at a constant learning rate."""

    def __init__(self, member: MemberOptimizer, rule: UpdateRule, groups: Sequence[Group]) -> None:
        self.optimizer = rule  # the linter reads from its class how updates follow the gradient
        self._member, self._groups = member, groups
        lr = rule.learning_rate(member.trial.optimizer)
        self.param_groups: list[dict[str, Any]] = [
            {"params": g.leaves, "lr": lr * g.lr_factor, "weight_decay": g.weight_decay, "eps": g.eps}
            for g in groups
        ]

    @torch.no_grad()
    def step(self) -> None:
        lr = self.optimizer.learning_rate(self._member.trial.optimizer)
        for group, of in zip(self._groups, self.param_groups, strict=True):
            self._member.apply(self.optimizer, dataclasses.replace(group, eps=of["eps"]), lr)


def trained(trial: Trial, vocab_size: int) -> Trained:
    """Return a trial's network with its fresh weights and forward factors, and its optimizers."""
    length = trial.data.sequence_length
    network = architecture_of(trial.model).network(trial.model, vocab_size, length, Forms(gathered=True))
    parameters = declare(trial.model, vocab_size, length).parameters
    scalings = parameter_scalings(trial, vocab_size, length)
    dtype = torch.float64 if trial.train.precision == "float64" else torch.float32
    weights = init_parameters(parameters, scalings, trial.model.init_std, trial.train.seed)
    leaves = {name: nn.Parameter(p.to(dtype)) for name, p in weights.items()}
    for name, built in parameters_of(network).items():
        for owner in built.owners:
            setattr(owner.module, owner.attribute, leaves[name])
    for name, factor in forward_factors(trial).items():
        part, _, attribute = name.rpartition(".")
        network.get_submodule(part).register_buffer(attribute, torch.tensor(factor, dtype=dtype))
    slots = state_slots(trial, parameters)
    state = {slot: {n: torch.zeros_like(leaves[n]) for n in names} for slot, names in slots.items()}
    member = MemberOptimizer(trial, parameters, leaves, scalings, state, 0)
    rules = dict.fromkeys(rule for rule, _ in member.groups)
    optimizers = [_Updates(member, rule, [g for r, g in member.groups if r is rule]) for rule in rules]
    if limit := trial.optimizer.grad_clip:
        clip = functools.partial(nn.utils.clip_grad_norm_, list(leaves.values()), limit)
        first = optimizers[0].step
        optimizers[0].step = lambda: (clip(), first())[1]  # type: ignore[method-assign]
    return network, optimizers


def check_trial(
    trial: Trial,
    scale: Axis,
    rules: Sequence[str],
    *,
    steps: int = 4,
    seeds: int = 3,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> CoordinateCheck:
    """Check a trial's network under each rule, along any number of its fields.

    The scale's field, parametrization and seed of the trial are replaced; without a base, the smallest value
    of the scale is it. The learning rate is constant from the first step on, since a warm-up would hide how
    fast layers grow. The batch is the first of the training. The rest is as in `lint`.

    Raises:
        ConfigError: the scale's field is no number.
    """
    ((field, values),) = scale.items()
    if field == "seed" or any(isinstance(value, str | bool) for value in values):
        raise ConfigError(
            f"scale {field} of a coordinate check is no axis of growth; take a number of a trial, such "
            "as width, depth or batch_size"
        )
    trial = trial.replace(steps=steps, warmup=0.0, schedule="constant")
    if trial.train.precision == "auto":
        trial = trial.replace(precision="float32")
    base = f"base_{field}"
    if trial.flat().get(base) == 0:  # without a base, no rule would count growth
        trial = trial.replace(**{base: min(values)})
    vocab_size = data.load(trial.data).vocab_size
    declared = declare(trial.model, vocab_size, trial.data.sequence_length).parameters
    roles = {name: p.role for name, p in declared.items()}

    def at(size: float, **fields: Any) -> Trial:
        return trial.replace(**{field: size}, **fields)

    def batch(size: float) -> Tensor:
        return torch.from_numpy(data.load(at(size).data).train_batch(0))

    def loss(network: nn.Module, tokens_BT1: Tensor) -> Tensor:
        of_member = member_loss(network, vocab_size, trial.train.precision, torch.device("cpu"))
        return of_member(dict(network.named_parameters()), dict(network.named_buffers()), tokens_BT1)

    def of_rule(rule: str, size: float, seed: int) -> Trained:
        return trained(at(size, parametrization=rule, seed=seed), vocab_size)

    reports = {
        rule: check_sizes(
            functools.partial(of_rule, rule), batch, loss, values, field_column(field), roles=roles,
            steps=steps, seeds=seeds, seconds=seconds, progress=progress, rule=f"{rule}, ",
        )
        for rule in rules
    }  # fmt: skip
    return CoordinateCheck.of(reports)
