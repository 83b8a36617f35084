"""Loss against the hyperparameter, and optima by scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from mup_tpu.analysis.drift import bends
from mup_tpu.analysis.optimum import LossCurve, Optimum, Status
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.plots import style
from mup_tpu.plots.style import INK, figure_type
from mup_tpu.words import names
from mup_tpu.words.names import bound
from mup_tpu.words.verdicts import status

_RAISED = 8  # points between a star and its interval, so that the star does not hide the interval
# Longest axis, over the range of the lower three quarters of its points: a longer one would squeeze them
_SQUEEZED = 3.0
_HOLLOW = {"mfc": "none"}
# Name of a mark -> its marker, text and look, in the order of the key
_KEY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fitted": ("*", "optimum, below its 95 % interval", {"ms": 10}),
    "missed": ("*", "optimum, fit off its runs", {"ms": 10, **_HOLLOW}),
    "edge": (">", "best of the grid, at its edge", {"ms": 8}),
    "first": ("", "the smallest's optimum", {"ls": ":", "lw": 0.9}),
    "diverged": ("x", "diverged", {"mew": 1.6, "ms": 5}),
    "stopped early": ("s", "stopped early", {"ms": 4, **_HOLLOW}),
    "refused": ("p", "refused by a condition", {"ms": 5, **_HOLLOW}),
    "above": ("^", "above the axis", {"ms": 4, **_HOLLOW}),
    "rail": ("", "off the axis, on this line", {"ls": "-", "lw": 0.5, "alpha": 0.6}),
}
_AT_RAIL = ("diverged", "stopped early", "refused", "above")  # marks at the top of the axis


def is_tuned(analysis: TransferAnalysis) -> bool:
    curves = [] if analysis.columns.scales_beside else [c for r in analysis.results for c in r.curves]
    return any(len(curve.x_G) > 1 for curve in curves)


def has_scales(analysis: TransferAnalysis) -> bool:
    scales = {o.scale for result in analysis.results for o in result.optima}
    is_one = not analysis.columns.scales_beside
    # A table of optima has no losses.
    return is_one and len(scales) > 1 and any(r.curves for r in analysis.results)


def is_tuned_at_scales(analysis: TransferAnalysis) -> bool:
    return is_tuned(analysis) and has_scales(analysis)


@dataclass(frozen=True)
class _LossRange:
    """Range of losses that a panel shows; runs outside of it lie on a line above, the rail."""

    bottom: float
    top: float

    @classmethod
    def of(cls, result: TransferResult) -> _LossRange:
        """Return the range of one panel.

        Losses at high learning rates, or one far run, would flatten the valley. The range ends at most 0.6
        nat above the best and 0.35 above the worst scale's best, or a fifth and an eighth of the loss itself
        where that is more, and leaves at least a third of itself to the lower three quarters of all points.
        """
        finite = [c.mean_G[np.isfinite(c.mean_G)] for c in result.curves if np.isfinite(c.mean_G).any()]
        if not finite:
            return cls(0.0, 1.0)
        optima = [o.loss for o in result.optima if np.isfinite(o.loss)]
        losses = np.concatenate(finite)
        best, worst = min(f.min() for f in finite), max(f.min() for f in finite)
        bottom = float(min([losses.min(), *optima]))
        wanted = max(best + max(0.6, 0.2 * abs(best)), worst + max(0.35, 0.12 * abs(worst)))
        squeezed = bottom + _SQUEEZED * (np.quantile(losses, 0.75) - bottom)
        top = float(max(min(losses.max(), wanted, squeezed), *optima, worst))
        return cls(bottom, max(top, bottom + (1e-9 * abs(top) or 0.05)))

    @property
    def rail(self) -> float:
        return self.top + 0.06 * (self.top - self.bottom)

    @property
    def limits(self) -> tuple[float, float]:
        return self.bottom - 0.08 * (self.top - self.bottom), self.rail + 0.05 * (self.top - self.bottom)


@figure_type(
    "Loss and optima",
    "Loss against the hyperparameter, a line a scale; stars are optima, below their intervals",
    is_tuned,
)
def transfer_figure(
    analysis: TransferAnalysis, *, runs: pd.DataFrame | None = None, is_judged: bool = True
) -> Figure:
    """Draw loss against log2 of the hyperparameter: a line per scale, a panel per rule, optima marked.

    Tooltips in reports list the table's `runs`. Titles have the verdicts, unless several sizes grow at once.
    """
    results = names.results_of(analysis)
    ranges = [_LossRange.of(result) for result in results]
    bottom, top = min(r.bottom for r in ranges), max(r.top for r in ranges)
    # Panels share one range, unless one of them would use less than a third of it.
    share_y = top == bottom or all(r.top - r.bottom > (top - bottom) / 3 for r in ranges)
    if share_y:
        ranges = [_LossRange(bottom, top)] * len(ranges)
    axes = style.panels(len(results), 4.6, 4.0, True, share_y)
    used = set[str]()
    for panel, result, shown in zip(axes, results, ranges, strict=True):
        of_result = None if runs is None else runs[runs["compared"] == result.compared]
        used |= _draw_valleys(panel, result, shown, analysis, of_result)
        rule = names.rule_name(result.compared, analysis.compares)
        texts = (f"{rule}: {result.verdict.decision}", names.alpha(result)) if is_judged else (rule,)
        panel.set_title(style.raised(", ".join(filter(None, texts))))
        panel.set_xlabel(style.title(analysis.hyperparameter))
        panel.set_ylim(*shown.limits)
        panel.yaxis.set_major_formatter(style.PlainTicks())
        style.log2_axis(panel)
    style.label_rows(axes, style.in_unit("loss", analysis.columns), each=not share_y)
    marks = [style.mark(marker, text, **look) for kind, (marker, text, look) in _KEY.items() if kind in used]
    lines = {line.get_label(): line for panel in axes for line in panel.lines}
    labels = (style.at(analysis.scale, scale) for scale in names.scales_of(results))
    return style.with_key(axes, [*(lines[label] for label in labels if label in lines), *marks])


def _draw_valleys(
    ax: Axes,
    result: TransferResult,
    losses: _LossRange,
    analysis: TransferAnalysis,
    runs: pd.DataFrame | None,
) -> set[str]:
    """Draw each scale's curve and optimum in a panel; return the entries of `_KEY` that they need."""
    used, scales = set[str](), names.scales_of(analysis.results)
    for curve, optimum in zip(result.curves, result.optima, strict=True):
        color, entry = style.sequential(scales, curve.scale), style.at(analysis.scale, curve.scale)
        head = f"{names.point(analysis.scale, curve.scale)}, {columns.label(analysis.hyperparameter)}"
        # Marks of several scales on the rail would cover each other.
        offset = (scales.index(curve.scale) - (len(scales) - 1) / 2) * min(0.06, 0.4 / len(scales))

        error_G, tooltips = result.noise.errors_G(curve), []
        of_scale = None if runs is None else runs[runs["scale"] == curve.scale]
        for x, mean, error in zip(curve.x_G, curve.mean_G, error_G, strict=True):
            of_point = of_scale if of_scale is None else of_scale[np.isclose(of_scale["x"], x)]
            lost = "no loss: half of its runs were lost"
            loss = style.loss_text(mean, error) if np.isfinite(mean) else lost
            tooltips.append("\n".join([f"{head} {bound(x)}", loss, *style.run_lines(of_point)]))
        tooltips_G = np.array(tooltips, object)
        shown_G = np.isfinite(curve.mean_G) & (curve.mean_G <= losses.top)
        x_G, mean_G, twice_G = curve.x_G[shown_G], curve.mean_G[shown_G], 2 * error_G[shown_G]
        (line,) = ax.plot(x_G, mean_G, "o-", color=color, ms=3.5, lw=1.4, label=entry)
        style.describe(line, tooltips_G[shown_G].tolist())
        ax.fill_between(x_G, mean_G - twice_G, mean_G + twice_G, color=color, alpha=0.18, lw=0)

        lost_G = curve.diverged_G + curve.stopped_G > 0
        fates = np.array([curve.fate([i]) if lost else "" for i, lost in enumerate(lost_G)])
        above_G = np.isfinite(curve.mean_G) & (curve.mean_G > losses.top) & ~lost_G
        for kind in _AT_RAIL if curve.refused_G.any() else [k for k in _AT_RAIL if k != "refused"]:
            here_G = above_G if kind == "above" else fates == kind
            marker, _, look = _KEY[kind]
            at_rail, look = np.full(here_G.sum(), losses.rail), {"mfc": "none", **look, "color": color}
            (marks,) = ax.plot(curve.x_G[here_G] + offset, at_rail, marker, **look)
            style.describe(marks, tooltips_G[here_G].tolist())
            used |= {kind} if here_G.any() else set()

        used |= _draw_optimum(ax, curve, optimum, color, f"{head} at its best")
    if (first := names.smallest_known(result)) is not None:
        ax.axvline(first.x, color=INK, lw=0.9, ls=":", zorder=0)
        used.add("first")
    if used & {*_AT_RAIL}:
        ax.axhline(losses.rail, color=INK, lw=0.5, alpha=0.4)
        used.add("rail")
    return used


