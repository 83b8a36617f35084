"""The rules against mup's own optimizers and shape inference, on a real GPT-2."""

import dataclasses
import math

import mup
import pytest
import torch
import transformers as hf

from mup_tpu.config import ModelConfig, OptimizerConfig, Trial
from mup_tpu.errors import ConfigError
from mup_tpu.models import (
    ARCHITECTURES,
    architecture_of,
    declare,
    forward_scaling,
    infshapes,
    parameter_scalings,
)
from mup_tpu.optimizers import UPDATE_RULES
from mup_tpu.rules.parametrization import (
    PARAMETRIZATIONS,
    ForwardScaling,
    Growth,
    Parameter,
    Scaling,
    infer_infshapes,
)
from mup_tpu.rules.parametrization import scaling as rule_scaling

VOCAB, T = 40, 16


def stock(trial: Trial) -> torch.nn.Module:
    """The class of transformers, by its own configuration for GPT-2."""
    m = trial.model
    if m.architecture != "gpt2":
        return architecture_of(m).stock(m, VOCAB, T)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB, n_positions=T, n_embd=m.width, n_layer=2, tie_word_embeddings=m.tied,
            n_head=m.width // 16 if m.growing_dimension == "heads" else 2,
        )
    )  # fmt: skip


GPT2, LLAMA = {"head_size": 16}, {"architecture": "llama", "head_size": 8, "query_group_size": 2}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("growing", ["heads", "head_size"])
@pytest.mark.parametrize(
    ("own", "width"),
    [
        (GPT2 | {"tied": True}, 32), (GPT2 | {"tied": True}, 128), (GPT2 | {"tied": False}, 128),
        (LLAMA | {"tied": False, "qk_norm": True}, 128), (LLAMA | {"tied": False, "qk_norm": False}, 128),
    ],
    ids=str,
)  # fmt: skip
def test_factors_match_mups_optimizer_groups(optimizer, growing, own, width):
    """Learning rate and decay of each parameter; the gain of a head's size stays where heads are added."""
    base, delta, trial = (
        Trial().replace(
            width=w, base_width=32, growing_dimension=growing, optimizer=optimizer, learning_rate=0.1,
            weight_decay=0.2, **own,
        )
        for w in (32, 64, width)
    )  # fmt: skip
    model = stock(trial)
    mup.set_base_shapes(model, stock(base), delta=stock(delta), rescale_params=False, do_assert=False)
    make = mup.MuAdamW if optimizer == "adamw" else mup.MuSGD
    groups = make(model.parameters(), lr=0.1, weight_decay=0.2).param_groups
    by_id = {id(p): group for group in groups for p in group["params"]}
    ours = parameter_scalings(trial, VOCAB, T)
    declared = declare(trial.model, VOCAB, T).parameters
    assert ours.keys() == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        assert 0.1 * ours[name].learning_rate == pytest.approx(by_id[id(p)]["lr"]), name
        decay = UPDATE_RULES[optimizer].weight_decay(trial.optimizer, declared[name], ours[name])
        # We never decay biases and norms.
        assert decay == (pytest.approx(by_id[id(p)]["weight_decay"]) if p.dim() > 1 else 0), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_router_trains_as_mups_readout_does(optimizer):
    """mup keeps a readout's weights and multiplies logits by 1/m; a router's weights are smaller by 1/m."""
    width, base, few = 64, 16, 5
    generator = torch.Generator().manual_seed(0)
    start, x, target = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((few, width), (30, width), (30, few))
    )
    theirs = mup.MuReadout(width, few, bias=False).double()
    mup.set_base_shapes(
        theirs,
        mup.MuReadout(base, few, bias=False),
        delta=mup.MuReadout(2 * base, few, bias=False),
        rescale_params=False,
    )
    theirs.weight.data.copy_(start)
    (axes,) = infer_infshapes({"w": (few, base)}, {"w": (few, 2 * base)}, {"w": (few, width)}).values()
    factors = rule_scaling(
        "mup", optimizer, Parameter((few, width), "router", width, few), axes, Growth(width=4)
    )
    ours = torch.nn.Parameter(start * factors.init)
    makers = {
        # Its gradient is 1/m as large, so ε would tell them apart.
        "adamw": (mup.MuAdamW, torch.optim.AdamW, {"eps": 1e-30}),
        "sgd": (mup.MuSGD, torch.optim.SGD, {}),
    }
    make_theirs, make, own = makers[optimizer]
    optimizers = (
        make_theirs([theirs.weight], lr=0.1, weight_decay=0.2, **own),
        make([ours], lr=0.1 * factors.learning_rate, weight_decay=0.2 * factors.weight_decay, **own),
    )
    for _ in range(3):
        logits = theirs(x), x @ ours.T
        torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
        for optimizer_, values in zip(optimizers, logits, strict=True):
            optimizer_.zero_grad()
            (values - target).square().mean().backward()
            optimizer_.step()


