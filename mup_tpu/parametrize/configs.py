"""Models of `transformers` of any width, from one configuration."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from mup_tpu.config.fields import require_one_of
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.roles import Build
from mup_tpu.parametrize.rules import parametrize

_SIZES = ("hidden_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff")
_NUMBERS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class GrownModel:
    """Model of `transformers` at a width, grown from a configuration at the base width."""

    config: Any
    """Configuration at the width."""
    grown: Mapping[str, tuple[int, int]]
    """Fields of the configuration that grew, with their values at the base and at the width."""
    build: Build = field(repr=False)
    """Function that makes the plain model at any width, as `coord_check` takes it."""
    mup: ModuleParametrization = field(repr=False)

    def model(self) -> Any:
        """Build a fresh model with the rule's init and forward factors."""
        return self.mup.init_(self.build(self.mup.width))

    def __str__(self) -> str:
        grown = ", ".join(f"{name} {before} → {after}" for name, (before, after) in self.grown.items())
        return f"{grown}; heads of size {_head_size(self.config)}"


def from_config(
    config: Any,
    *,
    width: int,
    heads: Literal["number", "size"] = "number",
    model_class: Any = None,
    **options: Any,
) -> GrownModel:
    """Build a model of `transformers` at a width, grown from its configuration at the base width.

    Hidden and intermediate sizes grow, and heads in number or in size. All other fields stay.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=8)
        >>> print(from_config(config, width=256))  # doctest: +NORMALIZE_WHITESPACE
        hidden_size 64 → 256, intermediate_size 128 → 512, num_attention_heads 4 → 16,
        num_key_value_heads 4 → 16; heads of size 16

    Args:
        config: configuration at the base width, where all factors are 1.
        width: hidden size to train at.
        heads: "number" adds heads of the base's size, "size" lets the base's number of heads grow.
        model_class: class of the model; by default a causal language model's.
        options: rule, optimizer and roles of `parametrize`.
    """
    base = getattr(config, "hidden_size", None)
    if not isinstance(base, int) or not isinstance(getattr(config, "num_attention_heads", None), int):
        raise ConfigError(
            f"config {shown(type(config).__name__)} has no hidden_size and num_attention_heads: give a "
            "configuration of a language model of transformers"
        )
    require_one_of("heads", heads, ("number", "size"))
    names = [*_SIZES, *(_NUMBERS if heads == "number" else ["head_dim"])]
    sizes = {name: size for name in names if isinstance(size := getattr(config, name, None), int)}

    def at(width: int) -> Any:
        step = base // math.gcd(base, *sizes.values())
        if width % step:
            grow = ", ".join(sizes)
            raise ConfigError(f"width {width} is not allowed: {grow} grow, so give a multiple of {step}")
        grown = copy.deepcopy(config)
        for name, size in sizes.items():
            setattr(grown, name, size * width // base)
        return grown

    def build(width: int) -> nn.Module:
        from transformers import AutoModelForCausalLM

        made: nn.Module = (model_class or AutoModelForCausalLM.from_config)(at(width))
        return made

    called = getattr(config, "attribute_map", {})
    grown = {called.get(name, name): (size, getattr(at(width), name)) for name, size in sizes.items()}
    mup = parametrize(build, width=width, base_width=base, **options)
    return GrownModel(at(width), grown, build, mup)


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)
