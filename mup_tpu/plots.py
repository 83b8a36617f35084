"""Figures from analysis results: one style, every function returns a Figure, the same input gives the same
bytes.

Scales are sequential colours (viridis), parametrizations are panels that share axes, and hyperparameters lie
on a log2 axis. Colours are safe for colour-blind readers, and nothing depends on colour alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from mup_tpu import columns
from mup_tpu.analysis.coord_check import by_setting, scale_of, slopes
from mup_tpu.analysis.looks import LookTaken
from mup_tpu.analysis.scaling_law import ScalingLaw
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult

P = ParamSpec("P")

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "mup_tpu",
    "svg.fonttype": "path",
}
_LABELS = {
    "mup": "μP",
    "sp": "SP",
    "sp_embedding": "SP, embeddings × m",
    "completep": "CompleteP",
    "completep_half": "CompleteP, α = ½",
    "completep_zero": "CompleteP, α = 0",
    "completedp": "Complete(d)P",
    "all": "all runs",
}
_INK = "#333333"
_MARKERS = "osD^v"


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under this module's style."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def label(parametrization: str) -> str:
    """What people call a parametrization."""
    return _LABELS.get(parametrization) or _plain(parametrization)


def _plain(name: str) -> str:
    """A name of a table as text: matplotlib takes what is between two $ for a formula."""
    return name.replace("$", r"\$")


def _title(name: str) -> str:
    return _plain(columns.title(name))


def _label(name: str) -> str:
    return _plain(columns.label(name))


def transfer_figures(analysis: TransferAnalysis) -> dict[str, Figure]:
    """Every figure that an analysis has the data for, by name."""
    figures = {"best_loss": best_loss_figure(analysis)}
    if any(len(curve.x_G) > 1 for result in analysis.results for curve in result.curves):
        figures = {
            "transfer": transfer_figure(analysis),
            "optimum": optimum_figure(analysis),
            "regret": regret_figure(analysis),
            **figures,
            "collapse": collapse_figure(analysis),
        }
    if any(result.learning_curves for result in analysis.results):
        figures["learning_curves"] = learning_curves_figure(analysis)
    if any(_known_looks(result) for result in analysis.results):
        figures["sequence"] = sequence_figure(analysis)
    return figures


def _known_looks(result: TransferResult) -> list[tuple[LookTaken, float]]:
    """The looks of a sequence at which α was known, each with what had been spent."""
    if result.sequence is None:
        return []
    looks = zip(result.sequence.looks, result.sequence.spent, strict=True)
    return [(look, spent) for look, spent in looks if look.number and look.evidence.drift.is_known]


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.png and name.svg, the same bytes for the same figure."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context(STYLE):
        figure.savefig(paths[0], dpi=150, metadata={"Software": None})
        # The second file has the first one's layout: working it out takes half the time.
        figure.set_layout_engine("none")
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


@_styled
def transfer_figure(analysis: TransferAnalysis) -> Figure:
    """Loss against log2 of the hyperparameter: a line a scale, a panel a parametrization, optima marked."""
    results = analysis.results
    figure, axes = _panels(len(results), width=4.6, height=4.3)
    tops = [_visible_top(result) for result in results]
    bottom = min(c.mean_G.min() for r in results for c in r.curves)
    bottom = min(bottom, *(z.loss for r in results for z in r.at_zero), bottom)
    top = max(*tops, bottom + 0.05)
    rail = top + 0.06 * (top - bottom)
    scales = sorted({c.scale for r in results for c in r.curves})
    for ax, result in zip(axes, results, strict=True):
        _draw_curves(ax, result, scales, top, rail, analysis.scale)
        ax.set_title(
            f"{label(result.parametrization)}: {result.verdict.decision}{_alpha(result)}", fontsize=10.5
        )
        ax.set_xlabel(_title(analysis.hyperparameter))
        ax.set_ylim(bottom - 0.08 * (top - bottom), rail + 0.05 * (top - bottom))
        _log2_axis(ax, _zero_x(result) if result.at_zero else None)
    axes[0].set_ylabel("loss (nat per token)")
    _legend_below(figure, axes[0])
    return figure


def _draw_curves(
    ax: Axes, result: TransferResult, scales: Sequence[float], top: float, rail: float, scale_name: str
) -> None:
    zero_x = _zero_x(result)
    for curve, optimum in zip(result.curves, result.optima, strict=True):
        color = _sequential(scales, curve.scale)
        shown = np.isfinite(curve.mean_G) & (curve.mean_G <= top)
        error_G = result.noise.errors_G(curve)
        ax.plot(
            curve.x_G[shown],
            curve.mean_G[shown],
            "o-",
            color=color,
            ms=3.5,
            lw=1.4,
            label=_at(scale_name, curve.scale),
        )
        low_G, high_G = curve.mean_G - 2 * error_G, curve.mean_G + 2 * error_G
        ax.fill_between(curve.x_G[shown], low_G[shown], high_G[shown], color=color, alpha=0.18, lw=0)
        above = (np.isfinite(curve.mean_G) & (curve.mean_G > top)) & (curve.diverged_G + curve.stopped_G == 0)
        offset = (scales.index(curve.scale) - (len(scales) - 1) / 2) * 0.06
        stopped = (curve.stopped_G > 0) & (curve.diverged_G == 0)
        for lost, marker in ((curve.diverged_G > 0, "x"), (stopped, "s"), (above, "^")):
            size, edge = (5, 1.6) if marker == "x" else (4, 1.0)
            ax.plot(
                curve.x_G[lost] + offset, np.full(lost.sum(), rail), marker, color=color, ms=size, mew=edge,
                mfc="none",
            )  # fmt: skip
        zero = next((z for z in result.at_zero if z.scale == curve.scale), None)
        if zero is not None:
            is_shown = zero.loss <= top
            ax.plot(
                zero_x + offset, zero.loss if is_shown else rail, "D" if is_shown else "^", color=color, ms=5,
                mfc="none", mew=1.3,
            )  # fmt: skip
        if optimum.is_bracketed:
            low, high = max(optimum.low, curve.x_G[0]), min(optimum.high, curve.x_G[-1])
            ax.plot(
                [low, high], [optimum.loss] * 2, "-", color=color, lw=3.2, alpha=0.55, solid_capstyle="butt"
            )
            inside, rim = (color, "white") if optimum.is_fitted else ("white", color)
            ax.plot(optimum.x, optimum.loss, "*", ms=12, mfc=inside, mec=rim, mew=0.9, zorder=5)
        elif np.isfinite(optimum.loss):
            arrow = "<" if optimum.status == "at lower edge" else ">"
            ax.plot(optimum.best_x, optimum.loss, arrow, color=color, ms=10, mec="white", mew=0.7, zorder=5)
    first = next((o for o in result.optima if o.is_bracketed), None)
    if first is not None:
        ax.axvline(first.x, color=_INK, lw=0.9, ls=":", zorder=0)
    ax.axhline(rail, color=_INK, lw=0.5, alpha=0.4)
    legend = "× diverged   △ above the axis"
    if not all(optimum.is_fitted for optimum in result.optima):
        legend = f"☆ fit off its runs   {legend}"
    if result.at_zero:
        legend = f"◇ at 0   {legend}"
        ax.axvline(zero_x + 0.5, color=_INK, lw=0.7, ls=(0, (4, 3)), alpha=0.6)
    if any(curve.stopped_G.any() for curve in result.curves):
        legend = f"□ stopped early   {legend}"
    ax.annotate(
        legend, (0.98, rail), xycoords=("axes fraction", "data"), fontsize=7.5,
        ha="right", va="bottom", color=_INK, xytext=(0, 2), textcoords="offset points",
    )  # fmt: skip


def _zero_x(result: TransferResult) -> float:
    """Where 0 is drawn: left of the smallest other value, by more than a step of the grid."""
    return min(c.x_G[0] for c in result.curves) - max(1.0, *(c.step for c in result.curves)) - 0.5


def _visible_top(result: TransferResult) -> float:
    """Loss up to which the valley is shown: high learning rates would flatten it."""
    best = min(c.mean_G.min() for c in result.curves)
    narrow = max(np.nanmin(np.where(np.isfinite(c.mean_G), c.mean_G, np.nan)) for c in result.curves)
    finite = np.concatenate([c.mean_G[np.isfinite(c.mean_G)] for c in result.curves])
    return float(min(finite.max(), max(best + 0.6, narrow + 0.35)))


@_styled
def optimum_figure(analysis: TransferAnalysis) -> Figure:
    """Optimum against scale, both logarithmic, with the fitted drift; unbracketed optima as arrows."""
    figure = Figure(figsize=(5.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for i, result in enumerate(analysis.results):
        color, marker = _categorical(i), _MARKERS[i % len(_MARKERS)]
        shift = 2 ** (0.03 * (i - (len(analysis.results) - 1) / 2))
        known = [o for o in result.optima if o.is_bracketed]
        if known:
            x = np.array([o.scale for o in known])
            y = np.array([o.x for o in known])
            errors = [[o.x - o.low for o in known], [o.high - o.x for o in known]]
            ax.errorbar(
                x * shift, y, yerr=np.clip(errors, 0, 1.5), fmt=marker, color=color, capsize=3, ms=6,
                label=f"{label(result.parametrization)}{_alpha(result)}",
            )  # fmt: skip
        if result.drift.is_known:
            line = np.array([min(result.drift.scales), max(result.drift.scales)])
            ax.plot(
                line,
                result.drift.intercept + result.drift.alpha * np.log2(line),
                "-",
                color=color,
                lw=1.3,
            )
        for o in result.optima:
            if not o.is_bracketed and np.isfinite(o.best_x):
                down = o.status == "at lower edge"
                ax.plot(o.scale * shift, o.best_x, "v" if down else "^", color=color, ms=9, mfc="none")
    _scale_axis(ax, analysis)
    ax.set_ylabel(f"best {_title(analysis.hyperparameter)}")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"$2^{{{v:g}}}$"))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=9)
    return figure


@_styled
def regret_figure(analysis: TransferAnalysis) -> Figure:
    """What each larger scale loses by taking a smaller one's optimum, nat per token, as a heat map."""
    figure, axes = _panels(len(analysis.results), width=3.8, height=3.6)
    largest = max(
        [r.value for result in analysis.results for r in result.regrets if np.isfinite(r.value)] or [0.01]
    )
    scales = sorted({o.scale for result in analysis.results for o in result.optima})
    for ax, result in zip(axes, analysis.results, strict=True):
        grid = np.full((len(scales), len(scales)), np.nan)
        for r in result.regrets:
            i, j = scales.index(r.source), scales.index(r.target)
            grid[i, j] = r.value
            words = {"outside the grid": "outside", "diverged": "∞", "stopped early": "stopped"}
            text = f"{r.value:.3f}" if np.isfinite(r.value) else words.get(r.status, "?")
            dark = np.isfinite(r.value) and r.value > 0.6 * largest
            ax.text(j, i, text, ha="center", va="center", fontsize=8.5, color="white" if dark else _INK)
        ax.imshow(grid, cmap="YlOrRd", vmin=0, vmax=max(largest, 0.01))
        ax.set_xticks(range(len(scales)), [columns.write_scale(analysis.scale, s) for s in scales])
        ax.set_yticks(range(len(scales)), [columns.write_scale(analysis.scale, s) for s in scales])
        ax.set_xlabel(f"trained at {_label(analysis.scale)}")
        ax.set_title(label(result.parametrization), fontsize=10.5)
        ax.grid(False)
    axes[0].set_ylabel(f"tuned at {_label(analysis.scale)}")
    figure.suptitle("regret (nat per token)", fontsize=10.5)
    return figure


