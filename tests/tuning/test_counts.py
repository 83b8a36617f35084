"""Parameters of configurations, as transformers builds them, beside the numbers that their makers publish."""

import importlib.util
import json

import pytest

from mup_tpu import plan
from mup_tpu.errors import ConfigError
from mup_tpu.tuning.laws import read_counts

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
# Type, width, depth, feed-forward, vocabulary, other fields; parameters in all, and those that a token uses
PUBLISHED = {
    "Llama-3.2-1B": ("llama", 2048, 16, 8192, 128256, LLAMA, 1.24e9, None),
    "Llama-2-7B": ("llama", 4096, 32, 11008, 32000, {"num_attention_heads": 32}, 6.74e9, None),
    "Mistral-7B": ("mistral", 4096, 32, 14336, 32000,
                   {"num_attention_heads": 32, "num_key_value_heads": 8}, 7.24e9, None),
    "Gemma-2B": ("gemma", 2048, 18, 16384, 256000,
                 {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}, 2.51e9, None),
    "Qwen2-0.5B": ("qwen2", 896, 24, 4864, 151936, {"num_attention_heads": 14, "num_key_value_heads": 2,
                                                    "tie_word_embeddings": True}, 0.49e9, None),
    "Qwen3-8B": ("qwen3", 4096, 36, 12288, 151936,
                 {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}, 8.19e9, None),
    "OLMo-2-7B": ("olmo2", 4096, 32, 11008, 100352, {"num_attention_heads": 32}, 7.3e9, None),
    "Phi-3-mini": ("phi3", 3072, 32, 8192, 32064, {"num_attention_heads": 32}, 3.82e9, None),
    "Mixtral-8x7B": ("mixtral", 4096, 32, 14336, 32000, {"num_attention_heads": 32, "num_key_value_heads": 8,
                     "num_local_experts": 8, "num_experts_per_tok": 2}, 46.7e9, 12.9e9),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 48, 6144, 151936, {
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768}, 30.5e9, 3.35e9),
    "OLMoE-1B-7B": ("olmoe", 2048, 16, 1024, 50304, {"num_attention_heads": 16, "num_experts": 64,
                    "num_experts_per_tok": 8}, 6.92e9, 1.28e9),
    "DeepSeek-V3": ("deepseek_v3", 7168, 61, 18432, 129280, {}, 671e9, 37.6e9),
    "Pythia-1B": ("gpt_neox", 2048, 16, 8192, 50304, {"num_attention_heads": 8}, 1.01e9, None),
    "GPT-2": ("gpt2", 768, 12, None, 50257, {"n_positions": 1024}, 124e6, None),
}  # fmt: skip


def written(path, name):
    kind, width, depth, inner, vocabulary, others, *_ = PUBLISHED[name]
    names = ("n_embd", "n_layer") if kind == "gpt2" else ("hidden_size", "num_hidden_layers")
    values = {"model_type": kind, names[0]: width, names[1]: depth, "vocab_size": vocabulary, **others}
    values |= {"intermediate_size": inner} if inner else {}
    # transformers refuses ids of tokens beyond a vocabulary
    path.write_text(json.dumps(values | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}))
    return str(path)


def test_parameters_are_those_that_are_published(tmp_path, monkeypatch):
    find, built = importlib.util.find_spec, {}
    for name, (*_, total, used) in PUBLISHED.items():
        built[name] = read_counts(written(tmp_path / "config.json", name))
        assert built[name].total == pytest.approx(total, rel=0.012), name
        assert built[name].used == pytest.approx(used or total, rel=0.03 if used else 0.012), name
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "torch" and find(name))
    for name, (kind, *_) in PUBLISHED.items():
        path = written(tmp_path / "config.json", name)
        if kind in ("deepseek_v3", "gpt_neox"):
            with pytest.raises(ConfigError, match="do not follow from it without torch and transformers"):
                read_counts(path)
            continue
        counts = read_counts(path)
        assert counts.total == pytest.approx(built[name].total, rel=0.002), name
        assert counts.used == pytest.approx(built[name].used, rel=0.002), name
        assert counts.readout == built[name].readout, name


def test_a_plan_of_a_mixture_has_its_memory_and_the_flops_of_a_token(tmp_path):
    config = written(tmp_path / "config.json", "Qwen3-30B-A3B")
    made = plan([config, "tokens=100e9", "batch=4M"], "1e22")
    assert made.goal.memory_bytes({}) == pytest.approx(488e9, rel=0.01)
    assert made.target_cost == pytest.approx(6 * (3.35e9 - 0.31e9) * 100e9, rel=0.02)
    (derived,) = made.goal.derived
    assert "30.5B parameters, of which a token uses 3.35B" in derived and "config.json" in derived
    assert made.goal.memory_bytes(made.steps[-1].values) < made.goal.memory_bytes({})
    plain, known = (plan(["width=1024", "depth=8", *more], "1e17") for more in ([], ["vocab=1000"]))
    assert plain.goal.memory_bytes({}) == 16 * (12 * 8 * 1024**2 + 2 * 50_304 * 1024)
    assert known.goal.memory_bytes({}) == 16 * (12 * 8 * 1024**2 + 2 * 1000 * 1024)
    assert known.target_cost / plain.target_cost == pytest.approx(1 + 1000 / (12 * 8 * 1024), rel=1e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((text, "has no model_type") for text in ("[1]", "3", "null", '"text"', "{}", '{"hidden_size": 1}')),
        ("{", "cannot be read as JSON"),
        ('{"model_type": "t5"}', "builds no causal language model of type 't5'"),
        ('{"model_type": "mine", "hidden_size": 64}', "builds no causal language model of type 'mine'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "builds no causal language model of type 'llama'"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_counted_is_one_sentence(content, words, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        plan(str(tmp_path / "config.json"), "1e20")
    assert "\n" not in str(error.value)
