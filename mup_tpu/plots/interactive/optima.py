"""Loss against the hyperparameter, each point with its runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mup_tpu.analysis.optimum import LossCurve, Optimum
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.config import columns
from mup_tpu.plots import style
from mup_tpu.plots.interactive.panel import (
    Entry,
    Panel,
    Panels,
    about,
    hexed,
    loss_text,
    power_ticks,
    room_for,
    run_lines,
)
from mup_tpu.plots.markup import power
from mup_tpu.plots.optima import ON_THE_LINE, height_range, lost_points, needs_line, zero_place

_LOST = (("x", "diverged"), ("square", "stopped early"), ("triangle", "above the axis"))
"""Marker and name of each kind of `lost_points`."""


def transfer_panels(analysis: TransferAnalysis, runs: pd.DataFrame) -> Panels:
    """Loss against log2 of the hyperparameter: a line a scale, a panel a parametrization, optima marked.

    Args:
        analysis: what to draw.
        runs: of the checked table that it was made from; points name them.
    """
    results = style.results_of(analysis)
    ranges = [height_range(result) for result in results]
    if style.lie_together(ranges):
        ranges = [(min(low for low, _ in ranges), max(high for _, high in ranges))] * len(results)
    scales = sorted({c.scale for r in results for c in r.curves})
    panels, zero_x = Panels(), zero_place(results)
    ends = [x for r in results for c in r.curves for x in (c.x_G[0], c.x_G[-1])]
    low, high = min(ends), max(ends)
    left = low if zero_x is None else zero_x
    x_range = room_for((left, high))
    for scale in scales:
        panels.entry(
            style.point(analysis.scale, scale), hexed(style.sequential(scales, scale)), "circle", "-"
        )
    for result, (bottom, top) in zip(results, ranges, strict=True):
        verdict = f"{style.name(result.compared, analysis.compares)}: {result.verdict.decision}"
        rail = top + 0.06 * (top - bottom)
        panel = Panel(
            panels, ", ".join(filter(None, (verdict, style.alpha(result)))),
            columns.title(analysis.hyperparameter), style.LOSS,
            (bottom - 0.08 * (top - bottom), rail + 0.05 * (top - bottom)), x_range=x_range,
        )  # fmt: skip
        if needs_line(result, top):
            panel.level(rail)
            panels.entry(ON_THE_LINE, style.INK, "", "-")
        own = runs[runs["compared"] == result.compared]
        tuned = columns.label(analysis.hyperparameter)
        for curve in result.curves:
            entry = panels.entries[style.point(analysis.scale, curve.scale)]
            _draw_curve(panel, entry, curve, result, own[own["scale"] == curve.scale], tuned, top, rail)
            if zero_x is not None:
                _draw_zeros(panel, entry, curve, result, tuned, top, rail, zero_x)
        for curve, optimum in zip(result.curves, result.optima, strict=True):  # above all curves
            entry = panels.entries[style.point(analysis.scale, curve.scale)]
            _draw_optimum(panel, entry, curve, optimum, tuned, 0.03 * (top - bottom))
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
    top: float,
    rail: float,
) -> None:
    """Draw means of a scale's runs with two standard errors; points without a place lie on the rail."""
    shown = np.isfinite(curve.mean_G) & (curve.mean_G <= top)
    x_G, y_G, error_G = curve.x_G, curve.mean_G, result.noise.errors_G(curve)
    panel.band(entry, x_G[shown], (y_G - 2 * error_G)[shown], (y_G + 2 * error_G)[shown])
    panel.line(entry, x_G[shown], y_G[shown])
    panel.marks(entry, x_G[shown], y_G[shown], "circle")
    for lost, (marker, text) in zip(lost_points(curve, top), _LOST, strict=True):
        if lost.any():
            panel.marks(entry, x_G[lost], np.full(lost.sum(), rail), marker, 7, hollow=True)
            panel.panels.entry(text, style.INK, marker, None, hollow=True)
    for x, y, error, is_shown in zip(x_G, y_G, error_G, shown, strict=True):
        loss = loss_text(y, error) if np.isfinite(y) else "no loss: half of its runs were lost"
        lines = run_lines(runs[np.isclose(runs["x"], x)])
        text = about(f"{entry.name}, {tuned} {power(x)}", loss, *lines)
        panel.tell(entry, [x], [y if is_shown else rail], [text])


def _draw_zeros(
    panel: Panel,
    entry: Entry,
    curve: LossCurve,
    result: TransferResult,
    tuned: str,
    top: float,
    rail: float,
    x: float,
) -> None:
    """Draw runs at hyperparameter 0, at x."""
    for zero in (z for z in result.at_zero if z.scale == curve.scale):
        is_shown = zero.loss <= top
        y = zero.loss if is_shown else rail
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
        low, high = max(optimum.low, curve.x_G[0]), min(optimum.high, curve.x_G[-1])
        panel.line(entry, [low, high], [loss + raised] * 2, 2)
        for end in (x for x in (optimum.low, optimum.high) if low <= x <= high):
            panel.line(entry, [end] * 2, [loss + 0.7 * raised, loss + 1.3 * raised], 2)
        text = f"{power(x)} (95 %: {power(optimum.low)} to {power(optimum.high)})"
    panel.marks(entry, [x], [loss], "star", 16, hollow=not is_sure)
    panel.tell(entry, [x], [loss], [about(f"{entry.name}: best {tuned}", text, loss_text(loss))])
    if is_sure:
        panel.panels.entry("optimum, below its 95 % interval", style.INK, "star", "-")
    else:
        panel.panels.entry("at the grid's edge, or fit off its runs", style.INK, "star", None, hollow=True)
