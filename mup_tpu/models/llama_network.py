"""Llama's network under transformers' names, with factors on embeddings, attention logits, residual branches
and logits.

Written after Touvron et al. 2023, section 2.2; tests compare it with transformers' own.

Shapes: B sequences, T tokens, N = B·T, D width, I width between an MLP's layers, H heads, G key-value heads,
d head size, h = d/2, X = 3·D, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.config import ModelConfig
from mup_tpu.models.attention import ATTENTION
from mup_tpu.models.base import Forms
from mup_tpu.models.layers import Linear, OnePassRMSNorm, RMSNorm, Scale, ScaledNetwork, embedding
from mup_tpu.models.llama import ROTARY_BASE, mlp_width
from mup_tpu.models.scans import through_blocks

MakeMlp = Callable[[ModelConfig, Forms], nn.Module]
"""Makes a block's MLP, called with x_ND, the tokens of a sequence, and a list for terms added to the loss."""


class Rotary(NamedTuple):
    """Cosines and sines of the angles of rotary positions."""

    cos_T1h: Tensor
    sin_T1h: Tensor


def rotary(positions: int, head_size: int, like: Tensor) -> Rotary:
    """Compute the angles of rotary positions (Su et al. 2021, arXiv:2104.09864), for activations like these.

    In float32 for any precision, as in transformers. No buffer, which each member of a pack would have.
    """
    steps_h = torch.arange(0, head_size, 2, dtype=torch.float32, device=like.device)
    positions_T = torch.arange(positions, dtype=torch.float32, device=like.device)
    angles_T1h = positions_T[:, None, None] * (1.0 / ROTARY_BASE ** (steps_h / head_size))
    return Rotary(angles_T1h.cos().to(like.dtype), angles_T1h.sin().to(like.dtype))


def rotate_and_join(query_NHd: Tensor, key_NGd: Tensor, value_NGd: Tensor, rotary: Rotary) -> Tensor:
    """Join rotated queries and keys, and values (B, T, 3·D): keys and values once a query head.

    Dimensions i and i + d/2 of a head rotate together, as in transformers; in the paper, neighbours.
    """
    t, heads = len(rotary.cos_T1h), query_NHd.shape[-2]

    def turned(x_NYd: Tensor) -> Tensor:
        first, second = x_NYd.unflatten(0, (-1, t)).chunk(2, -1)
        cos, sin = rotary
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(value_NGd.dtype)

    def for_each_query(x_BTGd: Tensor) -> Tensor:
        group = heads // x_BTGd.shape[-2]
        return x_BTGd.unsqueeze(-2).expand(*x_BTGd.shape[:-1], group, -1).flatten(-3, -2)

    value_BTGd = value_NGd.unflatten(0, (-1, t))
    parts = (turned(query_NHd), for_each_query(turned(key_NGd)), for_each_query(value_BTGd))
    return torch.cat([x_BTHd.flatten(-2) for x_BTHd in parts], -1)


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


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    # Shazeer 2020, arXiv:2002.05202
    return functional.silu(gate_NI) * up_NI


def swiglu_of(forms: Forms) -> Callable[[Tensor, Tensor], Tensor]:
    return _SwiGLU.apply if forms.vmapped else swiglu


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that keeps only its inputs; autograd would keep silu(gate) too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        return swiglu(gate_NI, up_NI)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient_NI: Tensor) -> tuple[Tensor, Tensor]:
        gate_NI, up_NI = ctx.saved_tensors
        share_NI = gate_NI.sigmoid()
        slope_NI = share_NI * (1 + gate_NI * (1 - share_NI))
        return gradient_NI * up_NI * slope_NI, gradient_NI * gate_NI * share_NI


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
