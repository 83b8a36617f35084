"""GPT-2 of a given width in a given parametrization: stock names and numbers, our init and three factors.

The module is written here, after GPT-2's definition (Radford et al. 2019, section 2.3), under transformers'
names, and tests hold it to transformers' own. To import that takes 11 s, twice as long as torch, in every
process that trains; so it is imported to export alone.

The factors (embeddings, attention logits, logits) are buffers, so that they can differ between the members of
a pack. A trained member exports to a stock `GPT2LMHeadModel` with the factors folded into its weights.

Shapes: B sequences, T tokens, N = B·T, D width, X = 3·D, V vocabulary; a layer's I inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.attention import ATTENTION, AttentionFunction
from mup_tpu.config import ModelConfig
from mup_tpu.parametrization import TABLES, Scaling, infer_infshapes, scalings


class _Scale(nn.Module):
    """Multiplies by a factor; stands where GPT-2 has its (unused) embedding dropout."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _FastGelu(nn.Module):
    """`_SigmoidGelu` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return _SigmoidGelu.apply(x)


class _SigmoidGelu(torch.autograd.Function):
    """GELU with tanh as x·σ(2u), u = √(2/π)(x + 0.044715 x³): the same function, since ½(1 + tanh u) = σ(2u).

    torch's own takes 2.6 times as long on a CPU, a sixth of a narrow model's step, for its tanh.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out, slope = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        # As 0-d tensors, for then torch multiplies and adds in one pass over memory.
        two_c, one = x.new_tensor(_TWO_C), x.new_ones(())
        for part, share, rise in zip(
            *(t.reshape(-1).split(_GELU_BLOCK) for t in (x, out, slope)), strict=True
        ):
            torch.addcmul(two_c, part, part, value=0.044715 * _TWO_C, out=share).mul_(part).sigmoid_()
            if ctx.needs_input_grad[0]:
                # d/dx xσ(2u) = σ·(1 + x·2u'·(1 - σ)), here while all is in the cache: backward then needs one
                # tensor instead of two.
                torch.addcmul(two_c, part, part, value=3 * 0.044715 * _TWO_C, out=rise)
                torch.addcmul(one, part, rise, out=rise)
                torch.lerp(rise, one, share, out=rise).mul_(share)
            share.mul_(part)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return slope * gradient


_TWO_C = 2 * math.sqrt(2 / math.pi)
_GELU_BLOCK = 2**18
"""Elements worked on at once: in float32 a MiB, which stays in the caches from one operation to the next."""


class _OnePassLayerNorm(nn.LayerNorm):
    """Layer norm as elementary operations: torch_xla's own merges the members and tokens axes,
    which XLA cannot take apart again, so that every norm would gather all members on every device.
    """

    def forward(self, x_ND: Tensor) -> Tensor:
        return _LayerNorm.apply(x_ND, self.weight, self.bias, self.eps)[0]


class _LayerNorm(torch.autograd.Function):
    """Reads its input once for both moments, and in backward once for all four sums.

    What autograd makes of the operations one by one reads it seven times, a fifth of a narrow step by the
    TPUs' compilers. The variance is the mean square less the squared mean, in float32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Output_ND, and each row's mean_N1 and inverse standard deviation_N1."""
        mean_N1 = x_ND.mean(-1, keepdim=True)
        variance_N1 = (x_ND.square().mean(-1, keepdim=True) - mean_N1.square()).clamp(min=0.0)
        inverse_N1 = (variance_N1 + eps).rsqrt()
        return (x_ND - mean_N1) * inverse_N1 * weight_D + bias_D, mean_N1, inverse_N1

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx, gradient_ND: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of input, weight and bias."""
        x_ND, weight_D, mean_N1, inverse_N1 = ctx.saved_tensors
        normed_ND = (x_ND - mean_N1) * inverse_N1
        scaled_ND = gradient_ND * weight_D
        shift_N1 = scaled_ND.mean(-1, keepdim=True)
        stretch_N1 = (scaled_ND * normed_ND).mean(-1, keepdim=True)
        to_x_ND = inverse_N1 * (scaled_ND - shift_N1 - normed_ND * stretch_N1)
        return to_x_ND, (gradient_ND * normed_ND).sum(0), gradient_ND.sum(0), None


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What blocks are made of, the same function in each form."""

    attention: AttentionFunction
    norm: type[nn.LayerNorm]
    gelu: Callable[[], nn.Module]


