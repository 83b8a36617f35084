"""Loss against the hyperparameter, optima by scale, and the collapse of whole curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from mup_tpu.analysis.drift import WIDEST_COLLAPSE, Drift, bends
from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.optimum import Optimum, Status
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.heights import Heights, heights_of, zero_place
from mup_tpu.plots.style import INK, LOSS, styled

ON_THE_RAIL = "line at the top: runs without a place below"
_RAISED = 8
"""Points from a star up to its interval, which it would hide."""
_REACH = 1.5
"""Most octaves of an interval on either side of an optimum; an arrow marks a longer one."""


@styled
def transfer_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Loss against log2 of the hyperparameter: a line a scale, a panel a parametrization, optima marked."""
    results = names.results_of(analysis)
    heights, share_y = heights_of(results)
    axes = style.panels(len(results), 4.6, 4.0, True, share_y, ax)
    scales, zero_x, used = names.scales_of(results), zero_place(results), set[str]()
    for panel, result, height in zip(axes, results, heights, strict=True):
        used |= _Valleys(panel, result, height, analysis.scale, scales, zero_x).draw()
        panel.set_title(names.raised(names.verdict_title(result, analysis)))
        panel.set_xlabel(names.title(analysis.hyperparameter))
        panel.set_ylim(*height.limits)
        panel.yaxis.set_major_formatter(ticks.PlainTicks())
        ticks.log2_axis(panel, zero_x)
    style.label_rows(axes, LOSS, each=not share_y)
    marks = [style.mark(marker, text, **look) for kind, (marker, text, look) in _KEY.items() if kind in used]
    return style.with_key(axes, [*_lines_of(axes), *marks], ax=ax)


def _lines_of(axes: Sequence[Axes]) -> list[Artist]:
    """Labelled lines of all panels, each name once, in the order of scales."""
    found: dict[str, tuple[float, Artist]] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, (getattr(handle, "scale", 0.0), handle))
    return [handle for _, handle in sorted(found.values(), key=lambda entry: entry[0])]


_HOLLOW = {"mfc": "none"}
_KEY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fitted": ("*", "optimum, below its 95 % interval", {"ms": 10}),
    "missed": ("*", "optimum, fit off its runs", {"ms": 10, **_HOLLOW}),
    "edge": (">", "best of the grid, at its edge", {"ms": 8}),
    "first": ("", "the smallest's optimum", {"ls": ":", "lw": 0.9}),
    "zero": ("D", "at 0", {"ms": 5, **_HOLLOW}),
    "diverged": ("x", "diverged", {"mew": 1.6, "ms": 5}),
    "stopped": ("s", "stopped early", {"ms": 4, **_HOLLOW}),
    "above": ("^", "above the axis", {"ms": 4, **_HOLLOW}),
    "rail": ("", ON_THE_RAIL, {"ls": "-", "lw": 0.5, "alpha": 0.6}),
}
"""Marker, text and look of each mark, by its name, in the order of the key."""


