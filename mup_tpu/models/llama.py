"""Llama (Touvron et al. 2023, arXiv:2302.13971): what it declares. Its network is in `llama_network`.

Shapes: D width, V vocabulary, T positions, I width between an MLP's layers, H heads, G key-value heads, d
head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import ActivationMemory, Architecture, Declaration, Fold, Forms, Parameter, readout
from mup_tpu.models.llama_sizes import EPS, ROTARY_BASE, mlp_width
from mup_tpu.rules.parametrization import ForwardScaling

if TYPE_CHECKING:
    from torch import nn

_TOKENS, _READOUT, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def activations(qk_norm: bool) -> ActivationMemory:
    """What its layers keep, as measured (tests/training/test_memory.py)."""
    return ActivationMemory(
        # In turns: inputs of norms and matrices, queries, keys and values by head and side by side, the MLP's
        # product and both slopes; with the rest it came to what GPT-2 keeps. Under vmap elementary operations
        # of norms and turns come and go beside them.
        vectors={"loop": 36, "vmap": 97} if qk_norm else {"loop": 34, "vmap": 78},
        scores={"loop": 0.5, "vmap": 4},
        logits=4,
        # As TPU v4's and v5e's compilers need them (benchmarks/tpu_memory_llama*.csv), within 13 %: GPT-2's
        # numbers but for the vectors of QK norms.
        xla_vectors={"matmul": 25, "recomputed": 20} if qk_norm else {"matmul": 15.6, "recomputed": 11.5},
        xla_scores={"matmul": 0.0, "recomputed": 0.26},
        xla_logits=2.3,
        xla_bf16=0.6,
    )


class Llama(Architecture):
    """Llama under transformers' names, where matrices are stored (outputs, inputs); with QK norms, Qwen3.

    RMS norms, rotary positions, SwiGLU, no biases; grouped key-value heads as an option.
    """

    name = "llama"

    def declare(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Declaration:
        """Its parameters and what follows from its size."""
        d = config.width
        layers = [f"model.layers.{i}" for i in range(config.depth)]
        parameters = {_TOKENS: Parameter((vocab_size, d), "token_embedding", vocab_size, d)}
        probes = {"embedding": "model.embed_scale"}
        for i, layer in enumerate(layers):
            parameters |= _layer(layer, i, config)
            probes |= {
                f"attention {i}": f"{layer}.self_attn.o_proj",
                f"mlp {i}": f"{layer}.mlp.down_proj",
                f"residual {i}": layer,
            }
        parameters[_FINAL_NORM] = _gain(d, in_block=False)
        if not config.tied:
            parameters[_READOUT] = readout(config, vocab_size)
        return Declaration(
            parameters=parameters,
            width=d,
            layers=config.depth,
            heads=config.heads,
            head_size=config.actual_head_size,
            probes=probes | {"final norm": _FINAL_NORM.removesuffix(".weight")},
            blocks=tuple(layers),
            activations=activations(config.qk_norm),
        )

    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        """Value of each buffer of its network."""
        return {
            "model.embed_scale.factor": config.alpha_in * scaling.embeddings,
            "attention_factor": config.alpha_attn * scaling.attention,
            "residual_factor": scaling.residual,
            "logit_factor": config.alpha_out * scaling.logits,
        }

    def network(
        self, config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms = Forms()
    ) -> nn.Module:
        """Its module without weights (meta device)."""
        from mup_tpu.models.llama_network import build

        return build(config, vocab_size, forms)

    def folds(self, config: ModelConfig, scaling: ForwardScaling) -> list[Fold]:
        """The embeddings' factor folds into the embedding, attention's into the query weights (or the gain of
        their norm, which would undo it), the residual branches' into their last layers, and the logits' into
        the final norm (over the embeddings' where the readout is the embedding).
        """
        factors = self.factors(config, scaling)
        embeddings = factors["model.embed_scale.factor"]
        query = "q_norm" if config.qk_norm else "q_proj"
        folds = [
            Fold(_TOKENS, embeddings),
            Fold(_FINAL_NORM, factors["logit_factor"] / (embeddings if config.tied else 1.0)),
        ]
        for name, parameter in self.declare(config, 1, 1).parameters.items():
            if name.endswith(f".self_attn.{query}.weight"):
                folds.append(Fold(name, factors["attention_factor"]))
            if parameter.branch:
                folds.append(Fold(name, factors["residual_factor"]))
        return folds

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        """A `LlamaForCausalLM` of the same shape; with QK norms a `Qwen3ForCausalLM`."""
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        make: Any = Qwen3ForCausalLM if config.qk_norm else LlamaForCausalLM
        settings: Any = Qwen3Config if config.qk_norm else LlamaConfig
        return make(
            settings(
                vocab_size=vocab_size,
                max_position_embeddings=sequence_length,
                hidden_size=config.width,
                intermediate_size=mlp_width(config.width),
                num_hidden_layers=config.depth,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads // config.query_group_size,
                head_dim=config.actual_head_size,
                rms_norm_eps=EPS,
                rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
                tie_word_embeddings=config.tied,
                bos_token_id=None,
                eos_token_id=None,
            )
        )


def _layer(name: str, index: int, config: ModelConfig) -> dict[str, Parameter]:
    """Attention and MLP, each behind a norm; all matrices start alike, as in transformers."""
    d, i = config.width, mlp_width(config.width)
    key_values = d // config.query_group_size
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    attention = {
        "q_proj": _matrix(d, d),
        "k_proj": _matrix(d, key_values),
        "v_proj": _matrix(d, key_values),
        "o_proj": _matrix(d, d, branch=f"attention {index}"),
        **{norm: _gain(config.actual_head_size) for norm in norms},
    }
    mlp = {
        "gate_proj": _matrix(d, i),
        "up_proj": _matrix(d, i),
        "down_proj": _matrix(i, d, branch=f"mlp {index}"),
    }
    modules: Mapping[str, Parameter] = {
        **{f"self_attn.{part}": parameter for part, parameter in attention.items()},
        **{f"mlp.{part}": parameter for part, parameter in mlp.items()},
        "input_layernorm": _gain(d),
        "post_attention_layernorm": _gain(d),
    }
    return {f"{name}.{module}.weight": parameter for module, parameter in modules.items()}


def _matrix(inputs: int, outputs: int, branch: str = "") -> Parameter:
    return Parameter((outputs, inputs), "hidden", inputs, outputs, in_block=True, branch=branch)


def _gain(width: int, in_block: bool = True) -> Parameter:
    return Parameter((width,), "norm", 1, width, in_block=in_block, init="ones")
