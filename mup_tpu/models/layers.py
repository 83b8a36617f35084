"""Layers that architectures share, the loss, and the residual stream through all blocks.

Layers replace torch's, which draw their init, which on the meta device imports torch's compiler (3 to 6 s).

Cross-entropy takes tokens some rows at a time, with the gradients of their hidden vectors and of the readout:
the products are those of a backward pass, but only one part's logits are in memory
(`benchmarks/vocabulary.py`).

Blocks follow each other, or are one loop of XLA's compiler, in a third of the memory (benchmarks/deep.csv).
`torch_xla.experimental.scan_layers` makes such a loop through AOTAutograd, which cannot see through
`torch.func`, by which a pack's members are stacked and their gradients taken. Here the loop lies below both,
in an autograd function of the members' stacked tensors. The backward pass keeps only each block's input and
computes the rest anew, block by block: a third more arithmetic, and one vector per token and layer.

Shapes: B sequences, T tokens, N = B·T, R of them at a time, D width, V vocabulary, L blocks, K members; a
layer's I inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional

from mup_tpu.internals.torch import tree_flatten, tree_unflatten
from mup_tpu.models.architectures import EPS


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


class OnePassLayerNorm(nn.LayerNorm):
    """Layer norm as elementary operations. torch_xla's own merges the axes of members and tokens; XLA cannot
    split them again, and every norm would gather all members on every device.
    """

    def forward(self, x_ND: Tensor) -> Tensor:
        return _LayerNorm.apply(x_ND, self.weight, self.bias, self.eps)[0]


class _LayerNorm(torch.autograd.Function):
    """Layer norm that reads its input once for both moments, and in backward once for all four sums.

    Autograd of the single operations reads it seven times: a fifth of a narrow step, by the TPUs' compilers.
    The variance is the mean square less the squared mean, in float32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
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
        x_ND, weight_D, mean_N1, inverse_N1 = ctx.saved_tensors
        normed_ND = (x_ND - mean_N1) * inverse_N1
        scaled_ND = gradient_ND * weight_D
        shift_N1 = scaled_ND.mean(-1, keepdim=True)
        stretch_N1 = (scaled_ND * normed_ND).mean(-1, keepdim=True)
        to_x_ND = inverse_N1 * (scaled_ND - shift_N1 - normed_ND * stretch_N1)
        return to_x_ND, (gradient_ND * normed_ND).sum(0), gradient_ND.sum(0), None


class RMSNorm(nn.Module):
    """Division by the root mean square of the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        # Projections in bf16 return bf16, too coarse for the mean square.
        return functional.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, EPS)


class OnePassRMSNorm(RMSNorm):
    """RMS norm under vmap, which reads its input once, and in backward once for both sums."""

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x.to(self.weight.dtype), self.weight)[0]


class _RMSNorm(torch.autograd.Function):
    """One operation: autograd of the single ones keeps three tensors, and reads each several times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        # ε times the width: gradient clipping has the constant ε too, and XLA cannot take one constant both
        # inside and outside of the part of the program that each device runs by itself.
        width = x.shape[-1]
        inverse = (x.square().sum(-1, keepdim=True) + width * EPS).rsqrt() * width**0.5
        return x * inverse * weight_D, inverse

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_D, inverse = ctx.saved_tensors
        normed = x * inverse
        scaled = gradient * weight_D
        stretch = (scaled * normed).mean(-1, keepdim=True)
        # Axis by axis: merged with the tokens' axis, the members' could not be split over devices.
        to_weight_D = (gradient * normed).sum(tuple(range(x.dim() - 1)))
        return inverse * (scaled - normed * stretch), to_weight_D


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


AT_ONCE = 2**24  # logits in memory: 64 MiB in float32; a narrow model's are fewer than that


def rows_at_once(vocab_size: int) -> int:
    return max(128, AT_ONCE // vocab_size)


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets, in nat, by the readout's weight."""
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden_ND, weight_VD, targets_N)[0]
    losses = [
        -_log_probabilities(hidden_RD, weight_VD).gather(-1, to_R1)
        for hidden_RD, to_R1 in _parts(hidden_ND, weight_VD, targets_N)
    ]
    return torch.cat(losses).mean()


