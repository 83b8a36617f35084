"""Many steps as one XLA program: a loop over a stack of batches, traced once.

torch_xla traces operations anew at every call: 36 ms of the host for a step at depth 2, 200 ms at depth 12. A
chip computes such a step in one or two. Here a step is traced once, into the body of a while loop. The number
of steps is data, so chunks of any length are one program, handed over in the same time.

Shapes: L items that the stacks of a program hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mup_tpu.devices.base import Step
from mup_tpu.internals.torch import tree_flatten, tree_leaves, tree_unflatten


def scan_flat(step: Callable[..., Any], carry: list[Tensor], stacks: list[Tensor], reverse: bool) -> Any:
    # The public `scan` needs AOTAutograd, which fails under vmap.
    from torch_xla.experimental.scan import _scan_impl_flat

    return _scan_impl_flat(step, carry, stacks, reverse=reverse)


class XlaLoop:
    """A step that one program makes any number of times.

    The step is called once, with tensors that hold no values. `place` sends a CPU tensor to the device, whole
    to each part of a mesh.
    """

    def __init__(self, step: Step, place: Callable[[Tensor], Tensor]) -> None:
        self._step, self._place = step, place
        self._program: _Program | None = None

    def __call__(self, changed: Any, fixed: Any, stacks: Any, steps: int) -> Tensor:
        """Make `steps` steps, which read `fixed` and write `changed`; return results (L, ...), then zeros.

        `stacks` hold L items: step i gets item i.
        """
        import torch_xla

        if self._program is None:
            self._program = _Program(self._step, changed, fixed, stacks)
        program = self._program
        groups = [tree_leaves(group) for group in (changed, fixed, stacks)]
        device = groups[2][0].device
        counters = [self._place(torch.tensor(number)) for number in (0, steps)]
        out = torch.zeros(program.out_shape, dtype=program.out_dtype, device=device)
        given = [*counters, *groups[0], *groups[1], *groups[2], out]
        results = torch_xla._XLAC._xla_user_computation("mup_tpu::loop", given, program.computation)
        _, new, _, _, (out,) = program.parts(results)
        with torch.no_grad():
            for tensor, value in zip(groups[0], new, strict=True):
                tensor.copy_(value)  # in place: XLA may write over the old values
        return out


class _Program:
    """The computation of a loop.

    Its parameters are its results too: counter and limit; changed tensors; read tensors; stacks; and the
    steps' results, stacked.
    """

    def __init__(self, step: Step, changed: Any, fixed: Any, stacks: Any) -> None:
        import torch_xla
        from torch_xla.core import xla_builder

        real, structures = zip(*map(tree_flatten, (changed, fixed, stacks)), strict=True)
        shapes = [[t.shape for t in real[0]], [t.shape for t in real[1]], [t.shape[1:] for t in real[2]]]
        arguments = [
            [xla_builder.create_placeholder_tensor(shape, t.dtype) for shape, t in zip(*group, strict=True)]
            for group in zip(shapes, real, strict=True)
        ]
        # Times 1: marking a sharding on a tensor with data replaces the data, and torch_xla would no longer
        # find the argument.
        inside = [[t * 1 for t in group] for group in arguments]
        out = step(*map(tree_unflatten, inside, structures))
        # The public `xla_builder` builds programs of its operations alone.
        context = torch_xla._XLAC.lowering.LoweringContext("step")
        context.set_name_string("step")
        context.build([*inside[0], out])
        self._step = xla_builder.computation_from_module_proto("step", context.hlo())
        self.out_shape, self.out_dtype = (len(real[2][0]), *out.shape), out.dtype

        # Tracing numbers the step's parameters as it meets them: arguments, and Python's numbers.
        flat = [t for group in arguments for t in group]
        met = {context.tensor_parameter_id(t): i for i, t in enumerate(flat)}
        mapping = context.device_parameter_id_tensor_mapping()
        self._arguments = {number: i for number, i in met.items() if number != -1}
        self._constants = {number: t.cpu() for number, t in mapping.items() if number not in met}

        self._counts = [2, *map(len, arguments), 1]
        given = [*(torch.tensor(0) for _ in range(2)), *real[0], *real[1], *real[2]]
        given.append(torch.empty(self.out_shape, dtype=self.out_dtype, device="meta"))
        builder = xla_builder.create_builder("loop")
        parameters = [
            xla_builder.mkparam(
                builder, i, xla_builder.mkshape(xla_builder.Op.from_torch_type(t.dtype), t.shape)
            )
            for i, t in enumerate(given)
        ]
        loop = xla_builder.Op.mkwhile(parameters, lambda counter, limit, *rest: counter < limit, self._body)
        self.computation = loop.build("loop")

    def parts(self, values: Sequence[Any]) -> list[list[Any]]:
        """Split parameters or results into their groups."""
        rest, groups = list(values), []
        for count in self._counts:
            groups.append(rest[:count])
            rest = rest[count:]
        return groups

    def _body(self, *values: Any) -> tuple[Any, ...]:
        from torch_xla.core.xla_builder import Op

        (counter, limit), changed, fixed, stacks, (out,) = self.parts(values)
        builder = counter.builder()
        given = [*changed, *fixed, *(_item(stack, counter) for stack in stacks)]
        called = {number: given[i] for number, i in self._arguments.items()}
        called |= {number: Op.constant(builder, value) for number, value in self._constants.items()}
        result = Op.call(self._step, [called[number] for number in range(len(called))])
        *changed, returned = (result.get_tuple_element(i) for i in range(len(changed) + 1))
        out = out.dynamic_update_slice(returned.broadcast([1]), _at(out, counter))
        one = Op.scalar(builder, 1, dtype=counter.shape().dtype)
        return counter + one, limit, *changed, *fixed, *stacks, out


def _at(stack: Any, counter: Any) -> list[Any]:
    return [counter, *(counter.zeros_like() for _ in range(stack.shape().rank - 1))]


def _item(stack: Any, counter: Any) -> Any:
    sizes = list(stack.shape().sizes)
    return stack.dynamic_slice(_at(stack, counter), [1, *sizes[1:]]).reshape(sizes[1:])
