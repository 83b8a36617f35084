"""Losses at the optima: against scale, against size, and by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mup_tpu.analysis.scaling_law import ScalingLaw
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.config import columns
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.style import INK, LOSS, styled


@styled
def best_loss_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Loss at each scale's own optimum and at the smallest one's, against scale and against size.

    The panel against parameters N is there where the table knows them, with the fitted scaling law A·N^-α
    where it is identified; where all runs have as many tokens D, its upper axis is compute (6·N·D
    floating-point operations, Kaplan et al. 2020). Where tokens alone grow, the panel is against compute. One
    `ax` alone has the panel against scale.
    """
    results = names.results_of(analysis)
    known = [r for r in results if len(r.law.params) > 1 and np.isfinite(r.law.params + r.law.tokens).all()]
    if isinstance(ax, Axes):
        known = []
    axes = style.panels(2 if known else 1, 4.9, 3.8, share_x=False, ax=ax)
    handles: list[Artist] = []
    for i, result in enumerate(results):
        handles += _draw_best_losses(axes[0], result, analysis, i)
    scales = sorted({o.scale for r in results for o in r.optima})
    ticks.scale_axis(axes[0], analysis.scale, scales, style.narrowed(4.9))
    losses = [value for line in axes[0].lines for value in np.asarray(line.get_ydata(), float)]
    ticks.loss_axis(axes[0], losses)
    axes[0].set_ylabel(LOSS)
    if known:
        handles += _draw_sizes(axes[1], known, analysis)
    return style.with_key(axes, handles, ax=ax)


def _draw_best_losses(
    ax: Axes, result: TransferResult, analysis: TransferAnalysis, index: int
) -> list[Artist]:
    color, marker = style.categorical(index), style.marker(index)
    name = names.label(result.compared, analysis.compares)
    best = {o.scale: o.loss for o in result.optima if np.isfinite(o.loss)}
    tuned = any(o.is_bracketed for o in result.optima)
    own = f"{name}, own optimum" if tuned else name
    handles: list[Artist] = [*ax.plot(list(best), list(best.values()), marker + "-", color=color, label=own)]
    first = names.smallest_known(result)
    moved = {
        r.target: best[r.target] + r.value
        for r in result.regrets
        if first is not None and r.source == first.scale and np.isfinite(r.value)
    }
    if moved and first is not None:
        handles += ax.plot(
            list(moved), list(moved.values()), marker + "--", color=color, mfc="none",
            label=f"{name}, optimum of {names.at(analysis.scale, first.scale)}",
        )  # fmt: skip
    return handles


def _draw_sizes(ax: Axes, known: Sequence[TransferResult], analysis: TransferAnalysis) -> list[Artist]:
    """Losses and laws against parameters, or against compute where parameters do not grow."""
    handles: list[Artist] = []
    results = names.results_of(analysis)
    grows = any(len(set(r.law.params)) > 1 for r in known)
    for result in known:
        i, points = results.index(result), result.law
        color, name = style.categorical(i), names.label(result.compared, analysis.compares)
        params, tokens = np.array(points.params), np.array(points.tokens)
        sizes = params if grows else 6 * params * tokens
        ax.plot(sizes, points.losses, style.marker(i), color=color)
        if points.law is not None and grows:
            along = np.geomspace(params.min(), 2 * params.max(), 64)
            law = f"{name}: {points.law.irreducible:.2f} + A·N$^{{{names.signed(-points.law.exponents[0])}}}$"
            losses = [points.law.loss(n) for n in along]
            handles += ax.plot(along, losses, ":", color=color, lw=1.3, label=law)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks.size_axis(ax.xaxis, low, high)
    lengths = {t for r in known for t in r.law.tokens}
    if not grows:
        ax.set_xlabel("compute 6·N·D (FLOP; N without embeddings)")
        return handles
    ax.set_xlabel("parameters without embeddings, N")
    if len(lengths) == 1:
        flop = 6 * lengths.pop()
        upper = ax.secondary_xaxis(
            "top", functions=(partial(np.multiply, flop), partial(np.multiply, 1 / flop))
        )
        ticks.size_axis(upper.xaxis, low * flop, high * flop)
        upper.tick_params(labelsize=8)
        upper.set_xlabel("compute 6·N·D (FLOP)", fontsize=8)
    return handles


