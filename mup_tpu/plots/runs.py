"""Single runs: their learning curves, trials of a search, and layers of a coordinate check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mup_tpu.analysis.diagnosis import Exponent, by_setting, layer_exponents, scale_of
from mup_tpu.analysis.load import named_loss
from mup_tpu.analysis.run_table import of_status
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.plots import style
from mup_tpu.plots.style import INK, ShownFigure, figure_type
from mup_tpu.words import names
from mup_tpu.words.names import bound, heading

_POINTS = 120  # largest number of tooltips on a curve: a pointer cannot separate closer points
# Quantity of a coordinate check -> title of its panel, name of its axis
CHECKED = {
    "activation": ("activation size", "rms of activation"),
    "update": ("update size", "rms of update"),
    "linearization": ("distance from linearization", "relative distance"),
}
_WIDTH, _HEIGHT = 5.2, 3.4  # size of a panel of a coordinate check with its key, inches


@figure_type(
    "Learning curves",
    "Training loss by step, at the grid point nearest to each optimum",
    lambda analysis: any(result.learning_curves for result in analysis.results),
)
def learning_curves_figure(analysis: TransferAnalysis, *, runs: pd.DataFrame | None = None) -> Figure:
    """Draw training loss against step, at the grid point nearest to each scale's optimum.

    Tooltips in reports list the table's `runs`.
    """
    results = [r for r in names.results_of(analysis) if r.learning_curves]
    axes = style.panels(len(results), 4.6, 3.6)
    scales = sorted({c.scale for r in results for c in r.learning_curves})
    entries, lacks = [], ""
    for scale in scales:
        taken = [next((c.x for c in r.learning_curves if c.scale == scale), None) for r in results]
        lacks = "; –: no curve" if None in taken else lacks
        values = [style.power(x) if x is not None else "–" for x in taken]
        values = values[:1] if len(set(values)) == 1 else values
        text = f"{columns.write_scale(analysis.scale, scale)} at {', '.join(values)}"
        entries.append(style.mark("", text, color=style.sequential(scales, scale), lw=1.5))
    for panel, result in zip(axes, results, strict=True):
        for curve in result.learning_curves:
            color = style.sequential(scales, curve.scale)
            (line,) = panel.plot(curve.steps, curve.losses, "-", lw=1.5, color=color)
            of_curve = None
            if runs is not None:
                is_same = (runs["compared"] == result.compared) & (runs["scale"] == curve.scale)
                of_curve = runs[is_same & ((runs["x"] - curve.x).abs() < 1e-6)]
            tuned = f"{columns.label(analysis.hyperparameter)} {bound(curve.x)}"
            at = f"{names.point(analysis.scale, curve.scale)}, {tuned}"
            every, after = -(-len(curve.steps) // _POINTS), style.run_lines(of_curve)
            tooltips = [
                "" if i % every else "\n".join([at, f"step {step:g}: {style.loss_text(loss)}", *after])
                for i, (step, loss) in enumerate(zip(curve.steps, curve.losses, strict=True))
            ]
            style.describe(line, tooltips)
        panel.set_title(style.label(result.compared, analysis.compares))
        panel.set_xlabel("step")
    shown = [loss for result in results for curve in result.learning_curves for loss in curve.losses]
    style.loss_axis(axes[0], shown)
    style.label_rows(axes, style.in_unit("training loss", analysis.columns))
    rules = ", ".join(style.label(r.compared, analysis.compares) for r in results)
    compared = f" ({rules})" if len(results) > 1 else ""
    tuned = style.column_label(analysis.hyperparameter)
    title = f"{style.column_label(analysis.scale)} at its best {tuned}{compared}{lacks}"
    return style.with_key(axes, entries, title)


@figure_type("Trials", "Loss of every trial against each hyperparameter that was searched")
def search_figure(trials: pd.DataFrame, varied: Sequence[str]) -> Figure:
    """Draw the loss of every trial of a search against each hyperparameter that it varied.

    Trials, best first, that were stopped early are hollow, at their last loss; diverged ones lie on a line
    above.
    """
    finished, stopped, diverged = (of_status(trials, s) for s in ("finished", "stopped", "diverged"))
    axes = style.panels(len(varied), 3.4, 2.7, share_x=False)
    losses = trials["loss"][finished.index.union(stopped.index)]
    low, high = losses.min(), losses.max()
    rail = high + 0.08 * ((high - low) or 1.0)
    blue, orange = style.categorical(0), style.categorical(1)
    marks: list[tuple[pd.DataFrame, str, str, dict[str, Any]]] = [
        (finished[:1], "*", "best", {"ms": 13, "color": INK, "mec": "white", "mew": 0.7, "zorder": 3}),
        (finished, "o", f"finished ({len(finished)})", {"ms": 5, "color": blue}),
        (stopped, "s", f"stopped early, loss at its last step ({len(stopped)})",
         {"ms": 4.5, "mfc": "none", "color": orange}),
        (diverged, "x", f"diverged ({len(diverged)})", {"ms": 5, "color": orange}),
    ]  # fmt: skip
    marks = [mark for mark in marks if len(mark[0])]
    tooltips = {}
    for i, trial in trials.iterrows():
        name = f"trial {trial['trial_id']}" if isinstance(trial.get("trial_id"), str) else "trial"
        loss = style.loss_text(trial["loss"]) if np.isfinite(trial["loss"]) else "no loss"
        loss += f", seed {trial['seed']:g}" if "seed" in trial else ""
        values = (f"{columns.label(c)} {columns.write(c, trial[c])}" for c in varied)
        ended = f"{trial['status']} after {trial['steps_done']:g} steps"
        tooltips[i] = "\n".join([name, loss, ended, *values])
    for ax, name in zip(axes, varied, strict=True):
        x = _places(ax, trials[name], name)
        for some, marker, _, look in marks:
            heights = np.full(len(some), rail) if marker == "x" else some["loss"]
            (line,) = ax.plot(x[some.index], heights, marker, **look)
            style.describe(line, [tooltips[i] for i in some.index])
        if len(diverged):
            ax.axhline(rail, color=INK, lw=0.5, alpha=0.4)
        ax.set_xlabel(style.title(name))
        ax.yaxis.set_major_formatter(style.PlainTicks())
    style.label_rows(axes, heading(*named_loss(trials.get("versions", ()))))
    entries = [style.mark(marker, text, **look) for _, marker, text, look in marks]
    return style.with_key(axes, entries)


def _places(ax: Axes, values: pd.Series, name: str) -> pd.Series:
    # The axis is logarithmic for powers of 2, and where values differ by more than a factor of 5.
    is_power = columns.is_power(name)
    if values.min() <= 0 or not (is_power or (values.dtype.kind == "f" and values.max() > 5 * values.min())):
        return values
    if is_power:
        style.log2_axis(ax)
        logarithms: pd.Series = np.log2(values)
        return logarithms
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    return values


def coordinate_check_figures(table: pd.DataFrame) -> dict[str, Figure]:
    return {name: coordinate_check_figure(part) for name, part in by_setting(table).items()}


@figure_type("Sizes of layers", "Sizes against the scale, a line a layer with its exponent; none should rise")
def coordinate_check_figure(table: pd.DataFrame) -> Figure:
    """Draw activation and update size of each layer against the scale, with each layer's slope in the key.

    Along the depth also blocks' distance from linearization. μP is the first column and SP the second. Of
    many blocks the first, the middle and the last are drawn.
    """
    scale, fitted = scale_of(table), layer_exponents(table)
    parametrizations = names.ordered(table["parametrization"].unique())
    last = table[table["step"] == table["step"].max()]
    block_of = {layer: re.search(r"(?<![^ .])\d+(?![^ .])", layer) for layer in table["layer"].unique()}
    blocks = list(dict.fromkeys(match[0] for match in block_of.values() if match))
    left_out = {*blocks[1:-1]} - {blocks[len(blocks) // 2]} if len(blocks) > 3 else set()
    layers = [layer for layer, match in block_of.items() if not match or match[0] not in left_out]
    points = sorted(last[scale].unique())
    measured = [quantity for quantity in CHECKED if (last["quantity"] == quantity).any()]
    rows, across = len(measured), len(parametrizations)
    # A key has 20 entries a column; a panel of 2 inches stands beside it.
    columns_of_key = -(-len(layers) // 20)
    width = max(_WIDTH, 2 + columns_of_key * (0.065 * max(map(len, layers)) + 1))
    figure = ShownFigure(figsize=(width * across, _HEIGHT * rows), layout="constrained")
    grid = figure.subplots(rows, across, sharex=True, sharey="row", squeeze=False)
    for row, quantity in zip(grid, measured, strict=True):
        title, size = CHECKED[quantity]
        for ax, parametrization in zip(row, parametrizations, strict=True):
            chosen = last[(last["parametrization"] == parametrization) & (last["quantity"] == quantity)]
            fits = {key[2]: fit for key, fit in fitted.items() if key[:2] == (parametrization, quantity)}
            _draw_layers(ax, chosen, scale, layers, fits)
            ax.set_yscale("log", base=2)
            style.log_ticks(ax, points, [columns.write(scale, p) for p in points], _WIDTH)
            ax.set_title(f"{style.label(parametrization)}: {title}")
            key = {"ncols": columns_of_key, "loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
            ax.legend(fontsize=7.5, title="slope", **key)
            if ax in grid[:, 0]:
                ax.set_ylabel(f"{size} after {last['step'].max()} steps")
            else:
                ax.tick_params(labelleft=False)
        low, high = row[0].get_ylim()
        row[0].set_ylim(low, max(high, 2 * low))  # an octave at least
    for ax in grid[-1]:
        ax.set_xlabel(style.title(scale))
    return figure


def _draw_layers(
    ax: Axes, chosen: pd.DataFrame, scale: str, layers: Sequence[str], fits: dict[str, Exponent]
) -> None:
    """Draw each layer's mean over seeds as a line; colour, marker and dashes distinguish 72 layers."""
    for i, layer in enumerate(layers):
        of_layer = chosen[chosen["layer"] == layer]
        line = of_layer.groupby(scale)["rms"].mean()
        line = line[line > 0]
        if line.empty:
            continue
        fit = fits.get(layer)
        slope = f"{round(fit.value, 2) + 0.0:+.2f}" if fit else "–"  # never -0.00
        (drawn,) = ax.plot(
            line.index, line, label=f"{style.plain(layer)}: {slope}", color=style.categorical(i),
            marker=style.marker(i), ms=4, lw=1.2, ls=("-", "--", ":")[i // 8 % 3],
        )  # fmt: skip
        grows = ""
        if fit:
            interval = f"(95 %: {fit.low:.2f} to {fit.high:.2f})"
            grows = f"grows as {columns.label(scale)}^{fit.value:.2f} {interval}"
        tooltips = []
        for point, mean in zip(line.index.tolist(), line.tolist(), strict=True):
            seeds = of_layer[of_layer[scale] == point].sort_values("seed")[["seed", "rms"]]
            runs = [f"seed {seed:g}: {rms:.4g}" for seed, rms in seeds.itertuples(index=False)]
            lines = (f"{layer}, {names.point(scale, point)}", f"rms {mean:.4g}", grows, *runs)
            tooltips.append("\n".join(filter(None, lines)))
        style.describe(drawn, tooltips)
