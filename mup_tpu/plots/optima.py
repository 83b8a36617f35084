"""Loss against the hyperparameter, optima by scale, and the collapse of whole curves."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation

from mup_tpu.analysis.drift import WIDEST_COLLAPSE, Drift, bends
from mup_tpu.analysis.optimum import LossCurve, Optimum
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.plots import style
from mup_tpu.plots.style import INK, LOSS, styled

ON_THE_LINE = "line at the top: runs without a place below"
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
    results = style.results_of(analysis)
    heights = [height_range(result) for result in results]
    share_y = style.lie_together(heights)
    axes = style.panels(len(results), 4.6, 4.0, True, share_y, ax)
    if share_y:
        heights = [(min(low for low, _ in heights), max(high for _, high in heights))] * len(results)
    scales, zero_x = _scales(results), zero_place(results)
    for panel, result, (bottom, top) in zip(axes, results, heights, strict=True):
        rail = top + 0.06 * (top - bottom)
        _draw_curves(panel, result, scales, top, rail, zero_x, analysis.scale)
        text = f"{style.label(result.compared, analysis.compares)}: {result.verdict.decision}"
        panel.set_title(", ".join(filter(None, (text, style.alpha(result)))))
        panel.set_xlabel(style.title(analysis.hyperparameter))
        panel.set_ylim(bottom - 0.08 * (top - bottom), rail + 0.05 * (top - bottom))
        panel.yaxis.set_major_formatter(style.PlainTicks())
        style.log2_axis(panel, zero_x)
    for panel in axes if not share_y else style.first_of_rows(axes):
        panel.set_ylabel(LOSS)
    style.key_below(style.figure_of(axes), [*_lines_of(axes), *_marks(results, heights)], ax=ax)
    return style.figure_of(axes)


def _scales(results: Sequence[TransferResult]) -> list[float]:
    return sorted({c.scale for r in results for c in r.curves})


def _lines_of(axes: Sequence[Axes]) -> list[Artist]:
    """Labelled lines of all panels, each name once, in the order of scales."""
    found: dict[str, tuple[float, Artist]] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, (getattr(handle, "scale", 0.0), handle))
    return [handle for _, handle in sorted(found.values(), key=lambda entry: entry[0])]


def height_range(result: TransferResult) -> tuple[float, float]:
    """Least and greatest loss that are shown; those of high learning rates would flatten the valley.

    0.6 nat above the best and 0.35 above the worst scale's best, or a fifth and an eighth of the loss itself
    where that is more.
    """
    finite = [c.mean_G[np.isfinite(c.mean_G)] for c in result.curves]
    finite = [losses for losses in finite if len(losses)]
    if not finite:
        return 0.0, 1.0
    best, worst = min(f.min() for f in finite), max(f.min() for f in finite)
    known = [o.loss for o in result.optima if np.isfinite(o.loss)]
    known += [z.loss for z in result.at_zero if np.isfinite(z.loss)]
    bottom = float(min([best, *known]))
    wanted = max(best + max(0.6, 0.2 * abs(best)), worst + max(0.35, 0.12 * abs(worst)))
    top = float(max(min(max(f.max() for f in finite), wanted), *known, worst))
    least = 1e-9 * abs(top) or 0.05
    return bottom, max(top, bottom + least)


def _draw_curves(
    ax: Axes,
    result: TransferResult,
    scales: Sequence[float],
    top: float,
    rail: float,
    zero_x: float | None,
    scale_name: str,
) -> None:
    for curve, optimum in zip(result.curves, result.optima, strict=True):
        color = style.sequential(scales, curve.scale)
        shown = np.isfinite(curve.mean_G) & (curve.mean_G <= top)
        error_G = result.noise.errors_G(curve)
        (line,) = ax.plot(
            curve.x_G[shown], curve.mean_G[shown], "o-", color=color, ms=3.5, lw=1.4,
            label=style.at(scale_name, curve.scale),
        )  # fmt: skip
        line.scale = curve.scale  # type: ignore[attr-defined]
        low_G, high_G = curve.mean_G - 2 * error_G, curve.mean_G + 2 * error_G
        ax.fill_between(curve.x_G[shown], low_G[shown], high_G[shown], color=color, alpha=0.18, lw=0)
        offset = (scales.index(curve.scale) - (len(scales) - 1) / 2) * min(0.06, 0.4 / len(scales))
        for lost, marker in zip(lost_points(curve, top), "xs^", strict=True):
            size, edge = (5, 1.6) if marker == "x" else (4, 1.0)
            ax.plot(
                curve.x_G[lost] + offset, np.full(lost.sum(), rail), marker, color=color, ms=size, mew=edge,
                mfc="none",
            )  # fmt: skip
        zero = next((z for z in result.at_zero if z.scale == curve.scale), None)
        if zero is not None and zero_x is not None:
            is_shown = zero.loss <= top
            ax.plot(
                zero_x + offset, zero.loss if is_shown else rail, "D" if is_shown else "^", color=color, ms=5,
                mfc="none", mew=1.3,
            )  # fmt: skip
        _draw_optimum(ax, curve, optimum, color)
    first = next((o for o in result.optima if o.is_bracketed), None)
    if first is not None:
        ax.axvline(first.x, color=INK, lw=0.9, ls=":", zorder=0)
    if needs_line(result, top):
        ax.axhline(rail, color=INK, lw=0.5, alpha=0.4)
    if zero_x is not None:
        ax.axvline(zero_x + 0.5, color=INK, lw=0.7, ls=(0, (4, 3)), alpha=0.6)


def lost_points(curve: LossCurve, top: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points without a place on the axis: diverged, stopped early, above it."""
    diverged, stopped = curve.diverged_G > 0, (curve.stopped_G > 0) & (curve.diverged_G == 0)
    above = np.isfinite(curve.mean_G) & (curve.mean_G > top) & (curve.diverged_G + curve.stopped_G == 0)
    return diverged, stopped, above


