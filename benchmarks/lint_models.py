"""What `from_config` makes of configurations of transformers, and what the check says under μP.

python benchmarks/lint_models.py              the table of `benchmarks/lint_models.md` (minutes)
python benchmarks/lint_models.py Gemma        those with this in their name, with the whole report
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import transformers as hf
import tyro

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import coord_check, from_config

BASE, WIDTHS = 32, (32, 64, 128, 256)
TEXT = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"hidden_size": BASE, "num_hidden_layers": 2, "intermediate_size": 64, **TEXT}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SIZE = {"head_dim": 8}
FEW = {"num_experts_per_tok": 2, **SIZE}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    **ALL_HEADS,
}  # fmt: skip
SSM = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}

CONFIGS: Mapping[str, hf.PreTrainedConfig] = {
    "GPT-2": hf.GPT2Config(n_positions=16, n_embd=BASE, n_layer=2, n_head=4, **TEXT),
    "GPT-NeoX": hf.GPTNeoXConfig(**SMALL, num_attention_heads=4),
    "Llama": hf.LlamaConfig(**SMALL, **HEADS),
    "Mistral": hf.MistralConfig(**SMALL, **HEADS),
    "Qwen2": hf.Qwen2Config(**SMALL, **HEADS),
    "Qwen3": hf.Qwen3Config(**SMALL, **HEADS, **SIZE),
    "Phi-3": hf.Phi3Config(**SMALL, **HEADS),
    "OLMo-2": hf.Olmo2Config(**SMALL, **HEADS),
    "Gemma": hf.GemmaConfig(**SMALL, **HEADS, **SIZE),
    "Gemma 2": hf.Gemma2Config(**SMALL, **HEADS, **SIZE),
    "Mixtral": hf.MixtralConfig(**SMALL, **HEADS, num_local_experts=4),
    "Qwen3-MoE": hf.Qwen3MoeConfig(**SMALL, **HEADS, **FEW, moe_intermediate_size=32, num_experts=4),
    "GPT-OSS": hf.GptOssConfig(**SMALL, **HEADS, **FEW, num_local_experts=4),
    "DeepSeek-V3": hf.DeepseekV3Config(
        **SMALL, **MLA, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1,
    ),
    "MiniCPM3": hf.MiniCPM3Config(**SMALL, **MLA),
    "Mamba2": hf.Mamba2Config(**SMALL, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8),
    "Falcon-H1": hf.FalconH1Config(
        **SMALL, **HEADS, **SIZE, **SSM, mamba_n_groups=1, embedding_multiplier=5.6,
        lm_head_multiplier=0.013,
    ),
    "Nemotron-H": hf.NemotronHConfig(
        **SMALL, **HEADS, **SIZE, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1,
        chunk_size=8, hybrid_override_pattern="M*",
    ),
    "LFM2": hf.Lfm2Config(**SMALL, **HEADS, layer_types=["conv", "full_attention"]),
    "T5": hf.T5Config(
        vocab_size=64, d_model=BASE, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "BART": hf.BartConfig(
        vocab_size=64, d_model=BASE, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, scale_embedding=True,
        max_position_embeddings=16,
    ),
    "OPT": hf.OPTConfig(
        hidden_size=BASE, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4, max_position_embeddings=16,
        word_embed_proj_dim=BASE, dropout=0.0, **TEXT,
    ),
    "BLOOM": hf.BloomConfig(hidden_size=BASE, n_layer=2, n_head=4, hidden_dropout=0.0, **TEXT),
    "Granite": hf.GraniteConfig(
        **SMALL, **HEADS, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
        attention_multiplier=1 / 64,
    ),
    "Bamba": hf.BambaConfig(
        **SMALL, **HEADS, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        mamba_chunk_size=8, attn_layer_indices=[1],
    ),
    "RWKV-4": hf.RwkvConfig(hidden_size=BASE, num_hidden_layers=2, context_length=16, **TEXT),
    "RecurrentGemma": hf.RecurrentGemmaConfig(
        **SMALL, **SIZE, num_attention_heads=4, num_key_value_heads=1, lru_width=BASE,
        block_types=("recurrent", "attention"),
    ),
    "Qwen3-Next": hf.Qwen3NextConfig(
        **SMALL, **HEADS, **FEW, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Mamba": hf.MambaConfig(**SMALL, state_size=8),
    "Jamba": hf.JambaConfig(
        **SMALL, **HEADS, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8,
    ),
    "Cohere": hf.CohereConfig(**SMALL, **HEADS, logit_scale=0.0625),
    "StarCoder2": hf.Starcoder2Config(**SMALL, **HEADS),
    "Falcon": hf.FalconConfig(
        hidden_size=BASE, num_hidden_layers=2, num_attention_heads=4, multi_query=False,
        new_decoder_architecture=True, num_kv_heads=2, **TEXT,
    ),
    "GPT-J": hf.GPTJConfig(n_positions=16, n_embd=BASE, n_layer=2, n_head=4, rotary_dim=4, **TEXT),
    "StableLM": hf.StableLmConfig(**SMALL, **HEADS),
    "OLMoE": hf.OlmoeConfig(**SMALL, **HEADS, num_experts=4, num_experts_per_tok=2),
    "SmolLM3": hf.SmolLM3Config(**SMALL, **HEADS, no_rope_layers=[1, 0]),
    "Apertus": hf.ApertusConfig(**SMALL, **HEADS),
    "ModernBERT": hf.ModernBertConfig(
        **SMALL, num_attention_heads=4, cls_token_id=1, sep_token_id=2, attn_implementation="eager",
    ),
    "DINOv2": hf.Dinov2Config(
        hidden_size=BASE, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4,
        num_labels=10,
    ),
    "ViT": hf.ViTConfig(
        hidden_size=BASE, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=8,
        patch_size=4, hidden_dropout_prob=0.0, num_labels=10,
    ),
}  # fmt: skip
CLASSES = {
    "T5": hf.T5ForConditionalGeneration,
    "BART": hf.BartForConditionalGeneration,
    "ViT": hf.ViTForImageClassification,
    "DINOv2": hf.Dinov2ForImageClassification,
    "ModernBERT": hf.ModernBertForMaskedLM,
}


def batch_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name in ("ViT", "DINOv2"):
        images = torch.randn(8, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(8)}
    tokens = torch.randint(4, 64, (4, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = module(**batch).loss
    return result


def grow(name: str, width: int = 4 * BASE, **options: Any) -> Any:
    return from_config(CONFIGS[name], width=width, model_class=CLASSES.get(name), **options)


def check(name: str, **options: Any) -> Any:
    grown = grow(name)
    options = {
        "widths": WIDTHS, "base_width": BASE, "lr": 2**-7, "rules": ["mup"], "roles": grown.roles, "steps": 2,
        "progress": lambda doing, share: None,
    } | options  # fmt: skip
    return coord_check(grown.build, batch_of(name), loss, **options).reports["mup"]


def main(part: Annotated[str, tyro.conf.Positional] = "", seeds: int = 2, eps: float = 1e-8) -> None:
    """Print a row a configuration.

    Args:
        part: part of the names of configurations to try, or several with commas; the whole report of each is
            printed too.
        seeds: number of seeds of the init.
        eps: Adam's ε.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    for name in CONFIGS:
        if not any(of in name for of in part.split(",")):
            continue
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                grown, report = grow(name), check(name, seeds=seeds, eps=eps)
        except ConfigError as error:
            print(f"| {name} | refused | | | {error} |", flush=True)
            continue
        counts = grown.mup.table()["role"].value_counts()
        roles = ", ".join(f"{count} {role.replace('_', ' ')}" for role, count in counts.items())
        effects = report.table()["effect"].dropna()
        low, high = (f"{effects[k]:.2f} ({k})" for k in (effects.idxmin(), effects.idxmax()))
        said = "flat" if report.passes else report.sentence
        print(f"| {name} | whole | {roles} | {low} to {high} | {said} |", flush=True)
        if part:
            print(report)


if __name__ == "__main__":
    tyro.cli(main)