@_styled
def best_loss_figure(analysis: TransferAnalysis) -> Figure:
    """Loss at each scale's own optimum and at the smallest one's, against scale and against compute.

    The panel against compute (6·N·D floating-point operations, Kaplan et al. 2020) is there where the table
    knows parameters and tokens; the fitted scaling law is drawn where it is identified.
    """
    with_compute = any(
        r.law.params and np.isfinite(r.law.params + r.law.tokens).all() for r in analysis.results
    )
    figure, axes = _panels(2 if with_compute else 1, width=4.9, height=4.0, share_x=False)
    for i, result in enumerate(analysis.results):
        _draw_best_losses(axes[0], result, analysis.scale, i)
        if with_compute:
            _draw_compute(axes[1], result, i)
    _scale_axis(axes[0], analysis)
    axes[0].set_ylabel("loss (nat per token)")
    if with_compute:
        axes[1].set_xscale("log")
        axes[1].xaxis.set_minor_formatter(NullFormatter())
        axes[1].set_xlabel("compute 6·N·D (FLOP; N without embeddings)")
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    return figure


def _draw_best_losses(ax: Axes, result: TransferResult, scale: str, index: int) -> None:
    color, marker = _categorical(index), _MARKERS[index % len(_MARKERS)]
    name = label(result.parametrization)
    best = {o.scale: o.loss for o in result.optima if np.isfinite(o.loss)}
    tuned = any(o.is_bracketed for o in result.optima)
    own = f"{name}, own optimum" if tuned else name
    ax.plot(list(best), list(best.values()), marker + "-", color=color, label=own)
    first = next((o.scale for o in result.optima if o.is_bracketed), None)
    moved = {
        r.target: best[r.target] + r.value
        for r in result.regrets
        if r.source == first and np.isfinite(r.value)
    }
    if moved and first is not None:
        ax.plot(
            list(moved), list(moved.values()), marker + "--", color=color, mfc="none",
            label=f"{name}, optimum of {_at(scale, first)}",
        )  # fmt: skip