def needs_line(result: TransferResult, top: float) -> bool:
    """Whether some runs have no place on the axis, and so lie on the line above it."""
    lost = (points for curve in result.curves for points in lost_points(curve, top))
    return any(points.any() for points in lost) or any(zero.loss > top for zero in result.at_zero)


def _draw_optimum(ax: Axes, curve: LossCurve, optimum: Optimum, color: tuple[float, ...]) -> None:
    if optimum.is_bracketed:
        low, high = max(optimum.low, curve.x_G[0]), min(optimum.high, curve.x_G[-1])
        ends = [
            x for x in (optimum.low, optimum.high) if low <= x <= high
        ]  # an end beyond the grid has no cap
        above = ax.transData + ScaledTranslation(0, _RAISED / 72, style.figure_of([ax]).dpi_scale_trans)
        for x, marks in (([low, high], "-"), (ends, "|")):
            ax.plot(x, [optimum.loss] * len(x), marks, color=color, lw=1.6, ms=6, mew=1.4, transform=above)
        inside, rim = (color, "white") if optimum.is_fitted else ("white", color)
        ax.plot(optimum.x, optimum.loss, "*", ms=12, mfc=inside, mec=rim, mew=0.9, zorder=5)
    elif np.isfinite(optimum.loss):
        arrow = "<" if optimum.status == "at lower edge" else ">"
        ax.plot(optimum.best_x, optimum.loss, arrow, color=color, ms=10, mec="white", mew=0.7, zorder=5)


def _marks(results: Sequence[TransferResult], heights: Sequence[tuple[float, float]]) -> list[Artist]:
    """Entries of the key for the marks that some panel has."""
    optima = [o for r in results for o in r.optima]
    lost = [
        lost_points(curve, top) for r, (_, top) in zip(results, heights, strict=True) for curve in r.curves
    ]
    hollow = {"mfc": "none"}
    is_at_edge = any(not o.is_bracketed and np.isfinite(o.loss) for o in optima)
    above_at_zero = any(z.loss > top for r, (_, top) in zip(results, heights, strict=True) for z in r.at_zero)
    on_line = any(needs_line(r, top) for r, (_, top) in zip(results, heights, strict=True))
    marks = (
        (
            any(o.is_bracketed and o.is_fitted for o in optima),
            "*",
            "optimum, below its 95 % interval",
            {"ms": 10},
        ),
        (any(not o.is_fitted for o in optima), "*", "optimum, fit off its runs", {"ms": 10, **hollow}),
        (is_at_edge, ">", "best of the grid, at its edge", {"ms": 8}),
        (any(o.is_bracketed for o in optima), "", "the smallest's optimum", {"ls": ":", "lw": 0.9}),
        (any(r.at_zero for r in results), "D", "at 0", {"ms": 5, **hollow}),
        (any(diverged.any() for diverged, _, _ in lost), "x", "diverged", {"mew": 1.6, "ms": 5}),
        (any(stopped.any() for _, stopped, _ in lost), "s", "stopped early", {"ms": 4, **hollow}),
        (any(a.any() for _, _, a in lost) or above_at_zero, "^", "above the axis", {"ms": 4, **hollow}),
        (on_line, "", ON_THE_LINE, {"ls": "-", "lw": 0.5, "alpha": 0.6}),
    )
    return [style.mark(marker, text, **look) for is_there, marker, text, look in marks if is_there]


