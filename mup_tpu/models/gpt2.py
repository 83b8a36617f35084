"""Declaration of GPT-2 (Radford et al. 2019). `gpt2_network` has the network, which needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import ActivationMemory, Architecture, Parameter, Slice

ACTIVATIONS = ActivationMemory(
    # 18 vectors are kept: inputs and outputs of both norms (4); queries, keys, values and products of
    # attention (5); a residual sum (1); the MLP's hidden layer after GELU, and before it or as GELU's slope
    # (8). The rest was measured at depths 2 and 8: gradients in the backward pass, and the allocator's share.
    # Under vmap 34 are alive at once, and malloc holds half as much again.
    vectors={"loop": 34, "vmap": 57},
    passing=16,
    # Under vmap logits, masked logits and softmax are alive at once (measured); in turns attention is fused.
    scores={"loop": 0, "vmap": 4},
    logits=4,  # logits, log-softmax, and the gradients of both
    # Fused attention, and an allocator that reuses all (benchmarks/gpu_memory.csv).
    cuda_vectors={"bf16": 11, "float32": 18},
    cuda_evaluation=10,  # without gradients, sums with biases are float32, in pieces that no step has
    # XLA frees and fuses. Least largest error over the needs of TPU v4's and v5e's compilers
    # (benchmarks/tpu_memory.csv): 18 %. Whole matrices of scores fit into room that others leave.
    xla_vectors={"matmul": 15.6, "recomputed": 11.5},
    xla_scores={"matmul": 0.0, "recomputed": 0.26},
    xla_logits=2.3,
    xla_bf16=0.6,
)


class GPT2(Architecture):
    """GPT-2, whose hidden matrices are stored (inputs, outputs)."""

    name = "gpt2"
    embedding_scale, blocks, final_norm = "transformer.drop", "transformer.h", "transformer.ln_f"
    branches = {"attention": "attn.c_proj", "mlp": "mlp.c_proj"}

    def embeddings(self, width: int, vocab_size: int, sequence_length: int) -> dict[str, Parameter]:
        return {
            "transformer.wte.weight": Parameter((vocab_size, width), "token_embedding", vocab_size, width),
            "transformer.wpe.weight": Parameter(
                (sequence_length, width), "position_embedding", sequence_length, width
            ),
        }

    def block(self, config: ModelConfig, index: int) -> dict[str, Parameter]:
        """Declare a block; branches' last layers start smaller by √(2·depth) (section 2.3)."""
        d, small = config.width, {"init_factor": (2 * config.depth) ** -0.5, "init_depth_exponent": -0.5}
        qkv = {part: Slice(i * d, (i + 1) * d) for i, part in enumerate(("query", "key", "value"))}
        modules = {
            "ln_1": self.norm(d),
            "attn.c_attn": _linear(d, 3 * d, slices=qkv),
            "attn.c_proj": _linear(d, d, branch=f"attention {index}", init=small),
            "ln_2": self.norm(d),
            "mlp.c_fc": _linear(d, 4 * d),
            "mlp.c_proj": _linear(4 * d, d, branch=f"mlp {index}", init=small),
        }
        return {f"{module}.{name}": p for module, both in modules.items() for name, p in both.items()}

    def norm(self, width: int, in_block: bool = True) -> dict[str, Parameter]:
        return {
            "weight": Parameter((width,), "norm", 1, width, in_block=in_block, init="ones"),
            "bias": Parameter((width,), "bias", 1, width, in_block=in_block, init="zeros"),
        }

    def query(self, config: ModelConfig) -> str:
        return "attn.c_attn"

    def activations(self, config: ModelConfig) -> ActivationMemory:
        return ACTIVATIONS

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size,
                n_positions=sequence_length,
                n_embd=config.width,
                n_layer=config.depth,
                n_head=config.heads,
                # The same function as GPT-2's gelu_new, in one fused kernel instead of eight.
                activation_function="gelu_pytorch_tanh",
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                tie_word_embeddings=config.tied,
                bos_token_id=None,
                eos_token_id=None,
            )
        )


def _linear(inputs: int, outputs: int, init: Mapping[str, float] = {}, **both: Any) -> dict[str, Parameter]:
    weight: dict[str, Any] = {**init, **both}
    return {
        "weight": Parameter((inputs, outputs), "hidden", inputs, outputs, in_block=True, **weight),
        "bias": Parameter((outputs,), "bias", 1, outputs, in_block=True, init="zeros", **both),
    }
