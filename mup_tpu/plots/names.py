"""Names for people in figures and reports: compared values, columns, points of a scale, exponents."""

from __future__ import annotations

import re

from mup_tpu.config import columns
from mup_tpu.words.names import (
    alpha,
    name,
    ordered,
    point,
    results_of,
    scales_of,
    signed,
    smallest_known,
    verdict_title,
)

__all__ = [
    "alpha", "at", "column_label", "label", "name", "ordered", "plain", "point", "power", "raised",
    "results_of",    "scales_of", "signed", "smallest_known", "title", "verdict_title",
]  # fmt: skip


def label(compared: str, column: str = "parametrization") -> str:
    """Name of a compared value for matplotlib; arguments as of `name`."""
    return raised(name(compared, column))


def raised(text: str) -> str:
    """Text for matplotlib with its exponents raised: tokens^−0.32."""
    return re.sub(r"\^(−?\d+(?:\.\d+)?)", r"$^{\1}$", plain(text))


def plain(name: str) -> str:
    """A name without formulas: matplotlib reads text between two $ as one."""
    return name.replace("$", r"\$")


def title(name: str) -> str:
    """Label and unit of a column."""
    return plain(columns.title(name))


def column_label(name: str) -> str:
    """Label of a column."""
    return plain(columns.label(name))


def at(scale: str, value: float) -> str:
    """A point of a scale for matplotlib."""
    return plain(point(scale, value))


def power(x: float) -> str:
    """A power of 2 for matplotlib."""
    return f"$2^{{{x:g}}}$"
