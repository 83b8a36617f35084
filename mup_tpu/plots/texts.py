"""Texts that matplotlib draws: names, powers, and ticks of axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, FixedLocator, Formatter, MaxNLocator, NullFormatter, NullLocator

from mup_tpu.config import columns
from mup_tpu.words.names import name, point


def label(compared: str, column: str = "parametrization") -> str:
    return raised(name(compared, column))


def raised(text: str) -> str:
    """Raise the exponents of a text: tokens^−0.32."""
    return re.sub(r"\^(−?\d+(?:\.\d+)?)", r"$^{\1}$", plain(text))


def plain(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib reads text between two $ as a formula


def title(column: str) -> str:
    return plain(columns.title(column))


def column_label(column: str) -> str:
    return plain(columns.label(column))


def at(scale: str, value: float) -> str:
    return plain(point(scale, value))


def power(x: float) -> str:
    return f"$2^{{{x:g}}}$"


class PlainTicks(Formatter):
    """Ticks with as many digits as keep them apart, and no offset: 2.32581, or 1.04e−6."""

    def __call__(self, value: float, position: int | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Write all ticks of an axis."""
        gaps = np.diff(np.unique(values))
        step = float(gaps.min()) if len(gaps) else max(map(abs, values), default=1.0)
        largest = max(map(abs, values), default=0.0)
        kind = "f" if largest == 0 or 1e-3 <= largest < 1e5 else "e"
        written: list[str] = []
        for digits in range(12):
            written = [f"{value:.{digits}{kind}}" for value in values]
            if all(abs(float(w) - v) <= 0.02 * step for w, v in zip(written, values, strict=True)):
                break
        return [_tidied(text) if value else "0" for text, value in zip(written, values, strict=True)]


def _tidied(number: str) -> str:
    # 1.04e−6 for 1.04e-06
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", number).replace("-", "−")


def loss_axis(ax: Axes, losses: Iterable[float]) -> None:
    """Format the vertical axis of losses: logarithmic where they differ by more than a factor of 3."""
    known = np.array([value for value in losses if np.isfinite(value)])
    if len(known) and known.min() > 0 and known.max() > 3 * known.min():
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(FixedLocator(log_ticks(low, high, least=5)))
        ax.yaxis.set_major_formatter(lambda value, _: _tidied(f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.minorticks_off()
    else:
        ax.yaxis.set_major_formatter(PlainTicks())


def log_ticks(low: float, high: float, least: int) -> list[float]:
    """Return round values on a logarithmic axis: at least `least`, or all."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= least:
            break
    return ticks


def size_axis(axis: Axis, low: float, high: float, is_compute: bool = False) -> None:
    """Format a logarithmic axis of parameters or tokens (50k, 2M, 1B), or of FLOP (2M, 1G)."""
    axis.set_major_locator(FixedLocator(log_ticks(low, high, least=3)))
    axis.set_major_formatter(lambda value, _: write_size(value, is_compute))
    axis.set_minor_locator(NullLocator())


def write_size(value: float, is_compute: bool = False) -> str:
    # A billion parameters are 1B, and 10⁹ FLOP are 1G.
    written = EngFormatter(sep="", useOffset=False)(value)
    return written if is_compute else written.replace("G", "B")


def scale_axis(ax: Axes, scale: str, scales: Sequence[float], width: float) -> None:
    """Format a logarithmic axis with a tick at each point of a scale; its panel has `width` inches."""
    ax.set_xscale("log", base=2)
    written = [columns.write_scale(scale, s) for s in scales]
    ax.set_xticks(scales, written, **turned(written, width))
    ax.minorticks_off()
    ax.set_xlabel(title(scale))


def turned(texts: Sequence[str], width: float) -> dict[str, Any]:
    """Return text properties of ticks: upright where they would touch each other."""
    is_crowded = max(map(len, texts), default=0) + 1 > 12 * (width - 1) / max(1, len(texts))
    return {"rotation": 90} if is_crowded else {}


def log2_axis(ax: Axes, zero_x: float | None = None) -> None:
    """Format an axis of log2 as powers of 2, with 0 at its edge where it is drawn."""

    def tick(x: float, _: object) -> str:
        return power(x) if zero_x is None or x > zero_x + 0.5 else ""

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.xaxis.set_major_formatter(tick)
    if zero_x is not None:
        ax.set_xticks([zero_x], ["0"], minor=True)
        ax.tick_params(axis="x", which="minor", length=3.5)


def log2_heights(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(lambda x, _: power(x))