def _parts(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = rows_at_once(len(weight_VD))
    return zip(hidden_ND.split(rows), targets_N[:, None].split(rows), strict=True)


def _log_probabilities(hidden_RD: Tensor, weight_VD: Tensor) -> Tensor:
    logits_RV = functional.linear(hidden_RD, weight_VD)
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(-1)


class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and its gradients by both tensors."""
        losses, to_hidden, to_weight_VD = [], [], torch.zeros_like(weight_VD)
        for hidden_RD, to_R1 in _parts(hidden_ND, weight_VD, targets_N):
            log_RV = _log_probabilities(hidden_RD, weight_VD)
            losses.append(-log_RV.gather(-1, to_R1))
            slope_RV = log_RV.exp_().scatter_add_(-1, to_R1, torch.full_like(losses[-1], -1.0))
            to_hidden.append((slope_RV @ weight_VD).to(hidden_ND.dtype))
            to_weight_VD += slope_RV.mT @ hidden_RD
        return torch.cat(losses).mean(), torch.cat(to_hidden), to_weight_VD

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        to_hidden_ND, to_weight_VD = ctx.saved_tensors
        share = gradient / len(to_hidden_ND)
        return share * to_hidden_ND, share * to_weight_VD, None


SCANNED_FROM = 16  # least number of blocks that are one loop on XLA (measured: benchmarks/deep.csv)


def through_blocks(
    scan: Callable[..., Any] | None, blocks: nn.ModuleList, x_ND: Tensor, *rest: Any
) -> Tensor:
    """Return the residual stream after all blocks, which take `rest` too.

    With `scan` (`Device.scan`) they are one loop, within `torch.func.functional_call` and `torch.func.vmap`:
    they have one structure, and tensors in `rest` have no gradient.
    """
    if scan is None:
        for block in blocks:
            x_ND = block(x_ND, *rest)
        return x_ND
    flat, structure = tree_flatten(rest)
    shared = [value for value in flat if isinstance(value, Tensor)]
    template = [Tensor if isinstance(value, Tensor) else value for value in flat]
    names = [name for name, _ in blocks[0].named_parameters()]
    kind = x_ND.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def call(x_ND: Tensor, given: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        tensors = iter(given)
        values = [next(tensors) if value is Tensor else value for value in template]
        arguments = (x_ND, *tree_unflatten(values, structure))
        # Backward runs after the caller's own context of autocast has ended.
        with torch.autocast(kind, dtype) if enabled else contextlib.nullcontext():
            return functional_call(blocks[0], dict(zip(names, parameters, strict=True)), arguments)

    parameters = [parameter for block in blocks for parameter in block.parameters()]
    out_ND, _ = _Blocks.apply(_Block(scan, call, len(shared), len(names)), x_ND, *shared, *parameters)
    return out_ND


class _Block(NamedTuple):
    """One block, and how the device loops over all of them."""

    scan: Callable[..., Any]
    call: Callable[..., Tensor]  # From the stream, shared tensors, and a block's parameters, to the stream
    shared: int  # Number of shared tensors
    each: int  # Number of a block's parameters


def _loop(
    scan: Callable[..., Any],
    step: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]],
    carry: Tensor,
    stacks: list[Tensor],
    fixed: list[Tensor],
    reverse: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Run a step over the items of stacks (L, ...); return the last carry, and stacked results."""

    def flat(carried: Sequence[Tensor], items: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        new, returned = step(carried[0], [*carried[1:], *items])
        return [new, *carried[1:]], returned

    # Fixed tensors are carried: a tensor from a closure would become a constant of the program.
    (out, *_), returned = scan(flat, [carry, *fixed], stacks, reverse)
    return out, returned


def _stacks(parameters: Sequence[Tensor], each: int) -> list[Tensor]:
    return [torch.stack(list(parameters[i::each])) for i in range(each)]


class _Blocks(torch.autograd.Function):
    """The blocks' output, and their inputs, stacked (L, N, D)."""

    @staticmethod
    def forward(block: _Block, x_ND: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("members are stacked here, and by torch.func.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.block, _, *tensors = inputs
        ctx.save_for_backward(output[1], *tensors)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs_LND, *tensors = ctx.saved_tensors
        stream_ND, *of_parameters = _Backward.apply(ctx.block, gradients[0], inputs_LND, *tensors)
        return None, stream_ND, *(None,) * ctx.block.shared, *of_parameters

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], block: _Block, x_KND: Tensor, *tensors: Tensor
    ) -> tuple[Any, ...]:
        scan, call, shared, each = block
        dims = (0, tuple(in_dims[2 : 2 + shared]), (0,) * each)

        def step(x_KND: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            out_KND = vmap(call, dims)(x_KND, tuple(items[:shared]), tuple(items[shared:]))
            return out_KND, [x_KND]

        out_KND, (inputs_LKND,) = _loop(
            scan, step, x_KND, _stacks(tensors[shared:], each), list(tensors[:shared])
        )
        return (out_KND, inputs_LKND), (0, 1)


class _Backward(torch.autograd.Function):
    """Gradients of the stream before the blocks and of each parameter."""

    @staticmethod
    def forward(block: _Block, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("members are stacked here, and by torch.func.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        block: _Block,
        gradient_KND: Tensor,
        inputs_LKND: Tensor,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        scan, call, shared, each = block
        dims = (0, 0, tuple(in_dims[3 : 3 + shared]), (0,) * each)
        inputs_LKND = inputs_LKND.movedim(in_dims[2] or 0, 1)

        def of_member(
            gradient_ND: Tensor, x_ND: Tensor, given: tuple[Tensor, ...], parameters: tuple[Tensor, ...]
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            pull = vjp(lambda x, p: call(x, given, p), x_ND, parameters)[1]
            return pull(gradient_ND)

        def step(gradient_KND: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            given, x_KND, parameters = items[:shared], items[shared], items[shared + 1 :]
            new, gradients = vmap(of_member, dims)(gradient_KND, x_KND, tuple(given), tuple(parameters))
            return new, list(gradients)

        stacks = [inputs_LKND, *_stacks(tensors[shared:], each)]
        stream_KND, stacked = _loop(scan, step, gradient_KND, stacks, list(tensors[:shared]), reverse=True)
        of_parameters = [stacked[i % each][i // each] for i in range(len(tensors) - shared)]
        return (stream_KND, *of_parameters), (0,) * (1 + len(of_parameters))
