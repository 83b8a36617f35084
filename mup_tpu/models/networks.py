"""Networks under transformers' names, with factors on embeddings, attention logits, branches and logits.

GPT-2 is written after Radford et al. 2019, section 2.3, Llama after Touvron et al. 2023, section 2.2; tests
compare them with transformers' own. A function with the architecture's name builds its network without
weights (meta device), for `torch.func.functional_call`. Weights, fresh or trained, are at the end. Only an
export imports transformers: that takes twice as long as torch.

Shapes: B sequences, T tokens, N = B·T, D width, V vocabulary, H heads, G key-value heads, d head size, h =
d/2, X = 3·D, I width between an MLP's layers, J = 2·I, E experts, K of them a token, R rows of a part.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.config import ModelConfig, Trial
from mup_tpu.models import Parameter, architecture_of, forward_scaling
from mup_tpu.models.architectures import ROTARY_BASE, mlp_width
from mup_tpu.models.attention import ATTENTION
from mup_tpu.models.base import Forms
from mup_tpu.models.layers import (
    Conv1D,
    Linear,
    OnePassLayerNorm,
    OnePassRMSNorm,
    RMSNorm,
    Scale,
    ScaledNetwork,
    embedding,
)
from mup_tpu.rules.parametrization import Scaling


class _GPT2Attention(nn.Module):
    """Causal self-attention of H heads."""

    def __init__(self, width: int, heads: int, forms: Forms) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.head_size, self._attention = width // heads, ATTENTION[forms.attention]

    def forward(self, x_ND: Tensor, sequence_length: int, attention_factor: Tensor) -> Tensor:
        qkv_BTX = self.c_attn(x_ND).view(-1, sequence_length, 3 * x_ND.shape[-1])
        return self.c_proj(self._attention(qkv_BTX, self.head_size, attention_factor).flatten(0, 1))


class _GPT2Mlp(nn.Module):
    """Two layers, 4·D wide between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x_ND)))


class _GPT2Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, forms: Forms) -> None:
        super().__init__()
        self.ln_1, self.attn = _layer_norm(width, forms), _GPT2Attention(width, heads, forms)
        self.ln_2, self.mlp = _layer_norm(width, forms), _GPT2Mlp(width)

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
        self.h = nn.ModuleList(_GPT2Block(width, config.heads, forms) for _ in range(config.depth))
        self.ln_f = _layer_norm(width, forms)

    def forward(
        self, tokens_BT: Tensor, attention_factor: Tensor, residual_factor: Tensor, added: deque[Tensor]
    ) -> Tensor:
        t = tokens_BT.shape[-1]
        # Rows of one matrix from here on, except in attention: TPUs copy between the layouts of products,
        # norms and sums that differ in shape.
        x_ND = self.drop(self.wte(tokens_BT) + self.wpe.weight[:t]).flatten(0, 1)
        for block in self.h:
            x_ND = block(x_ND, t, attention_factor, residual_factor)
        return self.ln_f(x_ND)


def _layer_norm(width: int, forms: Forms) -> nn.LayerNorm:
    return OnePassLayerNorm(width) if forms.one_pass_norms else nn.LayerNorm(width)


def gpt2(config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms) -> ScaledNetwork:
    with torch.device("meta"):
        transformer = _Transformer(config, vocab_size, sequence_length, forms)
        return ScaledNetwork("transformer", transformer, transformer.wte.weight, config.tied)


MakeMlp = Callable[[ModelConfig, Forms], nn.Module]
"""Makes a block's MLP, called with x_ND, the tokens of a sequence, and a queue for terms of the loss."""


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


