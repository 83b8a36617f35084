"""Loss against the hyperparameter, each point with its runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.config import columns
from mup_tpu.plots import names, style
from mup_tpu.plots.heights import Heights, heights_of, zero_place
from mup_tpu.plots.interactive.panel import Entry, Mark, Panel, Panels, power_ticks, room_for
from mup_tpu.plots.interactive.tooltips import about, loss_text, run_lines
from mup_tpu.plots.optima import ON_THE_RAIL, bar_of
from mup_tpu.words.names import bound
from mup_tpu.words.verdicts import status

_LOST = tuple(
    (Mark(shape, 7, hollow=True), name)
    for shape, name in (("x", "diverged"), ("square", "stopped early"), ("triangle", "above the axis"))
)
"""Mark and name of each kind of `Heights.lost_points`."""


def transfer_panels(analysis: TransferAnalysis, runs: pd.DataFrame) -> Panels:
    """Loss against log2 of the hyperparameter: a line a scale, a panel a parametrization, optima marked.

    Points name `runs` of the checked table that the analysis was made from.
    """
    results = names.results_of(analysis)
    heights, _ = heights_of(results)
    scales, zero_x = names.scales_of(results), zero_place(results)
    panels, tuned = Panels(), columns.label(analysis.hyperparameter)
    ends = [x for r in results for c in r.curves for x in (c.x_G[0], c.x_G[-1])]
    low, high = min(ends), max(ends)
    x_range = room_for((low if zero_x is None else zero_x, high))
    for scale in scales:
        panels.entry(names.point(analysis.scale, scale), style.sequential(scales, scale), Mark("circle"), "-")
    for result, height in zip(results, heights, strict=True):
        panel = Panel(
            panels, names.verdict_title(result, analysis), columns.title(analysis.hyperparameter), style.LOSS,
            height.limits, x_range=x_range,
        )  # fmt: skip
        own = runs[runs["compared"] == result.compared]
        _Valleys(panel, result, height, analysis.scale, tuned, zero_x).draw(own)
        power_ticks(panel.figure.xaxis, low, high, {zero_x: "0"} if zero_x is not None else {})
        panel.done()
    return panels


@dataclass(frozen=True)
class _Valleys:
    """Curves of one panel."""

    panel: Panel
    result: TransferResult
    heights: Heights
    scale_name: str
    tuned: str
    zero_x: float | None

    def draw(self, runs: pd.DataFrame) -> None:
        """Draw all curves, and above them all optima."""
        panel, result = self.panel, self.result
        if self.heights.needs_rail(result):
            panel.level(self.heights.rail)
            panel.panels.entry(ON_THE_RAIL, style.INK, dash="-")
        for curve in result.curves:
            self._draw_curve(curve, runs[runs["scale"] == curve.scale])
            if self.zero_x is not None:
                self._draw_zeros(curve, self.zero_x)
        for curve, optimum in zip(result.curves, result.optima, strict=True):
            if np.isfinite(optimum.loss):
                self._draw_optimum(curve, optimum)
        if (first := names.smallest_known(result)) is not None:
            panel.upright(first.x)
            panel.panels.entry("the smallest's optimum", style.INK, dash=":")
        if self.zero_x is not None:
            panel.upright(self.zero_x + 0.5, "dashed")

    def _entry(self, curve: LossCurve) -> Entry:
        return self.panel.panels.entries[names.point(self.scale_name, curve.scale)]

    def _draw_curve(self, curve: LossCurve, runs: pd.DataFrame) -> None:
        """Draw means of runs with two standard errors; points without a place lie on the rail."""
        panel, entry, shown = self.panel, self._entry(curve), self.heights.shows(curve)
        x_G, y_G, error_G = curve.x_G, curve.mean_G, self.result.noise.errors_G(curve)
        panel.band(entry, x_G[shown], (y_G - 2 * error_G)[shown], (y_G + 2 * error_G)[shown])
        panel.line(entry, x_G[shown], y_G[shown])
        panel.marks(entry, x_G[shown], y_G[shown])
        for lost, (mark, text) in zip(self.heights.lost_points(curve), _LOST, strict=True):
            if lost.any():
                panel.marks(entry, x_G[lost], np.full(lost.sum(), self.heights.rail), mark)
                panel.panels.entry(text, style.INK, mark)
        for x, y, error, is_shown in zip(x_G, y_G, error_G, shown, strict=True):
            loss = loss_text(y, error) if np.isfinite(y) else "no loss: half of its runs were lost"
            lines = run_lines(runs[np.isclose(runs["x"], x)])
            text = about(f"{entry.name}, {self.tuned} {bound(x)}", loss, *lines)
            panel.tell(entry, [x], [y if is_shown else self.heights.rail], [text])

    def _draw_zeros(self, curve: LossCurve, x: float) -> None:
        """Draw runs at hyperparameter 0, at x."""
        panel, entry = self.panel, self._entry(curve)
        for zero in (z for z in self.result.at_zero if z.scale == curve.scale):
            is_shown = zero.loss <= self.heights.top
            y = zero.loss if is_shown else self.heights.rail
            panel.marks(entry, [x], [y], Mark("diamond" if is_shown else "triangle", 8, hollow=True))
            panel.panels.entry("at 0", style.INK, Mark("diamond", hollow=True))
            loss = f"{loss_text(zero.loss, zero.error)}, {zero.runs} runs"
            panel.tell(entry, [x], [y], [about(f"{entry.name}, {self.tuned} 0", loss)])

    def _draw_optimum(self, curve: LossCurve, optimum: Optimum) -> None:
        """Draw a star below its interval; hollow at an edge, or where the fit misses its runs."""
        panel, entry, loss = self.panel, self._entry(curve), optimum.loss
        x = optimum.x if optimum.is_bracketed else optimum.best_x
        is_sure = optimum.is_bracketed and optimum.is_fitted
        text = status(optimum)
        if optimum.is_bracketed:
            raised = 0.03 * (self.heights.top - self.heights.bottom)
            low, high, caps = bar_of(optimum, curve)
            panel.line(entry, [low, high], [loss + raised] * 2, 2)
            for end in caps:
                panel.line(entry, [end] * 2, [loss + 0.7 * raised, loss + 1.3 * raised], 2)
            text = f"{bound(x)} (95 %: {bound(optimum.low)} to {bound(optimum.high)})"
        star = Mark("star", 16, hollow=not is_sure)
        panel.marks(entry, [x], [loss], star)
        panel.tell(entry, [x], [loss], [about(f"{entry.name}: best {self.tuned}", text, loss_text(loss))])
        said = "optimum, below its 95 % interval" if is_sure else "at the grid's edge, or fit off its runs"
        panel.panels.entry(said, style.INK, star, "-" if is_sure else None)
