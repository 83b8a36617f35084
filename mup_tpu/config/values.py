"""Values as text: numbers, powers and times of configurations, values in errors, text from outside."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

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
