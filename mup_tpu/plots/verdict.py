"""Evidence behind verdicts: regrets, drift exponents by look, and both for many sweeps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from mup_tpu.analysis.optimum import EPSILON
from mup_tpu.analysis.referee import Ruling
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.analysis.verdict import AT_LEAST, DELTA, LookTaken, Regret
from mup_tpu.config import columns
from mup_tpu.plots import style
from mup_tpu.plots.optima import is_tuned_at_scales
from mup_tpu.plots.style import INK, ShownFigure, figure_type
from mup_tpu.words import names
from mup_tpu.words.tables import span

# Largest exponent drawn. Longer intervals end in an arrow: they would squeeze the others.
_REACH = 1.5
_MOST_REGRET = 0.3  # largest regret drawn, nat
_MOST_INTERVALS = 6  # largest number of scales for which cells have room for intervals
# Regrets at which colours change, in units of the regret that does not matter
_STEPS = (0, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
# Colours of regret in all figures: blue where it does not matter, orange where it does
_COLORS = ListedColormap(
    ["#f7fbff", "#deebf7", "#b7d4ea", "#fee0c1", "#fdae6b", "#f57622", "#c94402", "#8c2d04"], name="regret"
).with_extremes(over="#511a02", bad="white")
_USUAL = ("gpt2", "adamw", "lr")  # setting that is not written beside a rule
# Status of a regret -> its short form in a cell, and the meaning of that form
_WORDS = {
    "outside the grid": ("out", "outside its grid"),
    "diverged": ("∞", "diverges"),
    "stopped early": ("stop", "stopped early"),
    "refused": ("no", "refused by a condition"),
    "not bracketed": ("?", "an optimum is at an edge"),
}


@figure_type("Regret", "Regret of every smaller scale's optimum at every larger scale", is_tuned_at_scales)
def regret_figure(analysis: TransferAnalysis) -> Figure:
    """Draw the regret of each smaller scale's optimum at each larger one, nat per token, as a heat map."""
    results = names.results_of(analysis)
    scales = sorted({o.scale for result in results for o in result.optima})
    regrets = [r for result in results for r in result.regrets]
    has_room = len(scales) <= _MOST_INTERVALS
    intervals = [_interval(r) for r in regrets] if has_room else []
    longest = max(
        0.09 * max((len(_written(r)) for r in regrets), default=0),
        0.058 * max(map(len, intervals), default=0) + 0.06,
    )
    width = max(0.45, 2.0 / len(scales), longest) * len(scales)
    axes = style.panels(len(results), width + 1.1, width + 1.1)
    figure = style.figure_of(axes)
    figure.set_figwidth(figure.get_figwidth() + style.BAR)
    norm = BoundaryNorm([analysis.epsilon * step for step in _STEPS], _COLORS.N)
    points = [columns.write_scale(analysis.scale, s) for s in scales]
    for ax, result in zip(axes, results, strict=True):
        grid = np.full((len(scales), len(scales)), np.nan)
        for r in result.regrets:
            i, j = scales.index(r.source), scales.index(r.target)
            grid[i, j] = r.value
            red, green, blue, _ = _COLORS(norm(r.value)) if not np.isnan(r.value) else (1.0, 1.0, 1.0, 1.0)
            luma = 0.299 * red + 0.587 * green + 0.114 * blue  # between 0 and 1
            ink = "white" if luma < 0.5 else INK
            below = _interval(r) if has_room else ""
            look: dict[str, Any] = {"ha": "center", "color": ink}
            ax.text(j, i, _written(r), va="bottom" if below else "center", fontsize=8.5, **look)
            if below:
                ax.text(j, i + 0.04, below, va="top", fontsize=6.5, **look)
        image = ax.imshow(np.where(np.isinf(grid), 1e30, grid), cmap=_COLORS, norm=norm, aspect="auto")
        texts, angle = style.apart(points, [i * width / len(scales) for i in range(len(scales))])
        ax.set_xticks(range(len(scales)), texts, **angle)
        ax.set_yticks(range(len(scales)), points)
        ax.set_xlabel(f"trained at {style.column_label(analysis.scale)}")
        ax.set_title(style.label(result.compared, analysis.compares))
        ax.grid(False)
    style.label_rows(axes, f"tuned at {style.column_label(analysis.scale)}")
    share = 0.2 / figure.get_figwidth()
    bar = figure.colorbar(image, ax=axes, extend="max", fraction=share, pad=0.02, aspect=20)
    bar.set_ticks([analysis.epsilon * step for step in _STEPS])
    bar.ax.yaxis.set_major_formatter(style.PlainTicks())
    bar.ax.tick_params(labelsize=8)
    bar.ax.axhline(analysis.epsilon, color=INK, lw=2)
    regret = style.in_unit("regret", analysis.columns)
    bar.set_label(f"{regret}\nbelow {analysis.epsilon:g} it does not matter", fontsize=8.5)
    used = {r.status for r in regrets}
    notes = [f"{short}: {meaning}" for status, (short, meaning) in _WORDS.items() if status in used]
    notes += ["small: 95 % interval"] if any(intervals) else []
    notes += [] if has_room else ["95 % intervals: table of the report"]
    return style.with_key(axes, [style.mark("", text, ls="") for text in notes])


