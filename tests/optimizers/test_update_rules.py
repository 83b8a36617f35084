"""Update rules with every factor that a parametrization may have, against torch.optim's parameter groups."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mup_tpu.config import OptimizerConfig, Trial
from mup_tpu.models import Parameter, declare, parameter_scalings
from mup_tpu.optimizers import UPDATE_RULES
from mup_tpu.rules import parametrization
from mup_tpu.rules.optimizer import BATCH_RULES, PowerRule
from mup_tpu.rules.parametrization import Parametrization, Scaling
from mup_tpu.training import schedule_factor
from mup_tpu.training.members import MemberOptimizer, StackedOptimizer, state_slots

STEPS = 6


class Hyperball(torch.optim.Optimizer):
    """Wen et al. 2025, by their formula: W ← Norm(W - η·Norm(u)·R)·R, with R the first norm of a matrix, and
    u the step of one of torch's optimizers at learning rate 1, from 0."""

    def __init__(self, inner, groups):
        super().__init__(groups, {})
        self.sphere = {p: p.norm() for group in groups for p in group["params"]}
        self.steps = {p: torch.zeros_like(p) for p in self.sphere}
        own = (
            {**g, "lr": 1.0, "weight_decay": 0.0, "params": [self.steps[p] for p in g["params"]]}
            for g in groups
        )
        self.inner = inner([*own])

    def step(self):
        for p, step in self.steps.items():
            step.zero_().grad = p.grad
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                moved = p + group["lr"] * self.sphere[p] * self.steps[p] / self.steps[p].norm()
                p.copy_(self.sphere[p] * moved / moved.norm())


def with_moments(o: OptimizerConfig, scaling: Scaling) -> dict:
    """ε, and β as Complete(d)P scales them: 1 - β times the factor."""
    return {"eps": o.eps * scaling.eps, "betas": (1 - (1 - o.beta1) * 2, 1 - (1 - o.beta2) * 2)}


def with_momentum(o: OptimizerConfig, scaling: Scaling) -> dict:
    return {"momentum": 0.8}


@dataclass(frozen=True)
class Reference:
    """Implementation that an update rule is compared with."""

    optimizer: Callable[[list[dict]], Any]
    """Class of an optimizer; it takes parameter groups."""
    options: Callable[[OptimizerConfig, Scaling], dict]
    """Options of a group beside its learning rate and weight decay."""
    own: dict[str, Any]
    """Hyperparameters of the trial that not every update rule reads."""