@dataclass(frozen=True)
class _Valleys:
    """Curves of one panel; methods return the entries of `_KEY` that they need."""

    ax: Axes
    result: TransferResult
    heights: Heights
    scale_name: str
    scales: Sequence[float]
    zero_x: float | None

    def draw(self) -> set[str]:
        """Draw all curves with their optima."""
        used = set[str]()
        for curve, optimum in zip(self.result.curves, self.result.optima, strict=True):
            color = style.sequential(self.scales, curve.scale)
            offset = self.scales.index(curve.scale) - (len(self.scales) - 1) / 2
            offset *= min(0.06, 0.4 / len(self.scales))
            self._draw_curve(curve, color)
            used |= self._draw_lost(curve, color, offset)
            used |= self._draw_zero(curve, color, offset)
            used |= _draw_optimum(self.ax, curve, optimum, color)
        if (first := names.smallest_known(self.result)) is not None:
            self.ax.axvline(first.x, color=INK, lw=0.9, ls=":", zorder=0)
            used.add("first")
        if self.heights.needs_rail(self.result):
            self.ax.axhline(self.heights.rail, color=INK, lw=0.5, alpha=0.4)
            used.add("rail")
        if self.zero_x is not None:
            self.ax.axvline(self.zero_x + 0.5, color=INK, lw=0.7, ls=(0, (4, 3)), alpha=0.6)
        return used

    def _draw_curve(self, curve: LossCurve, color: tuple[float, ...]) -> None:
        """Draw means of runs, with two standard errors as a shade."""
        shown = self.heights.shows(curve)
        error_G = self.result.noise.errors_G(curve)
        (line,) = self.ax.plot(
            curve.x_G[shown], curve.mean_G[shown], "o-", color=color, ms=3.5, lw=1.4,
            label=names.at(self.scale_name, curve.scale),
        )  # fmt: skip
        line.scale = curve.scale  # type: ignore[attr-defined]
        low_G, high_G = curve.mean_G - 2 * error_G, curve.mean_G + 2 * error_G
        self.ax.fill_between(curve.x_G[shown], low_G[shown], high_G[shown], color=color, alpha=0.18, lw=0)

    def _draw_lost(self, curve: LossCurve, color: tuple[float, ...], offset: float) -> set[str]:
        """Draw points without a place on the rail."""
        used = set[str]()
        for kind, lost in zip(("diverged", "stopped", "above"), self.heights.lost_points(curve), strict=True):
            marker = _KEY[kind][0]
            size, edge = (5, 1.6) if marker == "x" else (4, 1.0)
            self.ax.plot(
                curve.x_G[lost] + offset, np.full(lost.sum(), self.heights.rail), marker, color=color,
                ms=size, mew=edge, mfc="none",
            )  # fmt: skip
            used |= {kind} if lost.any() else set()
        return used

    def _draw_zero(self, curve: LossCurve, color: tuple[float, ...], offset: float) -> set[str]:
        """Draw runs at hyperparameter 0."""
        zero = next((z for z in self.result.at_zero if z.scale == curve.scale), None)
        if zero is None or self.zero_x is None:
            return set()
        is_shown = zero.loss <= self.heights.top
        self.ax.plot(
            self.zero_x + offset, zero.loss if is_shown else self.heights.rail, "D" if is_shown else "^",
            color=color, ms=5, mfc="none", mew=1.3,
        )  # fmt: skip
        return {"zero"} if is_shown else {"zero", "above"}


def bar_of(optimum: Optimum, curve: LossCurve) -> tuple[float, float, list[float]]:
    """Ends of an optimum's interval within the grid, and those with a cap: its own, not the grid's."""
    low, high = max(optimum.low, curve.x_G[0]), min(optimum.high, curve.x_G[-1])
    return low, high, [x for x in (optimum.low, optimum.high) if low <= x <= high]


def _draw_optimum(ax: Axes, curve: LossCurve, optimum: Optimum, color: tuple[float, ...]) -> set[str]:
    """Draw a star below its interval, or an arrow where the best is at an edge; returns entries of `_KEY`."""
    if optimum.is_bracketed:
        low, high, ends = bar_of(optimum, curve)
        above = ax.transData + ScaledTranslation(0, _RAISED / 72, style.figure_of([ax]).dpi_scale_trans)
        for x, marks in (([low, high], "-"), (ends, "|")):
            ax.plot(x, [optimum.loss] * len(x), marks, color=color, lw=1.6, ms=6, mew=1.4, transform=above)
        inside, rim = (color, "white") if optimum.is_fitted else ("white", color)
        ax.plot(optimum.x, optimum.loss, "*", ms=12, mfc=inside, mec=rim, mew=0.9, zorder=5)
        return {"fitted" if optimum.is_fitted else "missed"}
    if not np.isfinite(optimum.loss):
        return set()
    arrow = "<" if optimum.status == Status.LOWER else ">"
    ax.plot(optimum.best_x, optimum.loss, arrow, color=color, ms=10, mec="white", mew=0.7, zorder=5)
    return {"edge"}


