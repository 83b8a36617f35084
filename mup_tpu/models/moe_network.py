"""Network of a mixture of experts, under transformers' names: Llama's with other MLPs.

Written after Jiang et al. 2024 (arXiv:2401.04088), section 2.2; tests compare it with transformers' own.

Shapes: B sequences, T tokens, N = B·T, R rows sent to one expert, D width, E experts, K of them for a token,
I width of an expert between its layers, J = 2·I.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.config import ModelConfig
from mup_tpu.models import llama_network
from mup_tpu.models.base import Forms
from mup_tpu.models.layers import Linear, Scale, ScaledNetwork
from mup_tpu.models.llama_network import Mlp, swiglu_of


class _Experts(nn.Module):
    """Gated MLPs, their matrices stacked; each token's outputs are summed with its weights.

    Gathered, an expert computes the tokens sent to it: their number is known when it runs, so neither
    `torch.func.vmap` nor a compiler can take it. Otherwise every expert computes every token, and weights
    of 0 drop the others: the same function, E/k times the arithmetic.
    """

    def __init__(self, config: ModelConfig, forms: Forms) -> None:
        super().__init__()
        experts, d, between = config.num_experts, config.width, config.expert_width
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * between, d))
        self.down_proj = nn.Parameter(torch.empty(experts, d, between))
        self._swiglu, self._gathered = swiglu_of(forms), forms.gathered

    def forward(self, x_ND: Tensor, weights_NE: Tensor) -> Tensor:
        if self._gathered:
            return self._of_their_tokens(x_ND, weights_NE)
        gate_NEI, up_NEI = torch.einsum("nd,ejd->nej", x_ND, self.gate_up_proj).chunk(2, -1)
        hidden_NEI = self._swiglu(gate_NEI.contiguous(), up_NEI.contiguous()) * weights_NE[..., None]
        return torch.einsum("nei,edi->nd", hidden_NEI, self.down_proj)

    def _of_their_tokens(self, x_ND: Tensor, weights_NE: Tensor) -> Tensor:
        out_ND = torch.zeros_like(x_ND)
        stacks = (weights_NE.unbind(-1), self.gate_up_proj.unbind(), self.down_proj.unbind())
        for weight_N, gate_up_JD, down_DI in zip(*stacks, strict=True):
            (rows_R,) = weight_N.nonzero(as_tuple=True)
            gate_RI, up_RI = functional.linear(x_ND[rows_R], gate_up_JD).chunk(2, -1)
            hidden_RI = self._swiglu(gate_RI.contiguous(), up_RI.contiguous())
            out_RD = functional.linear(hidden_RI, down_DI) * weight_N[rows_R, None]
            out_ND = out_ND.index_add(0, rows_R, out_RD.to(out_ND.dtype))
        return out_ND


class _Mixture(nn.Module):
    """Router, experts, and optionally shared experts with a gate, as one MLP."""

    def __init__(self, config: ModelConfig, forms: Forms) -> None:
        super().__init__()
        self.gate, self.experts = Linear(config.width, config.num_experts), _Experts(config, forms)
        shared = config.shared_experts * config.expert_width
        self.shared_expert = Mlp(config.width, shared, forms) if shared else None
        self.shared_expert_gate = Linear(config.width, 1) if shared else None
        self.balance = Scale()
        self._chosen = config.experts_per_token

    def forward(self, x_ND: Tensor, sequence_length: int, added: list[Tensor]) -> Tensor:
        # In the precision of the norms: bf16 would send tokens elsewhere (Fedus et al. 2022, section 2.4).
        with torch.autocast(x_ND.device.type, enabled=False):
            probabilities_NE = self.gate(x_ND).softmax(-1)
        experts_E = torch.arange(probabilities_NE.shape[-1], device=x_ND.device)
        best_NK = probabilities_NE.detach().topk(self._chosen).indices
        is_chosen_NE = (best_NK[..., None] == experts_E).any(-2).to(x_ND.dtype)
        chosen_NE = probabilities_NE * is_chosen_NE
        out_ND = self.experts(x_ND, chosen_NE / chosen_NE.sum(-1, keepdim=True))
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out_ND = out_ND + self.shared_expert_gate(x_ND).sigmoid() * self.shared_expert(x_ND)
        chosen_BE, probability_BE = (
            y_NE.unflatten(0, (-1, sequence_length)).mean(1) for y_NE in (is_chosen_NE, probabilities_NE)
        )
        added.append(self.balance((chosen_BE * probability_BE).mean() * len(experts_E) ** 2))
        return out_ND


def build(config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms) -> ScaledNetwork:
    # One loop of XLA's compiler over all blocks would lose the terms that they add to the loss.
    unscanned = dataclasses.replace(forms, scan=None)
    return llama_network.build(config, vocab_size, sequence_length, unscanned, _Mixture)