def _interval(r: Regret) -> str:
    if r.status not in ("estimated", AT_LEAST) or not np.isfinite(r.value):
        return ""
    return f"{r.low:.3f}–{r.high:.3f}" if np.isfinite(r.high) else f"from {r.low:.3f}"


def _written(r: Regret) -> str:
    if not np.isfinite(r.value):
        return _WORDS.get(r.status, "?")[0]
    return f"{r.value:.3f}" if r.value < 100 else f"{r.value:.3g}"


def known_looks(result: TransferResult) -> list[tuple[LookTaken, float]]:
    """Return the looks of a sequence at which α was known, each with the cost until then."""
    if result.sequence is None:
        return []
    looks = zip(result.sequence.looks, result.sequence.spent, strict=True)
    return [(look, spent) for look, spent in looks if look.number and look.evidence.drift.is_known]


@figure_type(
    "Looks of the sequence",
    "Drift exponent and its interval against the cost until each look",
    lambda analysis: any(known_looks(result) for result in analysis.results),
)
def sequence_figure(analysis: TransferAnalysis) -> Figure:
    """Draw α with its interval against the cost until each look of a sequence, a panel per rule."""
    shown = [result for result in names.results_of(analysis) if known_looks(result)]
    axes, color = style.panels(len(shown), 4.6, 3.6), style.categorical(0)
    for ax, result in zip(axes, shown, strict=True):
        assert result.sequence is not None
        ax.axhspan(-analysis.delta, analysis.delta, color=INK, alpha=0.08, lw=0)
        ax.axhline(0, color=INK, lw=0.8)
        for look, spent in known_looks(result):
            drift, is_settled = look.evidence.drift, look.verdict.is_settled
            style.draw_interval(
                ax, spent, drift.alpha, (drift.low, drift.high), (-_REACH, _REACH), capsize=3, ms=5, lw=1.3,
                fmt="s" if is_settled else "o", mfc=color if is_settled else "white", color=color,
            )  # fmt: skip
            number: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
            ax.annotate(str(look.number), (spent, min(drift.high, _REACH)), (0, 4), **number)
        ax.set_xlabel(f"spent ({result.sequence.costs.unit}); numbers count looks")
        ax.margins(y=0.15)
        ax.set_title(f"{style.label(result.compared, analysis.compares)}: {result.verdict.decision}")
    for ax in axes:  # room for the last mark, its caps and its number
        ax.set_xlim(0, 1.08 * max(spent for result in shown for _, spent in known_looks(result)))
    style.label_rows(axes, f"α, exponent of {style.column_label(analysis.scale)} (95 %)")
    settled = {look.verdict.is_settled for result in shown for look, _ in known_looks(result)}
    marks = ((False, "o", "OPEN, bought on", "white"), (True, "s", "settled", color))
    entries = [style.mark(m, text, mfc=f, color=color) for s, m, text, f in marks if s in settled]
    return style.with_key(axes, [style.shade(f"|α| < {analysis.delta:g}"), *entries])


