"""Schedules, pack keys, and longer runs: what the fields of a trial decide about its steps."""

import contextlib
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest
import torch
import transformers as hf

from mup_tpu import models
from mup_tpu.config import ModelConfig, TrainConfig, Trial
from mup_tpu.config.values import described, typed_fields
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError
from mup_tpu.models import ARCHITECTURES, networks
from mup_tpu.models.architectures import Llama
from mup_tpu.optimizers import UPDATE_RULES
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.training import longer, pack_key, schedule_factor
from mup_tpu.training.pack import Pack


def factors(config: TrainConfig) -> list[float]:
    return [schedule_factor(config, step) for step in range(config.steps)]


def rates(schedule, steps: int) -> Iterator[float]:
    """Yield the learning rates of torch's scheduler, which is made for an optimizer."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = schedule(optimizer)
    for _ in range(steps):
        yield theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


def test_constant_with_warmup_is_transformers_one_step_ahead():
    """transformers starts at a learning rate of 0, a wasted step; ours at its second value."""
    _, *expected = rates(lambda o: hf.get_constant_schedule_with_warmup(o, num_warmup_steps=5), 21)
    assert factors(TrainConfig(steps=20, warmup=5, schedule="constant")) == pytest.approx(expected)


def test_cosine_follows_torch_annealing_to_the_floor():
    config = TrainConfig(steps=31, warmup=0, schedule="cosine", final_lr_fraction=0.1)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR
    expected = rates(lambda optimizer: annealing(optimizer, T_max=30, eta_min=0.1), 31)
    assert factors(config) == pytest.approx([*expected])


@pytest.mark.parametrize("floor", [0.5, 0.0])
def test_linear_falls_in_equal_steps_to_the_floor(floor):
    values = factors(TrainConfig(steps=12, warmup=2, schedule="linear", final_lr_fraction=floor))
    falls = [a - b for a, b in zip(values[2:], values[3:], strict=False)]
    assert values[1] == values[2] == 1.0 and values[-1] == pytest.approx(floor)
    assert falls == pytest.approx([(1 - floor) / 9] * 9)


def test_wsd_is_constant_and_then_cools_down_by_one_minus_the_root_to_the_floor():
    """Hägele et al. 2024: 1 - √((n - (N - N_decay)) / N_decay), here of the steps counted from 1."""
    config = TrainConfig(steps=100, warmup=10, schedule="wsd", cooldown=0.25, final_lr_fraction=0.2)
    values = factors(config)
    assert values[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert set(values[10:75]) == {1.0}
    shape = [1 - math.sqrt((n - (100 - 25)) / 25) for n in range(76, 101)]
    assert values[75:] == pytest.approx([0.2 + 0.8 * left for left in shape])
    assert factors(replace(config, cooldown=25)) == values


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), *((steps, warmup) for steps in (2, 3) for warmup in (0, 1, 0.5))]
)
def test_shortest_runs_have_a_learning_rate_above_zero(schedule, warmup, steps):
    values = factors(TrainConfig(steps=steps, warmup=warmup, schedule=schedule))
    assert all(0 < value <= 1 and math.isfinite(value) for value in values)


VOCAB = 40
TINY = Trial().replace(
    width=32, base_width=32, head_size=8, depth=1, steps=4, warmup=0.5, batch_size=2, sequence_length=8,
    base_batch_size=2, base_steps=4, weight_decay=0.1, grad_clip=0.1, tied=False, init_std=0.2,
)  # fmt: skip


def others(now: object, kind: object) -> tuple[object, ...]:
    """Return values to try in place of a field's: one of them is allowed, if any is."""
    if isinstance(now, bool):
        return (not now,)
    if isinstance(now, float):
        return (0.5 * now, 0.5)
    if isinstance(now, int):
        return (2 * now, now + 1, 4)
    return (*typing.get_args(kind), *PARAMETRIZATIONS, *BATCH_RULES, *TOKEN_RULES, *DECAY_RULES)


