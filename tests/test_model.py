"""The model: stock GPT-2 at the base width, mup's readout at others, exports that need none of our code."""

import math
import subprocess
import sys

import mup
import pytest
import torch
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel

from mup_tpu.config import ModelConfig
from mup_tpu.model import (
    _LayerNorm,
    build_skeleton,
    count_parameters,
    export_stock,
    forward_factors,
    init_parameters,
    parameter_scalings,
    parameter_shapes,
)

VOCAB, T = 40, 16


def weights(config: ModelConfig, seed: int = 0, spread: float = 1.0) -> dict[str, torch.Tensor]:
    """Fresh weights; biases and norms moved off 0 and 1, so that a factor folded wrongly shows."""
    shapes = parameter_shapes(config, VOCAB, T)
    fresh = init_parameters(config, seed, shapes, parameter_scalings(config, "adamw", VOCAB, T))
    generator = torch.Generator().manual_seed(1)
    return {
        name: p + 0.1 * spread * torch.randn(p.shape, generator=generator)
        if p.dim() == 1
        else p * (1 + 4 * spread)
        for name, p in fresh.items()
    }


def logits(
    config: ModelConfig, parameters: dict[str, torch.Tensor], attention: str = "fused"
) -> torch.Tensor:
    buffers = {name: torch.tensor(value) for name, value in forward_factors(config).items()}
    skeleton = build_skeleton(config, VOCAB, T, attention)
    return functional_call(skeleton, parameters | buffers, (tokens(),), tie_weights=True)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, T), generator=torch.Generator().manual_seed(0))


CONFIGS = [
    ModelConfig(width=64, base_width=32, head_size=16, alpha_in=1.7, alpha_out=0.6, alpha_attn=1.3),
    ModelConfig(width=128, base_width=32, head_size=16, growing="head_size", alpha_in=0.5),
    ModelConfig(width=64, base_width=32, head_size=16, tied=False, alpha_in=2.0, alpha_attn=0.8),
    ModelConfig(width=96, base_width=32, head_size=8, parametrization="sp", alpha_out=3.0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_exported_checkpoint_has_our_logits_with_nothing_but_transformers(config, tmp_path):
    parameters = weights(config)
    export_stock(config, parameters, VOCAB, T, tmp_path / "export")
    code = (
        "import sys, torch; from transformers import GPT2LMHeadModel\n"
        "model = GPT2LMHeadModel.from_pretrained(sys.argv[1])\n"
        "x = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(0))\n"
        "torch.save(model(x).logits.detach(), sys.argv[2])\n"
        "assert not any(name.startswith('mup') for name in sys.modules)"
    )
    out = tmp_path / "logits.pt"
    subprocess.run([sys.executable, "-c", code, tmp_path / "export", out], check=True, capture_output=True)
    torch.testing.assert_close(
        torch.load(out, weights_only=True), logits(config, parameters), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("form", ["matmul", "blocks"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_attention_equals_fused(config, form):
    parameters = weights(config)
    torch.testing.assert_close(
        logits(config, parameters, form), logits(config, parameters), rtol=1e-5, atol=1e-5
    )


def test_fast_gelu_is_gpt2s_gelu_and_so_is_its_gradient():
    x = torch.linspace(-12, 12, 300_001, dtype=torch.float64, requires_grad=True)  # more than a block
    config = ModelConfig(width=32, head_size=16, base_width=32)
    fast = build_skeleton(config, 16, 8, fast_gelu=True).transformer.h[0].mlp.act
    ours, torchs = fast(x), torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, torchs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    far = torch.tensor([-1e4, 1e4, math.nan], requires_grad=True)
    torch.testing.assert_close(fast(far), torch.nn.functional.gelu(far, approximate="tanh"), equal_nan=True)
    assert torch.autograd.grad(fast(far).sum(), far)[0][:2].tolist() == [0, 1]


def test_base_width_with_unit_alphas_is_stock_gpt2():
    config = ModelConfig(width=32, base_width=32, head_size=16)
    parameters = weights(config)
    stock = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=T, n_embd=32, n_layer=2, n_head=2,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )  # fmt: skip
    assert {name: tuple(p.shape) for name, p in stock.named_parameters()} == parameter_shapes(
        config, VOCAB, T
    )
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
    ours = (hidden * forward_factors(config)["logit_factor"]) @ weight.T
    torch.testing.assert_close(ours, theirs(hidden).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "expected"), [(32, 1.0), (64, 2**-0.5), (128, 0.5)])
def test_attention_follows_one_over_d_when_the_head_size_grows(width, expected):
    growing = ModelConfig(width=width, base_width=32, head_size=16, growing="head_size")
    assert forward_factors(growing)["attention_factor"] == pytest.approx(expected)  # × 1/√d gives √16/d
    assert forward_factors(ModelConfig(width=width, base_width=32, head_size=16))["attention_factor"] == 1
    assert build_skeleton(growing, VOCAB, T).transformer.h[0].attn.head_size == width // 2


@pytest.mark.parametrize("parametrization", ["sp", "mup"])
def test_init_standard_deviations(parametrization):
    config = ModelConfig(width=256, base_width=64, head_size=32, depth=3, init_std=0.03, tied=False,
                         parametrization=parametrization)  # fmt: skip
    shapes = parameter_shapes(config, 4000, T)
    fresh = init_parameters(config, 0, shapes, parameter_scalings(config, "adamw", 4000, T))
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
    shapes = parameter_shapes(config, VOCAB, T)
    fresh = init_parameters(config, 0, shapes, parameter_scalings(config, "adamw", VOCAB, T))
    assert not fresh["lm_head.weight"].any() and fresh["transformer.wte.weight"].all()


def test_parameter_counts_match_the_closed_form():
    """Kaplan et al. 2020, table 1: N = 12·L·D² without biases and norms; embeddings V·D + T·D."""
    config = ModelConfig(width=64, depth=3)
    total, non_embedding = count_parameters(parameter_shapes(config, VOCAB, T))
    vectors = 3 * (4 * 64 + 3 * 64 + 64 + 4 * 64 + 64) + 2 * 64
    assert non_embedding == 12 * 3 * 64**2 + vectors
    assert total - non_embedding == (VOCAB + T) * 64


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_one_pass_norm_is_torch_s_and_so_are_its_gradients(offset):
    """Under vmap, as it is used, against torch's own in float64; rows whose mean is far from 0 too."""
    generator = torch.Generator().manual_seed(0)
    x_KND = offset + torch.randn(2, 7, 32, generator=generator)
    weight_KD, bias_KD = torch.randn(2, 2, 32, generator=generator)

    def loss(norm, x_ND, weight_D, bias_D):
        return norm(x_ND, weight_D, bias_D).pow(3).mean()

    def ours(x_ND, weight_D, bias_D):
        return _LayerNorm.apply(x_ND, weight_D, bias_D, 1e-5)[0]

    def torchs(x_ND, weight_D, bias_D):
        return torch.nn.functional.layer_norm(x_ND, (32,), weight_D, bias_D)

    def gradients(norm, *tensors):
        differentiated = torch.func.grad(lambda *t: loss(norm, *t), argnums=(0, 1, 2))
        return torch.func.vmap(differentiated)(*tensors)

    found = gradients(ours, x_KND, weight_KD, bias_KD)
    expected = gradients(torchs, x_KND.double(), weight_KD.double(), bias_KD.double())
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    one_value_N = torch.full((3, 32), 1e4, requires_grad=True)
    assert ours(one_value_N, weight_KD[0], bias_KD[0]).isfinite().all()
