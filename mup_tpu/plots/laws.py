"""Laws over scales: best losses, and optima predicted at scales that were not run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mup_tpu.analysis.loss_law import COMPUTE, LargestRun, LossLaws
from mup_tpu.analysis.prediction import Predictions
from mup_tpu.analysis.result import PowerLaw, TransferResult
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.plots import style
from mup_tpu.plots.optima import has_scales
from mup_tpu.plots.style import INK, figure_type
from mup_tpu.words import names

_FAN = ((0.025, 0.975, 0.14), (0.25, 0.75, 0.22))  # lower and upper quantile of a shade, and its opacity
_COMPUTE = "compute 6·N·D (FLOP)"


@figure_type("Best losses", "Best loss against scale and size", has_scales)
def best_loss_figure(analysis: TransferAnalysis) -> Figure:
    """Draw the loss at each scale's own optimum and at the smallest one's, against scale and against size.

    Where the table knows parameters N, a second panel is against them, with the fitted scaling law A·N^-α if
    it is identified. If all runs have as many tokens D, its upper axis is compute (6·N·D floating-point
    operations, Kaplan et al. 2020); if only tokens grow, the panel is against compute.
    """
    results = names.results_of(analysis)
    known = [r for r in results if len(r.law.params) > 1 and np.isfinite(r.law.params + r.law.tokens).all()]
    axes = style.panels(2 if known else 1, 4.9, 3.8, share_x=False)
    handles: list[Artist] = []
    for i, result in enumerate(results):
        color, marker = style.categorical(i), style.marker(i)
        name = style.label(result.compared, analysis.compares)
        best = {o.scale: o.loss for o in result.optima if np.isfinite(o.loss)}
        text = f"{name}, own optimum" if any(o.is_bracketed for o in result.optima) else name
        handles += axes[0].plot(list(best), list(best.values()), marker + "-", color=color, label=text)
        first = names.smallest_known(result)
        regrets = [r for r in result.regrets if first is not None and r.source == first.scale]
        if first is not None and (moved := {r.target: r.value for r in regrets if np.isfinite(r.value)}):
            handles += axes[0].plot(
                list(moved), [best[scale] + cost for scale, cost in moved.items()], marker + "--",
                color=color, mfc="none", label=f"{name}, optimum of {style.at(analysis.scale, first.scale)}",
            )  # fmt: skip
    scales = sorted({o.scale for r in results for o in r.optima})
    style.scale_axis(axes[0], analysis.scale, scales, 4.9)
    losses = [value for line in axes[0].lines for value in np.asarray(line.get_ydata(), float)]
    style.loss_axis(axes[0], losses)
    axes[0].set_ylabel(style.in_unit("loss", analysis.columns))
    if known:
        handles += _draw_sizes(axes[1], known, analysis)
    return style.with_key(axes, handles)


def _draw_sizes(ax: Axes, known: Sequence[TransferResult], analysis: TransferAnalysis) -> list[Artist]:
    """Draw losses and laws against parameters, or against compute where parameters do not grow."""
    handles: list[Artist] = []
    results = names.results_of(analysis)
    grows = any(len(set(r.law.params)) > 1 for r in known)
    for result in known:
        i, points = results.index(result), result.law
        color, name = style.categorical(i), style.label(result.compared, analysis.compares)
        params = np.array(points.params)
        sizes = params if grows else 6 * params * np.array(points.tokens)
        ax.plot(sizes, points.losses, style.marker(i), color=color)
        if points.law is not None and grows:
            along = np.geomspace(params.min(), 2 * params.max(), 64)
            exponent = names.signed(-points.law.exponent)
            text = f"{name}: {points.law.irreducible:.2f} + A·N$^{{{exponent}}}$"
            losses = [points.law.loss(n) for n in along]
            handles += ax.plot(along, losses, ":", color=color, lw=1.3, label=text)
    ax.set_xscale("log")
    style.size_axis(ax.xaxis, is_compute=not grows)
    ax.set_xlabel("parameters without embeddings, N" if grows else f"{_COMPUTE[:-1]}; N without embeddings)")
    lengths = {t for r in known for t in r.law.tokens}
    if grows and len(lengths) == 1:
        flop = 6 * lengths.pop()
        functions = (partial(np.multiply, flop), partial(np.multiply, 1 / flop))
        upper = ax.secondary_xaxis("top", functions=functions)
        style.size_axis(upper.xaxis, is_compute=True)
        upper.tick_params(labelsize=8)
        upper.set_xlabel(_COMPUTE, fontsize=8)
    return handles


@figure_type("Law of the loss", "Loss against size or compute, with the law and the largest run, predicted")
def loss_law_figure(laws: LossLaws) -> Figure:
    """Draw the runs and law of each recipe, and the largest run with its prediction from the others.

    A law of parameters and tokens is drawn against compute at its best split; a second panel has that split.
    """
    both = laws.laws[0].is_of_both
    axes, handles = style.panels(2 if both else 1, 4.9, 3.8, share_y=False), list[Artist]()
    for i, one in enumerate(laws.laws):
        color, name = style.categorical(i), "" if len(laws.laws) == 1 else f"{style.plain(one.compared)}, "
        grid = np.geomspace(one.compute_P.min(), 2 * one.compute_P.max(), 40)
        expected = [one.frontier.predict(size) for size in grid]
        look: dict[str, Any] = {"color": color, "ms": 4, "alpha": 0.6, "label": f"{name}runs"}
        handles += axes[0].plot(one.compute_P, one.loss_P, style.marker(i), **look)
        handles += axes[0].plot(grid, [e.loss for e in expected], "-", color=color, label=f"{name}law")
        bounds = [e.low for e in expected], [e.high for e in expected]
        band = axes[0].fill_between(grid, *bounds, color=color, alpha=0.2, lw=0)
        band.set_label(f"{name}95 % of new runs")
        handles.append(band)
        if isinstance(largest := one.held_out, LargestRun):
            at = one.compute_of(np.array([largest.sizes]))[0]
            of = largest.expected
            ends = [[of.loss - of.low], [of.high - of.loss]]
            look = {"color": INK, "mfc": color, "ms": 7, "capsize": 3, "zorder": 4}
            axes[0].errorbar(at, of.loss, ends, fmt="D", **look)
            axes[0].plot(at, largest.loss, "*", color=color, mec=INK, ms=13, zorder=5)
        if both:
            best, low, high = np.transpose([one.law.best_size(size).params for size in grid])
            axes[1].plot(grid, best, "-", color=color)
            axes[1].fill_between(grid, low, high, color=color, alpha=0.2, lw=0)
            axes[1].plot(one.compute_P, one.size_PA[:, 0], style.marker(i), color=color, ms=3, alpha=0.4)
    for ax in axes:
        ax.set_xscale("log")
        style.size_axis(ax.xaxis, is_compute=both or laws.sizes[0] == COMPUTE)
        ax.set_xlabel(_COMPUTE if both else style.title(laws.sizes[0]))
    axes[0].set_ylabel(style.in_unit("loss", laws.table.columns))
    style.loss_axis(axes[0], np.concatenate([one.loss_P for one in laws.laws]))
    if both:
        axes[1].set_yscale("log")
        style.size_axis(axes[1].yaxis)
        axes[1].set_ylabel("best parameters N")
    if any(isinstance(one.held_out, LargestRun) for one in laws.laws):
        handles += [
            style.mark("D", "largest run, predicted from the others"),
            style.mark("*", "as it came out", ms=11),
        ]
    return style.with_key(axes, handles)


@figure_type("Predictions", "Optimum against scale, and its 50 and 95 % intervals out to the targets")
def prediction_figure(predictions: Predictions) -> Figure:
    """Draw optima, predictions, and the line with its intervals out to the targets; one panel per rule."""
    parts = predictions.analysis.parts
    each = [(result, part.hyperparameter) for part in parts for result in names.results_of(part)]
    shown = [(result, tuned) for result, tuned in each if (result.compared, tuned) in predictions.trends]
    axes = style.panels(len(shown), 4.6, 3.9, share_y=len(parts) == 1)
    color = style.categorical(0)
    for ax, (result, tuned) in zip(axes, shown, strict=True):
        name, optima, trend = result.compared, result.optima, predictions.trends[result.compared, tuned]
        targets = [p for p in predictions.predictions if (p.compared, p.hyperparameter) == (name, tuned)]
        last = max(trend.sizes[-1], *(p.scale for p in targets))
        along = np.geomspace(min(o.scale for o in optima), last, 120)
        fan = [trend.optimum(scale, measured=False) for scale in along]
        ax.plot(along, [optimum.mean for optimum in fan], color=color, lw=1.4)
        for low, high, opacity in _FAN:
            below, above = ([optimum.quantile(q) for optimum in fan] for q in (low, high))
            ax.fill_between(along, below, above, color=color, alpha=opacity, lw=0)
        style.draw_optima(ax, optima, fmt="o", color=INK, ms=4.5)
        for target in targets:
            low, high = target.interval
            ax.errorbar(
                target.scale, target.x, [[target.x - low], [high - target.x]], fmt="D", ms=6, capsize=4,
                color=color if target.bears else INK, mfc="white", mew=1.5,
            )  # fmt: skip
        ax.axvline(max(o.scale for o in optima), color=INK, lw=0.9, ls=":", zorder=0)
        ax.set_title(style.label(name, predictions.analysis.compares))
        scales = sorted({*(o.scale for o in optima), *(p.scale for p in targets)})
        style.scale_axis(ax, predictions.scale, scales, 4.6)
        ax.yaxis.set_major_formatter(lambda x, _: style.power(x))
        if len(parts) > 1:
            ax.set_ylabel(f"best {style.title(tuned)}")
    if len(parts) == 1:
        style.label_rows(axes, f"best {style.title(predictions.analysis.hyperparameter)}")
    entries: list[Artist] = [
        style.mark("o", "optimum, measured (95 %)", color=INK),
        style.mark("D", "predicted (95 %)", mfc="white", mew=1.5, color=color),
        Patch(color=color, alpha=0.4, lw=0, label="50 % of optima"),
        Patch(color=color, alpha=0.14, lw=0, label="95 %"),
    ]
    if not all(p.bears for p in predictions.predictions):
        entries.insert(2, style.mark("D", "extrapolated too far", mfc="white", mew=1.5, color=INK))
    return style.with_key(axes, entries)


@figure_type(
    "Law in several scales",
    "Contours of the optimum over two scales; circles are measured optima",
    lambda analysis: bool(analysis.columns.scales_beside),
)
def law_figure(shown: TransferAnalysis | Predictions) -> Figure:
    """Draw the optimum of each rule over its first two scales as contours, with the measured optima.

    Further scales are at their geometric means; measured optima are moved there along the law. A star with
    the predicted optimum marks each target of predictions.
    """
    analysis, predictions = (shown, None) if isinstance(shown, TransferAnalysis) else (shown.analysis, shown)
    at = [] if predictions is None else predictions.targets
    laws = [result.power_law for result in names.results_of(analysis) if result.power_law is not None]
    rules = [result.compared for result in names.results_of(analysis)]
    first, second = laws[0].scales[:2]
    targets_N2 = np.array([target.sizes[:2] for target in at]).reshape(-1, 2)
    planes = []  # for each law: two axes that hold all cells and targets, and the optimum (log2) over them
    for law in laws:
        sizes_N2 = np.vstack([law.sizes_SA[:, :2], np.log2(targets_N2)])
        low_A, high_A = sizes_N2.min(axis=0), sizes_N2.max(axis=0)
        margin_A = 0.06 * (high_A - low_A)
        sides = np.exp2(np.linspace(low_A - margin_A, high_A + margin_A, 40)).T
        across, up = np.meshgrid(*sides)
        x = law.optima(_at_means(law, np.column_stack([across.ravel(), up.ravel()])))
        planes.append((*sides, x.reshape(across.shape)))
    made = () if predictions is None else predictions.predictions
    x_LT = np.array([[one.x for one in made if one.compared == rule] for rule in rules])
    drawn = [*x_LT, *(x.ravel() for *_, x in planes), *(_measured(law)[1] for law in laws)]
    shown_N = np.concatenate(drawn)  # range of the colour bar
    colors = Normalize(math.floor(shown_N.min()), math.ceil(shown_N.max()))
    axes = style.panels(len(laws), 5.4, 4.4)
    for ax, rule, law, plane, x_T in zip(axes, rules, laws, planes, x_LT, strict=True):
        first_A, second_A, x = plane
        levels = np.arange(math.floor(x.min()), math.ceil(x.max()) + 0.5, 0.5)
        ax.contourf(first_A, second_A, x, levels, cmap="viridis", norm=colors)
        whole: dict[str, Any] = {"colors": "white", "linewidths": 0.9, "linestyles": "solid"}
        lines = ax.contour(first_A, second_A, x, levels[::2], **whole)
        ax.clabel(lines, fmt=style.power, fontsize=9)
        ax.set_xscale("log")
        ax.set_yscale("log")
        style.size_axis(ax.xaxis)
        style.size_axis(ax.yaxis)
        ax.grid(False)
        places_N2, optima_N = _measured(law)
        look: dict[str, Any] = {"cmap": "viridis", "norm": colors, "edgecolors": INK, "linewidths": 0.9}
        star = look | {"edgecolors": "white", "marker": "*", "s": 190}
        ax.scatter(targets_N2[:, 0], targets_N2[:, 1], c=x_T, zorder=3, **star)
        ax.scatter(places_N2[:, 0], places_N2[:, 1], c=optima_N, s=38, zorder=3, **look)
        for place, x in zip(targets_N2, x_T, strict=True):
            ax.annotate(
                style.power(round(x, 2)), tuple(place), (0, -14),
                textcoords="offset points", ha="center", fontsize=9, color=INK,
                bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
            )  # fmt: skip
        exponents = " · ".join(f"{style.plain(e.scale)}$^{{{names.signed(e.value)}}}$" for e in law.exponents)
        ax.set_title(f"{style.label(rule)}: ∝ {exponents}")
        ax.set_xlabel(style.title(first))
    style.label_rows(axes, style.title(second))
    bar = style.figure_of(axes).colorbar(ScalarMappable(colors, "viridis"), ax=axes, pad=0.02, aspect=25)
    bar.ax.yaxis.set_major_formatter(lambda x, _: style.power(x))
    bar.set_label(f"best {style.title(analysis.hyperparameter)}")
    several = ", mean of its cells" if len(laws[0].scales) > 2 else ""
    entries = [style.mark("o", f"measured optimum{several}", mfc="none")]
    entries += [style.mark("*", "predicted at a target", mfc="none", ms=11)] if at else []
    return style.with_key(axes, entries)


def _measured(law: PowerLaw) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes of the first two scales, N × 2, and means of the optima (log2) measured there, N.

    Optima are moved to the geometric means of all other scales.
    """
    sizes_SA, x_S = 2**law.sizes_SA, np.array([e.optimum.x for e in law.estimates])
    moved_S = x_S + law.optima(_at_means(law, sizes_SA[:, :2])) - law.optima(sizes_SA)
    places_N2, place_S = np.unique(sizes_SA[:, :2], axis=0, return_inverse=True)
    return places_N2, np.bincount(place_S.ravel(), moved_S) / np.bincount(place_S.ravel())


def _at_means(law: PowerLaw, sizes_N2: np.ndarray) -> np.ndarray:
    others = np.exp2(law.sizes_SA[:, 2:].mean(axis=0))
    return np.column_stack([sizes_N2, np.tile(others, (len(sizes_N2), 1))])