def _draw_compute(ax: Axes, result: TransferResult, index: int) -> None:
    points, color = result.law, _categorical(index)
    name = label(result.parametrization)
    params, tokens = np.array(points.params), np.array(points.tokens)
    if not np.isfinite(params * tokens).all():
        return
    ax.plot(6 * params * tokens, points.losses, _MARKERS[index % len(_MARKERS)], color=color, label=name)
    if points.law is not None:
        sizes = np.geomspace(params.min(), 2 * params.max(), 64)
        losses = [points.law.loss(n) for n in sizes]
        fit = f"{name}: {points.law.irreducible:.2f} + A·N$^{{−{points.law.exponents[0]:.2f}}}$"
        ax.plot(6 * sizes * tokens[0], losses, "-", color=color, lw=1.1, label=fit)


@_styled
def scaling_law_figure(law: ScalingLaw, params: np.ndarray, losses: np.ndarray, held_out: int = 0) -> Figure:
    """A law in one variable with its interval, the points it was fitted to, and those it was not.

    Args:
        law: fitted without the held-out points.
        params: parameters of each point, ascending.
        losses: nat per token.
        held_out: how many of the last points the law has not seen.
    """
    figure, (ax,) = _panels(1, width=5.4, height=4.0)
    grid = np.geomspace(params[0], params[-1], 60)
    predictions = [law.predict(n) for n in grid]
    fit = f"{law.irreducible:.2f} + {law.coefficients[0]:.3g}·N$^{{−{law.exponents[0]:.2f}}}$"
    ax.plot(grid, [p.loss for p in predictions], "-", color=_categorical(0), label=fit)
    low, high = [p.low for p in predictions], [p.high for p in predictions]
    ax.fill_between(grid, low, high, color=_categorical(0), alpha=0.2, lw=0, label="95 % of new runs")
    seen = len(params) - held_out
    ax.plot(params[:seen], losses[:seen], "o", color=_INK, ms=5, label="fitted")
    if held_out:
        ax.plot(params[seen:], losses[seen:], "*", color=_categorical(1), ms=13, label="held out")
    ax.set_xscale("log")
    ax.set_xlabel("parameters without embeddings")
    ax.set_ylabel("loss (nat per token)")
    ax.legend(fontsize=9)
    return figure


