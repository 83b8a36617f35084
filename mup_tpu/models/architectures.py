"""Declarations of GPT-2, Llama and the mixture of experts. `networks.py` has the networks, which need torch.

Radford et al. 2019; Touvron et al. 2023 (arXiv:2302.13971); Mixtral: Jiang et al. 2024 (arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import Architecture, Parameter
from mup_tpu.rules.parametrization import ForwardScaling, Slice


class GPT2(Architecture):
    """GPT-2, whose hidden matrices are stored (inputs, outputs)."""

    name = "gpt2"
    embedding_scale, blocks, final_norm = "transformer.drop", "transformer.h", "transformer.ln_f"

    def embeddings(self, width: int, vocab_size: int, sequence_length: int) -> dict[str, Parameter]:
        return {
            "transformer.wte.weight": Parameter((vocab_size, width), "token_embedding", vocab_size, width),
            "transformer.wpe.weight": Parameter(
                (sequence_length, width), "position_embedding", sequence_length, width
            ),
        }

    def block(self, config: ModelConfig) -> dict[str, Parameter]:
        """Declare a block; branches' last layers start smaller by √(2·depth) (section 2.3)."""
        d, small = config.width, {"init_factor": (2 * config.depth) ** -0.5, "init_depth_exponent": -0.5}
        qkv = {part: Slice(i * d, (i + 1) * d) for i, part in enumerate(("query", "key", "value"))}
        modules = {
            "ln_1": self.norm(d),
            "attn.c_attn": _linear(d, 3 * d, slices=qkv),
            "attn.c_proj": _linear(d, d, ends_branch=True, init=small),
            "ln_2": self.norm(d),
            "mlp.c_fc": _linear(d, 4 * d),
            "mlp.c_proj": _linear(4 * d, d, ends_branch=True, init=small),
        }
        return {f"{module}.{name}": p for module, both in modules.items() for name, p in both.items()}

    def norm(self, width: int, in_block: bool = True) -> dict[str, Parameter]:
        return {
            "weight": Parameter((width,), "norm", 1, width, in_block=in_block, init="ones"),
            "bias": Parameter((width,), "bias", 1, width, in_block=in_block, init="zeros"),
        }

    def query(self, config: ModelConfig) -> str:
        return "attn.c_attn"

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        # gelu_pytorch_tanh is GPT-2's gelu_new in one fused kernel instead of eight.
        settings = GPT2Config(
            vocab_size=vocab_size, n_positions=sequence_length, n_embd=config.width, n_layer=config.depth,
            n_head=config.heads, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, tie_word_embeddings=config.tied, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return GPT2LMHeadModel(settings)


def _linear(inputs: int, outputs: int, init: Mapping[str, float] = {}, **both: Any) -> dict[str, Parameter]:
    weight: dict[str, Any] = {**init, **both}
    return {
        "weight": Parameter((inputs, outputs), "hidden", inputs, outputs, in_block=True, **weight),
        "bias": Parameter((outputs,), "bias", 1, outputs, in_block=True, init="zeros", **both),
    }


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
    counted = Architecture.counted | {"qk_norm", "query_group_size"}

    def embeddings(self, width: int, vocab_size: int, sequence_length: int) -> dict[str, Parameter]:
        tokens = Parameter((vocab_size, width), "token_embedding", vocab_size, width)
        return {"model.embed_tokens.weight": tokens}

    def block(self, config: ModelConfig) -> dict[str, Parameter]:
        d = config.width
        key_values, head = d // config.query_group_size, config.actual_head_size
        norms = {"self_attn.q_norm": _gain(head), "self_attn.k_norm": _gain(head)}
        attention = {
            "self_attn.q_proj": matrix(d, d),
            "self_attn.k_proj": matrix(d, key_values),
            "self_attn.v_proj": matrix(d, key_values),
            "self_attn.o_proj": matrix(d, d, ends_branch=True),
            **(norms if config.qk_norm else {}),
        }
        after = {"input_layernorm": _gain(d), "post_attention_layernorm": _gain(d)}
        return weights(attention) | self.mlp(config) | weights(after)

    def mlp(self, config: ModelConfig) -> dict[str, Parameter]:
        return weights(gated(config.width, mlp_width(config.width), "mlp"))

    def norm(self, width: int, in_block: bool = True) -> dict[str, Parameter]:
        return {"weight": _gain(width, in_block)}

    def query(self, config: ModelConfig) -> str:
        # The queries' norm would undo a factor on their weights.
        return "self_attn.q_norm" if config.qk_norm else "self_attn.q_proj"

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


def gated(width: int, between: int, module: str) -> dict[str, Parameter]:
    return {
        f"{module}.gate_proj": matrix(width, between),
        f"{module}.up_proj": matrix(width, between),
        f"{module}.down_proj": matrix(between, width, ends_branch=True),
    }


def matrix(inputs: int, outputs: int, ends_branch: bool = False) -> Parameter:
    return Parameter((outputs, inputs), "hidden", inputs, outputs, in_block=True, ends_branch=ends_branch)


def _gain(width: int, in_block: bool = True) -> Parameter:
    return Parameter((width,), "norm", 1, width, in_block=in_block, init="ones")


class MoE(Llama):
    """Llama with experts: a token goes to the k likeliest of a softmax, weighted by their share of its sum.

    `balance_loss` times the mean over layers and sequences of E·Σ fₑ·pₑ is added to the training loss, with
    fₑ the share of tokens that go to expert e, and pₑ its mean probability (Fedus et al. 2022,
    arXiv:2101.03961, section 2.2). By sequence, parts of a batch add up to the whole.
    """

    name = "moe"
    counted = Llama.counted | {"num_experts", "experts_per_token", "expert_granularity", "shared_experts"}
    per_member = Llama.per_member | {"balance_loss"}

    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        # Members may differ in the weight of the balance loss: a factor of each layer.
        factors = [f"{self.blocks}.{i}.mlp.balance.factor" for i in range(config.depth)]
        return super().factors(config, scaling) | dict.fromkeys(factors, config.balance_loss / config.depth)

    def mlp(self, config: ModelConfig) -> dict[str, Parameter]:
        d, between, experts = config.width, config.expert_width, config.num_experts
        shared = config.shared_experts * between
        # Gate and up of an expert are rows of one matrix, in this order.
        rows = {"gate": Slice(0, between), "up": Slice(between, 2 * between)}
        gate_up = replace(_experts(config, d, 2 * between), slices=rows, sliced_axis=-2)
        parameters = {
            "mlp.gate.weight": _router(d, experts),
            "mlp.experts.gate_up_proj": gate_up,
            "mlp.experts.down_proj": replace(_experts(config, between, d), ends_branch=True),
        }
        if shared:
            parameters |= weights(gated(d, shared, "mlp.shared_expert"))
            parameters["mlp.shared_expert_gate.weight"] = _router(d, 1)
        return parameters

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        """Build a Mixtral of the same shape; a Qwen3-MoE with QK norms, a Qwen2-MoE with shared experts."""
        more: dict[str, Any] = {"num_experts_per_tok": config.experts_per_token}
        more["router_aux_loss_coef"] = config.balance_loss
        if not (config.qk_norm or config.shared_experts):
            more |= {"num_local_experts": config.num_experts, "intermediate_size": config.expert_width}
            return stock("Mixtral", config, vocab_size, sequence_length, **more)
        more |= {"num_experts": config.num_experts, "norm_topk_prob": True}
        more["moe_intermediate_size"] = config.expert_width
        if config.qk_norm:
            return stock("Qwen3Moe", config, vocab_size, sequence_length, **more)
        more |= {"shared_expert_intermediate_size": config.shared_experts * config.expert_width}
        return stock("Qwen2Moe", config, vocab_size, sequence_length, qkv_bias=False, **more)


def _router(width: int, outputs: int) -> Parameter:
    return Parameter((outputs, width), "router", width, outputs, in_block=True)


def _experts(config: ModelConfig, inputs: int, outputs: int) -> Parameter:
    shape, active = (config.num_experts, outputs, inputs), config.experts_per_token / config.num_experts
    return Parameter(shape, "hidden", inputs, outputs, in_block=True, active=active)