def zero_place(results: Sequence[TransferResult]) -> float | None:
    """Place of 0, left of the smallest value above it by more than a step of the grid; None without 0."""
    if not any(result.at_zero for result in results):
        return None
    curves = [curve for result in results for curve in result.curves]
    return float(min(c.x_G[0] for c in curves) - max(1.0, *(c.step for c in curves)) - 0.5)


@styled
def optimum_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Optimum against scale, both logarithmic, with the fitted drift and the drift that does not matter.

    Optima at the edge of their grid are arrows.

    Args:
        analysis: from `mup_tpu.analysis.analyze`.
        ax: axes to draw in; a new figure by default.
    """
    results = style.results_of(analysis)
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
        text = (style.label(result.compared, analysis.compares), style.alpha(result), bent)
        handles.append(style.mark(marker, ", ".join(filter(None, text)), color=color, ls=dashes))
    style.scale_axis(panel, analysis.scale, _scales(results), 5.2)
    panel.set_ylabel(f"best {style.title(analysis.hyperparameter)}")
    low, high = panel.get_ylim()
    if high - low < 1:  # an octave at least, or noise looks like a drift
        panel.set_ylim((low + high - 1) / 2, (low + high + 1) / 2)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"$2^{{{v:g}}}$"))
    if lines:
        band = f"slopes that do not matter, |α| < {analysis.delta:g}"
        handles.append(matplotlib.patches.Patch(color=INK, alpha=0.12, lw=0, label=band))
    if any(not o.is_bracketed and np.isfinite(o.best_x) for r in results for o in r.optima):
        handles.append(style.mark("^", "best of the grid, at its edge", mfc="none", ms=8))
    style.key_below(style.figure_of([panel]), handles, ax=ax)
    return style.figure_of([panel])


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
    results = style.results_of(analysis)
    axes = style.panels(len(results), 4.6, 4.0, ax=ax)
    scales, top = _scales(results), 0.0
    for panel, result in zip(axes, results, strict=True):
        for curve in result.curves:
            shown = np.isfinite(curve.mean_G)
            moved_G = curve.x_G - _beta(result) * np.log2(curve.scale / scales[0])
            above_G = (curve.mean_G - curve.mean_G.min())[shown] if shown.any() else np.array([])
            (line,) = panel.plot(
                moved_G[shown], above_G, "o-", ms=3.5, lw=1.3, color=style.sequential(scales, curve.scale),
                label=style.at(analysis.scale, curve.scale),
            )  # fmt: skip
            line.scale = curve.scale  # type: ignore[attr-defined]
            if shown.any():
                most = max(0.8, 0.25 * abs(curve.mean_G.min()))
                top = max(top, min(1.04 * float(above_G.max()), most))
        panel.set_title(_collapse_title(result, analysis))
        panel.set_xlabel(
            f"{style.title(analysis.hyperparameter)}, moved to {style.at(analysis.scale, scales[0])}"
        )
        style.log2_axis(panel)
    for panel in axes:
        panel.set_ylim(-0.03 * (top or 1.0), top or 1.0)
    for panel in style.first_of_rows(axes):
        panel.set_ylabel("loss above the best (nat per token)")
        panel.yaxis.set_major_formatter(style.PlainTicks())
    style.key_below(style.figure_of(axes), _lines_of(axes), ax=ax)
    return style.figure_of(axes)


def _beta(result: TransferResult) -> float:
    return result.collapse_exponent if np.isfinite(result.collapse_exponent) else 0.0


def _collapse_title(result: TransferResult, analysis: TransferAnalysis) -> str:
    """Exponent of whole curves, and below it the exponent of the optima, which may differ."""
    beta, name = result.collapse_exponent, style.label(result.compared, analysis.compares)
    if not np.isfinite(beta):
        return f"{name}: not moved, the curves have too few points in common"
    if abs(beta) >= WIDEST_COLLAPSE:
        return f"{name}: no exponent within ±{WIDEST_COLLAPSE:g} brings the curves together"
    text = f"{name}: whole curves move by {style.column_label(analysis.scale)}$^{{{style.exponent(beta)}}}$"
    optima = style.alpha(result)
    return f"{text}\n(their optima alone: {optima})" if optima else text