@_styled
def collapse_figure(analysis: TransferAnalysis) -> Figure:
    """Loss above each scale's best, the curves moved by the exponent that brings them closest together."""
    figure, axes = _panels(len(analysis.results), width=4.6, height=4.0)
    scales = sorted({c.scale for r in analysis.results for c in r.curves})
    for ax, result in zip(axes, analysis.results, strict=True):
        beta = result.collapse_exponent if np.isfinite(result.collapse_exponent) else 0.0
        for curve in result.curves:
            shown = np.isfinite(curve.mean_G)
            moved_G = curve.x_G - beta * np.log2(curve.scale / scales[0])
            ax.plot(
                moved_G[shown], (curve.mean_G - curve.mean_G.min())[shown], "o-", ms=3.5, lw=1.3,
                color=_sequential(scales, curve.scale), label=_at(analysis.scale, curve.scale),
            )  # fmt: skip
        title = f"{label(result.parametrization)}: moved by {_label(analysis.scale)}$^{{{beta:.2f}}}$"
        ax.set_title(title.replace("-", "−"), fontsize=10.5)
        ax.set_ylim(-0.02, 0.8)
        ax.set_xlabel(f"{_title(analysis.hyperparameter)}, moved to {_at(analysis.scale, scales[0])}")
        _log2_axis(ax)
    axes[0].set_ylabel("loss above the best (nat per token)")
    _legend_below(figure, axes[0])
    return figure


