"""Layers that architectures share.

They replace torch's, which draw their init, which on the meta device imports torch's compiler (3 to 6 s).

Shapes: B sequences, T tokens, N = B·T, D width, V vocabulary; a layer's I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.models.kernels.cross_entropy import cross_entropy


class Scale(nn.Module):
    """Multiplication by a factor, a buffer that may differ between members of a pack."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Linear(nn.Module):
    """x·Wᵀ with W (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self.weight)


class Conv1D(nn.Module):
    """x·W + b with W (inputs, outputs), GPT-2's form of hidden matrices: the transpose of nn.Linear's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x_NI: Tensor) -> Tensor:
        return torch.addmm(self.bias, x_NI, self.weight)


def embedding(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class Readout(nn.Module):
    """Logits of the vocabulary; the weight (V, D) may be the embedding's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_ND: Tensor) -> Tensor:
        return functional.linear(hidden_ND, self.weight)


class ScaledNetwork(nn.Module):
    """A network with factors on attention logits, residual branches and logits.

    Factors are buffers, which may differ between members of a pack. The trunk, whose parameters begin with
    `name`, takes tokens_BT, the factors of attention and branches, and a list for terms added to the loss. It
    returns hidden_ND.
    """

    attention_factor: Tensor
    residual_factor: Tensor
    logit_factor: Tensor

    def __init__(self, name: str, trunk: nn.Module, embedding_VD: Tensor, tied: bool) -> None:
        super().__init__()
        self.add_module(name, trunk)
        self._trunk = name
        self.lm_head = Readout(embedding_VD if tied else nn.Parameter(torch.empty_like(embedding_VD)))
        for factor in ("attention_factor", "residual_factor", "logit_factor"):
            self.register_buffer(factor, torch.ones(()))

    def forward(
        self, tokens_BT: Tensor, added: list[Tensor] | None = None, targets_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits_BTV of the token after each of `tokens_BT`, or with targets their mean cross-entropy.

        `added` takes terms added to the loss.
        """
        trunk, added = self.get_submodule(self._trunk), [] if added is None else added
        hidden_ND = trunk(tokens_BT, self.attention_factor, self.residual_factor, added) * self.logit_factor
        if targets_BT is not None:
            return cross_entropy(hidden_ND, self.lm_head.weight, targets_BT.flatten())
        return self.lm_head(hidden_ND).view(*tokens_BT.shape, -1)
