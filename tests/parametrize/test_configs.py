"""One configuration of transformers, at any width."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import from_config, parametrize

OWN = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
GPT2 = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, **OWN)
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    **OWN,
)  # fmt: skip


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
        (GPT2, {"width": 100}, "width 100 is not allowed: hidden_size, .* so give a multiple of 8"),
        (GPT2, {"width": 64, "heads": "both"}, "heads 'both' is not one of 'number', 'size'"),
        ({}, {"width": 64}, "config 'dict' has no hidden_size"),
    ],
)  # fmt: skip
def test_what_cannot_grow_is_refused(config, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        from_config(config, **options)
