"""GPT-2 beside what all networks share (test_networks.py): mup's readout, initial weights, counts."""

import os
import subprocess
import sys

import mup
import pytest
import torch

from mup_tpu.config import ModelConfig, Trial
from mup_tpu.models import declare, forward_factors, parameter_scalings, training_flops
from mup_tpu.models.networks import init_parameters

VOCAB, T = 40, 16


def fresh_weights(config: ModelConfig, seed: int = 0, vocab_size: int = VOCAB) -> dict[str, torch.Tensor]:
    parameters = declare(config, vocab_size, T).parameters
    scalings = parameter_scalings(Trial(model=config), vocab_size, T)
    return init_parameters(parameters, scalings, config.init_std, seed)


@pytest.mark.nightly
def test_an_export_imports_no_torch_xla_and_leaves_the_choice_of_others_as_it_is(tmp_path, with_torch_xla):
    code = (
        "import os, sys, torch; from mup_tpu.config import ModelConfig, Trial\nfrom mup_tpu.models import "
        "declare; from mup_tpu.models.networks import export_stock\nconfig = ModelConfig(width=64, "
        "base_width=32, head_size=16)\nweights = {n: torch.ones(p.shape) for n, p in declare(config, 40, "
        "16).parameters.items()}\nexport_stock(Trial(model=config), weights, 40, 16, 0, sys.argv[1])\nassert "
        "'accelerate' in sys.modules and 'torch_xla' not in sys.modules\nassert 'USE_TORCH_XLA' not in "
        "os.environ\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "USE_TORCH_XLA"}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=environment)
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_mups_readout(width, tied):
    """MuReadout / MuSharedReadout over the same hidden states, with mup's own base shapes."""
    config = ModelConfig(width=width, base_width=32, head_size=16, tied=tied, alpha_out=1.5)
    parameters = fresh_weights(config)
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


def test_fused_matrices_are_declared_as_what_they_are_made_of():
    """transformers splits c_attn's last axis into queries, keys and values, in this order."""
    config = ModelConfig(width=64, base_width=32, head_size=16)
    fused = [p for p in declare(config, VOCAB, T).parameters.values() if p.slices]
    assert len(fused) == 2 * config.depth
    for parameter in fused:
        parts = torch.arange(parameter.shape[-1]).split(config.width)
        assert list(parameter.slices) == ["query", "key", "value"]
        for part, declared in zip(parts, parameter.slices.values(), strict=True):
            assert (declared.start, declared.stop) == (int(part[0]), int(part[-1]) + 1)


def test_arithmetic_is_a_float_at_any_size():
    """Whole numbers beyond 2^53 do not fit into a column of floats."""
    huge = Trial().replace(width=2**20, depth=48, steps=10**6)
    assert isinstance(training_flops(huge, 256), float) and training_flops(huge, 256) > 2**53
