"""All stored sweeps in one figure: the drift exponent of each rule, by the way of growing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mup_tpu.analysis.drift import is_told
from mup_tpu.analysis.referee import Ruling
from mup_tpu.analysis.verdict import DELTA
from mup_tpu.config import columns
from mup_tpu.plots import names, style
from mup_tpu.plots.style import INK, styled
from mup_tpu.words.referee import span, why_drifts

_REACH = 1.5
"""Largest exponent drawn; points and intervals beyond lie at the edge, or they would squeeze the others."""


@styled
def referee_figure(found: Sequence[Ruling]) -> Figure:
    """Drift exponent α of each rule with its 95 % interval, by the way of growing, marked by its verdict.

    Args:
        found: from `mup_tpu.analysis.referee.rulings`.
    """
    entries = [
        e
        for way, of_way in groupby(_sorted(found), lambda r: columns.label(r.columns.scale))
        for e in (way, *of_way)
    ]
    written = [names.plain(e) if isinstance(e, str) else _named(e) for e in entries]
    longest = min(4.0, 0.072 * max(map(len, written), default=0))
    figure = style.new_figure(5.0 + longest, 0.25 * len(entries) + 1.5)
    ax = figure.subplots()
    rows = np.arange(len(entries))[::-1]
    for row, entry in zip(rows, entries, strict=True):
        if isinstance(entry, str):
            ax.axhline(row + 0.5, color=INK, lw=0.6)
        else:
            _draw(ax, row, entry)
    ax.axvspan(-DELTA, DELTA, color=INK, alpha=0.08, lw=0, zorder=0)
    ax.axvline(0, color=INK, lw=0.9, ls=":", zorder=0)
    ax.set_yticks(rows, written, fontsize=8.5)
    for tick, entry in zip(ax.get_yticklabels(), entries, strict=True):
        tick.set_fontweight("bold" if isinstance(entry, str) else "normal")
    ax.set_ylim(-0.7, len(entries) - 0.3)
    ax.set_xlim(-_REACH - 0.08, _REACH + 0.08)
    ax.set_xlabel("drift exponent α, 95 % interval")
    key = style.verdict_key(r.decision for r in found)
    return style.with_key([ax], [*key, style.shade(f"|α| < {DELTA:g} does not matter")])


def _sorted(found: Sequence[Ruling]) -> list[Ruling]:
    """Rulings by way and compared column, as given, then by rule, the baseline first, then by sweep."""
    places = {key: i for i, key in enumerate(dict.fromkeys((r.columns.scale, r.compares) for r in found))}

    def place(ruling: Ruling) -> tuple[int, int, str]:
        rules = names.ordered({r.rule for r in found if r.compares == ruling.compares}, ruling.compares)
        return places[ruling.columns.scale, ruling.compares], rules.index(ruling.rule), ruling.sweep

    return sorted(found, key=place)


def _draw(ax: Axes, row: int, ruling: Ruling) -> None:
    """Draw an exponent with its interval, and why it drifts where the interval does not say so."""
    marker, color = style.VERDICTS[ruling.decision]
    if not is_told(ruling.low, ruling.high):
        ax.annotate("not known", (0, row), ha="center", va="center", fontsize=8.5)
        return
    low, high = max(ruling.low, -_REACH), min(ruling.high, _REACH)
    at = min(max(ruling.alpha, -_REACH), _REACH)
    ax.plot([low, high], [row, row], color=color, lw=1.6, solid_capstyle="butt")
    for end, bound, cut in ((ruling.low, low, "<"), (ruling.high, high, ">")):
        ax.plot(bound, row, "|" if end == bound else cut, color=color, ms=7)
    ax.plot(at, row, marker, color=color, ms=6, mec="white", mew=0.6)
    if why := why_drifts(ruling):
        is_left = high > 0.3
        ax.annotate(
            why, (low - 0.05 if is_left else high + 0.05, row), va="center", fontsize=7.5,
            ha="right" if is_left else "left",
        )  # fmt: skip


def _named(ruling: Ruling) -> str:
    common = zip(ruling.setting, ("gpt2", "adamw", "lr"), strict=True)
    differs = ", ".join(dict.fromkeys(columns.label(name) for name, usual in common if name != usual))
    rule = names.label(ruling.rule, ruling.compares) + (f" ({differs})" if differs else "")
    return f"{rule}: {span(ruling)}, {names.plain(ruling.sweep)}"
