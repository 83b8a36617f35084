"""GPT-2 (Radford et al. 2019): what it declares. Its network is in `gpt2_network`, which needs torch.

Shapes: D width, V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import (
    ActivationMemory,
    Architecture,
    Declaration,
    Fold,
    Forms,
    Parameter,
    Slice,
    readout,
)
from mup_tpu.rules.parametrization import ForwardScaling

if TYPE_CHECKING:
    from torch import nn

_TOKENS, _POSITIONS, _READOUT = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
_FINAL_NORM = "transformer.ln_f"

ACTIVATIONS = ActivationMemory(
    # 18 vectors are kept: inputs and outputs of both norms (4), queries, keys, values and their products (5),
    # a residual sum (1), the MLP's hidden layer behind GELU and, before it or as GELU's slope, what its
    # gradient needs (8). The rest was measured: gradients in the backward pass and the allocator's share.
    # Under vmap 34 are alive at once, and malloc holds half as much again.
    vectors={"loop": 34, "vmap": 57},
    # Where attention is matrix products: under vmap logits, masked and softmax that are alive at once
    # (measured); in turns the softmax, of pairs that see each other.
    scores={"loop": 0.5, "vmap": 4},
    logits=4,  # logits, log-softmax, and the gradients of both
    # XLA frees and fuses. As the compilers for TPU v4 and v5e need them: of least largest error over
    # benchmarks/tpu_memory.csv, 18 %. Whole matrices of scores come and go in the others' room.
    xla_vectors={"matmul": 15.6, "recomputed": 11.5},
    xla_scores={"matmul": 0.0, "recomputed": 0.26},
    xla_logits=2.3,
    xla_bf16=0.6,
)


class GPT2(Architecture):
    """GPT-2 under transformers' names, where hidden matrices are stored (inputs, outputs)."""

    name = "gpt2"

    def declare(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Declaration:
        """Its parameters and what follows from its size."""
        d = config.width
        probes = {"embedding": "transformer.drop"}
        parameters = {
            _TOKENS: Parameter((vocab_size, d), "token_embedding", vocab_size, d),
            _POSITIONS: Parameter((sequence_length, d), "position_embedding", sequence_length, d),
        }
        for i in range(config.depth):
            parameters |= _block(f"transformer.h.{i}", i, config)
            probes |= {
                f"attention {i}": f"transformer.h.{i}.attn.c_proj",
                f"mlp {i}": f"transformer.h.{i}.mlp.c_proj",
                f"residual {i}": f"transformer.h.{i}",
            }
        parameters |= _norm(_FINAL_NORM, d)
        if not config.tied:
            parameters[_READOUT] = readout(config, vocab_size)
        return Declaration(
            parameters=parameters,
            width=d,
            layers=config.depth,
            heads=config.heads,
            head_size=config.actual_head_size,
            probes=probes | {"final norm": _FINAL_NORM},
            blocks=tuple(f"transformer.h.{i}" for i in range(config.depth)),
            activations=ACTIVATIONS,
        )

    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        """Value of each buffer of its network."""
        return {
            "transformer.drop.factor": config.alpha_in * scaling.embeddings,
            "attention_factor": config.alpha_attn * scaling.attention,
            "residual_factor": scaling.residual,
            "logit_factor": config.alpha_out * scaling.logits,
        }

    def network(
        self, config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms = Forms()
    ) -> nn.Module:
        """Its module without weights (meta device)."""
        from mup_tpu.models.gpt2_network import build

        return build(config, vocab_size, sequence_length, forms)

    def folds(self, config: ModelConfig, scaling: ForwardScaling) -> list[Fold]:
        """The embeddings' factor folds into both embeddings, attention's into the queries, the residual
        branches' into their last layers, and the logits' into the final norm (over the embeddings' where the
        readout is the embedding).
        """
        factors = self.factors(config, scaling)
        embeddings = factors["transformer.drop.factor"]
        logits = factors["logit_factor"] / (embeddings if config.tied else 1.0)
        folds = [Fold(name, embeddings) for name in (_TOKENS, _POSITIONS)]
        folds += [Fold(f"{_FINAL_NORM}.{kind}", logits) for kind in ("weight", "bias")]
        for name, parameter in self.declare(config, 1, 1).parameters.items():
            if "query" in parameter.slices:
                folds.append(Fold(name, factors["attention_factor"], parameter.slices["query"]))
            if parameter.branch:
                folds.append(Fold(name, factors["residual_factor"]))
        return folds

    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        """A `GPT2LMHeadModel` of the same shape."""
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


def _block(name: str, index: int, config: ModelConfig) -> dict[str, Parameter]:
    """Attention and MLP, each behind a norm; their last layers start smaller by √(2·depth) (section 2.3)."""
    d, small = config.width, {"init_factor": (2 * config.depth) ** -0.5, "init_depth_exponent": -0.5}
    qkv = {part: Slice(i * d, (i + 1) * d) for i, part in enumerate(("query", "key", "value"))}
    return {
        **_norm(f"{name}.ln_1", d, in_block=True),
        **_linear(f"{name}.attn.c_attn", d, 3 * d, slices=qkv),
        **_linear(f"{name}.attn.c_proj", d, d, branch=f"attention {index}", init=small),
        **_norm(f"{name}.ln_2", d, in_block=True),
        **_linear(f"{name}.mlp.c_fc", d, 4 * d),
        **_linear(f"{name}.mlp.c_proj", 4 * d, d, branch=f"mlp {index}", init=small),
    }


def _linear(
    name: str,
    inputs: int,
    outputs: int,
    init: Mapping[str, float] = {},
    **both: Any,
) -> dict[str, Parameter]:
    weight: dict[str, Any] = {**init, **both}
    bias = Parameter((outputs,), "bias", 1, outputs, in_block=True, init="zeros", **both)
    return {
        f"{name}.weight": Parameter((inputs, outputs), "hidden", inputs, outputs, in_block=True, **weight),
        f"{name}.bias": bias,
    }


def _norm(name: str, width: int, in_block: bool = False) -> dict[str, Parameter]:
    return {
        f"{name}.weight": Parameter((width,), "norm", 1, width, in_block=in_block, init="ones"),
        f"{name}.bias": Parameter((width,), "bias", 1, width, in_block=in_block, init="zeros"),
    }
