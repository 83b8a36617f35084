"""Factors of the forward pass, as plain numbers in hooks and attributes of modules.

They are neither buffers nor parameters: the state dict does not change, no cast rounds a factor, and a module
that was built on the meta device keeps its factors when it gets memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.roles import is_linear
from mup_tpu.parametrize.survey import Found
from mup_tpu.rules.parameter import Parameter
from mup_tpu.rules.parametrization import ForwardScaling

Place = Literal["input", "output", "scaling", "by hand"]


@dataclass(frozen=True)
class ForwardFactor:
    """One factor of the forward pass."""

    module: str
    """Submodule with the factor."""
    place: Place
    """Place of the factor: input or output of the module, or its attribute `scaling` (attention logits)."""
    factor: float
    """1 at the base."""
    parameter: str = ""
    """Matrix of a readout."""
    scaling: float = 1.0
    """Value of attention's attribute, with the factor."""


class _Scale:
    """A hook that multiplies. It is an object, so that it can be copied, pickled and found again."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class _ScaleInput(_Scale):
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        first, *others = kwargs
        return args, {first: kwargs[first] * self.factor} | {name: kwargs[name] for name in others}


class _ScaleOutput(_Scale):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return output * self.factor
        return (output[0] * self.factor, *output[1:])


def apply(module: nn.Module, factors: Sequence[ForwardFactor]) -> None:
    """Have a module, not yet wrapped or compiled, compute with its factors; a second call changes nothing."""
    for factor in factors:
        if factor.place == "by hand":
            continue
        part = module.get_submodule(factor.module)
        if factor.place == "scaling":
            part.scaling = factor.scaling  # type: ignore[assignment]
            continue
        hooks: Mapping[int, Any] = part._forward_pre_hooks if factor.place == "input" else part._forward_hooks
        if there := [hook for hook in hooks.values() if isinstance(hook, _Scale)]:
            there[0].factor = factor.factor
        elif factor.factor == 1:
            continue
        elif factor.place == "input":
            part.register_forward_pre_hook(_ScaleInput(factor.factor), with_kwargs=True)
        else:
            part.register_forward_hook(_ScaleOutput(factor.factor))


def readout_factors(
    found: Mapping[str, Found],
    parameters: Mapping[str, Parameter],
    logits: Mapping[str, float],
    by_hand: Sequence[str],
) -> list[ForwardFactor]:
    """Factor of each readout's logits, tied ones too, applied before the matrix (as mup.MuReadout).

    Raises:
        ConfigError: a factor cannot be applied from outside.
    """
    factors = []
    for name, parameter in parameters.items():
        owners = found[name].owners
        if parameter.is_embedding:  # tied readouts
            owners = tuple(o for o in owners if len(owners) > 1 and is_linear(o.module))
        elif parameter.role != "readout":
            continue
        for owner in owners:
            place: Place = "by hand" if _named(owner.name, by_hand) else "input"
            if place == "input" and logits[name] != 1 and not is_linear(owner.module):
                raise ConfigError(
                    f"the readout {name!r} lies in a {type(owner.module).__name__}, whose logits cannot be "
                    f"scaled from outside: multiply the input of {name!r} by {logits[name]:g} in your code "
                    f"(base width / width), and say by_hand=[{owner.name!r}]"
                )
            factors.append(ForwardFactor(owner.name, place, logits[name], parameter=name))
    return factors


def attention_factors(
    base: nn.Module, module: nn.Module, rule: Callable[[float], ForwardScaling], by_hand: Sequence[str]
) -> list[ForwardFactor]:
    """Factor of the attention logits of each module with an attribute `head_dim`.

    Raises:
        ConfigError: a module has a factor and no attribute `scaling`.
    """
    factors = []
    for name, part in module.named_modules():
        size, scaling = getattr(part, "head_dim", None), getattr(part, "scaling", None)
        before = getattr(base.get_submodule(name), "head_dim", None)
        if not (isinstance(size, int) and isinstance(before, int)) or size == before:
            continue
        factor = rule(size / before).attention
        if _named(name, by_hand):
            factors.append(ForwardFactor(name, "by hand", factor))
        elif isinstance(scaling, float):
            factors.append(ForwardFactor(name, "scaling", factor, scaling=scaling * factor))
        elif factor != 1:
            raise ConfigError(
                f"the head size of {name!r} ({type(part).__name__}) grows from {before} to {size}, and it "
                "has no attribute `scaling` to divide its attention logits by the head size: let the number "
                "of heads grow in place of their size, or multiply the logits by "
                f"{factor:g} in your code (scaled_dot_product_attention takes scale={factor * size**-0.5:g}) "
                f"and say by_hand=[{name!r}]"
            )
    return factors


def branch_factors(
    module: nn.Module, branches: Sequence[str], residual: float, rule: str
) -> list[ForwardFactor]:
    """Factor of each residual branch, after its last layer.

    Raises:
        ConfigError: the factor is not 1, and no branch is named.
    """
    names = [name for name, _ in module.named_modules()]
    for pattern in branches:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"branches has {pattern!r}, but the module has no such submodule")
    ends = [name for name in names if _named(name, branches)]
    if residual != 1 and not ends:
        raise ConfigError(
            f"rule {rule!r} multiplies residual branches by {residual:g} here; say which submodules are the "
            "last of one, such as branches=['layers.*.self_attn.o_proj', 'layers.*.mlp.down_proj']"
        )
    return [ForwardFactor(name, "output", residual) for name in ends]


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