_MUON = {"eps": 1e-6, "adamw_lr_ratio": 0.5, "muon_momentum": 0.8, "newton_schulz_dtype": "bfloat16"}
REFERENCES = {
    "adamw": Reference(torch.optim.AdamW, with_moments, {"eps": 1e-6}),
    "sgd": Reference(torch.optim.SGD, with_momentum, {"momentum": 0.8}),
    "muon": Reference(
        torch.optim.Muon,
        lambda o, scaling: {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
        _MUON | {"muon_scale": "match_rms_adamw"},
    ),
    "adamh": Reference(
        functools.partial(Hyperball, torch.optim.AdamW), with_moments, {"eps": 1e-6, "adamw_lr_ratio": 0.5}
    ),
    "muonh": Reference(functools.partial(Hyperball, torch.optim.Muon), with_momentum, _MUON),
}
"""Reference of each update rule; of parameters that it does not take, AdamW's."""


def by_role(parameter, infshape, growth) -> Scaling:
    """Factors that differ between roles in all that a rule may change."""
    k = 1 + ["token_embedding", "position_embedding", "hidden", "readout", "norm", "bias"].index(
        parameter.role
    )
    return Scaling(learning_rate=1 / k, weight_decay=k / 2, eps=10.0**k)


@pytest.fixture
def trial(monkeypatch) -> Trial:
    rules = {name: by_role for name in (*UPDATE_RULES, "muon_match_rms_adamw")}
    rule = Parametrization("a rule of this test", rules)
    monkeypatch.setitem(BATCH_RULES, "moments", PowerRule("a rule of this test", moments=1))
    monkeypatch.setitem(parametrization.PARAMETRIZATIONS, "by_role", rule)  # type: ignore[arg-type]
    return Trial().replace(
        parametrization="by_role", width=32, base_width=32, head_size=16, tied=False, batch_size=4,
        base_batch_size=2, batch_rule="moments", steps=STEPS, warmup=2.0, weight_decay=0.3,
        learning_rate=0.02,
    )  # fmt: skip


def matrices(parameter: Parameter, values: torch.Tensor) -> list[torch.Tensor]:
    """Views of a parameter, which may be a fused one."""
    return [values[..., part.start : part.stop] for part in parameter.slices.values()] or [values]


def references_of(trial: Trial, values: dict[str, list[torch.Tensor]]) -> list[Any]:
    """Reference optimizers of all parameters, with a group a parameter."""
    o = trial.optimizer
    scalings = parameter_scalings(trial, 16, 8)
    groups: dict[str, list[dict]] = {}
    for name, p in declare(trial.model, 16, 8).parameters.items():
        scaling = scalings[name]
        rule = o.optimizer if UPDATE_RULES[o.optimizer].takes(p) else "adamw"
        peak = o.learning_rate * (0.5 if rule != o.optimizer else 1)
        decay = 0.0 if p.role in ("norm", "bias") else o.weight_decay * scaling.weight_decay
        group = {"params": values[name], "lr": peak * scaling.learning_rate, "weight_decay": decay}
        groups.setdefault(rule, []).append(group | REFERENCES[rule].options(o, scaling))
    return [REFERENCES[rule].optimizer(of_rule) for rule, of_rule in groups.items()]


def gradients(values: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in values.items()}


@pytest.mark.parametrize("form", ["member", "stack"])
@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_every_factor_reaches_both_forms_of_every_update_rule(rule, form, trial):
    trial = trial.replace(optimizer=rule, **REFERENCES[rule].own)
    parameters = declare(trial.model, 16, 8).parameters
    generator = torch.Generator().manual_seed(0)
    start = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters.items()}
    theirs = {n: p.clone() for n, p in start.items()}
    leaves_of = {n: matrices(parameters[n], p) for n, p in theirs.items()}
    references = references_of(trial, leaves_of)
    groups = [group for reference in references for group in reference.param_groups]
    peaks = [group["lr"] for group in groups]
    scalings = parameter_scalings(trial, 16, 8)
    ours = {n: p.clone()[None] for n, p in start.items()}
    state = {
        slot: {n: torch.zeros_like(ours[n]) for n in names}
        for slot, names in state_slots(trial, parameters).items()
    }
    stacked = StackedOptimizer([trial], parameters, [scalings], lambda t: t)
    leaves = {n: p[0].detach().requires_grad_() for n, p in ours.items()}
    member = MemberOptimizer(
        trial,
        parameters,
        leaves,
        scalings,
        {s: {n: t[0] for n, t in ts.items()} for s, ts in state.items()},
        0,
    )
    for step in range(STEPS):
        given = gradients(theirs, step)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * schedule_factor(trial.train, step)
        for n, its in leaves_of.items():
            for leaf, gradient in zip(its, matrices(parameters[n], given[n]), strict=True):
                leaf.grad = gradient.clone()
        for reference in references:
            reference.step()
        if form == "member":
            for n, leaf in leaves.items():
                leaf.grad = given[n].clone()
            member.update(step)
        else:
            numbers = stacked.step_numbers(range(step, step + 1))[0]
            stack = {n: g[None] for n, g in given.items()}
            stacked.update(ours, stack, torch.ones(1), state, stacked.factors_RP3, numbers)
    # Products of stacked matrices may sum in another order, which in Muon's bfloat16 is half a per cent.
    rounding = 0.01 * STEPS * max(peaks) if form == "stack" and "muon" in rule else 0.0
    for n, p in theirs.items():
        within = 1e-12 + rounding * (parameters[n].role == "hidden")
        torch.testing.assert_close(ours[n][0], p, rtol=1e-12, atol=within)
