"""Llama's network under transformers' names, with factors on embeddings, attention logits, residual branches
and logits.

Written after Touvron et al. 2023, section 2.2; tests compare it with transformers' own.

Shapes: B sequences, T tokens, N = B·T, D width, H heads, G key-value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import Forms
from mup_tpu.models.kernels.attention import ATTENTION
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
from mup_tpu.models.layers import Linear, Scale, ScaledNetwork, embedding
from mup_tpu.models.llama import mlp_width

MakeMlp = Callable[[ModelConfig, Forms], nn.Module]
"""Makes a block's MLP, called with x_ND, the tokens of a sequence, and a list for terms added to the loss."""


class _Attention(nn.Module):
    """Causal self-attention of H heads over G key-value heads."""

    def __init__(self, config: ModelConfig, forms: Forms) -> None:
        super().__init__()
        d = self.head_size = config.actual_head_size
        outputs = config.width // config.query_group_size
        self.q_proj, self.k_proj = Linear(config.width, config.width), Linear(config.width, outputs)
        self.v_proj, self.o_proj = Linear(config.width, outputs), Linear(config.width, config.width)
        self.q_norm = _norm(d, forms) if config.qk_norm else None
        self.k_norm = _norm(d, forms) if config.qk_norm else None
        self._attention = ATTENTION[forms.attention]

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

    def __init__(self, width: int, between: int, forms: Forms) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, between), Linear(width, between)
        self.down_proj = Linear(between, width)
        self._swiglu = swiglu_of(forms)

    def forward(self, x_ND: Tensor, *_: Any) -> Tensor:
        return self.down_proj(self._swiglu(self.gate_proj(x_ND), self.up_proj(x_ND)))


class _Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, forms: Forms, mlp: MakeMlp) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config, forms), mlp(config, forms)
        self.input_layernorm = _norm(config.width, forms)
        self.post_attention_layernorm = _norm(config.width, forms)

    def forward(
        self,
        x_ND: Tensor,
        rotary: Rotary,
        attention_factor: Tensor,
        residual_factor: Tensor,
        added: list[Tensor],
    ) -> Tensor:
        attention_ND = self.self_attn(self.input_layernorm(x_ND), rotary, attention_factor)
        x_ND = torch.addcmul(x_ND, attention_ND, residual_factor)
        mlp_ND = self.mlp(self.post_attention_layernorm(x_ND), len(rotary.cos_T1h), added)
        return torch.addcmul(x_ND, mlp_ND, residual_factor)


class _Model(nn.Module):
    """Llama without its readout."""

    def __init__(self, config: ModelConfig, vocab_size: int, forms: Forms, mlp: MakeMlp) -> None:
        super().__init__()
        self.embed_tokens = embedding(vocab_size, config.width)
        self.embed_scale = Scale()
        self.layers = nn.ModuleList(_Layer(config, forms, mlp) for _ in range(config.depth))
        self.norm = _norm(config.width, forms)
        self._head_size, self._scan = config.actual_head_size, forms.scan

    def forward(
        self, tokens_BT: Tensor, attention_factor: Tensor, residual_factor: Tensor, added: list[Tensor]
    ) -> Tensor:
        # Rows of one matrix from here on, except in attention, as in `gpt2_network`.
        x_ND = self.embed_scale(self.embed_tokens(tokens_BT)).flatten(0, 1)
        turns = rotary(tokens_BT.shape[-1], self._head_size, x_ND)
        rest = (turns, attention_factor, residual_factor, added)
        return self.norm(through_blocks(self._scan, self.layers, x_ND, *rest))


def _norm(width: int, forms: Forms) -> RMSNorm:
    return OnePassRMSNorm(width) if forms.vmapped else RMSNorm(width)


def swiglu_of(forms: Forms) -> Callable[[Tensor, Tensor], Tensor]:
    return one_pass_swiglu if forms.vmapped else swiglu


def dense(config: ModelConfig, forms: Forms) -> nn.Module:
    return Mlp(config.width, mlp_width(config.width), forms)


def build(
    config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms, mlp: MakeMlp = dense
) -> ScaledNetwork:
    """Build the module without weights (meta device), to be called through `torch.func.functional_call`.

    It takes sequences of any length: positions are rotary.
    """
    with torch.device("meta"):
        model = _Model(config, vocab_size, forms, mlp)
        return ScaledNetwork("model", model, model.embed_tokens.weight, config.tied)
