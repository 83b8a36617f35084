"""Loss against the hyperparameter, optima by scale, and the collapse of whole curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from mup_tpu.analysis.drift import WIDEST_COLLAPSE, Drift, bends
from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.optimum import Optimum
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
    """Loss against log2 of the hyperparameter: a line a scale, a panel a parametrization, optima marked.

    Args:
        analysis: from `mup_tpu.analysis.analyze`.
        ax: axes to draw in, one a parametrization; a new figure by default.
    """
    results = names.results_of(analysis)
    heights, share_y = heights_of(results)
    axes = style.panels(len(results), 4.6, 4.0, True, share_y, ax)
    scales, zero_x = _scales(results), zero_place(results)
    for panel, result, height in zip(axes, results, heights, strict=True):
        _draw_curves(panel, result, scales, height, zero_x, analysis.scale)
        text = f"{names.label(result.compared, analysis.compares)}: {result.verdict.decision}"
        panel.set_title(", ".join(filter(None, (text, names.alpha(result)))))
        panel.set_xlabel(names.title(analysis.hyperparameter))
        panel.set_ylim(*height.limits)
        panel.yaxis.set_major_formatter(ticks.PlainTicks())
        ticks.log2_axis(panel, zero_x)
    for panel in axes if not share_y else style.first_of_rows(axes):
        panel.set_ylabel(LOSS)
    return style.with_key(axes, [*_lines_of(axes), *_marks(results, heights)], ax=ax)


def _scales(results: Sequence[TransferResult]) -> list[float]:
    return sorted({c.scale for r in results for c in r.curves})


def _lines_of(axes: Sequence[Axes]) -> list[Artist]:
    """Labelled lines of all panels, each name once, in the order of scales."""
    found: dict[str, tuple[float, Artist]] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, (getattr(handle, "scale", 0.0), handle))
    return [handle for _, handle in sorted(found.values(), key=lambda entry: entry[0])]


def _draw_curves(
    ax: Axes,
    result: TransferResult,
    scales: Sequence[float],
    heights: Heights,
    zero_x: float | None,
    scale_name: str,
) -> None:
    rail = heights.rail
    for curve, optimum in zip(result.curves, result.optima, strict=True):
        color = style.sequential(scales, curve.scale)
        shown = np.isfinite(curve.mean_G) & (curve.mean_G <= heights.top)
        error_G = result.noise.errors_G(curve)
        (line,) = ax.plot(
            curve.x_G[shown], curve.mean_G[shown], "o-", color=color, ms=3.5, lw=1.4,
            label=names.at(scale_name, curve.scale),
        )  # fmt: skip
        line.scale = curve.scale  # type: ignore[attr-defined]
        low_G, high_G = curve.mean_G - 2 * error_G, curve.mean_G + 2 * error_G
        ax.fill_between(curve.x_G[shown], low_G[shown], high_G[shown], color=color, alpha=0.18, lw=0)
        offset = (scales.index(curve.scale) - (len(scales) - 1) / 2) * min(0.06, 0.4 / len(scales))
        for lost, marker in zip(heights.lost_points(curve), "xs^", strict=True):
            size, edge = (5, 1.6) if marker == "x" else (4, 1.0)
            ax.plot(
                curve.x_G[lost] + offset, np.full(lost.sum(), rail), marker, color=color, ms=size, mew=edge,
                mfc="none",
            )  # fmt: skip
        zero = next((z for z in result.at_zero if z.scale == curve.scale), None)
        if zero is not None and zero_x is not None:
            is_shown = zero.loss <= heights.top
            ax.plot(
                zero_x + offset, zero.loss if is_shown else rail, "D" if is_shown else "^", color=color, ms=5,
                mfc="none", mew=1.3,
            )  # fmt: skip
        _draw_optimum(ax, curve, optimum, color)
    first = next((o for o in result.optima if o.is_bracketed), None)
    if first is not None:
        ax.axvline(first.x, color=INK, lw=0.9, ls=":", zorder=0)
    if heights.needs_rail(result):
        ax.axhline(rail, color=INK, lw=0.5, alpha=0.4)
    if zero_x is not None:
        ax.axvline(zero_x + 0.5, color=INK, lw=0.7, ls=(0, (4, 3)), alpha=0.6)


def bar_of(optimum: Optimum, curve: LossCurve) -> tuple[float, float, list[float]]:
    """Ends of an optimum's interval within the grid, and those with a cap: its own, not the grid's."""
    low, high = max(optimum.low, curve.x_G[0]), min(optimum.high, curve.x_G[-1])
    return low, high, [x for x in (optimum.low, optimum.high) if low <= x <= high]


def _draw_optimum(ax: Axes, curve: LossCurve, optimum: Optimum, color: tuple[float, ...]) -> None:
    if optimum.is_bracketed:
        low, high, ends = bar_of(optimum, curve)
        above = ax.transData + ScaledTranslation(0, _RAISED / 72, style.figure_of([ax]).dpi_scale_trans)
        for x, marks in (([low, high], "-"), (ends, "|")):
            ax.plot(x, [optimum.loss] * len(x), marks, color=color, lw=1.6, ms=6, mew=1.4, transform=above)
        inside, rim = (color, "white") if optimum.is_fitted else ("white", color)
        ax.plot(optimum.x, optimum.loss, "*", ms=12, mfc=inside, mec=rim, mew=0.9, zorder=5)
    elif np.isfinite(optimum.loss):
        arrow = "<" if optimum.status == "at lower edge" else ">"
        ax.plot(optimum.best_x, optimum.loss, arrow, color=color, ms=10, mec="white", mew=0.7, zorder=5)


def _marks(results: Sequence[TransferResult], heights: Sequence[Heights]) -> list[Artist]:
    """Entries of the key for the marks that some panel has."""
    pairs = [*zip(results, heights, strict=True)]
    optima = [o for r in results for o in r.optima]
    lost = [height.lost_points(curve) for r, height in pairs for curve in r.curves]
    diverged, stopped, above = (any(kind.any() for kind in kinds) for kinds in zip(*lost, strict=True))
    above |= any(zero.loss > height.top for r, height in pairs for zero in r.at_zero)
    on_rail = any(height.needs_rail(r) for r, height in pairs)
    is_at_edge = any(not o.is_bracketed and np.isfinite(o.loss) for o in optima)
    is_fitted = any(o.is_bracketed and o.is_fitted for o in optima)
    hollow = {"mfc": "none"}
    marks = (
        (is_fitted, "*", "optimum, below its 95 % interval", {"ms": 10}),
        (any(not o.is_fitted for o in optima), "*", "optimum, fit off its runs", {"ms": 10, **hollow}),
        (is_at_edge, ">", "best of the grid, at its edge", {"ms": 8}),
        (any(o.is_bracketed for o in optima), "", "the smallest's optimum", {"ls": ":", "lw": 0.9}),
        (any(r.at_zero for r in results), "D", "at 0", {"ms": 5, **hollow}),
        (diverged, "x", "diverged", {"mew": 1.6, "ms": 5}),
        (stopped, "s", "stopped early", {"ms": 4, **hollow}),
        (above, "^", "above the axis", {"ms": 4, **hollow}),
        (on_rail, "", ON_THE_RAIL, {"ls": "-", "lw": 0.5, "alpha": 0.6}),
    )
    return [style.mark(marker, text, **look) for is_there, marker, text, look in marks if is_there]


@styled
def optimum_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Optimum against scale, both logarithmic, with the fitted drift and the drift that does not matter.

    Optima at the edge of their grid are arrows.

    Args:
        analysis: from `mup_tpu.analysis.analyze`.
        ax: axes to draw in; a new figure by default.
    """
    results = names.results_of(analysis)
    (panel,) = style.panels(1, 5.2, 3.8, ax=ax)
    handles: list[Artist] = []
    lines = [result.drift for result in results if result.drift.is_told]
    if lines:
        _draw_band(panel, lines, analysis.delta)
    for i, result in enumerate(results):
        color, marker = style.categorical(i), style.MARKERS[i % len(style.MARKERS)]
        shift = 2 ** (0.03 * (i - (len(results) - 1) / 2))
        dashes = _draw_line(panel, result, color)
        _draw_intervals(panel, [o for o in result.optima if o.is_bracketed], shift, color, marker)
        for o in result.optima:
            if not o.is_bracketed and np.isfinite(o.best_x):
                down = o.status == "at lower edge"
                panel.plot(o.scale * shift, o.best_x, "v" if down else "^", color=color, ms=9, mfc="none")
        bent = "bends: no power law" if dashes == "--" else ""
        text = (names.label(result.compared, analysis.compares), names.alpha(result), bent)
        handles.append(style.mark(marker, ", ".join(filter(None, text)), color=color, ls=dashes))
    ticks.scale_axis(panel, analysis.scale, _scales(results), style.narrowed(5.2))
    panel.set_ylabel(f"best {names.title(analysis.hyperparameter)}")
    low, high = panel.get_ylim()
    if high - low < 1:  # an octave at least, or noise looks like a drift
        panel.set_ylim((low + high - 1) / 2, (low + high + 1) / 2)
    ticks.log2_heights(panel)
    if lines:
        handles.append(style.shade(f"slopes that do not matter, |α| < {analysis.delta:g}"))
    if any(not o.is_bracketed and np.isfinite(o.best_x) for r in results for o in r.optima):
        handles.append(style.mark("^", "best of the grid, at its edge", mfc="none", ms=8))
    return style.with_key([panel], handles, ax=ax)