OPTIMIZERS = {
    rule.scaled_as(config): config
    for name, rule in UPDATE_RULES.items()
    for own in ({}, {"muon_scale": "match_rms_adamw"})[: 1 + (name == "muon")]
    for config in [OptimizerConfig(optimizer=name, **own)]
}
"""A configuration for each way that parametrizations have factors."""


@pytest.mark.parametrize(
    ("architecture", "growing"), [*((a, "head_size") for a in ARCHITECTURES), ("gpt2", "heads")]
)
@pytest.mark.parametrize(
    ("name", "optimizer"), [(name, rule) for name, p in PARAMETRIZATIONS.items() for rule in p.parameters]
)
def test_at_the_base_every_factor_of_every_rule_is_one(name, architecture, optimizer, growing):
    trial = Trial(optimizer=OPTIMIZERS[optimizer]).replace(
        architecture=architecture, parametrization=name, width=32, growing_dimension=growing,
        base_width=32, head_size=16, depth=3, base_depth=3, batch_size=8, base_batch_size=8, steps=50,
        base_steps=50, tied=False,
    )  # fmt: skip
    assert trial.growth == Growth()
    assert set(parameter_scalings(trial, VOCAB, T).values()) == {Scaling()}
    assert forward_scaling(trial) == ForwardScaling()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("name", "lr", "residual", "eps", "embedding_eps"),
    [
        ("completep", 1.0, 0.25, 0.125, 1.0),
        ("completep_half", 0.5, 0.5, 0.25, 1.0),
        ("completep_zero", 0.25, 1.0, 0.5, 1.0),
        ("completedp", 1.0, 0.25, 0.125, 0.5),
    ],
)
def test_factors_of_every_parameter_are_those_of_completep_s_table(
    name, lr, residual, eps, embedding_eps, tied
):
    """Dey et al. 2025 and Mlodozeniec et al. 2025, both Table 1, at m_N = 2 and m_L = 4: within blocks the
    learning rate is × m_L^(α-1), and 1/m_N for matrices; ε × 1/(m_N·m_L^α); residual branches × m_L^-α."""
    trial = Trial().replace(
        parametrization=name, width=64, base_width=32, head_size=16, depth=8, base_depth=2, tied=tied
    )
    matrix = Scaling(init=2**-0.5, learning_rate=lr / 2, weight_decay=2, eps=eps)
    # GPT-2's 1/√(2·layers) is that of the base depth: × √(8/2) undoes what the declaration has too much.
    branch = Scaling(init=2**-0.5 * 2, learning_rate=lr / 2, weight_decay=2, eps=eps)
    vector = Scaling(learning_rate=lr, eps=eps)
    block = {
        "ln_1.weight": vector, "ln_1.bias": vector, "attn.c_attn.weight": matrix, "attn.c_attn.bias": vector,
        "attn.c_proj.weight": branch, "attn.c_proj.bias": vector, "ln_2.weight": vector, "ln_2.bias": vector,
        "mlp.c_fc.weight": matrix, "mlp.c_fc.bias": vector, "mlp.c_proj.weight": branch,
        "mlp.c_proj.bias": vector,
    }  # fmt: skip
    embedding = Scaling(eps=embedding_eps)
    expected = {"transformer.wte.weight": embedding, "transformer.wpe.weight": embedding}
    expected |= {f"transformer.h.{i}.{part}": scaling for i in range(8) for part, scaling in block.items()}
    expected |= {"transformer.ln_f.weight": Scaling(), "transformer.ln_f.bias": Scaling()}
    # Complete(d)P's readout, init/m, η/m, λ·m and ε without a factor on the logits, is this one behind 1/m.
    expected |= {} if tied else {"lm_head.weight": embedding}
    found = parameter_scalings(trial, VOCAB, T)
    assert found.keys() == expected.keys()
    for parameter, scaling in expected.items():
        assert vars(found[parameter]) == pytest.approx(vars(scaling)), parameter
    assert vars(forward_scaling(trial)) == pytest.approx(vars(ForwardScaling(residual=residual, logits=0.5)))
    grown = forward_scaling(trial.replace(growing_dimension="head_size", width=128))
    assert grown.attention == pytest.approx(0.5), "1/d_head"


