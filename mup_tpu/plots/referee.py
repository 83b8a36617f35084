"""All stored sweeps in one figure: the drift exponent of each rule, by the way of growing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mup_tpu.analysis.referee import Ruling
from mup_tpu.analysis.verdict import DELTA
from mup_tpu.plots import style
from mup_tpu.plots.style import INK, styled

_REACH = 1.5
"""Largest exponent drawn; points and intervals beyond lie at the edge, or they would squeeze the others."""


@styled
def referee_figure(found: Sequence[Ruling]) -> Figure:
    """Drift exponent α of each rule with its 95 % interval, sweep below sweep, marked by its verdict.

    Args:
        found: from `mup_tpu.analysis.referee.rulings`, in the order in which they are drawn.
    """
    names = [_named(r) for r in found]
    longest = min(4.0, 0.072 * max(map(len, names), default=0))
    figure = style.new_figure(5.0 + longest, 0.25 * len(found) + 1.5)
    ax = figure.subplots()
    rows = np.arange(len(found))[::-1]
    for row, ruling in zip(rows, found, strict=True):
        marker, color = style.VERDICTS[ruling.decision]
        if not math.isfinite(ruling.alpha):
            ax.annotate("not known", (0, row), ha="center", va="center", fontsize=8.5)
            continue
        low, high = max(ruling.low, -_REACH), min(ruling.high, _REACH)
        at = min(max(ruling.alpha, -_REACH), _REACH)
        ax.plot([low, high], [row, row], color=color, lw=1.6, solid_capstyle="butt")
        for end, bound, cut in ((ruling.low, low, "<"), (ruling.high, high, ">")):
            ax.plot(bound, row, "|" if end == bound else cut, color=color, ms=7)
        ax.plot(at, row, marker, color=color, ms=6, mec="white", mew=0.6)
    for row, above, below in zip(rows, found, found[1:], strict=False):
        if _way(above) != _way(below):
            ax.axhline(row - 0.5, color=INK, lw=0.6)
    ax.axvspan(-DELTA, DELTA, color=INK, alpha=0.08, lw=0, zorder=0)
    ax.axvline(0, color=INK, lw=0.9, ls=":", zorder=0)
    ax.set_yticks(rows, names, fontsize=8.5)
    ax.set_ylim(-0.7, len(found) - 0.3)
    ax.set_xlim(-_REACH - 0.08, _REACH + 0.08)
    ax.set_xlabel("drift exponent α, 95 % interval")
    entries = style.verdict_key(r.decision for r in found)
    band = matplotlib.patches.Patch(color=INK, alpha=0.12, lw=0, label=f"|α| < {DELTA:g} does not matter")
    style.key_below(figure, [*entries, band])
    return figure


def _named(ruling: Ruling) -> str:
    made = [name for name in (ruling.architecture, ruling.update_rule) if name not in ("gpt2", "adamw")]
    beside = f" ({', '.join(made)})" if made else ""
    return f"{ruling.growing}: {style.label(ruling.rule)}{beside}, {style.plain(ruling.sweep)}"


def _way(ruling: Ruling) -> str:
    return ruling.growing.partition(" ")[0]
