"""Hyperball: its first step in closed form, constant norms in training, and stacks matrix by matrix.

`test_update_rules.py` compares it with its definition over torch's optimizers.
"""

import math

import pytest
import torch

from mup_tpu.config import OptimizerConfig, Trial
from mup_tpu.devices import get_device
from mup_tpu.models import Parameter, declare
from mup_tpu.optimizers import UPDATE_RULES, Group, StackedParameter, constants
from mup_tpu.optimizers.base import matrices_of
from mup_tpu.training.pack import Pack
from mup_tpu.training.record import applied

ANGLE, VOCAB, T = 0.05, 40, 16


def trained(
    rule: str, parameter: Parameter, start: torch.Tensor, given: list[torch.Tensor], form: str = "member"
) -> torch.Tensor:
    """A parameter after an update by each gradient, its learning rate half the configured one."""
    own, config = UPDATE_RULES[rule], OptimizerConfig(optimizer=rule)
    shared = constants(Trial(optimizer=config), [own])[rule]
    slots = {slot: torch.zeros_like(start) for slot in own.slots(config)}
    values = start.clone().requires_grad_(form == "member")
    group = Group(
        [parameter], [values], {slot: [t] for slot, t in slots.items()}, [torch.tensor(0.0)], 0.5, 0.0, 1e-30
    )
    over = (1,) * (start.dim() + 1)
    half, zero, eps = (torch.full(over, x, dtype=start.dtype) for x in (0.5, 0.0, 1e-30))
    with torch.no_grad():
        for step, gradient in enumerate(given):
            if form == "member":
                values.grad = gradient.clone()
                own.update_member(group, shared, ANGLE)
                continue
            numbers = tuple(
                torch.full(over, x, dtype=start.dtype) for x in own.step_numbers(shared, step, ANGLE)
            )
            stacked = {slot: t[None] for slot, t in slots.items()}
            own.update_stack(
                StackedParameter(parameter, values[None], gradient[None], stacked, numbers, half, zero, eps),
                shared,
            )
    return values.detach()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("form", ["member", "stack"])
def test_adamh_s_first_step_is_along_the_gradient_s_signs(form):
    """Adam's first update is sign(g), of norm √(R·C): W₁ ∝ W₀ - η·‖W₀‖·sign(g)/√(R·C)."""
    start, gradient = normal(6, 10), normal(6, 10, seed=1)
    found = trained("adamh", Parameter((6, 10), "hidden", 6, 10), start, [gradient], form)
    moved = start - ANGLE / 2 * start.norm() * gradient.sign() / math.sqrt(60)
    torch.testing.assert_close(found, moved * start.norm() / moved.norm(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["member", "stack"])
@pytest.mark.parametrize("rule", ["muonh", "adamh", "muon"])
def test_experts_and_rows_of_one_parameter_are_matrices_that_train_alone(rule, form):
    """Gate and up of each expert, 4 rows of 8, are as if each were a parameter."""
    trial = Trial().replace(
        architecture="moe", width=8, base_width=8, head_size=8, num_experts=3, expert_granularity=8
    )
    gate_up = declare(trial.model, VOCAB, T).parameters["model.layers.0.mlp.experts.gate_up_proj"]
    start, given = normal(3, 8, 8), [normal(3, 8, 8, seed=s) for s in (1, 2, 3)]
    found = matrices_of(gate_up, trained(rule, gate_up, start, given, form))
    alone = Parameter((4, 8), "hidden", 8, 4)
    for k, part in enumerate(found):
        its, *gradients = (matrices_of(gate_up, tensor)[k] for tensor in (start, *given))
        for expert in range(3):
            expected = trained(rule, alone, its[expert], [g[expert] for g in gradients])
            torch.testing.assert_close(part[expert], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize(("rule", "architecture"), [("adamh", "gpt2"), ("muonh", "moe"), ("muon", "moe")])
def test_norms_stay_while_the_loss_falls(rule, architecture, execution):
    """On sequences that count upwards; Muon's norms change."""
    trial = Trial().replace(
        architecture=architecture, width=32, base_width=32, head_size=16, depth=1, sequence_length=T,
        batch_size=8, steps=20, warmup=0.0, optimizer=rule, learning_rate=0.03, weight_decay=0.1,
        precision="float64", init_std=0.05,
    )  # fmt: skip
    pack = Pack([trial, trial.replace(seed=1)], VOCAB, get_device("cpu"), execution)
    hidden = {n: p for n, p in declare(trial.model, VOCAB, T).parameters.items() if p.role == "hidden"}

    def norms() -> torch.Tensor:
        values = pack.member_parameters(1)
        parts = [part for n, p in hidden.items() for part in matrices_of(p, values[n])]
        return torch.cat([part.norm(dim=(-2, -1)).flatten() for part in parts])

    start = norms()
    first = torch.randint(0, VOCAB, (20, 8, 1), generator=torch.Generator().manual_seed(0))
    losses = [pack.step((f + torch.arange(T + 1)) % VOCAB)[1].item() for f in first]
    assert losses[-1] < losses[0] - 0.5
    assert (rule == "muon") == ((norms() / start - 1).abs().max() > 1e-12)
    assert applied(trial, VOCAB)["applied_weight_decay"] == (0.1 if rule == "muon" else 0)


@pytest.mark.parametrize(("directions", "exponent"), [(None, 0.0), (8, 0.5)])
def test_muonh_s_step_grows_with_the_width_where_its_directions_do_not(directions, exponent):
    """Its spectral norm is η·R/√directions, and R ∝ √width under μP's init."""
    widths, norms = (16, 32, 64, 128), []
    for n in widths:
        left, right = (torch.linalg.qr(normal(n, directions or n, seed=s)).Q for s in (1, 2))
        start = normal(n, n) / math.sqrt(n)
        step = trained("muonh", Parameter((n, n), "hidden", n, n), start, [left @ right.T]) - start
        norms.append(float(torch.linalg.matrix_norm(step, 2)))
    growth = math.log(norms[-1] / norms[0]) / math.log(widths[-1] / widths[0])
    assert growth == pytest.approx(exponent, abs=0.05)
