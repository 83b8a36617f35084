"""GPT-2: stock at the base width, mup's readout at others, exports that need none of our code."""

import dataclasses
import os
import subprocess
import sys

import mup
import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from mup_tpu.config import ModelConfig, Trial
from mup_tpu.models import (
    Forms,
    architecture_of,
    declare,
    forward_factors,
    forward_scaling,
    parameter_scalings,
    training_flops,
)
from mup_tpu.models.weights import export_stock, init_parameters
from mup_tpu.rules.parametrization import ForwardScaling, Parametrization

VOCAB, T = 40, 16


def fresh_weights(config: ModelConfig, seed: int = 0, vocab_size: int = VOCAB) -> dict[str, torch.Tensor]:
    parameters = declare(config, vocab_size, T).parameters
    scalings = parameter_scalings(Trial(model=config), vocab_size, T)
    return init_parameters(parameters, scalings, config.init_std, seed)


def weights(config: ModelConfig, seed: int = 0, spread: float = 1.0) -> dict[str, torch.Tensor]:
    """Fresh weights; biases and norms moved off 0 and 1, so that a factor folded wrongly shows."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: p + 0.1 * spread * torch.randn(p.shape, generator=generator)
        if p.dim() == 1
        else p * (1 + 4 * spread)
        for name, p in fresh_weights(config, seed).items()
    }


def logits(
    config: ModelConfig, parameters: dict[str, torch.Tensor], forms: Forms | None = None
) -> torch.Tensor:
    residual = forward_scaling(Trial(model=config)).residual
    forms = dataclasses.replace(forms or Forms(), scaled_branches=residual != 1)
    network = architecture_of(config).network(config, VOCAB, T, forms)
    values = forward_factors(Trial(model=config))
    buffers = {name: torch.tensor(values[name]) for name, _ in network.named_buffers()}
    return functional_call(network, parameters | buffers, (tokens(),), tie_weights=True)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, T), generator=torch.Generator().manual_seed(0))


CONFIGS = [
    ModelConfig(width=64, base_width=32, head_size=16, alpha_in=1.7, alpha_out=0.6, alpha_attn=1.3),
    ModelConfig(width=128, base_width=32, head_size=16, growing_dimension="head_size", alpha_in=0.5),
    ModelConfig(width=64, base_width=32, head_size=16, tied=False, alpha_in=2.0, alpha_attn=0.8),
    ModelConfig(width=96, base_width=32, head_size=8, parametrization="sp", alpha_out=3.0),
    ModelConfig(
        width=64,
        base_width=32,
        head_size=16,
        depth=4,
        base_depth=1,
        parametrization="completep",
        alpha_in=1.2,
    ),
    ModelConfig(
        width=64, base_width=32, head_size=16, depth=4, base_depth=1, parametrization="completedp", tied=False
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_exported_checkpoint_has_our_logits_in_the_class_of_transformers(config, tmp_path):
    """`tests/cli/test_train.py` loads exports in a process without mup_tpu."""
    export_stock(Trial(model=config), weights(config), VOCAB, T, 0, tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1, "others can read some files only"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is GPT2LMHeadModel and "auto_map" not in model.config.to_dict()
    stock = model(tokens()).logits.detach()
    torch.testing.assert_close(stock, logits(config, weights(config)), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_an_export_imports_no_torch_xla_and_leaves_the_choice_of_others_as_it_is(tmp_path):
    pytest.importorskip("torch_xla")
    code = (
        "import os, sys, torch; from mup_tpu.config import ModelConfig, Trial\n"
        "from mup_tpu.models import declare; from mup_tpu.models.weights import export_stock\n"
        "config = ModelConfig(width=64, base_width=32, head_size=16)\n"
        "weights = {n: torch.ones(p.shape) for n, p in declare(config, 40, 16).parameters.items()}\n"
        "export_stock(Trial(model=config), weights, 40, 16, 0, sys.argv[1])\n"
        "assert 'accelerate' in sys.modules and 'torch_xla' not in sys.modules\n"
        "assert 'USE_TORCH_XLA' not in os.environ\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "USE_TORCH_XLA"}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=environment)
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("config", CONFIGS)
def test_attention_by_products_equals_fused(config):
    parameters = weights(config)
    products = logits(config, parameters, Forms(attention="matmul"))
    torch.testing.assert_close(products, logits(config, parameters), rtol=1e-5, atol=1e-5)


def test_base_width_with_unit_alphas_is_stock_gpt2():
    config = ModelConfig(width=32, base_width=32, head_size=16)
    parameters = weights(config)
    stock = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=T, n_embd=32, n_layer=2, n_head=2,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )  # fmt: skip
    assert {name: tuple(p.shape) for name, p in stock.named_parameters()} == declare(config, VOCAB, T).shapes
    stock.load_state_dict(parameters, strict=False)
    stock.tie_weights()
    torch.testing.assert_close(stock(tokens()).logits, logits(config, parameters), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_mups_readout(width, tied):
    """MuReadout / MuSharedReadout over the same hidden states, with mup's own base shapes."""
    config = ModelConfig(width=width, base_width=32, head_size=16, tied=tied, alpha_out=1.5)
    parameters = weights(config)
    hidden = torch.randn(2, 5, width)

    def readout(w: int) -> torch.nn.Module:
        if tied:
            return mup.MuSharedReadout(torch.nn.Parameter(torch.empty(VOCAB, w)), bias=False, output_mult=1.5)
        return mup.MuReadout(w, VOCAB, bias=False, output_mult=1.5)

    theirs = readout(width)
    mup.set_base_shapes(theirs, readout(32), delta=readout(96), rescale_params=False)
    weight = parameters["transformer.wte.weight" if tied else "lm_head.weight"]
    theirs.weight.data.copy_(weight)
    ours = (hidden * forward_factors(Trial(model=config))["logit_factor"]) @ weight.T
    torch.testing.assert_close(ours, theirs(hidden).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "expected"), [(32, 1.0), (64, 2**-0.5), (128, 0.5)])
