"""Declaration of Llama (Touvron et al. 2023, arXiv:2302.13971). `llama_network` has the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import ActivationMemory, Architecture, Parameter
from mup_tpu.models.gpt2 import ACTIVATIONS

EPS = 1e-6  # addend to the mean square in norms, the default of transformers' Llama and Qwen3

ROTARY_BASE = 10_000.0  # Llama's base of rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.2.2)


def mlp_width(width: int) -> int:
    """Return the width between an MLP's layers: 43/16 of the model's, Llama's share at 4096 and 8192.

    Llama rounds ⌊8/3·D⌋ up to a multiple of 256. At the widths of a sweep the share would then change with
    width (4 at 64, 3 at 256), and width multipliers with it; here the multiple is D/16.
    """
    return -(-43 * width // 16)


class Llama(Architecture):
    """Llama, whose matrices are stored (outputs, inputs); with QK norms, Qwen3.

    RMS norms, rotary positions, SwiGLU, no biases; grouped key-value heads as an option.
    """

    name = "llama"
    embedding_scale, blocks, final_norm = "model.embed_scale", "model.layers", "model.norm"
    branches = {"attention": "self_attn.o_proj", "mlp": "mlp.down_proj"}
    counted = Architecture.counted | {"qk_norm", "query_group_size"}

    def embeddings(self, width: int, vocab_size: int, sequence_length: int) -> dict[str, Parameter]:
        tokens = Parameter((vocab_size, width), "token_embedding", vocab_size, width)
        return {"model.embed_tokens.weight": tokens}

    def block(self, config: ModelConfig, index: int) -> dict[str, Parameter]:
        d = config.width
        key_values, head = d // config.query_group_size, config.actual_head_size
        norms = {"self_attn.q_norm": _gain(head), "self_attn.k_norm": _gain(head)}
        attention = {
            "self_attn.q_proj": matrix(d, d),
            "self_attn.k_proj": matrix(d, key_values),
            "self_attn.v_proj": matrix(d, key_values),
            "self_attn.o_proj": matrix(d, d, branch=f"attention {index}"),
            **(norms if config.qk_norm else {}),
        }
        after = {"input_layernorm": _gain(d), "post_attention_layernorm": _gain(d)}
        return weights(attention) | self.mlp(config, f"mlp {index}") | weights(after)

    def mlp(self, config: ModelConfig, branch: str) -> dict[str, Parameter]:
        return weights(gated(config.width, mlp_width(config.width), branch, "mlp"))

    def norm(self, width: int, in_block: bool = True) -> dict[str, Parameter]:
        return {"weight": _gain(width, in_block)}

    def query(self, config: ModelConfig) -> str:
        # The queries' norm would undo a factor on their weights.
        return "self_attn.q_norm" if config.qk_norm else "self_attn.q_proj"

    def activations(self, config: ModelConfig) -> ActivationMemory:
        """Return the numbers measured with Llama's layers."""
        # In turns: inputs of norms and matrices; queries, keys and values by head and side by side; the MLP's
        # product and both slopes, 26; measured as GPT-2's. Under vmap, elementary operations
        # of norms and rotations add temporary tensors. XLA's numbers are GPT-2's except for the vectors of QK
        # norms: within 13 % of TPU v4's and v5e's compilers (benchmarks/tpu_memory_llama*.csv).
        measured = replace(ACTIVATIONS, cuda_vectors={"bf16": 11.7, "float32": 19}, cuda_evaluation=0)
        if not config.qk_norm:
            return replace(measured, vectors={"loop": 40, "vmap": 78}, passing=14)
        cuda_vectors = {"bf16": 14.6, "float32": 23.6}
        vectors, xla_vectors = {"loop": 43, "vmap": 97}, {"matmul": 25, "recomputed": 20}
        return replace(
            measured, vectors=vectors, passing=14, xla_vectors=xla_vectors, cuda_vectors=cuda_vectors
        )

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        name, between = "Qwen3" if config.qk_norm else "Llama", mlp_width(config.width)
        return stock(name, config, vocab_size, sequence_length, intermediate_size=between)


def stock(name: str, config: ModelConfig, vocab_size: int, sequence_length: int, **more: Any) -> Any:
    """Build a model of a family of transformers that shares Llama's attention, with more settings."""
    import transformers

    settings = getattr(transformers, f"{name}Config")(
        vocab_size=vocab_size,
        max_position_embeddings=sequence_length,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads // config.query_group_size,
        head_dim=config.actual_head_size,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )
    return getattr(transformers, f"{name}ForCausalLM")(settings)


def weights(modules: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {f"{module}.weight": parameter for module, parameter in modules.items()}


def gated(width: int, between: int, branch: str, module: str) -> dict[str, Parameter]:
    """Declare the matrices of a gated MLP, by module."""
    return {
        f"{module}.gate_proj": matrix(width, between),
        f"{module}.up_proj": matrix(width, between),
        f"{module}.down_proj": matrix(between, width, branch=branch),
    }


def matrix(inputs: int, outputs: int, branch: str = "") -> Parameter:
    return Parameter((outputs, inputs), "hidden", inputs, outputs, in_block=True, branch=branch)


def _gain(width: int, in_block: bool = True) -> Parameter:
    return Parameter((width,), "norm", 1, width, in_block=in_block, init="ones")
