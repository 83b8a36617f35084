"""Fields of configurations: what they are called, how values are written, and what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, Literal

import tyro

from mup_tpu.errors import ConfigError


def parse_learning_rate(text: str | float) -> float:
    """A plain, finite number from `0.004`, `4e-3` or `2^-8`.

    Raises:
        ConfigError: the text is none of these.
    """
    value: Any = None
    with contextlib.suppress(ValueError, TypeError, ArithmeticError):
        if isinstance(text, str) and "^" in text:
            base, exponent = text.split("^")
            value = float(base) ** float(exponent)  # complex where the base is negative
        else:
            value = float(text)
    if not isinstance(value, float) or not math.isfinite(value):
        raise ConfigError(f"learning rate {shown(text)} is not a number; write 0.00390625, 3.9e-3 or 2^-8")
    return value


def shown(value: Any) -> str:
    """A value in an error, on one line and cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, tables in tables in tables
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_word(name: str) -> str:
    """A name in an error: as it is, or in quotes where it is no word."""
    return name if name.isidentifier() else shown(name)


def on_one_line(value: Any) -> str:
    """A value of a table in an error: as it is, or in quotes where it would not be seen or break the line."""
    text = str(value)
    return text if text and text.isprintable() and text == text.strip() else shown(value)


def parse_seconds(name: str, text: str) -> float:
    """Seconds from `90s`, `30m` (or `30min`), `2h`.

    Raises:
        ConfigError: the text is no such time above 0; it is called `name`.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|sec|m|min|h)", text.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2][0]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} {shown(text)} is not a time; write 90s, 30m or 2h")
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
    default: Any,
    label: str = "",
    unit: str = "",
    column: str = "",
    as_power: bool = False,
    former: str = "",
    least: int = -(2**63),
    most: int = 2**63 - 1,
    only: tuple[str, ...] = (),
) -> Any:
    """A field with what its column in run tables is called, where that does not follow from its name.

    Args:
        default: of the field.
        label: what figures and tables for people call it.
        unit: of its values.
        column: its name in run tables.
        as_power: whether its values are written as powers of 2.
        former: its name in earlier versions, which is still understood, and which `trial_id` goes by.
        least: smallest value that makes sense of a whole number; of all, what 64 bits hold.
        most: largest value that makes sense of a whole number.
        only: the architectures that have it; () is all.
    """
    about = {"label": label, "unit": unit, "column": column, "as_power": as_power, "former": former}
    return field(default=default, metadata=about | {"least": least, "most": most, "only": only})


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
    require_above_zero(name, getattr(config, name), allow_zero)


def require_above_zero(name: str, value: float, allow_zero: bool = False) -> None:
    """A value must be a finite number above 0 (or 0).

    Raises:
        ConfigError: it is not.
    """
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        allowed = "0 or more" if allow_zero else "above 0"
        raise ConfigError(f"{name} {shown(value)} is not allowed: it must be {allowed}")


def require_name(name: str, value: str) -> None:
    """A name that a folder is called by must be one.

    Raises:
        ConfigError: it is empty, a path, or holds what is not printed.
    """
    if not value.strip() or value.startswith(".") or not value.isprintable() or set(value) & set("/\\"):
        raise ConfigError(
            f"{name} {shown(value)} is not allowed: it is the name of a folder, so it must be neither empty "
            "nor a path, nor start with a dot"
        )
    if len(value.encode()) > 200:
        raise ConfigError(f"{name} {shown(value)} is longer than 200 bytes")


def require_valid(config: Any) -> None:
    """Every field must hold a value of its type: a finite number, a whole one within its bounds, a choice.

    Raises:
        ConfigError: one does not; of choices the nearest is named.
    """
    for f, kind in _kinds(config.__class__):
        value: Any = getattr(config, f.name)
        if isinstance(kind, tuple):
            require_one_of(f.name, value, kind)
            continue
        if not isinstance(value, _ALLOWED[kind]) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{f.name} {shown(value)} is not {TYPE_NAMES[kind]}")
        if kind is int:
            least, most = f.metadata.get("least", -(2**63)), f.metadata.get("most", 2**63 - 1)
            if not least <= value <= most:
                allowed = f"{least:,} or more" if value < least else f"at most {most:,}"
                raise ConfigError(f"{f.name} {shown(value)} is not allowed: it must be {allowed}")
        if kind is float and not _is_finite(value):
            raise ConfigError(f"{f.name} {shown(value)} is not allowed: it must be a finite number")


TYPE_NAMES: dict[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
"""Types of fields, for people."""

_ALLOWED: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what floats hold
        return False


def require_of_architecture(config: Any) -> None:
    """A field that an architecture does not have must be at its default.

    Raises:
        ConfigError: it is not; the architectures that have it are named.
    """
    for f in dataclasses.fields(config):
        only, value = f.metadata.get("only", ()), getattr(config, f.name)
        if only and config.architecture not in only and value != f.default:
            raise ConfigError(
                f"{f.name} {shown(value)} is for architecture {' or '.join(map(repr, only))}: "
                f"{config.architecture!r} has none, so that it must be {shown(f.default)}"
            )


@functools.cache
def _kinds(cls: type) -> tuple[tuple[dataclasses.Field, Any], ...]:
    """Fields of plain types with these, and those of choices with what they allow."""
    hints = typing.get_type_hints(cls)
    kinds = [
        (f, typing.get_args(hints[f.name]) if typing.get_origin(hints[f.name]) is Literal else hints[f.name])
        for f in dataclasses.fields(cls)
    ]
    return tuple((f, kind) for f, kind in kinds if isinstance(kind, tuple) or kind in TYPE_NAMES)


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """A field must hold one of some values.

    Raises:
        ConfigError: it does not; the nearest value is named.
    """
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1) if isinstance(value, str) else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name} {shown(value)} is not one of {', '.join(map(repr, choices))}{hint}")
