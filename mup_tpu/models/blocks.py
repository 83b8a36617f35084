"""The residual stream through all blocks: one after another, or, for XLA, as one loop of the compiler's,
which takes a third of the memory (benchmarks/deep.csv).

`torch_xla.experimental.scan_layers` does this for a module of its own. It goes through AOTAutograd, which
cannot see through `torch.func`, by which the members of a pack are stacked and their gradients taken. Here
the loop is below both: an autograd function that is called with the members' stacked tensors.

The backward pass keeps each block's input alone and computes the rest anew, block by block: a third more
arithmetic, and memory that grows with depth by one vector a token and layer.

Shapes: L blocks, K members, N tokens, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

SCANNED_FROM = 16
"""Blocks from which on XLA has them as one loop (measured: benchmarks/deep.csv)."""


@dataclass(frozen=True)
class _Call:
    """How one block is called: all that is no tensor."""

    block: nn.Module
    names: tuple[str, ...]
    """Of its parameters."""
    rest: tuple[Any, ...]
    """What it takes after the stream, flat; tensors are left open."""
    structure: Any
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    """What forward and backward multiply in: backward runs when the caller's context has ended."""

    def __call__(self, x_ND: Tensor, shared: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        given = iter(shared)
        rest = [next(given) if value is Tensor else value for value in self.rest]
        arguments = (x_ND, *tree_unflatten(rest, self.structure))
        with self.autocast():
            return functional_call(self.block, dict(zip(self.names, parameters, strict=True)), arguments)


def through_blocks(blocks: nn.ModuleList, x_ND: Tensor, *rest: Any) -> Tensor:
    """What the blocks make of the residual stream, one after another; each is called with it and `rest`."""
    for block in blocks:
        x_ND = block(x_ND, *rest)
    return x_ND


def scan_blocks(blocks: nn.ModuleList, x_ND: Tensor, *rest: Any) -> Tensor:
    """The same as one loop.

    Args:
        blocks: of one structure. Within `torch.func.functional_call`
            and `torch.func.vmap`, on an XLA device.
        x_ND: the stream.
        rest: nested tensors, which have no gradient, and anything else.
    """
    flat, structure = tree_flatten(rest)
    shared = [value for value in flat if isinstance(value, Tensor)]
    kind = x_ND.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(kind, dtype) if enabled else contextlib.nullcontext()

    open_rest = tuple(Tensor if isinstance(value, Tensor) else value for value in flat)
    names = tuple(name for name, _ in blocks[0].named_parameters())
    call = _Call(blocks[0], names, open_rest, structure, autocast)
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    out_ND, _ = _Blocks.apply(call, len(shared), x_ND, *shared, *parameters)
    return out_ND


def _scan(
    step: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]],
    carry: Tensor,
    stacks: list[Tensor],
    fixed: list[Tensor],
    reverse: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """A step over the items of stacks (L, ...): the last carry, and what the steps returned, stacked."""
    from mup_tpu.devices.torch_xla_private import scan_flat

    def flat(carried: Sequence[Tensor], items: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        new, returned = step(carried[0], [*carried[1:], *items])
        return [new, *carried[1:]], returned

    # What is fixed is carried: whatever a step closes over would become a constant of the program.
    (out, *_), returned = scan_flat(flat, [carry, *fixed], stacks, reverse)
    return out, returned


def _stacks(parameters: Sequence[Tensor], each: int) -> list[Tensor]:
    """Each parameter of a block, stacked over blocks (L, K, ...)."""
    return [torch.stack(list(parameters[i::each])) for i in range(each)]


class _Blocks(torch.autograd.Function):
    """The blocks' output, and what each of them read, stacked (L, N, D)."""

    @staticmethod
    def forward(call: _Call, shared: int, x_ND: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("members are stacked here, and by torch.func.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, ctx.shared, _, *tensors = inputs
        ctx.save_for_backward(output[1], *tensors)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs_LND, *tensors = ctx.saved_tensors
        stream_ND, *of_parameters = _Backward.apply(ctx.call, ctx.shared, gradients[0], inputs_LND, *tensors)
        return None, None, stream_ND, *(None,) * ctx.shared, *of_parameters

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], call: _Call, shared: int, x_KND: Tensor, *tensors: Tensor
    ) -> tuple[Any, ...]:
        each = len(call.names)
        dims = (0, tuple(in_dims[3 : 3 + shared]), (0,) * each)

        def step(x_KND: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            out_KND = vmap(call, dims)(x_KND, tuple(items[:shared]), tuple(items[shared:]))
            return out_KND, [x_KND]

        out_KND, (inputs_LKND,) = _scan(step, x_KND, _stacks(tensors[shared:], each), list(tensors[:shared]))
        return (out_KND, inputs_LKND), (0, 1)


class _Backward(torch.autograd.Function):
    """Gradients of the stream before the blocks and of each parameter."""

    @staticmethod
    def forward(call: _Call, shared: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("members are stacked here, and by torch.func.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        call: _Call,
        shared: int,
        gradient_KND: Tensor,
        inputs_LKND: Tensor,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        each = len(call.names)
        dims = (0, 0, tuple(in_dims[4 : 4 + shared]), (0,) * each)
        inputs_LKND = inputs_LKND.movedim(in_dims[3] or 0, 1)

        def of_member(
            gradient_ND: Tensor, x_ND: Tensor, given: tuple[Tensor, ...], parameters: tuple[Tensor, ...]
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            _, pull = vjp(lambda x, p: call(x, given, p), x_ND, parameters)
            return pull(gradient_ND)

        def step(gradient_KND: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            given, x_KND, parameters = items[:shared], items[shared], items[shared + 1 :]
            new, found = vmap(of_member, dims)(gradient_KND, x_KND, tuple(given), tuple(parameters))
            return new, list(found)

        stacks = [inputs_LKND, *_stacks(tensors[shared:], each)]
        stream_KND, found = _scan(step, gradient_KND, stacks, list(tensors[:shared]), reverse=True)
        of_parameters = [found[i % each][i // each] for i in range(len(tensors) - shared)]
        return (stream_KND, *of_parameters), (0,) * (1 + len(of_parameters))
