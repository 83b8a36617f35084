"""Values of configurations: as text, and the facts about each field beside its type and default, with its
checks.

Numbers, powers and times are read and written here, values in errors, and text from outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import logging
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from mup_tpu.errors import ConfigError


def parse_number(text: str | float, name: str = "number") -> float:
    """Read a finite number from `0.004`, `4e-3` or `2^-8`."""
    value: Any = None
    with contextlib.suppress(ValueError, TypeError, ArithmeticError):
        if isinstance(text, str) and "^" in text:
            base, exponent = text.split("^")
            value = float(base) ** float(exponent)  # complex where the base is negative
        else:
            value = float(text)
    if isinstance(text, bool) or not isinstance(value, float) or not math.isfinite(value):
        raise ConfigError(f"{name} {shown(text)} is not a number; write 0.00390625, 3.9e-3 or 2^-8")
    return value


def as_kind(kind: Any, value: Any, name: str) -> Any:
    """Convert a whole number or a power of text to a float, where that is the kind."""
    if kind is float and isinstance(value, str):
        return parse_number(value, name)
    if kind is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    return value


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def shown(value: Any) -> str:
    """Write a value for an error: on one line, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, tables in tables in tables
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_pairs(option: str, texts: Iterable[str], form: str) -> dict[str, str]:
    """Split each NAME=VALUE of an option; `form` says in its error how one is written."""
    pairs = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option} {text!r} is not {form}")
        if name in pairs:
            raise ConfigError(
                f"{option} {text!r} and another value of {name} were both given: give one of them"
            )
        pairs[name] = value
    return pairs


def as_word(name: str) -> str:
    return name if name.isidentifier() else shown(name)


def on_one_line(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and text == text.strip() else shown(value)


def parse_seconds(name: str, text: str) -> float:
    """Read seconds from `90s`, `30m` (or `30min`), `2h`."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|sec|m|min|h)", text.strip())
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2][0]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} {shown(text)} is not a time; write 90s, 30m or 2h")
    return seconds


def parse_limit(name: str, text: str | None) -> float:
    return math.inf if text is None else parse_seconds(name, text)


def format_learning_rate(value: float) -> str:
    """Write a learning rate: `2^-8` if the exponent is a multiple of 1/8, else three digits."""
    exponent = math.log2(value) if value > 0 else math.nan
    return f"2^{exponent:g}" if (8 * exponent).is_integer() else f"{value:.3g}"


def option(metavar: str, kind: Any, read: Callable[[str], Any], write: Callable[[Any], str] = str) -> Any:
    """Return how the command line reads a type from a word, and how help shows its default."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [write(value)],
    )


