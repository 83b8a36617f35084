"""GPT-2's network under transformers' names, with factors on embeddings, attention logits, residual branches
and logits.

Written after Radford et al. 2019, section 2.3; tests compare it with transformers' own. Only an export
imports transformers, which takes 11 s, twice as long as torch.

Shapes: B sequences, T tokens, N = B·T, D width, X = 3·D, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mup_tpu.config import ModelConfig
from mup_tpu.models.attention import ATTENTION
from mup_tpu.models.base import Forms
from mup_tpu.models.layers import Conv1D, OnePassLayerNorm, Scale, ScaledNetwork, embedding
from mup_tpu.models.scans import through_blocks


class _Attention(nn.Module):
    """Causal self-attention of H heads."""

    def __init__(self, width: int, heads: int, forms: Forms) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.head_size, self._attention = width // heads, ATTENTION[forms.attention]

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

    def __init__(self, width: int, heads: int, forms: Forms) -> None:
        super().__init__()
        self.ln_1, self.attn = _norm(width, forms), _Attention(width, heads, forms)
        self.ln_2, self.mlp = _norm(width, forms), _Mlp(width)

    def forward(
        self, x_ND: Tensor, sequence_length: int, attention_factor: Tensor, residual_factor: Tensor
    ) -> Tensor:
        attention_ND = self.attn(self.ln_1(x_ND), sequence_length, attention_factor)
        x_ND = torch.addcmul(x_ND, attention_ND, residual_factor)
        return torch.addcmul(x_ND, self.mlp(self.ln_2(x_ND)), residual_factor)


class _Transformer(nn.Module):
    """GPT-2 without its readout."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms) -> None:
        super().__init__()
        width = config.width
        self.wte, self.wpe = embedding(vocab_size, width), embedding(sequence_length, width)
        self.drop = Scale()  # in place of GPT-2's (unused) embedding dropout
        self.h = nn.ModuleList(_Block(width, config.heads, forms) for _ in range(config.depth))
        self.ln_f = _norm(width, forms)
        self._scan = forms.scan

    def forward(
        self, tokens_BT: Tensor, attention_factor: Tensor, residual_factor: Tensor, added: list[Tensor]
    ) -> Tensor:
        t = tokens_BT.shape[-1]
        # Rows of one matrix from here on, except in attention: TPUs copy between the layouts of products,
        # norms and sums that differ in shape.
        x_ND = self.drop(self.wte(tokens_BT) + self.wpe.weight[:t]).flatten(0, 1)
        return self.ln_f(through_blocks(self._scan, self.h, x_ND, t, attention_factor, residual_factor))


def _norm(width: int, forms: Forms) -> nn.LayerNorm:
    return OnePassLayerNorm(width) if forms.one_pass_norms else nn.LayerNorm(width)


def build(config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms) -> ScaledNetwork:
    """Build the module without weights (meta device), to be called by `torch.func.functional_call`."""
    with torch.device("meta"):
        transformer = _Transformer(config, vocab_size, sequence_length, forms)
        return ScaledNetwork("transformer", transformer, transformer.wte.weight, config.tied)
