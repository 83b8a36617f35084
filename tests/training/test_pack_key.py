"""A pack's key: trials that differ where the network or an update rule is built apart never share a pack."""

import contextlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest
import torch

from mup_tpu import models
from mup_tpu.config import ModelConfig, Trial
from mup_tpu.config.fields import described, typed_fields
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError
from mup_tpu.models import ARCHITECTURES, llama_network
from mup_tpu.models.llama import Llama
from mup_tpu.optimizers import UPDATE_RULES
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.training.pack import Pack
from mup_tpu.training.pack_key import pack_key

VOCAB = 40
TINY = Trial().replace(
    width=64, base_width=64, head_size=16, depth=2, steps=4, warmup=0.5, batch_size=2, sequence_length=8,
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


@pytest.mark.parametrize("rule", UPDATE_RULES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_members_of_one_key_train_as_each_does_alone(architecture, rule):
    trial = TINY.replace(architecture=architecture, optimizer=rule)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCAB, (2, 9), generator=generator) for _ in range(3)]

    def losses(trials: list[Trial]) -> list[list[float]]:
        pack = Pack(trials, VOCAB, get_device("cpu"), "loop")
        return torch.stack([pack.read(pack.step(batch)) for batch in batches]).T.tolist()

    alone = losses([trial])[0]
    seen = set()
    for name, other in changed(trial):
        seen.add(name)
        if pack_key(other) == pack_key(trial):
            assert losses([trial, other]) == [alone, *losses([other])], name
    assert {"alpha_in", "parametrization", "width", "learning_rate", "schedule", "steps"} <= seen


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
        network = llama_network.build(config, *sizes)
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