def _real(text: str) -> float:
    try:
        return parse_number(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None  # tyro adds the name of the option


Real = Annotated[float, option("FLOAT", int | float, _real)]  # a real number, plain or as a power

# A learning rate; help shows it as a power
LearningRate = Annotated[float, option("LR", int | float, _real, format_learning_rate)]


def unknown_key(key: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"the nearest known key is {near[0]!r}" if near else f"known keys are {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def write_time(seconds: float) -> str:
    unit, length = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / length:.{1 if unit == 'h' else 0}f} {unit}"


def parse_price(text: str | None) -> float:
    """Read a price of an hour, as 2.5/h; nan for None."""
    value = math.nan if text is None else as_number(text.strip().removesuffix("/h"))
    if value is None or value <= 0 or math.isinf(value):
        raise ConfigError(f"price {text!r} is not that of an hour: write 2.5/h")
    return value


def counted(counts: Iterable[tuple[object, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts)


def not_a_multiple(name: str, value: int, of_name: str, of: int) -> str:
    lower, upper = value // of * of, (value // of + 1) * of
    nearest = f"{lower}, {upper}" if lower else f"{upper}"
    return f"{name} {value} is not a multiple of {of_name} {of}; nearest allowed: {nearest}"


# Control characters of terminals, and halves of characters
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class VisibleFormatter(logging.Formatter):
    """Log lines with control characters as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


# Types of fields, for people
TYPE_NAMES: dict[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

_ALLOWED: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


@dataclass(frozen=True)
class About:
    """Facts about a field beside its name, type and default."""

    label: str = ""  # name in figures and tables; by default the field's, in words
    unit: str = ""
    column: str = ""  # name in run tables; by default the field's
    as_power: bool = False  # whether values are written as powers of 2
    hashed_as: str = ""  # name under which `trial_id` hashes the field, where it is not the field's
    above: float = -math.inf  # lower bound, itself not allowed
    least: float = -math.inf
    below: float = math.inf  # upper bound, itself not allowed
    most: float = math.inf
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Choices that read the field, such as {"optimizer": ("muon",)}. Under another choice the field must be
    at its default, or equal trainings would have two names."""


def described(default: Any, **facts: Any) -> Any:
    return field(default=default, metadata={"about": About(**facts)})


def about(f: dataclasses.Field[Any]) -> About:
    facts: About = f.metadata.get("about", _USUAL)
    return facts


_USUAL = About()


@functools.cache
def typed_fields(cls: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((f, hints[f.name]) for f in dataclasses.fields(cls))


def require_valid(config: Any) -> None:
    """Refuse a field of another type, out of bounds, or unread by the chosen architecture, optimizer or
    schedule.
    """
    for f, kind in typed_fields(type(config)):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        require_value(f.name, value, kind, about(f))
        if value != f.default and (choice := unread_under(f, vars(config))):
            names = " or ".join(map(repr, about(f).only[choice]))
            raise ConfigError(
                f"{f.name} {shown(value)} is for {choice} {names}: {getattr(config, choice)!r} does not read "
                f"it, so it must be {shown(f.default)}"
            )


def unread_under(f: dataclasses.Field[Any], values: Mapping[str, Any]) -> str:
    wrong = (choice for choice, names in about(f).only.items() if values[choice] not in names)
    return next(wrong, "")


def require_value(name: str, value: Any, kind: Any, facts: About = _USUAL) -> None:
    """Refuse a value of another type, or out of bounds."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        require_one_of(name, value, inner)
    elif origin in (typing.Union, types.UnionType):
        kinds = [each for each in inner if each is not type(None)]
        if value is not None and not (len(kinds) > 1 and isinstance(value, tuple(kinds))):
            require_value(name, value, kinds[0], facts)
    elif origin in (tuple, dict):
        if origin is dict and not isinstance(value, dict):
            raise ConfigError(f"{name} {shown(value)} is not a table of keys")
        if origin is tuple and (isinstance(value, str | Mapping) or not hasattr(value, "__iter__")):
            raise ConfigError(f"{name} {shown(value)} is not a list")
        items = value.items() if origin is dict else [("", item) for item in value]
        for key, item in items:
            require_value(f"{name}: {key}" if key else name, item, inner[0 if origin is tuple else 1])
    # True is a whole number to Python, and a width to nobody.
    elif not isinstance(value, _ALLOWED.get(kind, kind)) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} {shown(value)} is not {TYPE_NAMES.get(kind, kind.__name__)}")
    elif kind in (int, float):
        least, most, allowed = facts.least, facts.most, ""
        if kind is int:  # within the range of 64-bit columns
            least, most = max(least, -(2**63)), min(most, 2**63 - 1)
        if kind is float and not abs(value) <= sys.float_info.max:
            allowed = "a finite number"
        elif value <= facts.above:
            allowed = f"above {facts.above:g}"
        elif value < least:
            allowed = f"{least:,} or more"
        elif value >= facts.below:
            allowed = f"below {facts.below:g}"
        elif value > most:
            allowed = f"at most {most:,}"
        if allowed:
            raise ConfigError(f"{name} {shown(value)} is not allowed: it must be {allowed}")


def require_count(name: str, value: Any, most: int = 2**63 - 1) -> None:
    require_value(name, value, int, About(least=1, most=most))


def require_above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} {shown(value)} is not allowed: it must be above 0")


def require_one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name} {shown(value)} is not one of {', '.join(map(repr, choices))}{hint}")


def require_name(name: str, value: str) -> None:
    """Refuse a name that no folder can have: empty, a path, hidden, not printable or too long."""
    if not value.strip() or value.startswith(".") or not value.isprintable() or set(value) & set("/\\"):
        raise ConfigError(
            f"{name} {shown(value)} is not allowed: it is the name of a folder, so it must be neither empty "
            "nor a path, nor start with a dot"
        )
    if len(value.encode()) > 200:
        raise ConfigError(f"{name} {shown(value)} is longer than 200 bytes")