@styled
def optimum_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Optimum against scale, both logarithmic, with the fitted drift and the drift that does not matter.

    Optima at the edge of their grid are arrows.
    """
    results = names.results_of(analysis)
    (panel,) = style.panels(1, 5.2, 3.8, ax=ax)
    handles: list[Artist] = []
    lines = [result.drift for result in results if result.drift.is_told]
    if lines:
        _draw_band(panel, lines, analysis.delta)
    for i, result in enumerate(results):
        color, marker = style.categorical(i), style.marker(i)
        dashes = _draw_line(panel, result, color)
        _draw_optima(panel, result.optima, 2 ** (0.03 * (i - (len(results) - 1) / 2)), color, marker)
        bent = "bends: no power law" if dashes == "--" else ""
        text = (names.label(result.compared, analysis.compares), names.alpha(result), bent)
        handles.append(style.mark(marker, ", ".join(filter(None, text)), color=color, ls=dashes))
    ticks.scale_axis(panel, analysis.scale, names.scales_of(results), style.narrowed(5.2))
    panel.set_ylabel(f"best {names.title(analysis.hyperparameter)}")
    panel.set_ylim(ticks.an_octave(*panel.get_ylim()), auto=None)
    ticks.log2_heights(panel)
    if lines:
        handles.append(style.shade(f"slopes that do not matter, |α| < {analysis.delta:g}"))
    if any(not o.is_bracketed and np.isfinite(o.best_x) for r in results for o in r.optima):
        handles.append(style.mark("^", "best of the grid, at its edge", mfc="none", ms=8))
    return style.with_key([panel], handles, ax=ax)


def _draw_line(ax: Axes, result: TransferResult, color: str) -> str:
    """Draw the fitted power law; returns its dashes, "" if α is not known."""
    drift = result.drift
    if not drift.is_told:
        return ""
    ends = np.array([min(drift.scales), max(drift.scales)])
    dashes = "--" if bends(result.optima) else "-"
    ax.plot(ends, drift.intercept + drift.alpha * np.log2(ends), dashes, color=color, lw=1.3)
    return dashes


def _draw_band(ax: Axes, lines: Sequence[Drift], delta: float) -> None:
    """Draw one wedge of the slopes within ±delta, from the mean of all lines at the smallest scale."""
    first, last = min(min(d.scales) for d in lines), max(max(d.scales) for d in lines)
    middle = float(np.mean([d.intercept + d.alpha * np.log2(first) for d in lines]))
    reach = delta * np.log2(np.array([first, last]) / first)
    ax.fill_between([first, last], middle - reach, middle + reach, color=INK, alpha=0.1, lw=0)


def _draw_optima(ax: Axes, optima: Sequence[Optimum], shift: float, color: str, marker: str) -> None:
    """Draw optima with their intervals, then arrows for optima at an edge of the grid."""
    for o in (o for o in optima if o.is_bracketed):
        reach = [o.x - o.low, o.high - o.x]
        down, up = np.clip(reach, 0, _REACH)
        ax.errorbar(o.scale * shift, o.x, yerr=[[down], [up]], fmt=marker, color=color, capsize=3, ms=6)
        for goes_on, y, arrow in ((reach[0] > _REACH, o.x - down, "v"), (reach[1] > _REACH, o.x + up, "^")):
            if goes_on:
                ax.plot(o.scale * shift, y, arrow, color=color, ms=5)
    for o in optima:
        style.at_edge(ax, o, o.scale * shift, color=color, ms=9)


@styled
def collapse_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Loss above each scale's best, the curves moved by the exponent that brings them closest together."""
    results = names.results_of(analysis)
    axes = style.panels(len(results), 4.6, 4.0, ax=ax)
    scales, top = names.scales_of(results), 0.0
    for panel, result in zip(axes, results, strict=True):
        beta = result.collapse_exponent if np.isfinite(result.collapse_exponent) else 0.0
        for curve in result.curves:
            shown = np.isfinite(curve.mean_G)
            moved_G = curve.x_G - beta * np.log2(curve.scale / scales[0])
            above_G = (curve.mean_G - curve.mean_G.min())[shown] if shown.any() else np.array([])
            (line,) = panel.plot(
                moved_G[shown], above_G, "o-", ms=3.5, lw=1.3, color=style.sequential(scales, curve.scale),
                label=names.at(analysis.scale, curve.scale),
            )  # fmt: skip
            line.scale = curve.scale  # type: ignore[attr-defined]
            if shown.any():
                most = max(0.8, 0.25 * abs(curve.mean_G.min()))
                top = max(top, min(1.04 * float(above_G.max()), most))
        panel.set_title(_collapse_title(result, analysis))
        panel.set_xlabel(
            f"{names.title(analysis.hyperparameter)}, moved to {names.at(analysis.scale, scales[0])}"
        )
        ticks.log2_axis(panel)
    for panel in axes:
        panel.set_ylim(-0.03 * (top or 1.0), top or 1.0)
        panel.yaxis.set_major_formatter(ticks.PlainTicks())
    style.label_rows(axes, "loss above the best (nat per token)")
    return style.with_key(axes, _lines_of(axes), ax=ax)


def _collapse_title(result: TransferResult, analysis: TransferAnalysis) -> str:
    """Exponent of whole curves, and below it the exponent of the optima, which may differ."""
    beta, name = result.collapse_exponent, names.label(result.compared, analysis.compares)
    if not np.isfinite(beta):
        return f"{name}: not moved, the curves have too few points in common"
    if abs(beta) >= WIDEST_COLLAPSE:
        return f"{name}: no exponent within ±{WIDEST_COLLAPSE:g} brings the curves together"
    text = f"{name}: whole curves move by {names.column_label(analysis.scale)}$^{{{names.signed(beta)}}}$"
    optima = names.alpha(result)
    return f"{text}\n(their optima alone: {optima})" if optima else text