@styled
def scaling_law_figure(
    law: ScalingLaw, params: np.ndarray, losses: np.ndarray, held_out: int = 0, *, ax: style.Given = None
) -> Figure:
    """A law in one variable with its interval, its fitted points and the held-out ones.

    Args:
        law: fitted without the held-out points.
        params: parameters of each point, ascending.
        losses: nat per token.
        held_out: number of last points that were not fitted.
        ax: axes to draw in; a new figure by default.
    """
    (panel,) = style.panels(1, 5.4, 3.8, ax=ax)
    grid = np.geomspace(params[0], params[-1], 60)
    predictions = [law.predict(n) for n in grid]
    fit = f"{law.irreducible:.2f} + {law.coefficients[0]:.3g}·N$^{{{names.signed(-law.exponents[0])}}}$"
    handles: list[Artist] = []
    handles += panel.plot(grid, [p.loss for p in predictions], "-", color=style.categorical(0), label=fit)
    low, high = [p.low for p in predictions], [p.high for p in predictions]
    band = panel.fill_between(
        grid, low, high, color=style.categorical(0), alpha=0.2, lw=0, label="95 % of new runs"
    )
    seen = len(params) - held_out
    handles += [band, *panel.plot(params[:seen], losses[:seen], "o", color=INK, ms=5, label="fitted")]
    if held_out:
        handles += panel.plot(
            params[seen:], losses[seen:], "*", color=style.categorical(1), ms=13, label="held out"
        )
    panel.set_xscale("log")
    ticks.size_axis(panel.xaxis, *panel.get_xlim())
    panel.set_xlabel("parameters without embeddings, N")
    panel.set_ylabel(LOSS)
    panel.yaxis.set_major_formatter(ticks.PlainTicks())
    return style.with_key([panel], handles, ax=ax)


@styled
def learning_curves_figure(analysis: TransferAnalysis, *, ax: style.Given = None) -> Figure:
    """Training loss against step, at the grid point nearest to each scale's optimum."""
    results = [r for r in names.results_of(analysis) if r.learning_curves]
    axes = style.panels(len(results), 4.6, 3.6, ax=ax)
    scales = sorted({c.scale for r in results for c in r.learning_curves})
    shown: list[float] = []
    for panel, result in zip(axes, results, strict=True):
        for curve in result.learning_curves:
            color = style.sequential(scales, curve.scale)
            panel.plot(curve.steps, curve.losses, "-", lw=1.5, color=color)
            shown += curve.losses
        panel.set_title(names.label(result.compared, analysis.compares))
        panel.set_xlabel("step")
    for panel in axes if ax is not None else axes[:1]:
        ticks.loss_axis(panel, shown)
    style.label_rows(axes, "training loss (nat per token)")
    return style.with_key(axes, *_curve_key(results, scales, analysis), ax=ax)


def _curve_key(
    results: Sequence[TransferResult], scales: Sequence[float], analysis: TransferAnalysis
) -> tuple[list[Line2D], str]:
    """An entry a scale, with the value of each panel's curve, and the key's title."""
    entries, lacks = [], ""
    for scale in scales:
        taken = [next((c.x for c in r.learning_curves if c.scale == scale), None) for r in results]
        lacks = "; –: no curve" if None in taken else lacks
        values = [names.power(x) if x is not None else "–" for x in taken]
        values = values[:1] if len(set(values)) == 1 else values
        text = f"{columns.write_scale(analysis.scale, scale)} at {', '.join(values)}"
        entries.append(style.mark("", text, color=style.sequential(scales, scale), lw=1.5))
    several = ", ".join(names.label(r.compared, analysis.compares) for r in results)
    compared = f" ({several})" if len(results) > 1 else ""
    tuned = names.column_label(analysis.hyperparameter)
    return entries, f"{names.column_label(analysis.scale)} at its best {tuned}{compared}{lacks}"
