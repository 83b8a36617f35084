"""Llama's network under transformers' names, with factors on embeddings, attention logits, residual branches
and logits.

Written after Touvron et al. 2023, section 2.2; tests compare it with transformers' own.

Shapes: B sequences, T tokens, N = B·T, D width, H heads, G key-value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import Forms
from mup_tpu.models.kernels.attention import ATTENTION, AttentionFunction
from mup_tpu.models.kernels.pointwise import (
    OnePassRMSNorm,
    RMSNorm,
    Rotary,
    one_pass_swiglu,
    rotary,
    rotate_and_join,
    swiglu,
)
from mup_tpu.models.kernels.scans import through_blocks
from mup_tpu.models.layers import Linear, Scale, ScaledNetwork, embedding, join_stream
from mup_tpu.models.llama import mlp_width


@dataclass(frozen=True)
class Parts:
    """Parts of the blocks: each function in one of its forms."""

    mlp: Callable[[ModelConfig, Parts], nn.Module]
    """A block's MLP, called with x_ND, the tokens of a sequence, and a list for terms added to the loss."""
    attention: AttentionFunction
    norm: type[RMSNorm]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    through: Callable[..., Tensor]
    """The residual stream through all layers."""


class _Attention(nn.Module):
    """Causal self-attention of H heads over G key-value heads."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        d = self.head_size = config.actual_head_size
        outputs = config.width // config.query_group_size
        self.q_proj, self.k_proj = Linear(config.width, config.width), Linear(config.width, outputs)
        self.v_proj, self.o_proj = Linear(config.width, outputs), Linear(config.width, config.width)
        self.q_norm = parts.norm(d) if config.qk_norm else None
        self.k_norm = parts.norm(d) if config.qk_norm else None
        self._attention = parts.attention

    def forward(self, x_ND: Tensor, rotary: Rotary, attention_factor: Tensor) -> Tensor:
        query_NHd, key_NGd, value_NGd = (
            projection(x_ND).unflatten(-1, (-1, self.head_size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query_NHd, key_NGd = self.q_norm(query_NHd), self.k_norm(key_NGd)
        qkv_BTX = rotate_and_join(query_NHd, key_NGd, value_NGd, rotary)
        return self.o_proj(self._attention(qkv_BTX, self.head_size, attention_factor).flatten(0, 1))


class Mlp(nn.Module):
    """SwiGLU: a layer, a gate on its outputs, and a layer back to the stream."""

    def __init__(self, width: int, between: int, parts: Parts) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, between), Linear(width, between)
        self.down_proj = Linear(between, width)
        self._swiglu = parts.swiglu

    def forward(self, x_ND: Tensor, *_: Any) -> Tensor:
        return self.down_proj(self._swiglu(self.gate_proj(x_ND), self.up_proj(x_ND)))


class _Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config, parts), parts.mlp(config, parts)
        self.input_layernorm = parts.norm(config.width)
        self.post_attention_layernorm = parts.norm(config.width)

    def forward(
        self,
        x_ND: Tensor,
        rotary: Rotary,
        attention_factor: Tensor,
        residual_factor: Tensor | None,
        added: list[Tensor],
    ) -> Tensor:
        attention_ND = self.self_attn(self.input_layernorm(x_ND), rotary, attention_factor)
        x_ND = join_stream(x_ND, attention_ND, residual_factor)
        mlp_ND = self.mlp(self.post_attention_layernorm(x_ND), len(rotary.cos_T1h), added)
        return join_stream(x_ND, mlp_ND, residual_factor)


class _Model(nn.Module):
    """Llama without its readout."""

    def __init__(self, config: ModelConfig, vocab_size: int, parts: Parts) -> None:
        super().__init__()
        self.embed_tokens = embedding(vocab_size, config.width)
        self.embed_scale = Scale()
        self.layers = nn.ModuleList(_Layer(config, parts) for _ in range(config.depth))
        self.norm = parts.norm(config.width)
        self._head_size, self._through = config.actual_head_size, parts.through

    def forward(
        self, tokens_BT: Tensor, attention_factor: Tensor, residual_factor: Tensor | None, added: list[Tensor]
    ) -> Tensor:
        # Rows of one matrix from here on, except in attention, as in `gpt2_network`.
        x_ND = self.embed_scale(self.embed_tokens(tokens_BT)).flatten(0, 1)
        turns = rotary(tokens_BT.shape[-1], self._head_size, x_ND)
        return self.norm(self._through(self.layers, x_ND, turns, attention_factor, residual_factor, added))


def dense(config: ModelConfig, parts: Parts) -> nn.Module:
    return Mlp(config.width, mlp_width(config.width), parts)


def build(
    config: ModelConfig,
    vocab_size: int,
    sequence_length: int,
    forms: Forms,
    mlp: Callable[[ModelConfig, Parts], nn.Module] = dense,
) -> ScaledNetwork:
    """Build the module without weights (meta device), to be called through `torch.func.functional_call`.

    It takes sequences of any length: positions are rotary.
    """
    attention, through = ATTENTION[forms.attention], through_blocks(forms.scan)
    if forms.vmapped:
        parts = Parts(mlp, attention, OnePassRMSNorm, one_pass_swiglu, through)
    else:
        parts = Parts(mlp, attention, RMSNorm, swiglu, through)
    with torch.device("meta"):
        model = _Model(config, vocab_size, parts)
        return ScaledNetwork("model", model, model.embed_tokens.weight, config.tied, forms.scaled_branches)
