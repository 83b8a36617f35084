"""Private parts of torch_xla 2.9, the last release, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def sharding_spec(tensor: Tensor) -> str:
    # No public function has it.
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def user_computation(name: str, given: Sequence[Tensor], computation: Any) -> list[Tensor]:
    import torch_xla

    results: list[Tensor] = torch_xla._XLAC._xla_user_computation(name, given, computation)
    return results


def lowering_context(name: str, results: Sequence[Tensor]) -> Any:
    """Build the program of recorded tensors; the public `xla_builder` does so for its operations alone."""
    import torch_xla

    context = torch_xla._XLAC.lowering.LoweringContext(name)
    context.set_name_string(name)
    context.build(results)
    return context


def scan_flat(step: Callable[..., Any], carry: list[Tensor], stacks: list[Tensor], reverse: bool) -> Any:
    # The public `scan` needs AOTAutograd, which fails under vmap.
    from torch_xla.experimental.scan import _scan_impl_flat

    return _scan_impl_flat(step, carry, stacks, reverse=reverse)


def tpu_accelerator_type() -> str:
    from torch_xla._internal import tpu

    return tpu.get_tpu_env()["ACCELERATOR_TYPE"]


def tpu_chips() -> int:
    from torch_xla._internal import tpu

    return tpu.num_available_chips()