def test_attention_follows_one_over_d_when_the_head_size_grows(width, expected):
    growing = ModelConfig(width=width, base_width=32, head_size=16, growing_dimension="head_size")
    factors = forward_factors(Trial(model=growing))
    assert factors["attention_factor"] == pytest.approx(expected)  # × 1/√d gives √16/d
    more_heads = ModelConfig(width=width, base_width=32, head_size=16)
    assert forward_factors(Trial(model=more_heads))["attention_factor"] == 1
    assert declare(growing, VOCAB, T).head_size == width // 2


@pytest.mark.parametrize("parametrization", ["sp", "mup"])
def test_init_standard_deviations(parametrization):
    config = ModelConfig(width=256, base_width=64, head_size=32, depth=3, init_std=0.03, tied=False,
                         parametrization=parametrization)  # fmt: skip
    fresh = fresh_weights(config, vocab_size=4000)
    hidden = 0.03 * (0.5 if parametrization == "mup" else 1.0)  # 1/√m, m = 4
    expected = {
        "transformer.wte.weight": 0.03,
        "lm_head.weight": 0.03,
        "transformer.h.1.attn.c_attn.weight": hidden,
        "transformer.h.1.mlp.c_fc.weight": hidden,
        "transformer.h.1.attn.c_proj.weight": hidden / 6**0.5,
        "transformer.h.1.mlp.c_proj.weight": hidden / 6**0.5,
    }
    for name, std in expected.items():
        assert float(fresh[name].std()) == pytest.approx(std, rel=0.02), name
    assert not fresh["transformer.h.0.attn.c_attn.bias"].any()
    assert (fresh["transformer.ln_f.weight"] == 1).all()


def test_readout_zero_init():
    config = ModelConfig(tied=False, readout_zero_init=True)
    fresh = fresh_weights(config)
    assert not fresh["lm_head.weight"].any() and fresh["transformer.wte.weight"].all()


def test_parameter_counts_match_the_closed_form():
    """Kaplan et al. 2020, table 1: N = 12·L·D² without biases and norms; embeddings V·D + T·D."""
    config = ModelConfig(width=64, depth=3)
    declared = declare(config, VOCAB, T)
    vectors = 3 * (4 * 64 + 3 * 64 + 64 + 4 * 64 + 64) + 2 * 64
    assert declared.non_embedding == 12 * 3 * 64**2 + vectors
    assert declared.total - declared.non_embedding == (VOCAB + T) * 64


@pytest.mark.parametrize("config", CONFIGS)
def test_the_network_has_the_declared_parameters_in_the_declared_order(config):
    network = architecture_of(config).network(config, VOCAB, T)
    declared = declare(config, VOCAB, T)
    assert [(n, tuple(p.shape)) for n, p in network.named_parameters()] == list(declared.shapes.items())
    for module in declared.probes.values():
        network.get_submodule(module)
    scaled = architecture_of(config).network(config, VOCAB, T, Forms(scaled_branches=True))
    assert {name for name, _ in scaled.named_buffers()} == forward_factors(Trial(model=config)).keys()


@pytest.mark.parametrize("config", CONFIGS)
def test_fused_matrices_are_declared_as_what_they_are_made_of(config):
    """transformers splits c_attn's last axis into queries, keys and values, in this order."""
    fused = [p for p in declare(config, VOCAB, T).parameters.values() if p.slices]
    assert len(fused) == 2 * config.depth
    for parameter in fused:
        parts = torch.arange(parameter.shape[-1]).split(config.width)
        assert list(parameter.slices) == ["query", "key", "value"]
        for part, declared in zip(parts, parameter.slices.values(), strict=True):
            assert (declared.start, declared.stop) == (int(part[0]), int(part[-1]) + 1)


def test_residual_factor_scales_every_branch_and_folds_into_the_export(monkeypatch, tmp_path):
    """Against stock GPT-2 whose branches are scaled by hooks of this test."""
    from mup_tpu import models
    from mup_tpu.rules import parametrization

    rule = Parametrization(
        "a rule of this test", parametrization.PARAMETRIZATIONS["sp"].parameters,
        forward=lambda growth: ForwardScaling(residual=growth.depth**-0.5),
    )  # fmt: skip
    monkeypatch.setitem(parametrization.PARAMETRIZATIONS, "halved", rule)  # type: ignore[arg-type]
    config = ModelConfig(
        width=32, base_width=32, head_size=16, depth=4, base_depth=1, parametrization="halved"
    )
    parameters = weights(config)
    ours = logits(config, parameters)
    stock = models.architecture_of(config).stock(config, VOCAB, T)
    stock.load_state_dict(parameters, strict=False)
    stock.tie_weights()
    for block in stock.transformer.h:
        for branch in (block.attn.c_proj, block.mlp.c_proj):
            branch.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    torch.testing.assert_close(stock(tokens()).logits, ours, rtol=1e-5, atol=1e-5)
    export_stock(Trial(model=config), parameters, VOCAB, T, 0, tmp_path)
    exported = GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(exported(tokens()).logits, ours, rtol=1e-5, atol=1e-5)


def test_arithmetic_is_a_float_at_any_size():
    """Whole numbers beyond 2^53 do not fit into a column of floats."""
    huge = Trial().replace(width=2**20, depth=48, steps=10**6)
    assert isinstance(training_flops(huge, 256), float) and training_flops(huge, 256) > 2**53