def changed(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """Yield the trial with each field of its model, optimizer and training at another allowed value."""
    for part in (trial.model, trial.optimizer, trial.train):
        for field, kind in typed_fields(type(part)):
            now = getattr(part, field.name)
            for value in others(now, kind):
                with contextlib.suppress(ConfigError):
                    other = trial.replace(**{field.name: value})
                    if value != now and pack_key(other):
                        yield field.name, other
                        break


@pytest.mark.parametrize(
    ("architecture", "rule"),
    [
        ("llama", "muon"),
        ("moe", "adamw"),
        *(pytest.param("gpt2", rule, marks=pytest.mark.nightly) for rule in UPDATE_RULES),
    ],
)
def test_members_of_one_key_train_as_each_does_alone(architecture, rule):
    trial = TINY.replace(architecture=architecture, optimizer=rule)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCAB, (2, 9), generator=generator) for _ in range(3)]

    def losses(*trials: Trial) -> dict[Trial, list[float]]:
        pack = Pack(trials, VOCAB, get_device("cpu"), "loop")
        losses_SK = torch.stack([pack.read(pack.step(batch)) for batch in batches])
        return dict(zip(trials, losses_SK.T.tolist(), strict=True))

    others = dict(changed(trial))
    assert {"alpha_in", "parametrization", "width", "learning_rate", "schedule", "steps"} <= others.keys()
    together = losses(trial, *(other for other in others.values() if pack_key(other) == pack_key(trial)))
    assert together == {k: v for member in together for k, v in losses(member).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_that_a_network_is_built_with_is_in_the_key(architecture):
    trial = TINY.replace(architecture=architecture)
    declared = ARCHITECTURES[architecture]
    shared = {name for name, other in changed(trial) if pack_key(other) == pack_key(trial)}
    assert not shared & {f.name for f in fields(ModelConfig)} - declared.per_member
    assert declared.per_member - {"head_size", "growing_dimension"} <= shared | {"base_width", "base_depth"}


@dataclass(frozen=True)
class Sharpened(ModelConfig):
    """Llama with a field that changes the network and no shape, as a contributor may add one."""

    sharpness: int = described(1, least=1)


class SharpenedLlama(Llama):
    def network(self, config, *sizes):
        network = networks.llama(config, *sizes)
        network.register_forward_hook(lambda module, inputs, logits: logits * config.sharpness)
        return network


@pytest.fixture
def sharpened(monkeypatch) -> list[Trial]:
    """Two trials that differ in the contributor's field alone."""
    monkeypatch.setattr(models, "ARCHITECTURES", {**ARCHITECTURES, "llama": SharpenedLlama()})
    models.declare.cache_clear()
    shape = vars(replace(TINY.model, architecture="llama"))
    yield [replace(TINY, model=Sharpened(**shape, sharpness=n)) for n in (1, 2)]
    models.declare.cache_clear()


def test_a_field_that_no_architecture_lists_is_refused(sharpened):
    with pytest.raises(
        ConfigError, match="^sharpness 2 .* list it in `counted` or in `per_member` of .*'llama'$"
    ):
        Pack(sharpened, VOCAB, get_device("cpu"))


def test_a_field_that_changes_the_network_and_no_shape_splits_a_pack(sharpened, monkeypatch):
    monkeypatch.setattr(SharpenedLlama, "counted", Llama.counted | {"sharpness"})
    assert len({pack_key(trial) for trial in sharpened}) == 2
    with pytest.raises(ConfigError, match="must share"):
        Pack(sharpened, VOCAB, get_device("cpu"))


TOKENS = {"base_steps": 10, "base_batch_size": 4}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule": "cosine"}, "needs schedule 'constant' or 'wsd': 'cosine' falls over all"),
        ({"warmup": 0.2}, "needs a warmup in steps: 0.2 is a share, 6 steps of 30"),
        ({"steps": 60}, "is not allowed: it must be above the trial's steps, 60"),
        ({"token_rule": "lr_0.32", **TOKENS}, "needs token_rule without tokens: 'lr_0.32' sets"),
        ({"decay_rule": "timescale", "base_steps": 10}, "needs decay_rule without tokens: 'timescale' sets"),
    ],
)
def test_what_a_longer_run_would_do_otherwise_from_the_first_on_is_refused(tiny, settings, sentence):
    with pytest.raises(ConfigError, match=f"continue_to 60 {sentence}"):
        longer(tiny.replace(**{"schedule": "constant", "warmup": 3} | settings), 60)