class _Conv1D(nn.Module):
    """x·W + b, where W is (inputs, outputs), as GPT-2 has hidden matrices: the transpose of nn.Linear's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x_NI: Tensor) -> Tensor:
        return torch.addmm(self.bias, x_NI, self.weight)


class _Attention(nn.Module):
    """Causal self-attention of H heads."""

    def __init__(self, width: int, heads: int, attention: AttentionFunction) -> None:
        super().__init__()
        self.c_attn, self.c_proj = _Conv1D(width, 3 * width), _Conv1D(width, width)
        self.head_size = width // heads
        self._attention = attention

    def forward(self, x_ND: Tensor, sequence_length: int, attention_factor: Tensor) -> Tensor:
        qkv_BTX = self.c_attn(x_ND).view(-1, sequence_length, 3 * x_ND.shape[-1])
        return self.c_proj(self._attention(qkv_BTX, self.head_size, attention_factor).flatten(0, 1))


class _Mlp(nn.Module):
    """Two layers, 4·D wide between."""

    def __init__(self, width: int, gelu: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.c_fc, self.c_proj = _Conv1D(width, 4 * width), _Conv1D(4 * width, width)
        self.act = gelu()

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x_ND)))


class _Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, parts: _Parts) -> None:
        super().__init__()
        self.ln_1, self.attn = parts.norm(width), _Attention(width, heads, parts.attention)
        self.ln_2, self.mlp = parts.norm(width), _Mlp(width, parts.gelu)

    def forward(self, x_ND: Tensor, sequence_length: int, attention_factor: Tensor) -> Tensor:
        x_ND = x_ND + self.attn(self.ln_1(x_ND), sequence_length, attention_factor)
        return x_ND + self.mlp(self.ln_2(x_ND))


# torch's own layers would draw their init, which on the meta device imports torch's compiler: 3 to 6 s.
def _embedding(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class _Readout(nn.Module):
    """Logits of the vocabulary, through a weight (V, D) that may be the embedding's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_ND: Tensor) -> Tensor:
        return functional.linear(hidden_ND, self.weight)


class _Transformer(nn.Module):
    """All of GPT-2 but its readout."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, parts: _Parts) -> None:
        super().__init__()
        width = config.width
        self.wte, self.wpe = _embedding(vocab_size, width), _embedding(sequence_length, width)
        self.drop = _Scale()
        self.h = nn.ModuleList(_Block(width, config.heads, parts) for _ in range(config.depth))
        self.ln_f = parts.norm(width)

    def forward(self, tokens_BT: Tensor, attention_factor: Tensor) -> Tensor:
        t = tokens_BT.shape[-1]
        # Rows of one matrix from here on, but within attention: where products, norms and sums differ in
        # shape, TPUs copy from one layout to the other between them.
        x_ND = self.drop(self.wte(tokens_BT) + self.wpe.weight[:t]).flatten(0, 1)
        for block in self.h:
            x_ND = block(x_ND, t, attention_factor)
        return self.ln_f(x_ND)


class ScaledGPT2(nn.Module):
    """GPT-2 under transformers' names, with a factor each on embeddings, attention logits and logits."""

    attention_factor: Tensor
    logit_factor: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, parts: _Parts) -> None:
        super().__init__()
        self.transformer = _Transformer(config, vocab_size, sequence_length, parts)
        embedding = self.transformer.wte.weight
        self.lm_head = _Readout(embedding if config.tied else nn.Parameter(torch.empty_like(embedding)))
        self.register_buffer("attention_factor", torch.ones(()))
        self.register_buffer("logit_factor", torch.ones(()))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits_BTV of the token after each of `tokens_BT`."""
        hidden_ND = self.transformer(tokens_BT, self.attention_factor)
        return self.lm_head(hidden_ND * self.logit_factor).view(*tokens_BT.shape, -1)


def build_skeleton(
    config: ModelConfig,
    vocab_size: int,
    sequence_length: int,
    attention: str = "fused",
    one_pass_norms: bool = False,
    fast_gelu: bool = False,
) -> ScaledGPT2:
    """The module without weights (meta device), to be called through `torch.func.functional_call`.

    Args:
        config: its shape; learning rates and factors are not here.
        vocab_size: tokens of the vocabulary.
        sequence_length: positions.
        attention: its form, of `mup_tpu.attention`: "fused", "matmul" under vmap, "blocks" for CPUs.
        one_pass_norms: layer norms as few elementary operations, for XLA.
        fast_gelu: GELU by the sigmoid, for CPUs; not for bf16, whose x³ would be too coarse, nor
            under vmap or torch.compile.
    """
    parts = _Parts(
        ATTENTION[attention],
        _OnePassLayerNorm if one_pass_norms else nn.LayerNorm,
        _FastGelu if fast_gelu else functools.partial(nn.GELU, approximate="tanh"),
    )
    with torch.device("meta"):
        return ScaledGPT2(config, vocab_size, sequence_length, parts)


def parameter_shapes(
    config: ModelConfig, vocab_size: int, sequence_length: int
) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by name; a tied readout counts once, as the embedding."""
    return dict(_shapes(config, vocab_size, sequence_length))