def _draw_optimum(
    ax: Axes, curve: LossCurve, optimum: Optimum, color: tuple[float, ...], head: str
) -> set[str]:
    """Draw a star below its interval, or an arrow where the best is at an edge."""
    if not optimum.is_bracketed and not np.isfinite(optimum.loss):
        return set()
    drawn: list[Line2D] = []
    if optimum.is_bracketed:
        low, high = max(optimum.low, curve.x_G[0]), min(optimum.high, curve.x_G[-1])
        # A bound at the end of the grid has no mark.
        ends = [x for x in (optimum.low, optimum.high) if low <= x <= high]
        above = ax.transData + ScaledTranslation(0, _RAISED / 72, style.figure_of([ax]).dpi_scale_trans)
        for x, marks in (([low, high], "-"), (ends, "|")):
            y = [optimum.loss] * len(x)
            drawn += ax.plot(x, y, marks, color=color, lw=1.6, ms=6, mew=1.4, transform=above)
        inside, rim = (color, "white") if optimum.is_fitted else ("white", color)
        drawn += ax.plot(optimum.x, optimum.loss, "*", ms=12, mfc=inside, mec=rim, mew=0.9, zorder=5)
        text = f"{bound(optimum.x)} (95 %: {bound(optimum.low)} to {bound(optimum.high)})"
    else:
        arrow = "<" if optimum.status == Status.LOWER else ">"
        look: dict[str, Any] = {"color": color, "ms": 10, "mec": "white", "mew": 0.7, "zorder": 5}
        drawn += ax.plot(optimum.best_x, optimum.loss, arrow, **look)
        text = status(optimum)
    style.describe(drawn[-1], [f"{head}: {text}\n{style.loss_text(optimum.loss)}"])
    return {"edge"} if not optimum.is_bracketed else {"fitted"} if optimum.is_fitted else {"missed"}