@_styled
def learning_curves_figure(analysis: TransferAnalysis) -> Figure:
    """Training loss against step, at the grid point nearest to each scale's optimum."""
    results = [r for r in analysis.results if r.learning_curves]
    figure, axes = _panels(max(1, len(results)), width=4.6, height=4.0)
    scales = sorted({c.scale for r in results for c in r.learning_curves})
    for ax, result in zip(axes, results, strict=False):
        for curve in result.learning_curves:
            ax.plot(
                curve.steps, curve.losses, "-", lw=1.5, color=_sequential(scales, curve.scale),
                label=f"{_at(analysis.scale, curve.scale)} at $2^{{{curve.x:g}}}$",
            )  # fmt: skip
        ax.set_title(label(result.parametrization), fontsize=10.5)
        ax.set_xlabel("step")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.legend(fontsize=8.5)
    axes[0].set_ylabel("training loss (nat per token)")
    return figure


def coordinate_check_figures(table: pd.DataFrame) -> dict[str, Figure]:
    """A figure of each optimizer and tying that a coordinate check measured, by name."""
    return {name: coordinate_check_figure(part) for name, part in by_setting(table).items()}


@_styled
def sequence_figure(analysis: TransferAnalysis) -> Figure:
    """α with its interval against what was spent until each look of a sequence, a panel a parametrization."""
    shown = [result for result in analysis.results if _known_looks(result)]
    figure, axes = _panels(len(shown), width=4.6, height=3.6)
    for ax, result in zip(axes, shown, strict=True):
        assert result.sequence is not None
        delta = analysis.delta
        ax.axhspan(-delta, delta, color=_INK, alpha=0.08, lw=0, label=f"|α| < {delta:g}")
        ax.axhline(0, color=_INK, lw=0.8)
        for look, spent in _known_looks(result):
            drift, settled = look.evidence.drift, look.decision != "INCONCLUSIVE"
            reach = [[drift.alpha - drift.low], [drift.high - drift.alpha]]
            name = look.decision if settled else "INCONCLUSIVE, bought on"
            seen = ax.get_legend_handles_labels()[1]
            ax.errorbar(
                [spent], [drift.alpha], reach, fmt="s" if settled else "o", capsize=3, ms=5, lw=1.3,
                mfc=_categorical(0) if settled else "white", color=_categorical(0),
                label="_" if name in seen else name,
            )  # fmt: skip
            ax.annotate(
                str(look.number), (spent, drift.high), (0, 4), textcoords="offset points", ha="center",
                fontsize=8,
            )  # fmt: skip
        unit = result.sequence.costs.unit
        ax.set_xlabel(f"spent ({unit}); numbers count looks")
        ax.set_xlim(left=0)
        ax.margins(y=0.15)
        ax.set_title(f"{label(result.parametrization)}: {result.verdict.decision}", fontsize=10.5)
        ax.legend(loc="best", fontsize=8)
    axes[0].set_ylabel(f"α, exponent of {_label(analysis.scale)} (95 %)")
    return figure