@functools.lru_cache(maxsize=64)
def _shapes(config: ModelConfig, vocab_size: int, sequence_length: int) -> dict[str, tuple[int, ...]]:
    """Kept, because each trial of a pack asks for the base, the delta and its own."""
    module = build_skeleton(config, vocab_size, sequence_length)
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def parameter_scalings(
    config: ModelConfig, optimizer: str, vocab_size: int, sequence_length: int
) -> dict[str, Scaling]:
    """The parametrization's row of each parameter at this width, by name.

    Biases and norms never decay: their weight-decay factor is 0 in every parametrization.
    """

    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(dataclasses.replace(config, width=width), vocab_size, sequence_length)

    # A sequence length or vocabulary that equals a width would look like a growing axis only if it changed
    # between base and delta, which it does not.
    infshapes = infer_infshapes(
        shapes(config.base_width), shapes(2 * config.base_width), shapes(config.width)
    )
    rows = scalings(config.parametrization, optimizer, infshapes)
    return {
        name: row if len(infshapes[name]) > 1 else dataclasses.replace(row, weight_decay=0.0)
        for name, row in rows.items()
    }


def forward_factors(config: ModelConfig) -> dict[str, float]:
    """Value of each of the module's buffers for this configuration."""
    base_heads_size = dataclasses.replace(config, width=config.base_width).actual_head_size
    scaling = TABLES[config.parametrization].forward(
        config.width_multiplier, config.actual_head_size / base_heads_size
    )
    return {
        "transformer.drop.factor": config.alpha_in,
        "attention_factor": config.alpha_attn * scaling.attention,
        "logit_factor": config.alpha_out * scaling.logits,
    }


def init_parameters(
    config: ModelConfig, seed: int, shapes: Mapping[str, tuple[int, ...]], scaling: Mapping[str, Scaling]
) -> dict[str, Tensor]:
    """Fresh float32 weights on the CPU, by name: a function of the seed and each parameter's name and shape.

    GPT-2's init (Radford et al. 2019, section 2.3): normal with std σ, residual projections with
    σ/√(2·depth), biases 0, norms 1; times the parametrization's factor.
    """
    parameters = {}
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            parameters[name] = torch.zeros(shape)
        elif ".ln_" in name:
            parameters[name] = torch.ones(shape)
        elif name == "lm_head.weight" and config.readout_zero_init:
            parameters[name] = torch.zeros(shape)
        else:
            residual = (2 * config.depth) ** -0.5 if name.endswith("c_proj.weight") else 1.0
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            std = config.init_std * residual * scaling[name].init
            parameters[name] = torch.randn(shape, generator=generator) * std
    return parameters


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Number of parameters, and of those that are not embeddings or readout (Kaplan et al. 2020, N)."""
    total = sum(math.prod(shape) for shape in shapes.values())
    embedding = sum(
        math.prod(s) for n, s in shapes.items() if ".wte." in n or ".wpe." in n or n.startswith("lm_head")
    )
    return total, total - embedding


def export_stock(
    config: ModelConfig,
    parameters: Mapping[str, Tensor],
    vocab_size: int,
    sequence_length: int,
    path: str | Path,
) -> Path:
    """Write a checkpoint folder that `GPT2LMHeadModel.from_pretrained` loads with no code of ours.

    The embedding factor folds into both embeddings, the attention factor into the query weights, and the
    logit factor into the final norm (divided by the embedding factor where the readout is the embedding).

    Args:
        config: the trial's model.
        parameters: its trained weights by name.
        vocab_size: tokens of the vocabulary.
        sequence_length: positions.
        path: folder to write config.json and model.safetensors to.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    factors = forward_factors(config)
    alpha_in = factors["transformer.drop.factor"]
    folded = {name: p.detach().to("cpu", torch.float32).clone() for name, p in parameters.items()}
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        folded[name] *= alpha_in
    for i in range(config.depth):
        for kind in ("weight", "bias"):  # Conv1D stores (in, out): the first D outputs are the queries
            folded[f"transformer.h.{i}.attn.c_attn.{kind}"][..., : config.width] *= factors[
                "attention_factor"
            ]
    for kind in ("weight", "bias"):
        folded[f"transformer.ln_f.{kind}"] *= factors["logit_factor"] / (alpha_in if config.tied else 1.0)
    stock = GPT2Config(
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
    model = GPT2LMHeadModel(stock)
    missing, unexpected = model.load_state_dict(folded, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.save_pretrained(path)
    return Path(path)
