"""Fields of configurations: what they are called, how values are written, and what is allowed."""

from __future__ import annotations

import difflib
import functools
import math
import typing
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, Literal

import tyro

from mup_tpu.errors import ConfigError


def parse_learning_rate(text: str | float) -> float:
    """A plain number from `0.004`, `4e-3` or `2^-8`.

    Raises:
        ConfigError: the text is none of these.
    """
    try:
        if isinstance(text, str) and "^" in text:
            base, exponent = text.split("^")
            return float(base) ** float(exponent)
        return float(text)
    except (ValueError, TypeError):
        raise ConfigError(
            f"learning rate {text!r} is not a number; write 0.00390625, 3.9e-3 or 2^-8"
        ) from None


def parse_seconds(name: str, text: str) -> float:
    """Seconds from `90s`, `30m` or `2h`.

    Raises:
        ConfigError: the text is no such time above 0; it is called `name`.
    """
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} {text!r} is not a time; write 90s, 30m or 2h")
    return seconds


def format_learning_rate(value: float) -> str:
    """`2^-8` where the exponent is a multiple of 1/8, else the plain number to three digits."""
    exponent = math.log2(value) if value > 0 else math.nan
    return f"2^{exponent:g}" if (8 * exponent).is_integer() else f"{value:.3g}"


def _learning_rate_argument(tokens: list[str]) -> float:
    try:
        return parse_learning_rate(tokens[0])
    except ConfigError as error:
        raise ValueError(str(error)) from None


def described(
    default: Any, label: str = "", unit: str = "", column: str = "", as_power: bool = False, former: str = ""
) -> Any:
    """A field with what its column in run tables is called, where that does not follow from its name.

    Args:
        default: of the field.
        label: what figures and tables for people call it.
        unit: of its values.
        column: its name in run tables.
        as_power: whether its values are written as powers of 2.
        former: its name in earlier versions, which is still understood, and which `trial_id` goes by.
    """
    about = {"label": label, "unit": unit, "column": column, "as_power": as_power, "former": former}
    return field(default=default, metadata=about)


LearningRate = Annotated[
    float,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="LR",
        instance_from_str=_learning_rate_argument,
        is_instance=lambda x: isinstance(x, float),
        str_from_instance=lambda x: [format_learning_rate(x)],
    ),
]


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a key that is not known, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"the nearest known key is {near[0]!r}" if near else f"known keys are {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def not_a_multiple(name: str, value: int, of_name: str, of: int) -> str:
    """The sentence for a value that must be a multiple, with the nearest ones."""
    lower, upper = value // of * of, (value // of + 1) * of
    nearest = f"{lower}, {upper}" if lower else f"{upper}"
    return f"{name} {value} is not a multiple of {of_name} {of}; nearest allowed: {nearest}"


def require_positive(config: Any, name: str, allow_zero: bool = False) -> None:
    """A field must hold a finite number above 0 (or 0).

    Raises:
        ConfigError: it does not.
    """
    value = getattr(config, name)
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ConfigError(
            f"{name} {value} is not allowed: it must be {'0 or more' if allow_zero else 'above 0'}"
        )


def require_choices(config: Any) -> None:
    """Every field of a `Literal` type must hold one of its values.

    Raises:
        ConfigError: one does not; the nearest value is named.
    """
    for name, choices in _choices(config.__class__).items():
        require_one_of(name, getattr(config, name), choices)


@functools.cache
def _choices(cls: type) -> dict[str, tuple[str, ...]]:
    hints = typing.get_type_hints(cls)
    return {n: typing.get_args(hint) for n, hint in hints.items() if typing.get_origin(hint) is Literal}


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """A field must hold one of some values.

    Raises:
        ConfigError: it does not; the nearest value is named.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name} {value!r} is not one of {', '.join(map(repr, choices))}{hint}")