@pytest.mark.parametrize(
    ("growth", "rate"),
    [
        # Ren et al. 2026, equation 8: 24.27·T^-0.320, from 10.4 to 166.4 billion tokens at equal batch size
        ({"base_steps": 104, "steps": 1664}, 24.27 * 166.4e9**-0.320 / (24.27 * 10.4e9**-0.320)),
        # microsoft/ArchScale, pretrain.py: √(8/24) of the depth, √(b/b0) and (tokens/t0)^-0.32 of the batch
        ({"base_depth": 8, "depth": 24}, (8 / 24) ** 0.5),
        ({"base_batch_size": 4, "batch_size": 8}, 2**0.5 * 2**-0.32),
        ({"base_width": 32, "width": 64}, 1.0),
    ],
)
def test_hidden_rates_of_hyperp_are_its_authors(growth, rate):
    base = {"base_depth": 2, "depth": 2, "base_batch_size": 4, "batch_size": 4, "base_steps": 9, "steps": 9}
    trial = Trial(optimizer=OptimizerConfig(optimizer="muonh")).replace(
        architecture="llama",
        parametrization="hyperp",
        head_size=16,
        **{"base_width": 32, "width": 32} | base | growth,
    )
    factors = parameter_scalings(trial, VOCAB, T)
    assert factors["model.layers.0.mlp.up_proj.weight"].learning_rate == pytest.approx(rate)
    norm = rate * trial.growth.tokens**0.32
    assert factors["model.layers.0.input_layernorm.weight"].learning_rate == pytest.approx(norm)
    assert factors["model.embed_tokens.weight"].learning_rate == pytest.approx(norm)
    assert forward_scaling(trial).residual == pytest.approx(trial.growth.depth**-0.5)


