"""Schedules against their closed forms, and against transformers' schedulers where the definitions agree."""

import math

import pytest
import torch
from transformers import get_constant_schedule_with_warmup

from mup_tpu.config import TrainConfig
from mup_tpu.training.schedule import schedule_factor


def factors(config: TrainConfig) -> list[float]:
    return [schedule_factor(config, step) for step in range(config.steps)]


def test_warmup_rises_linearly_to_the_peak_and_never_starts_at_zero():
    values = factors(TrainConfig(steps=20, warmup=4, schedule="constant"))
    assert values[:4] == [0.25, 0.5, 0.75, 1.0] and set(values[4:]) == {1.0}


def test_constant_with_warmup_is_transformers_one_step_ahead():
    """transformers starts at a learning rate of 0, a wasted step; ours at its second value."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=5)
    expected = []
    for _ in range(20):
        optimizer.step()
        theirs.step()
        expected.append(theirs.get_last_lr()[0])
    assert factors(TrainConfig(steps=20, warmup=5, schedule="constant")) == pytest.approx(expected)


def test_cosine_follows_torch_annealing_to_the_floor():
    config = TrainConfig(steps=31, warmup=0, schedule="cosine", final_lr_fraction=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.1)
    expected = []
    for _ in range(31):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert factors(config) == pytest.approx(expected)


def test_linear_falls_in_equal_steps_to_the_floor():
    values = factors(TrainConfig(steps=12, warmup=2, schedule="linear", final_lr_fraction=0.5))
    falls = [a - b for a, b in zip(values[2:], values[3:], strict=False)]
    assert values[1] == values[2] == 1.0 and values[-1] == pytest.approx(0.5)
    assert falls == pytest.approx([0.5 / 9] * 9)


def test_wsd_is_constant_and_then_cools_down_by_one_minus_the_root_to_the_floor():
    """Hägele et al. 2024: 1 - √((n - (N - N_decay)) / N_decay), here of the steps counted from 1."""
    config = TrainConfig(steps=100, warmup=10, schedule="wsd", cooldown=0.25, final_lr_fraction=0.2)
    values = factors(config)
    assert values[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert set(values[10:75]) == {1.0}
    shape = [1 - math.sqrt((n - (100 - 25)) / 25) for n in range(76, 101)]
    assert values[75:] == pytest.approx([0.2 + 0.8 * left for left in shape])
    assert values[-1] == pytest.approx(0.2)
    assert (
        factors(TrainConfig(steps=100, warmup=10, schedule="wsd", cooldown=25, final_lr_fraction=0.2))
        == values
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), *((steps, warmup) for steps in (2, 3) for warmup in (0, 1, 0.5))]
)
def test_shortest_runs_have_a_learning_rate_above_zero(schedule, warmup, steps):
    values = factors(TrainConfig(steps=steps, warmup=warmup, schedule=schedule))
    assert all(0 < value <= 1 and math.isfinite(value) for value in values)