@_styled
def coordinate_check_figure(table: pd.DataFrame) -> Figure:
    """Activation and update size of each layer against the scale, with each layer's slope in the legend.

    Along the depth also blocks' distance from linearization.
    """
    scale = scale_of(table)
    fitted = slopes(table).set_index(["parametrization", "quantity", "layer"])["slope"]
    parametrizations = sorted(table["parametrization"].unique(), reverse=True)
    last = table[table["step"] == table["step"].max()]
    layers, points = list(dict.fromkeys(table["layer"])), sorted(last[scale].unique())
    measured = [quantity for quantity in _CHECKED if (last["quantity"] == quantity).any()]
    figure = Figure(figsize=(4.9 * len(parametrizations), 3.7 * len(measured)), layout="constrained")
    FigureCanvasAgg(figure)
    shape = (len(measured), len(parametrizations))
    axes = np.atleast_2d(figure.subplots(*shape, sharex=True, sharey="row", squeeze=False))
    for row, quantity in zip(axes, measured, strict=True):
        title, size = _CHECKED[quantity]
        for ax, parametrization in zip(row, parametrizations, strict=True):
            chosen = last[(last["parametrization"] == parametrization) & (last["quantity"] == quantity)]
            for i, layer in enumerate(layers):
                line = chosen[chosen["layer"] == layer].groupby(scale)["rms"].mean()
                line = line[line > 0]
                if line.empty:
                    continue
                slope = fitted.get((parametrization, quantity, layer), np.nan)
                color = matplotlib.colormaps["cividis"](i / len(layers))
                style = {"color": color, "marker": "osD^v<>Ph"[i % 9], "ms": 4, "lw": 1.2}
                ax.plot(line.index, line, label=f"{layer}: {slope:+.2f}", **style)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            ax.set_xticks(points, [columns.write(scale, p) for p in points])
            ax.minorticks_off()
            ax.legend(fontsize=7, title="slope", title_fontsize=7.5, ncols=2)
            ax.set_title(f"{label(parametrization)}: {title}", fontsize=10.5)
        row[0].set_ylabel(f"{size} after {last['step'].max()} steps")
        if len(measured) > 2:  # room for the legend, and an octave at least
            low, high = row[0].get_ylim()
            row[0].set_ylim(low / 4, max(high, 2 * low))
    for ax in axes[-1]:
        ax.set_xlabel(_title(scale))
    return figure


_CHECKED = {
    "activation": ("activation size", "rms of activation"),
    "update": ("update size", "rms of update"),
    "linearization": ("distance from linearization", "relative distance"),
}
"""Quantity of a coordinate check -> title of its panel, what its axis shows."""


