"""GPT-2's network under transformers' names, with factors on embeddings, attention logits, residual branches
and logits.

Written after Radford et al. 2019, section 2.3; tests compare it with transformers' own. Only an export
imports transformers, which takes 11 s, twice as long as torch.

Shapes: B sequences, T tokens, N = B·T, D width, X = 3·D, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import Forms
from mup_tpu.models.kernels.attention import ATTENTION, AttentionFunction
from mup_tpu.models.kernels.pointwise import OnePassLayerNorm
from mup_tpu.models.kernels.scans import through_blocks
from mup_tpu.models.layers import Conv1D, Scale, ScaledNetwork, embedding, join_stream


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Parts of the blocks: each function in one of its forms."""

    attention: AttentionFunction
    norm: type[nn.LayerNorm]
    through: Callable[..., Tensor]
    """The residual stream through all blocks."""


class _Attention(nn.Module):
    """Causal self-attention of H heads."""

    def __init__(self, width: int, heads: int, attention: AttentionFunction) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.head_size = width // heads
        self._attention = attention

    def forward(self, x_ND: Tensor, sequence_length: int, attention_factor: Tensor) -> Tensor:
        qkv_BTX = self.c_attn(x_ND).view(-1, sequence_length, 3 * x_ND.shape[-1])
        return self.c_proj(self._attention(qkv_BTX, self.head_size, attention_factor).flatten(0, 1))


class _Mlp(nn.Module):
    """Two layers, 4·D wide between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x_ND)))


class _Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, parts: _Parts) -> None:
        super().__init__()
        self.ln_1, self.attn = parts.norm(width), _Attention(width, heads, parts.attention)
        self.ln_2, self.mlp = parts.norm(width), _Mlp(width)

    def forward(
        self, x_ND: Tensor, sequence_length: int, attention_factor: Tensor, residual_factor: Tensor | None
    ) -> Tensor:
        attention_ND = self.attn(self.ln_1(x_ND), sequence_length, attention_factor)
        x_ND = join_stream(x_ND, attention_ND, residual_factor)
        return join_stream(x_ND, self.mlp(self.ln_2(x_ND)), residual_factor)


class _Transformer(nn.Module):
    """GPT-2 without its readout."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, parts: _Parts) -> None:
        super().__init__()
        width = config.width
        self.wte, self.wpe = embedding(vocab_size, width), embedding(sequence_length, width)
        self.drop = Scale()  # in place of GPT-2's (unused) embedding dropout
        self.h = nn.ModuleList(_Block(width, config.heads, parts) for _ in range(config.depth))
        self.ln_f = parts.norm(width)
        self._through = parts.through

    def forward(
        self, tokens_BT: Tensor, attention_factor: Tensor, residual_factor: Tensor | None, added: list[Tensor]
    ) -> Tensor:
        t = tokens_BT.shape[-1]
        # Rows of one matrix from here on, except in attention: TPUs copy between the layouts of products,
        # norms and sums that differ in shape.
        x_ND = self.drop(self.wte(tokens_BT) + self.wpe.weight[:t]).flatten(0, 1)
        return self.ln_f(self._through(self.h, x_ND, t, attention_factor, residual_factor))


def build(config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms) -> ScaledNetwork:
    """Build the module without weights (meta device), to be called by `torch.func.functional_call`."""
    parts = _Parts(
        ATTENTION[forms.attention],
        OnePassLayerNorm if forms.one_pass_norms else nn.LayerNorm,
        through_blocks(forms.scan),
    )
    with torch.device("meta"):
        transformer = _Transformer(config, vocab_size, sequence_length, parts)
        return ScaledNetwork(
            "transformer", transformer, transformer.wte.weight, config.tied, forms.scaled_branches
        )
