"""The tables against mup's own optimizers and shape inference, on a real GPT-2."""

import mup
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from mup_tpu.config import ModelConfig
from mup_tpu.errors import ConfigError
from mup_tpu.model import parameter_scalings, parameter_shapes
from mup_tpu.parametrization import TABLES, infer_infshapes

VOCAB, T = 40, 16
WIDTHS = [32, 64, 128, 256]


def stock(width: int, tied: bool, growing: str) -> GPT2LMHeadModel:
    heads = width // 16 if growing == "heads" else 2
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=T, n_embd=width, n_layer=2, n_head=heads, tie_word_embeddings=tied
        )
    )


def mup_group_values(
    model: GPT2LMHeadModel, optimizer: str, lr: float, wd: float
) -> dict[str, tuple[float, float]]:
    """(learning rate, weight decay) of each parameter by name, in mup's own optimizer."""
    make = mup.MuAdamW if optimizer == "adamw" else mup.MuSGD
    groups = make(model.parameters(), lr=lr, weight_decay=wd).param_groups
    by_id = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("growing", ["heads", "head_size"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_factors_match_mups_optimizer_groups(optimizer, growing, tied, width):
    model = stock(width, tied, growing)
    mup.set_base_shapes(
        model, stock(32, tied, growing), delta=stock(96, tied, growing), rescale_params=False, do_assert=False
    )
    theirs = mup_group_values(model, optimizer, lr=0.1, wd=0.2)
    config = ModelConfig(width=width, base_width=32, head_size=16, tied=tied, growing=growing)
    ours = parameter_scalings(config, optimizer, VOCAB, T)
    assert ours.keys() == theirs.keys()
    for name, (lr, wd) in theirs.items():
        assert 0.1 * ours[name].learning_rate == pytest.approx(lr), name
        if len(dict(model.named_parameters())[name].shape) > 1:  # we never decay biases and norms
            assert 0.2 * ours[name].weight_decay == pytest.approx(wd), name
        else:
            assert ours[name].weight_decay == 0, name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_table_is_sp_at_the_base_width(optimizer):
    for growing in ("heads", "head_size"):
        rows = [
            parameter_scalings(
                ModelConfig(width=32, base_width=32, head_size=16, parametrization=name, growing=growing),
                optimizer,
                VOCAB,
                T,
            )
            for name in TABLES
        ]
        assert all(row == rows[0] for row in rows)
        assert all(scaling.learning_rate == scaling.init == 1 for scaling in rows[0].values())


def test_a_sequence_or_vocabulary_as_long_as_a_width_does_not_look_like_width():
    config = ModelConfig(width=64, base_width=32, head_size=16)
    rows = parameter_scalings(config, "adamw", vocab_size=64, sequence_length=32)
    assert rows["transformer.wte.weight"].learning_rate == rows["transformer.wpe.weight"].learning_rate == 1
    assert rows["transformer.h.0.mlp.c_fc.weight"].learning_rate == 0.5


def test_delta_equal_to_the_base_is_an_error():
    shapes = parameter_shapes(ModelConfig(width=64), VOCAB, T)
    with pytest.raises(ConfigError, match="delta model"):
        infer_infshapes(shapes, shapes, parameter_shapes(ModelConfig(width=128), VOCAB, T))


def test_mup_alone_would_accept_it():
    """Why that is an error of ours: mup sees no growing axis, and every multiplier is 1 without a word."""
    model, base = stock(64, True, "heads"), stock(32, True, "heads")
    shapes = mup.make_base_shapes(base, base)
    assert all(shape.ninf() == 0 for shape in shapes.values())
    assert len(shapes) == len(dict(model.named_parameters()))