def _draw_line(ax: Axes, result: TransferResult, color: str) -> str:
    """Draw the fitted power law; returns its dashes, "" where α is not known."""
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


def _draw_intervals(ax: Axes, known: Sequence[Optimum], shift: float, color: str, marker: str) -> None:
    for o in known:
        reach = [o.x - o.low, o.high - o.x]
        down, up = np.clip(reach, 0, _REACH)
        ax.errorbar(o.scale * shift, o.x, yerr=[[down], [up]], fmt=marker, color=color, capsize=3, ms=6)
        for goes_on, y, arrow in ((reach[0] > _REACH, o.x - down, "v"), (reach[1] > _REACH, o.x + up, "^")):
            if goes_on:
                ax.plot(o.scale * shift, y, arrow, color=color, ms=5)


@styled
def collapse_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Loss above each scale's best, the curves moved by the exponent that brings them closest together.

    Args:
        analysis: from `mup_tpu.analysis.analyze`.
        ax: axes to draw in, one a parametrization; a new figure by default.
    """
    results = names.results_of(analysis)
    axes = style.panels(len(results), 4.6, 4.0, ax=ax)
    scales, top = _scales(results), 0.0
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
    for panel in style.first_of_rows(axes):
        panel.set_ylabel("loss above the best (nat per token)")
        panel.yaxis.set_major_formatter(ticks.PlainTicks())
    return style.with_key(axes, _lines_of(axes), ax=ax)


def _collapse_title(result: TransferResult, analysis: TransferAnalysis) -> str:
    """Exponent of whole curves, and below it the exponent of the optima, which may differ."""
    beta, name = result.collapse_exponent, names.label(result.compared, analysis.compares)
    if not np.isfinite(beta):
        return f"{name}: not moved, the curves have too few points in common"
    if abs(beta) >= WIDEST_COLLAPSE:
        return f"{name}: no exponent within ±{WIDEST_COLLAPSE:g} brings the curves together"
    text = f"{name}: whole curves move by {names.column_label(analysis.scale)}$^{{{names.exponent(beta)}}}$"
    optima = names.alpha(result)
    return f"{text}\n(their optima alone: {optima})" if optima else text
