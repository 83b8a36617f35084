"""Factors of the forward pass, as plain numbers in hooks and attributes of modules.

They are neither buffers nor parameters: the state dict does not change, no cast rounds a factor, and a module
that was built on the meta device keeps its factors when it gets memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.roles import BRANCH, BY_HAND, Built, is_linear, matches, own_power
from mup_tpu.rules.parametrization import ForwardScaling, Parameter

# Attributes of attention modules with their number of heads.
_NUMBER_OF_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")

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
    """Add factors to a module that is not yet wrapped or compiled; a second call changes nothing."""
    for factor in factors:
        if factor.place == "by hand":
            continue
        part = module.get_submodule(factor.module)
        if factor.place == "scaling":
            part.scaling = factor.scaling  # type: ignore[assignment]
            continue
        hooks: Mapping[int, Any] = part._forward_pre_hooks if factor.place == "input" else part._forward_hooks
        if scales := [hook for hook in hooks.values() if isinstance(hook, _Scale)]:
            scales[0].factor = factor.factor
        elif factor.factor == 1:
            continue
        elif factor.place == "input":
            part.register_forward_pre_hook(_ScaleInput(factor.factor), with_kwargs=True)
        else:
            part.register_forward_hook(_ScaleOutput(factor.factor))


@torch.no_grad()
def bake(module: nn.Module, factors: Sequence[ForwardFactor], untie: bool) -> None:
    """Multiply weights by the forward factors and remove these: the plain class then computes the same."""
    for factor in factors if not untie else ():
        part = module.get_submodule(factor.module)
        hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        if any(isinstance(hook, _Scale) for hook in hooks) and (other := _tied_to(module, part)):
            raise ConfigError(
                f"the module {factor.module!r} is tied to {other!r} and has a factor × {factor.factor:g}: "
                f"baked, '{factor.module}.weight' is another matrix, which a module that ties both drops "
                "without a word; call bake_(module, untie=True), and load it where they are not tied"
            )
    for factor in factors:
        if factor.place == "by hand":
            continue
        part = module.get_submodule(factor.module)
        if factor.place == "scaling":
            if part.scaling == factor.scaling:
                _bake_queries(part, factor)
            continue
        scales: Any = part._forward_pre_hooks if factor.place == "input" else part._forward_hooks
        for key in [key for key, hook in scales.items() if isinstance(hook, _Scale)]:
            if not is_linear(part) and not isinstance(part, nn.Embedding):
                raise ConfigError(
                    f"the factor of {factor.module!r} ({type(part).__name__}) cannot be baked: it "
                    "is no linear layer"
                )
            weight, bias = part.get_parameter("weight"), getattr(part, "bias", None)
            if _tied_to(module, part):
                part.weight = nn.Parameter(weight * scales[key].factor)
                config: Any = getattr(module, "config", None)
                if config is not None:  # transformers would tie them again
                    config.tie_word_embeddings = False
            else:
                weight.mul_(scales[key].factor)
            if factor.place == "output" and bias is not None:
                bias.mul_(scales[key].factor)
            del scales[key]
            part._forward_pre_hooks_with_kwargs.pop(key, None)


def _tied_to(module: nn.Module, part: nn.Module) -> str:
    """Return the name of another module with the same weight; "" for none."""
    others = (
        name
        for name, other in module.named_modules()
        if other is not part and getattr(other, "weight", None) is getattr(part, "weight", part)
    )
    return next(others, "")


def _bake_queries(part: Any, factor: ForwardFactor) -> None:
    """Multiply the queries of an attention module of `transformers` by the factor of its logits."""
    stock = factor.scaling / factor.factor
    norm, alone, joint = (getattr(part, name, None) for name in ("q_norm", "q_proj", "c_attn"))
    queries: list[Tensor | None]
    if isinstance(norm, nn.Module):
        queries = [norm.weight]  # type: ignore[list-item]
    elif isinstance(alone, nn.Linear):
        queries = [alone.weight, alone.bias]
    elif joint is not None and is_linear(joint) and isinstance(size := part.split_size, int):
        queries = [joint.weight[..., :size], joint.bias[..., :size]]  # queries, keys and values of GPT-2
    else:
        raise ConfigError(
            f"the factor of {factor.module!r} ({type(part).__name__}) cannot be baked: it has no "
            f"q_proj, q_norm or c_attn; multiply queries by {factor.factor:g}, and set scaling to {stock:g}"
        )
    for tensor in queries:
        if tensor is not None:
            tensor.mul_(factor.factor)
    part.scaling = stock


def embedding_factors(
    built: Mapping[str, Built], parameters: Mapping[str, Parameter], m: float, roles: Mapping[str, str]
) -> list[ForwardFactor]:
    """Return the factor of each embedding whose class multiplies it by a power of the width, as Gemma's.

    The output then keeps its size over widths, as the embedding's σ and learning rate expect.
    """
    owners = [o for name, p in parameters.items() if p.is_embedding for o in built[name].owners]
    powers = {o.name: own_power(o.name, roles) for o in owners if not is_linear(o.module)}
    return [ForwardFactor(name, "output", m**-power) for name, power in powers.items() if power]


def readout_factors(
    built: Mapping[str, Built],
    parameters: Mapping[str, Parameter],
    logits: Mapping[str, float],
    m: float,
    roles: Mapping[str, str],
) -> list[ForwardFactor]:
    """Return the factor of each readout's logits, tied ones too; it goes before the matrix, as mup's."""
    factors = []
    for name, parameter in parameters.items():
        owners = built[name].owners
        if parameter.is_embedding:  # tied readouts
            owners = tuple(o for o in owners if len(owners) > 1 and is_linear(o.module))
        elif parameter.role != "readout":
            continue
        for owner in owners:
            place: Place = "by hand" if matches(owner.name, BY_HAND, roles) else "input"
            factor = logits[name]
            if factor != 1:  # a rule that leaves logits leaves them as the class makes them
                factor *= m ** -own_power(owner.name, roles)
            if place == "input" and factor != 1 and not is_linear(owner.module):
                raise ConfigError(
                    f"the readout {name!r} lies in a {type(owner.module).__name__}, whose logits cannot be "
                    f"scaled from outside: multiply the input of {name!r} by {factor:g} in your code "
                    f"(base width / width), and give roles={{{owner.name!r}: 'by hand'}}"
                )
            factors.append(ForwardFactor(owner.name, place, factor, parameter=name))
    return factors


def attention_factors(
    base: nn.Module, module: nn.Module, rule: Callable[[float], ForwardScaling], roles: Mapping[str, str]
) -> list[ForwardFactor]:
    """Return the factor of the attention logits of each module with an attribute `head_dim`."""
    factors = []
    for name, part in module.named_modules():
        size, scaling = getattr(part, "head_dim", None), getattr(part, "scaling", None)
        before = getattr(base.get_submodule(name), "head_dim", None)
        by_hand = matches(name, BY_HAND, roles)
        if size is None and not by_hand:
            _warn_of_heads(name, part, base.get_submodule(name))
        if not (isinstance(size, int) and isinstance(before, int)) or size == before:
            continue
        factor = rule(size / before).attention
        if by_hand:
            factors.append(ForwardFactor(name, "by hand", factor))
        elif isinstance(scaling, float):
            factors.append(ForwardFactor(name, "scaling", factor, scaling=scaling * factor))
        elif factor != 1:
            raise ConfigError(
                f"the head size of {name!r} ({type(part).__name__}) grows from {before} to {size}, and it "
                "has no attribute `scaling` to divide its attention logits by the head size: let the number "
                "of heads grow in place of their size, or multiply the logits by "
                f"{factor:g} in your code (scaled_dot_product_attention takes scale={factor * size**-0.5:g}) "
                f"and give roles={{{name!r}: 'by hand'}}"
            )
    return factors


def _warn_of_heads(name: str, part: nn.Module, base: nn.Module) -> None:
    """Warn of an attention module with as many heads in a wider module: they may grow in size."""
    for attribute in _NUMBER_OF_HEADS:
        number = getattr(part, attribute, None)
        wider = any(p.numel() > q.numel() for p, q in zip(part.parameters(), base.parameters(), strict=False))
        if isinstance(number, int) and wider and number == getattr(base, attribute, None):
            warnings.warn(
                f"{name!r} ({type(part).__name__}) has {attribute} {number} at every width, so its heads "
                "seem to grow, and no head_dim and scaling to set: divide its logits by the head size, not "
                f"by its root, and give roles={{{name!r}: 'by hand'}}; or let {attribute} grow",
                stacklevel=2,
            )
            return


def branch_factors(
    module: nn.Module, residual: float, rule: str, roles: Mapping[str, str]
) -> list[ForwardFactor]:
    """Return the factor of each residual branch, which goes after its last layer."""
    ends = [name for name, _ in module.named_modules() if matches(name, BRANCH, roles)]
    if residual != 1 and not ends:
        raise ConfigError(
            f"rule {rule!r} multiplies residual branches by {residual:g} here; name the last submodule of "
            "each, such as roles={'layers.*.self_attn.o_proj': 'branch', 'layers.*.mlp.down_proj': 'branch'}"
        )
    return [ForwardFactor(name, "output", residual) for name in ends]