@pytest.mark.parametrize(
    ("name", "alpha"),
    [("mup", None), ("completep", 1), ("completep_half", 0.5), ("completep_zero", 0), ("completedp", 1)],
)
@pytest.mark.parametrize(
    ("own", "width"),
    [
        ({"optimizer": "muon", "muon_scale": "spectral"}, 1.0),
        ({"optimizer": "muon", "muon_scale": "match_rms_adamw"}, 0.5),
        ({"optimizer": "muonh"}, 1.0),
        ({"optimizer": "adamh"}, 0.5),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_are_scaled_by_their_updates_norm_and_the_rest_as_adamw_has_it(
    name, alpha, own, width, tied
):
    """At m_N = 4 and m_L = 4: the norm of the update is ∝ √m_N, or constant, and must not grow (Yang et
    al. 2023, Condition 1), so that the learning rate is × 1/√m_N, or 1; in blocks × m_L^(α-1). A step's
    decay, η·λ, does not follow width. Init, ε, and all that is no hidden matrix, is as under AdamW."""
    trial = Trial().replace(
        parametrization=name, width=128, base_width=32, head_size=16, depth=8, base_depth=2, tied=tied,
        **own,
    )  # fmt: skip
    found, adamw = (parameter_scalings(t, VOCAB, T) for t in (trial, trial.replace(optimizer="adamw")))
    depth = 1 if alpha is None else 4 ** (alpha - 1)
    for n, parameter in declare(trial.model, VOCAB, T).parameters.items():
        if parameter.role == "hidden":
            expected = dataclasses.replace(adamw[n], learning_rate=width * depth, weight_decay=1 / width)
            assert vars(found[n]) == pytest.approx(vars(expected)), n
        else:
            assert found[n] == adamw[n], n


@pytest.mark.parametrize("scale", ["spectral", "match_rms_adamw"])
def test_sp_scales_nothing_for_muon(scale):
    trial = Trial().replace(
        parametrization="sp", width=128, base_width=32, head_size=16, optimizer="muon", muon_scale=scale
    )
    assert set(parameter_scalings(trial, VOCAB, T).values()) == {Scaling()}


@pytest.mark.parametrize("growing", ["heads", "head_size"])
@pytest.mark.parametrize(
    ("name", "lr", "eps", "embedding_eps"),
    [("completep", 1.0, 0.25, 1.0), ("completep_half", 0.5, 0.5, 1.0), ("completedp", 1.0, 0.25, 0.5)],
)
def test_factors_of_llama_s_parameters_are_those_of_the_same_tables(name, lr, eps, embedding_eps, growing):
    """At m_N = 2 and m_L = 4, as above; gate and up are matrices too. The gain of a query or key norm has
    all heads' gradients: where heads are added its ε does not follow the width (Mlodozeniec et al.)."""
    trial = Trial().replace(
        architecture="llama", parametrization=name, width=64, base_width=32, head_size=8, depth=8,
        base_depth=2, tied=False, qk_norm=True, query_group_size=2, growing_dimension=growing,
    )  # fmt: skip
    matrix = Scaling(init=2**-0.5, learning_rate=lr / 2, weight_decay=2, eps=eps / 2)
    gain = Scaling(learning_rate=lr, eps=eps / 2)
    head_gain = gain if growing == "head_size" else Scaling(learning_rate=lr, eps=eps)
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    layer = {f"self_attn.{part}": matrix for part in attention} | {f"mlp.{part}": matrix for part in mlp}
    layer |= {"self_attn.q_norm": head_gain, "self_attn.k_norm": head_gain}
    layer |= {"input_layernorm": gain, "post_attention_layernorm": gain}
    expected = {f"model.layers.{i}.{part}.weight": s for i in range(8) for part, s in layer.items()}
    embedding = Scaling(eps=embedding_eps)
    expected |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    expected |= {"model.norm.weight": Scaling()}
    found = parameter_scalings(trial, VOCAB, T)
    assert found.keys() == expected.keys()
    for parameter, scaling in expected.items():
        assert vars(found[parameter]) == pytest.approx(vars(scaling)), parameter


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["completep", "completep_half", "completep_zero", "completedp", "umup"])
def test_init_under_completep_does_not_follow_depth(name, architecture):
    base = Trial().replace(architecture=architecture, parametrization=name, depth=2, base_depth=2)
    deep = base.replace(depth=32)

    def spread(trial: Trial) -> dict[str, float]:
        parameters = declare(trial.model, VOCAB, T).parameters
        scalings = parameter_scalings(trial, VOCAB, T)
        return {n: p.init_factor * scalings[n].init for n, p in parameters.items()}

    first = spread(base)
    assert {n: x for n, x in spread(deep).items() if n in first} == pytest.approx(first)
    mup = spread(deep.replace(parametrization="mup"))
    follows = any(p.init_depth_exponent for p in declare(deep.model, VOCAB, T).parameters.values())
    assert (mup != pytest.approx(spread(deep))) == follows, "in μP and SP GPT-2's own factor follows it"


def test_sp_with_faster_embeddings_differs_in_these_alone_and_keeps_their_decay_a_step():
    trial = Trial().replace(
        parametrization="sp_embedding", width=128, base_width=32, head_size=16, tied=False
    )
    found = parameter_scalings(trial, VOCAB, T)
    faster = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert {found.pop(name) for name in faster} == {Scaling(learning_rate=4, weight_decay=0.25)}
    assert set(found.values()) == {Scaling()}
    assert forward_scaling(trial) == ForwardScaling()


def test_growth_is_that_of_the_trial_over_its_base_and_none_where_no_base_is_given():
    trial = Trial().replace(
        growing_dimension="head_size", width=96, base_width=32, head_size=16, depth=6, base_depth=2,
        batch_size=24, base_batch_size=8, steps=500, base_steps=100,
    )  # fmt: skip
    assert trial.growth == Growth(width=3, head_size=3, depth=3, batch_size=3, tokens=15)
    assert Trial().replace(width=64, depth=5, batch_size=7, steps=99).growth == Growth()


@pytest.mark.parametrize(
    ("architecture", "own"),
    [*((name, {}) for name in ARCHITECTURES), ("llama", {"qk_norm": True, "query_group_size": 2})],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("growing", ["heads", "head_size"])
def test_what_is_declared_is_what_mup_infers(architecture, tied, growing, own):
    """Fans and roles against the axes that mup's shape inference finds to grow."""
    config = ModelConfig(
        architecture=architecture, width=96, base_width=32, head_size=16, tied=tied,
        growing_dimension=growing, **own,
    )  # fmt: skip
    base = declare(ModelConfig(**(vars(config) | {"width": 32})), VOCAB, T).parameters
    inferred = infshapes(config, VOCAB, T)
    for name, p in declare(config, VOCAB, T).parameters.items():
        grown = [p.fan_in != base[name].fan_in, p.fan_out != base[name].fan_out]
        assert sum(grown) == inferred[name].ninf(), name
        assert (sum(grown) == 2) == (p.role == "hidden"), name
        assert math.prod(p.shape[-2:]) == p.fan_in * p.fan_out, name
        assert inferred[name].width_mult() == (3 if any(grown) else 1), name
        if p.role in ("readout", "router"):
            assert grown == [True, False]


@pytest.mark.parametrize("mode", ["coupled", "independent"])
@pytest.mark.parametrize("name", ["mup", "sp"])
def test_weight_decay_shrinks_as_its_mode_says(name, mode):
    """Coupled: in μP lr·λ of a matrix is the base's at every width. Independent: so is the shrinking by λ."""
    trial = Trial().replace(
        parametrization=name, width=128, base_width=32, head_size=16, learning_rate=0.01, weight_decay=0.1,
        decay_mode=mode,
    )  # fmt: skip
    shrinks = {
        p.role: 0.01 * s.learning_rate * UPDATE_RULES["adamw"].weight_decay(trial.optimizer, p, s)
        for p, s in zip(
            declare(trial.model, VOCAB, T).parameters.values(),
            parameter_scalings(trial, VOCAB, T).values(),
            strict=True,
        )
    }
    expected = 0.001 if mode == "coupled" else 0.1
    assert shrinks == pytest.approx(
        {
            "token_embedding": expected,
            "position_embedding": expected,
            "hidden": expected,
            "norm": 0,
            "bias": 0,
        }
    )


def test_an_update_rule_without_a_rule_of_its_own_is_one_sentence(monkeypatch):
    monkeypatch.setitem(
        UPDATE_RULES, "sgd", type("Lion", (type(UPDATE_RULES["sgd"]),), {"name": "unheard"})()
    )
    with pytest.raises(ConfigError, match="parametrization 'mup' has no rule for optimizer 'unheard'"):
        parameter_scalings(Trial().replace(optimizer="sgd"), VOCAB, T)


def test_a_sequence_or_vocabulary_as_long_as_a_width_does_not_look_like_width():
    trial = Trial().replace(width=64, base_width=32, head_size=16)
    rows = parameter_scalings(trial, vocab_size=64, sequence_length=32)
    assert rows["transformer.wte.weight"].learning_rate == rows["transformer.wpe.weight"].learning_rate == 1
    assert rows["transformer.h.0.mlp.c_fc.weight"].learning_rate == 0.5


def test_delta_equal_to_the_base_is_an_error():
    shapes = declare(ModelConfig(width=64), VOCAB, T).shapes
    with pytest.raises(ConfigError, match="delta model"):
        infer_infshapes(shapes, shapes, declare(ModelConfig(width=128), VOCAB, T).shapes)
