"""Predictions: optima, their line, and the fan of intervals out to the targets."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mup_tpu.analysis.line import Line
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.prediction import Predictions, RulePrediction
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.style import INK, styled

_FAN = ((0.025, 0.975, 0.14), (0.25, 0.75, 0.22))
"""Quantiles between which a fan is drawn, and its opacity."""


@styled
def prediction_figure(predictions: Predictions) -> Figure:
    """Optima, their line with 50 and 95 % intervals out to the targets, and predictions; a panel a rule."""
    rules = names.ordered(predictions.lines, predictions.analysis.compares)
    axes = style.panels(len(rules), 4.6, 3.9)
    results = {result.compared: result for result in predictions.analysis.results}
    for ax, name in zip(axes, rules, strict=True):
        found = [p for p in predictions.predictions if p.compared == name]
        optima, line = results[name].optima, predictions.lines[name]
        color = style.categorical(0)
        _draw_fan(ax, line, found, min(o.scale for o in optima), color)
        _draw_optima(ax, optima)
        for target in found:
            low, high = target.interval
            ax.errorbar(
                target.scale, target.x, [[target.x - low], [high - target.x]], fmt="D", ms=6, capsize=4,
                color=color if target.bears else INK, mfc="white", mew=1.5,
            )  # fmt: skip
        run = max(o.scale for o in optima)
        ax.axvline(run, color=INK, lw=0.9, ls=":", zorder=0)
        ax.set_title(names.label(name, predictions.analysis.compares))
        scales = sorted({*(o.scale for o in optima), *(p.scale for p in found)})
        ticks.scale_axis(ax, predictions.scale, scales, 4.6)
        ticks.log2_heights(ax)
    style.label_rows(axes, f"best {names.title(predictions.hyperparameter)}")
    return style.with_key(axes, _key(predictions))


def _key(predictions: Predictions) -> list[Artist]:
    color = style.categorical(0)
    entries: list[Artist] = [
        style.mark("o", "optimum, measured (95 %)", color=INK),
        style.mark("D", "predicted (95 %)", mfc="white", mew=1.5, color=color),
        Patch(color=color, alpha=0.4, lw=0, label="50 % of optima"),
        Patch(color=color, alpha=0.14, lw=0, label="95 %"),
    ]
    if not all(p.bears for p in predictions.predictions):
        entries.insert(2, style.mark("D", "more than the table bears", mfc="white", mew=1.5, color=INK))
    return entries


def _draw_fan(ax: Axes, line: Line, found: list[RulePrediction], first: float, color: str) -> None:
    last = max(line.origin, *(p.scale for p in found))
    scales = np.geomspace(first, last, 120)
    # The same shocks at every scale, so that the fan has smooth edges.
    optima = np.array([line.trend_R(scale, np.random.default_rng(0)) for scale in scales])
    ax.plot(scales, optima.mean(axis=1), color=color, lw=1.4)
    for low, high, opacity in _FAN:
        edges = np.quantile(optima, [low, high], axis=1)
        ax.fill_between(scales, *edges, color=color, alpha=opacity, lw=0)


def _draw_optima(ax: Axes, optima: tuple[Optimum, ...]) -> None:
    for o in optima:
        if o.is_bracketed:
            reach = np.clip([[o.x - o.low], [o.high - o.x]], 0, 2)
            ax.errorbar(o.scale, o.x, reach, fmt="o", color=INK, ms=4.5, capsize=3)
        style.at_edge(ax, o, o.scale, color=INK, ms=8)