class _LlamaAttention(nn.Module):
    """Causal self-attention of H heads over G key-value heads."""

    def __init__(self, config: ModelConfig, forms: Forms) -> None:
        super().__init__()
        d = self.head_size = config.actual_head_size
        outputs = config.width // config.query_group_size
        self.q_proj, self.k_proj = Linear(config.width, config.width), Linear(config.width, outputs)
        self.v_proj, self.o_proj = Linear(config.width, outputs), Linear(config.width, config.width)
        self.q_norm = _rms_norm(d, forms) if config.qk_norm else None
        self.k_norm = _rms_norm(d, forms) if config.qk_norm else None
        self._attention = ATTENTION[forms.attention]

    def forward(self, x_ND: Tensor, rotary: Rotary, attention_factor: Tensor) -> Tensor:
        projected = (projection(x_ND) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query_NHd, key_NGd, value_NGd = (y_NX.unflatten(-1, (-1, self.head_size)) for y_NX in projected)
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
        self.self_attn, self.mlp = _LlamaAttention(config, forms), mlp(config, forms)
        self.input_layernorm = _rms_norm(config.width, forms)
        self.post_attention_layernorm = _rms_norm(config.width, forms)

    def forward(
        self,
        x_ND: Tensor,
        rotary: Rotary,
        attention_factor: Tensor,
        residual_factor: Tensor,
        added: deque[Tensor],
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
        self.norm = _rms_norm(config.width, forms)
        self._head_size = config.actual_head_size

    def forward(
        self, tokens_BT: Tensor, attention_factor: Tensor, residual_factor: Tensor, added: deque[Tensor]
    ) -> Tensor:
        # Rows of one matrix from here on, except in attention, as in GPT-2.
        x_ND = self.embed_scale(self.embed_tokens(tokens_BT)).flatten(0, 1)
        turns = rotary(tokens_BT.shape[-1], self._head_size, x_ND)
        for layer in self.layers:
            x_ND = layer(x_ND, turns, attention_factor, residual_factor, added)
        return self.norm(x_ND)


def _rms_norm(width: int, forms: Forms) -> RMSNorm:
    return OnePassRMSNorm(width) if forms.vmapped else RMSNorm(width)


def dense(config: ModelConfig, forms: Forms) -> nn.Module:
    return Mlp(config.width, mlp_width(config.width), forms)


def llama(
    config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms, mlp: MakeMlp = dense
) -> ScaledNetwork:
    # It takes sequences of any length: positions are rotary.
    with torch.device("meta"):
        model = _Model(config, vocab_size, forms, mlp)
        return ScaledNetwork("model", model, model.embed_tokens.weight, config.tied)


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
            out_ND = torch.zeros_like(x_ND)
            stacks = (weights_NE.unbind(-1), self.gate_up_proj.unbind(), self.down_proj.unbind())
            for weight_N, gate_up_JD, down_DI in zip(*stacks, strict=True):
                (rows_R,) = weight_N.nonzero(as_tuple=True)
                gate_RI, up_RI = functional.linear(x_ND[rows_R], gate_up_JD).chunk(2, -1)
                hidden_RI = self._swiglu(gate_RI.contiguous(), up_RI.contiguous())
                out_RD = functional.linear(hidden_RI, down_DI) * weight_N[rows_R, None]
                out_ND = out_ND.index_add(0, rows_R, out_RD.to(out_ND.dtype))
            return out_ND
        gate_NEI, up_NEI = torch.einsum("nd,ejd->nej", x_ND, self.gate_up_proj).chunk(2, -1)
        hidden_NEI = self._swiglu(gate_NEI.contiguous(), up_NEI.contiguous()) * weights_NE[..., None]
        return torch.einsum("nei,edi->nd", hidden_NEI, self.down_proj)


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

    def forward(self, x_ND: Tensor, sequence_length: int, added: deque[Tensor]) -> Tensor:
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


def moe(config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms) -> ScaledNetwork:
    return llama(config, vocab_size, sequence_length, forms, _Mixture)


def init_parameters(
    parameters: Mapping[str, Parameter], scaling: Mapping[str, Scaling], init_std: float, seed: int
) -> dict[str, Tensor]:
    """Draw float32 weights on the CPU, by name: a function of the seed and each parameter's name and shape.

    `init_std` is the standard deviation at the base, without the architecture's factor.
    """
    weights = {}
    for name, parameter in parameters.items():
        if parameter.init != "normal":
            weights[name] = torch.full(parameter.shape, 1.0 if parameter.init == "ones" else 0.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        std = init_std * parameter.init_factor * scaling[name].init
        weights[name] = torch.randn(parameter.shape, generator=generator) * std
    return weights


def folded(trial: Trial, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a trial's weights with all factors folded in, for its stock class."""
    stock = {name: p.detach().clone() for name, p in weights.items()}
    for name, factor, part in architecture_of(trial.model).folds(trial.model, forward_scaling(trial)):
        if name in stock:
            stock[name][..., part] *= factor
    return stock


def export_stock(
    trial: Trial,
    weights: Mapping[str, Tensor],
    vocab_size: int,
    sequence_length: int,
    separator: int,
    path: str | Path,
) -> Path:
    """Write a checkpoint folder that transformers' stock class loads without our code.

    `separator` is the token between documents: texts begin after it and end with it.
    """
    # accelerate (1.15), which models of transformers need, imports torch_xla wherever that is installed,
    # unless USE_TORCH_XLA is 0 at that moment: in 3 to 4 s, and torch_xla may take the machine's TPUs.
    is_quiet = "torch_xla" not in sys.modules and "USE_TORCH_XLA" not in os.environ
    if is_quiet:
        os.environ["USE_TORCH_XLA"] = "0"
    try:
        with contextlib.suppress(ImportError):
            import accelerate  # noqa: F401
    finally:
        if is_quiet:
            del os.environ["USE_TORCH_XLA"]
    from transformers import GenerationConfig

    exported = folded(trial, {name: p.detach().to("cpu", torch.float32) for name, p in weights.items()})
    model = architecture_of(trial.model).stock(trial.model, vocab_size, sequence_length)
    missing, unexpected = model.load_state_dict(exported, strict=False)
    assert not unexpected and set(missing) <= set(model._tied_weights_keys or ()), (missing, unexpected)
    model.tie_weights()
    ends = {name: separator for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.config.update(ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(path)
    mode = Path(path, "config.json").stat().st_mode
    for file in Path(path).glob("*.safetensors"):
        file.chmod(mode)  # safetensors lets only this user read them
    return Path(path)