@figure_type(
    "Drift of the optimum",
    "Optimum against scale, with the fitted drift; the shade is drift that does not matter",
    is_tuned_at_scales,
)
def optimum_figure(analysis: TransferAnalysis) -> Figure:
    """Draw the optimum against scale, both logarithmic, with the fitted drift.

    The shade of each rule is drift that does not matter, from its line's start; optima at the edge of their
    grid are arrows.
    """
    results = names.results_of(analysis)
    (panel,) = style.panels(1, 5.2, 3.8)
    handles: list[Artist] = []
    for i, result in enumerate(results):
        color, marker, drift = style.categorical(i), style.marker(i), result.drift
        dashes = ""
        if drift.is_told:
            dashes = "--" if bends(result.optima) else "-"
            ends = np.array([min(drift.scales), max(drift.scales)])
            line = drift.intercept + drift.alpha * np.log2(ends)
            panel.plot(ends, line, dashes, color=color, lw=1.3)
            reach = analysis.delta * np.log2(ends / ends[0])
            panel.fill_between(ends, line[0] - reach, line[0] + reach, color=color, alpha=0.12, lw=0)
        shift = 2 ** (0.03 * (i - (len(results) - 1) / 2))
        style.draw_optima(panel, result.optima, shift, fmt=marker, color=color, ms=6)
        bent = "bends: no power law" if dashes == "--" else ""
        text = (style.label(result.compared, analysis.compares), names.alpha(result), bent)
        handles.append(style.mark(marker, ", ".join(filter(None, text)), color=color, ls=dashes))
    style.scale_axis(panel, analysis.scale, names.scales_of(results), 5.2)
    panel.set_ylabel(f"best {style.title(analysis.hyperparameter)}")
    low, high = panel.get_ylim()
    room = max(0.0, 1 - (high - low)) / 2  # on an axis below an octave, noise looks like a drift
    panel.set_ylim(low - room, high + room, auto=None)
    panel.yaxis.set_major_formatter(lambda x, _: style.power(x))
    if any(result.drift.is_told for result in results):
        handles.append(style.shade(f"slopes that do not matter, |α| < {analysis.delta:g}"))
    if any(not o.is_bracketed and np.isfinite(o.best_x) for r in results for o in r.optima):
        handles.append(style.mark("^", "best of the grid, at its edge", mfc="none", ms=8))
    return style.with_key([panel], handles)
