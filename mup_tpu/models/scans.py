"""The residual stream through all blocks: one after another, or as one loop of XLA's compiler, in a third of
the memory (benchmarks/deep.csv).

`torch_xla.experimental.scan_layers` makes such a loop through AOTAutograd, which cannot see through
`torch.func`, by which a pack's members are stacked and their gradients taken. Here the loop lies below both,
in an autograd function of the members' stacked tensors.

The backward pass keeps only each block's input and computes the rest anew, block by block: a third more
arithmetic, and one vector a token and layer.

Shapes: L blocks, K members, N tokens, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from mup_tpu.internals.torch import tree_flatten, tree_unflatten

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
            _, pull = vjp(lambda x, p: call(x, given, p), x_ND, parameters)
            return pull(gradient_ND)

        def step(gradient_KND: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            given, x_KND, parameters = items[:shared], items[shared], items[shared + 1 :]
            new, gradients = vmap(of_member, dims)(gradient_KND, x_KND, tuple(given), tuple(parameters))
            return new, list(gradients)

        stacks = [inputs_LKND, *_stacks(tensors[shared:], each)]
        stream_KND, stacked = _loop(scan, step, gradient_KND, stacks, list(tensors[:shared]), reverse=True)
        of_parameters = [stacked[i % each][i // each] for i in range(len(tensors) - shared)]
        return (stream_KND, *of_parameters), (0,) * (1 + len(of_parameters))
