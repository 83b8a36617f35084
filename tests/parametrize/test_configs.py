"""One configuration of transformers, at any width."""

import pytest
import torch
from transformers import (
    FalconH1Config,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MiniCPM3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import from_config, parametrize

OWN = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
GPT2 = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, **OWN)
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    **OWN,
)  # fmt: skip


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, **OWN}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LFM2 = Lfm2Config(**SMALL, **HEADS, layer_types=["conv", "full_attention"], block_ff_dim=64)
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
# Model, and its number of parameters a role. Whatever the architecture, matrices of blocks are hidden.
GROWN = {
    "mixtral": (MixtralConfig(**SMALL, **HEADS, num_local_experts=4), {"hidden": 12, "router": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig(**SMALL, **HEADS, **EXPERTS, moe_intermediate_size=32, num_experts=4),
        {"hidden": 12, "router": 2},
    ),
    "gpt_oss": (
        GptOssConfig(**SMALL, **HEADS, **EXPERTS, num_local_experts=4),
        {"hidden": 12, "router": 2, "bias": 16},
    ),
    "minicpm3": (MiniCPM3Config(**SMALL, **MLA), {"hidden": 16}),
    "mamba2": (
        Mamba2Config(**SMALL, num_heads=8, head_dim=8, state_size=8, n_groups=1),
        {"hidden": 6},
    ),
    "falcon_h1": (
        FalconH1Config(**SMALL, **HEADS, head_dim=8, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8,
                       mamba_d_state=8, embedding_multiplier=5.6, lm_head_multiplier=0.013),
        {"hidden": 20},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWN)
def test_state_spaces_low_ranks_and_experts_grow_whole(name):
    config, roles = GROWN[name]
    grown = from_config(config, width=64)
    counts = grown.mup.table()["role"].value_counts()
    assert {role: counts[role] for role in roles} == roles
    readouts = [n for n, p in grown.mup.parameters.items() if p.role == "readout"]
    assert readouts in ([], ["lm_head.weight"])
    for field in ("embedding_multiplier", "lm_head_multiplier"):  # of the architecture: not the rule's
        assert getattr(grown.config, field, 0) == getattr(config, field, 0)
    model = grown.model()
    before = dict(grown.build(32).named_parameters())
    for n, p in model.named_parameters():
        if p.dim() == 1 and n.endswith("A_log"):  # no draw: the model's, whatever the width
            assert torch.equal(p[: len(before[n])], before[n]), n


def test_it_says_what_it_grew():
    assert str(from_config(GPT2, width=128)) == "n_embd 32 → 128, n_head 4 → 16; heads of size 8"
    assert from_config(LLAMA, width=64).grown == {
        "hidden_size": (32, 64), "intermediate_size": (96, 192), "num_attention_heads": (4, 8),
        "num_key_value_heads": (2, 4),
    }  # fmt: skip
    assert "head_dim 8 → 16; heads of size 16" in str(from_config(LLAMA, width=64, heads="size"))
    assert GPT2.n_embd == 32 and LLAMA.hidden_size == 32


def gpt2(width):
    shape = {"n_positions": 16, "n_layer": 2, "n_embd": width, "n_head": width // 8}
    return GPT2LMHeadModel(GPT2Config(**shape, **OWN))


def llama(width):
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": width // 8, "num_key_value_heads": width // 16}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **OWN))


@pytest.mark.parametrize("config, build", [(GPT2, gpt2), (LLAMA, llama)])
def test_model_and_factors_are_those_of_a_build_by_hand(config, build):
    grown, by_hand = from_config(config, width=128), parametrize(build, width=128, base_width=32)
    assert grown.mup.scalings == by_hand.scalings and grown.mup.forward == by_hand.forward
    torch.manual_seed(0)
    model = grown.model().eval()
    torch.manual_seed(0)
    other = by_hand.init_(build(128)).eval()
    tokens = torch.arange(12).reshape(1, 12)
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)


def test_heads_that_grow_divide_by_their_size():
    factors = {f.place: f.factor for f in from_config(GPT2, width=128, heads="size").mup.forward}
    assert factors["scaling"] == pytest.approx(0.5), "1/d in place of 1/√d, from 8 to 32"
    assert "scaling" not in {f.place for f in from_config(GPT2, width=128).mup.forward}


@pytest.mark.parametrize(
    "config, options, sentence",
    [
        (GPT2, {"width": 100}, "width 100 is not allowed: n_embd, n_head grow, so give a multiple of 8"),
        (GPT2, {"width": 64, "heads": "both"}, "heads 'both' is not one of 'number', 'size'"),
        ({}, {"width": 64}, "config 'dict' has no hidden_size"),
        (GPT2, {"width": 64, "grow": ["d_inner"]}, "grow has 'd_inner', which is no number of GPT2Config"),
        (LFM2, {"width": 64}, r"does not grow whole: 'model.layers.0.feed_forward.w1.weight' \(256, 32\)"),
    ],
)  # fmt: skip
def test_what_cannot_grow_is_refused(config, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        from_config(config, **options)
