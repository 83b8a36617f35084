"""Declaration of a mixture of experts: Llama whose MLPs are experts; a router takes a few a token.

Mixtral (Jiang et al. 2024, arXiv:2401.04088); with QK norms Qwen3-MoE, with shared experts Qwen2-MoE.
`moe_network` has the network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import ActivationMemory, Parameter, Slice
from mup_tpu.models.llama import Llama, gated, stock, weights
from mup_tpu.rules.parametrization import ForwardScaling


class MoE(Llama):
    """Llama with experts: a token goes to the k likeliest of a softmax, weighted by their share of its sum.

    `balance_loss` times the mean over layers and sequences of E·Σ fₑ·pₑ is added to the training loss, with
    fₑ the share of tokens that go to expert e, and pₑ its mean probability (Fedus et al. 2022,
    arXiv:2101.03961, section 2.2). By sequence, parts of a batch add up to the whole.
    """

    name = "moe"
    branches = {"attention": "self_attn.o_proj", "router": "mlp.gate", "mlp": "mlp"}
    counted = Llama.counted | {"num_experts", "experts_per_token", "expert_granularity", "shared_experts"}
    per_member = Llama.per_member | {"balance_loss"}

    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        # Members may differ in the weight of the balance loss: a factor of each layer.
        factors = [f"{self.blocks}.{i}.mlp.balance.factor" for i in range(config.depth)]
        return super().factors(config, scaling) | dict.fromkeys(factors, config.balance_loss / config.depth)

    def mlp(self, config: ModelConfig, branch: str) -> dict[str, Parameter]:
        d, between, experts = config.width, config.expert_width, config.num_experts
        shared = config.shared_experts * between
        # Gate and up of an expert are rows of one matrix, in this order.
        rows = {"gate": Slice(0, between), "up": Slice(between, 2 * between)}
        gate_up = replace(_experts(config, d, 2 * between), slices=rows, sliced_axis=-2)
        parameters = {
            "mlp.gate.weight": _router(d, experts),
            "mlp.experts.gate_up_proj": gate_up,
            "mlp.experts.down_proj": replace(_experts(config, between, d), branch=branch),
        }
        if shared:
            parameters |= weights(gated(d, shared, branch, "mlp.shared_expert"))
            parameters["mlp.shared_expert_gate.weight"] = _router(d, 1)
        return parameters

    def activations(self, config: ModelConfig) -> ActivationMemory:
        """Return the memory as measured: of a token's experts on a CPU in turns, otherwise of all."""
        llama, size = super().activations(config), config.expert_width / config.width
        of_token, of_all = (
            (config.experts_per_token + config.shared_experts) * size,
            config.num_experts * size,
        )
        vectors = {"loop": llama.vectors["loop"] + 8 * of_token, "vmap": llama.vectors["vmap"] + 14 * of_all}
        cuda_vectors = {
            "bf16": llama.cuda_vectors["bf16"] + 1.5 * of_all,
            "float32": llama.cuda_vectors["float32"] + 3.3 * of_all,
        }
        passing = llama.passing + 8 * of_token
        return replace(llama, vectors=vectors, passing=passing, cuda_vectors=cuda_vectors)

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        """Build a Mixtral of the same shape; a Qwen3-MoE with QK norms, a Qwen2-MoE with shared experts."""
        more: dict[str, Any] = {
            "num_experts_per_tok": config.experts_per_token,
            "router_aux_loss_coef": config.balance_loss,
        }
        if not (config.qk_norm or config.shared_experts):
            more |= {"num_local_experts": config.num_experts, "intermediate_size": config.expert_width}
            return stock("Mixtral", config, vocab_size, sequence_length, **more)
        more |= {
            "num_experts": config.num_experts,
            "moe_intermediate_size": config.expert_width,
            "norm_topk_prob": True,
        }
        if config.qk_norm:
            return stock("Qwen3Moe", config, vocab_size, sequence_length, **more)
        more |= {"shared_expert_intermediate_size": config.shared_experts * config.expert_width}
        return stock("Qwen2Moe", config, vocab_size, sequence_length, qkv_bias=False, **more)


def _router(width: int, outputs: int) -> Parameter:
    return Parameter((outputs, width), "router", width, outputs, in_block=True)


def _experts(config: ModelConfig, inputs: int, outputs: int) -> Parameter:
    shape, active = (config.num_experts, outputs, inputs), config.experts_per_token / config.num_experts
    return Parameter(shape, "hidden", inputs, outputs, in_block=True, active=active)