@figure_type(
    "All sweeps",
    "Drift exponent and regret of each rule, by the way of growing; values in the shade do not matter",
)
def sweeps_figure(rulings: Sequence[Ruling]) -> Figure:
    """Draw drift exponent and regret of each rule with their 95 % intervals, marked by verdict.

    Rules are grouped by the way of growing, in the order of the rulings; each group begins with its baseline.
    """
    groups = list(dict.fromkeys((r.columns.scale, r.columns.parametrization) for r in rulings))

    def place(r: Ruling) -> tuple[int, int, str]:
        group = r.columns.scale, r.columns.parametrization
        rules = names.ordered({o.rule for o in rulings if o.columns.parametrization == group[1]}, group[1])
        return groups.index(group), rules.index(r.rule), r.sweep

    entries: list[str | Ruling] = []
    for way, of_way in groupby(sorted(rulings, key=place), lambda r: columns.label(r.columns.scale)):
        entries += [way, *of_way]
    written = []
    for entry in entries:
        if not isinstance(entry, str):
            pairs = zip(map(columns.label, entry.setting), map(columns.label, _USUAL), strict=True)
            differs = ", ".join(dict.fromkeys(setting for setting, most in pairs if setting != most))
            rule = style.label(entry.rule, entry.columns.parametrization) + f" ({differs})" * bool(differs)
            text = f"{rule}: {span(entry)}, {style.plain(entry.sweep)}"
        else:
            text = style.plain(entry)
        written.append(textwrap.fill(text, 60))
    lines = [text.count("\n") + 1 for text in written]
    rows = np.cumsum(lines[::-1])[::-1] - np.array(lines) / 2 - 0.5
    longest = 0.072 * max(len(line) for text in written for line in text.split("\n"))
    figure = ShownFigure(figsize=(longest + 6.2, 0.2 * sum(lines) + 1.3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for row, entry, height in zip(rows, entries, lines, strict=True):
        for ax in axes:
            if isinstance(entry, str):
                ax.axhline(row + height / 2, color=INK, lw=0.6)
        if not isinstance(entry, str):
            drift = cost = (np.nan,) * 3
            if entry.drift.is_told:
                drift = entry.drift.alpha, entry.drift.low, entry.drift.high
            if (r := entry.regret) is not None:
                cost = r.value, r.low, r.high
            _draw_interval(axes[0], row, drift, _REACH, entry.decision)
            _draw_interval(axes[1], row, cost, _MOST_REGRET, entry.decision)
    axes[0].axvspan(-DELTA, DELTA, color=INK, alpha=0.08, lw=0, zorder=0)
    axes[1].axvspan(0, EPSILON, color=INK, alpha=0.08, lw=0, zorder=0)
    axes[0].set_yticks(rows, written)
    for ax in axes:
        ax.tick_params(axis="y", labelsize=8.5)
        # The second panel has no labels of ticks.
        for tick, entry in zip(ax.get_yticklabels(), entries, strict=False):
            tick.set_fontweight("bold" if isinstance(entry, str) else "normal")
    axes[0].set_ylim(-0.7, sum(lines) - 0.3)
    axes[0].set_xlim(-1.05 * _REACH, 1.05 * _REACH)
    axes[1].set_xlim(-0.05 * _MOST_REGRET, 1.05 * _MOST_REGRET)
    for ax, text in zip(axes, ("drift exponent α", "regret, smallest to largest (nat)"), strict=True):
        ax.axvline(0, color=INK, lw=0.9, ls=":", zorder=0)
        ax.set_xlabel(text)
        ax.grid(False, axis="y")
    band = style.shade(f"does not matter: |α| < {DELTA:g}, regret < {EPSILON:g} nat")
    used = {r.decision for r in rulings}
    marks = [style.mark(m, verdict, color=c) for verdict, (m, c) in style.VERDICTS.items() if verdict in used]
    return style.with_key(axes, [*marks, band])


def _draw_interval(
    ax: Axes, row: float, values: tuple[float, float, float], reach: float, decision: str
) -> None:
    """Draw a value between its bounds; an arrow marks a bound beyond ±reach."""
    at, low, high = values
    if not np.isfinite(at):
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center"}
        ax.annotate("not known" if np.isnan(at) else "∞", (0.98, row), fontsize=8, **place)
        return
    marker, color = style.VERDICTS[decision]
    low_end, high_end = np.clip([low, high], -reach, reach)
    ax.plot([low_end, high_end], [row, row], color=color, lw=1.6, solid_capstyle="butt")
    for bound, end, cut in ((low, low_end, "<"), (high, high_end, ">")):
        ax.plot(end, row, "|" if end == bound else cut, color=color, ms=6)
    if abs(at) > reach:
        marker = "<" if at < 0 else ">"
    ax.plot(np.clip(at, -reach, reach), row, marker, color=color, ms=6, mec="white", mew=0.6)
