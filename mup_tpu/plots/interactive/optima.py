"""Loss against the hyperparameter, each point with its runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.config import columns
from mup_tpu.plots import names, style
from mup_tpu.plots.heights import Heights, heights_of, zero_place
from mup_tpu.plots.interactive.panel import Entry, Panel, Panels, power_ticks, room_for
from mup_tpu.plots.interactive.tooltips import about, loss_text, run_lines
from mup_tpu.plots.markup import power
from mup_tpu.plots.optima import ON_THE_RAIL, bar_of

_LOST = (("x", "diverged"), ("square", "stopped early"), ("triangle", "above the axis"))
"""Marker and name of each kind of `Heights.lost_points`."""


def transfer_panels(analysis: TransferAnalysis, runs: pd.DataFrame) -> Panels:
    """Loss against log2 of the hyperparameter: a line a scale, a panel a parametrization, optima marked.

    Args:
        analysis: what to draw.
        runs: of the checked table that it was made from; points name them.
    """
    results = names.results_of(analysis)
    heights, _ = heights_of(results)
    scales = sorted({c.scale for r in results for c in r.curves})
    panels, zero_x = Panels(), zero_place(results)
    ends = [x for r in results for c in r.curves for x in (c.x_G[0], c.x_G[-1])]
    low, high = min(ends), max(ends)
    left = low if zero_x is None else zero_x
    x_range = room_for((left, high))
    for scale in scales:
        panels.entry(names.point(analysis.scale, scale), style.sequential(scales, scale), "circle", "-")
    for result, height in zip(results, heights, strict=True):
        verdict = f"{names.name(result.compared, analysis.compares)}: {result.verdict.decision}"
        panel = Panel(
            panels, ", ".join(filter(None, (verdict, names.alpha(result)))),
            columns.title(analysis.hyperparameter), style.LOSS, height.limits, x_range=x_range,
        )  # fmt: skip
        if height.needs_rail(result):
            panel.level(height.rail)
            panels.entry(ON_THE_RAIL, style.INK, "", "-")
        own = runs[runs["compared"] == result.compared]
        tuned = columns.label(analysis.hyperparameter)
        for curve in result.curves:
            entry = panels.entries[names.point(analysis.scale, curve.scale)]
            _draw_curve(panel, entry, curve, result, own[own["scale"] == curve.scale], tuned, height)
            if zero_x is not None:
                _draw_zeros(panel, entry, curve, result, tuned, height, zero_x)
        for curve, optimum in zip(result.curves, result.optima, strict=True):  # above all curves
            entry = panels.entries[names.point(analysis.scale, curve.scale)]
            _draw_optimum(panel, entry, curve, optimum, tuned, 0.03 * (height.top - height.bottom))
        if first := next((o for o in result.optima if o.is_bracketed), None):
            panel.upright(first.x)
            panels.entry("the smallest's optimum", style.INK, "", ":")
        if zero_x is not None:
            panel.upright(zero_x + 0.5, "dashed")
        power_ticks(panel.figure.xaxis, low, high, {zero_x: "0"} if zero_x is not None else {})
        panel.done()
    return panels


def _draw_curve(
    panel: Panel,
    entry: Entry,
    curve: LossCurve,
    result: TransferResult,
    runs: pd.DataFrame,
    tuned: str,
    heights: Heights,
) -> None:
    """Draw means of a scale's runs with two standard errors; points without a place lie on the rail."""
    shown = np.isfinite(curve.mean_G) & (curve.mean_G <= heights.top)
    x_G, y_G, error_G = curve.x_G, curve.mean_G, result.noise.errors_G(curve)
    panel.band(entry, x_G[shown], (y_G - 2 * error_G)[shown], (y_G + 2 * error_G)[shown])
    panel.line(entry, x_G[shown], y_G[shown])
    panel.marks(entry, x_G[shown], y_G[shown], "circle")
    for lost, (marker, text) in zip(heights.lost_points(curve), _LOST, strict=True):
        if lost.any():
            panel.marks(entry, x_G[lost], np.full(lost.sum(), heights.rail), marker, 7, hollow=True)
            panel.panels.entry(text, style.INK, marker, None, hollow=True)
    for x, y, error, is_shown in zip(x_G, y_G, error_G, shown, strict=True):
        loss = loss_text(y, error) if np.isfinite(y) else "no loss: half of its runs were lost"
        lines = run_lines(runs[np.isclose(runs["x"], x)])
        text = about(f"{entry.name}, {tuned} {power(x)}", loss, *lines)
        panel.tell(entry, [x], [y if is_shown else heights.rail], [text])


def _draw_zeros(
    panel: Panel,
    entry: Entry,
    curve: LossCurve,
    result: TransferResult,
    tuned: str,
    heights: Heights,
    x: float,
) -> None:
    """Draw runs at hyperparameter 0, at x."""
    for zero in (z for z in result.at_zero if z.scale == curve.scale):
        is_shown = zero.loss <= heights.top
        y = zero.loss if is_shown else heights.rail
        panel.marks(entry, [x], [y], "diamond" if is_shown else "triangle", 8, hollow=True)
        panel.panels.entry("at 0", style.INK, "diamond", None, hollow=True)
        loss = f"{loss_text(zero.loss, zero.error)}, {zero.runs} runs"
        panel.tell(entry, [x], [y], [about(f"{entry.name}, {tuned} 0", loss)])


def _draw_optimum(
    panel: Panel, entry: Entry, curve: LossCurve, optimum: Optimum, tuned: str, raised: float
) -> None:
    """Draw a star below its interval; hollow where the optimum is at an edge or the fit misses its runs."""
    if not np.isfinite(optimum.loss):
        return
    x, loss = (optimum.x if optimum.is_bracketed else optimum.best_x), optimum.loss
    is_sure = optimum.is_bracketed and optimum.is_fitted
    text = optimum.sentence()
    if optimum.is_bracketed:
        low, high, caps = bar_of(optimum, curve)
        panel.line(entry, [low, high], [loss + raised] * 2, 2)
        for end in caps:
            panel.line(entry, [end] * 2, [loss + 0.7 * raised, loss + 1.3 * raised], 2)
        text = f"{power(x)} (95 %: {power(optimum.low)} to {power(optimum.high)})"
    panel.marks(entry, [x], [loss], "star", 16, hollow=not is_sure)
    panel.tell(entry, [x], [loss], [about(f"{entry.name}: best {tuned}", text, loss_text(loss))])
    if is_sure:
        panel.panels.entry("optimum, below its 95 % interval", style.INK, "star", "-")
    else:
        panel.panels.entry("at the grid's edge, or fit off its runs", style.INK, "star", None, hollow=True)
