"""Private parts of torch, as they are in torch 2.9 to 2.15.

- `_pytree`: nested dicts and tuples of tensors as flat lists. `torch.func` and `torch.compile` go by the same
  module, and optree, the public one, is another dependency.
- `GraphMemory`: torch's own `MemPool` ends the process if a graph outlives it. And a capture that
  fails is not ended: from then on torch frees no unused memory, and refuses later captures into the same pool
  ("already recording to mempool_id").
- `has_triton`: whether inductor can compile for this GPU. Without Triton, `torch.compile` fails at its first
  call; without the C compiler that Triton looks for, after half a minute.
- `changed_by`: arguments that a traced operation changes, by its schema.
- `compile_function`: `torch.compile`, which makes an `UnboundLocalError` of Ctrl-C while it compiles.
- `compiler_error`: base class of errors of `torch.compile`; importing it takes seconds.
"""

import contextlib
import functools
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils._triton import has_triton

__all__ = [
    "GraphMemory", "changed_by", "compile_function", "compiler_error", "compiler_lacks", "tree_flatten",
    "tree_leaves", "tree_unflatten",
]  # fmt: skip


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function by torch, as one program for each shape."""
    compiled = torch.compile(function, dynamic=False, fullgraph=True)

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        try:
            return compiled(*given)
        except UnboundLocalError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise

    return call


class GraphMemory:
    """Memory of CUDA graphs on the current device, for allocations outside of captures too."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._where = torch.cuda.current_device(), self.handle
        # A first user: torch refuses a capture into memory whose users have all gone.
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._where)
        torch._C._cuda_endAllocateToPool(*self._where)
        weakref.finalize(self, torch._C._cuda_releasePool, *self._where)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take this thread's allocations from here in the block."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._where)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(*self._where)
            torch._C._cuda_releasePool(*self._where)

    def end_failed_capture(self) -> None:
        # torch 2.11 refuses this memory all the same.
        with contextlib.suppress(RuntimeError):  # it had not begun, or torch has ended it
            torch._C._cuda_endAllocateToPool(*self._where)


def changed_by(node: Node) -> list[Node]:
    """Return tensors that a traced operation changes; none for what is no operation of torch's dispatcher."""
    schema = getattr(node.target, "_schema", None)
    places = zip(node.args, schema.arguments if schema else (), strict=False)
    changed = [given for given, place in places if place.alias_info is not None and place.alias_info.is_write]
    return [given for given in changed if isinstance(given, Node)]


def compiler_error() -> type[RuntimeError]:
    from torch._dynamo.exc import TorchDynamoException

    base: type[RuntimeError] = TorchDynamoException
    return base


def compiler_lacks() -> str:
    """Return the program that is missing for inductor to compile for this GPU, in words; "" for none."""
    if not has_triton():
        return "Triton for this GPU"
    has = os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))
    return "" if has else "a C compiler (gcc, clang)"
