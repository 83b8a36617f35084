"""One configuration of transformers, at any width."""

import pytest
import torch
import transformers as hf

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import from_config, parametrize


def models():
    """The benchmark; importing its classes takes seconds, so that collecting this file does not."""
    import lint_models

    return lint_models


def config_of(name):
    return models().CONFIGS[name]


# Parameters a role of some architectures. Whatever it is, matrices of blocks are hidden.
GROWN = {
    "Mixtral": {"hidden": 12, "router": 2},
    "Qwen3-MoE": {"hidden": 12, "router": 2},
    "GPT-OSS": {"hidden": 12, "router": 2, "bias": 16},
    "MiniCPM3": {"hidden": 16},
    "Mamba2": {"hidden": 6},
    "Falcon": {"hidden": 8},
    "Falcon-H1": {"hidden": 20},
    "LFM2": {"hidden": 13},
    "T5": {"hidden": 32},
    "Llama": {"token_embedding": 1, "hidden": 14, "norm": 5, "readout": 1},
}


@pytest.mark.parametrize("name", GROWN)
def test_state_spaces_low_ranks_and_experts_grow_whole(name):
    config, roles = config_of(name), GROWN[name]
    grown = models().grow(name, 64)
    counts = grown.mup.table()["role"].value_counts()
    assert {role: counts[role] for role in roles} == roles
    readouts = [n for n, p in grown.mup.parameters.items() if p.role == "readout"]
    assert readouts in ([], ["lm_head.weight"])
    for field in ("embedding_multiplier", "lm_head_multiplier"):  # of the architecture: not the rule's
        assert getattr(grown.config, field, 0) == getattr(config, field, 0)
    model = grown.model()
    before = dict(grown.build(32).named_parameters())
    for n, p in model.named_parameters():
        if p.dim() == 1 and n.endswith("A_log"):  # no draw: heads of the same decays, whatever the width
            assert torch.equal(p, before[n].repeat(2)), n


def test_it_says_what_it_grew():
    gpt2, llama = config_of("GPT-2"), config_of("Llama")
    assert str(from_config(gpt2, width=128)) == "n_embd 32 → 128, n_head 4 → 16; heads of size 8"
    assert from_config(llama, width=64).grown == {
        "hidden_size": (32, 64), "intermediate_size": (64, 128), "num_attention_heads": (4, 8),
        "num_key_value_heads": (2, 4),
    }  # fmt: skip
    assert "head_dim 8 → 16; heads of size 16" in str(from_config(llama, width=64, heads="size"))
    assert gpt2.n_embd == 32 and llama.hidden_size == 32


def gpt2(width):
    config = config_of("GPT-2")
    sizes = {"n_embd": width, "n_head": width // 8}
    return hf.GPT2LMHeadModel(type(config).from_dict(config.to_dict() | sizes))


def llama(width):
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": 8}
    heads = {"num_attention_heads": width // 8, "num_key_value_heads": width // 16}
    config = config_of("Llama")
    return hf.LlamaForCausalLM(type(config).from_dict(config.to_dict() | sizes | heads))


@pytest.mark.parametrize("name, build", [("GPT-2", gpt2), ("Llama", llama)])
def test_model_and_factors_are_those_of_a_build_by_hand(name, build):
    grown, by_hand = from_config(config_of(name), width=128), parametrize(build, width=128, base_width=32)
    assert grown.mup.scalings == by_hand.scalings and grown.mup.forward == by_hand.forward
    torch.manual_seed(0)
    model = grown.model().eval()
    torch.manual_seed(0)
    other = by_hand.init_(build(128)).eval()
    tokens = torch.arange(12).reshape(1, 12)
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)


def test_heads_that_grow_divide_by_their_size():
    config = config_of("GPT-2")
    factors = {f.place: f.factor for f in from_config(config, width=128, heads="size").mup.forward}
    assert factors["scaling"] == pytest.approx(0.5), "1/d in place of 1/√d, from 8 to 32"
    assert "scaling" not in {f.place for f in from_config(config, width=128).mup.forward}


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("GPT-2", {"width": 100}, "width 100 is not allowed: n_embd, n_head grow, so give a multiple of 8"),
        ("GPT-2", {"width": 64, "heads": "both"}, "heads 'both' is not one of 'number', 'size'"),
        ("", {"width": 64}, "config 'dict' has no hidden_size"),
        ("GPT-2", {"width": 64, "grow": ["d_inner"]}, "grow has 'd_inner', which is no number of GPT2Config"),
        ("MiniCPM3", {"width": 64, "heads": "size"},
         r"does not grow whole: 'model.layers.0.self_attn.q_b_proj.weight' \(32, 16\) → \(32, 32\)"),
    ],
)  # fmt: skip
def test_what_cannot_grow_is_refused(name, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        from_config(config_of(name) if name else {}, **options)


@pytest.mark.parametrize(
    ("name", "module", "factor"),
    [
        ("Gemma 2", "model.embed_tokens", 1 / 2),  # the class multiplies by √width
        ("BART", "model.shared", 1 / 2),
        ("MiniCPM3", "lm_head", 1.0),  # divides by the width, as the rule does
        ("T5", "lm_head", 1 / 2),  # divides by √width
        ("Llama", "lm_head", 1 / 4),
    ],
)
def test_factors_of_the_class_are_taken_out(name, module, factor):
    grown = models().grow(name, 128)
    assert {f.module: f.factor for f in grown.mup.forward}[module] == pytest.approx(factor)
    if name == "Gemma 2":  # tied: the embedding's factor is baked into a matrix of its own
        model, tokens = grown.model().eval(), torch.arange(12).reshape(1, 12)
        logits = model(tokens).logits
        torch.testing.assert_close(grown.mup.bake_(model, untie=True)(tokens).logits, logits)


def test_with_these_factors_the_check_is_flat():
    report = models().check("Gemma 2", widths=(32, 64, 128), seeds=1, steps=1)
    assert report.passes, report