@_styled
def search_figure(trials: pd.DataFrame) -> Figure:
    """Loss of every trial of a search against each hyperparameter it varied; what was stopped is hollow.

    Args:
        trials: from `mup_tpu.analysis.search.ranking`.
    """
    varied = list(trials.columns[3:])
    finished = trials[trials["status"] == "finished"]
    stopped = trials[(trials["status"] == "stopped") & np.isfinite(trials["loss"])]
    across = min(3, len(varied))
    rows = -(-len(varied) // across)
    figure = Figure(figsize=(3.2 * across, 2.6 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, across, sharey=True, squeeze=False).flat
    for ax, name in zip(axes, varied, strict=False):
        spread = trials[name].max() / max(trials[name].min(), 1e-12)
        powers = columns.COLUMNS[name].as_power
        x = np.log2(trials[name]) if powers else trials[name]
        ax.scatter(
            x[stopped.index],
            stopped["loss"],
            s=22,
            facecolors="none",
            edgecolors=_categorical(1),
            marker="s",
        )
        ax.scatter(x[finished.index], finished["loss"], s=26, color=_categorical(0), marker="o")
        ax.scatter(x[finished.index[:1]], finished["loss"][:1], s=120, color=_INK, marker="*", zorder=3)
        if powers:
            _log2_axis(ax)
        elif trials[name].dtype.kind == "f" and trials[name].min() > 0 and spread > 5:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(_title(name))
    for ax in list(axes)[len(varied) :]:
        ax.remove()
    for ax in figure.axes[::across]:
        ax.set_ylabel("loss (nat per token)")
    marks: dict[str, dict[str, Any]] = {
        "best": {"marker": "*", "color": _INK, "s": 120},
        f"finished ({len(finished)})": {"marker": "o", "color": _categorical(0)},
        f"stopped early ({len(stopped)})": {
            "marker": "s",
            "facecolors": "none",
            "edgecolors": _categorical(1),
        },
    }
    handles = [figure.axes[0].scatter([], [], label=text, **style) for text, style in marks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


@_styled
def ablations_figure(table: pd.DataFrame) -> Figure:
    """Drift exponent and regret of several sweeps, with 95 % intervals, the worst regret on top.

    Args:
        table: from `mup_tpu.analysis.ablations.compare`.
    """
    figure = Figure(figsize=(8.2, 0.34 * len(table) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(table))[::-1]
    drifts = (table["verdict"] == "DRIFTS").to_numpy()
    for ax, (value, low, high), text in (
        (axes[0], ("alpha", "low", "high"), "drift exponent α (lr* ∝ width^α)"),
        (axes[1], ("regret", "regret_low", "regret_high"), "regret, smallest to largest width (nat)"),
    ):
        x, ends = table[value].to_numpy(float), table[[low, high]].to_numpy(float)
        errors = np.abs(ends - x[:, None]).T
        for chosen, color, marker, name in (
            (drifts, _categorical(1), "s", "DRIFTS"),
            (~drifts, _categorical(0), "o", "not shown to drift"),
        ):
            known = chosen & np.isfinite(x) & np.isfinite(errors).all(axis=0)
            ax.errorbar(
                x[known], rows[known], xerr=errors[:, known], fmt=marker, color=color, capsize=3, ms=6,
                label=name,
            )  # fmt: skip
        ax.axvline(0, color=_INK, lw=0.9, ls=":", zorder=0)
        ax.set_xlabel(text)
        for row in rows[~np.isfinite(x)]:
            ax.annotate("not known", (0.98, row), xycoords=("axes fraction", "data"), ha="right", va="center")
        for row in rows[np.isposinf(x)]:
            ax.annotate("∞", (0.98, row), xycoords=("axes fraction", "data"), ha="right", va="center")
    axes[0].set_yticks(rows, table["name"])
    axes[0].set_ylim(-0.7, len(table) - 0.3)
    _legend_below(figure, axes[0])
    return figure


def _panels(count: int, width: float, height: float, share_x: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, sharex=share_x, sharey=True, squeeze=False)[0])


def _legend_below(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    # A line of a key takes about six letters, and an inch of the figure's width about twelve in all.
    longest = max((len(text) for text in labels), default=0) + 6
    fits = max(1, int(12 * figure.get_figwidth() / longest))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, fits, max(1, len(labels))))


def _scale_axis(ax: Axes, analysis: TransferAnalysis) -> None:
    scales = sorted({o.scale for r in analysis.results for o in r.optima})
    ax.set_xscale("log", base=2)
    ax.set_xticks(scales, [columns.write_scale(analysis.scale, s) for s in scales])
    ax.minorticks_off()
    ax.set_xlabel(_title(analysis.scale))


def _at(scale: str, value: float) -> str:
    return f"{_label(scale)} {columns.write_scale(scale, value)}"


def _sequential(scales: Sequence[float], scale: float) -> tuple:
    position = list(scales).index(scale) / max(1, len(scales) - 1)
    return matplotlib.colormaps["viridis"](0.88 * (1 - position))


def _categorical(index: int) -> str:
    return ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")[index % 5]


def _alpha(result: TransferResult) -> str:
    drift = result.drift
    if not drift.is_known:
        return ""
    return f", α = {drift.alpha:.2f} [{drift.low:.2f}, {drift.high:.2f}]".replace("-", "−")


def _log2_axis(ax: Axes, zero_x: float | None = None) -> None:
    """Powers of 2; and 0 at its edge, where it is drawn."""

    def tick(v: float, _: object) -> str:
        is_power = zero_x is None or v > zero_x + 0.5
        return f"$2^{{{v:g}}}$" if is_power else ""

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.xaxis.set_major_formatter(FuncFormatter(tick))
    if zero_x is not None:
        ax.set_xticks([zero_x], ["0"], minor=True)
        ax.tick_params(axis="x", which="minor", length=3.5)
