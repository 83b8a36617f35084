"""Coordinate checks: sizes of activations and updates along a scale."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mup_tpu.analysis.coord_check import by_setting, scale_of, slopes
from mup_tpu.config import columns
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.style import styled

CHECKED = {
    "activation": ("activation size", "rms of activation"),
    "update": ("update size", "rms of update"),
    "linearization": ("distance from linearization", "relative distance"),
}
"""Quantity of a coordinate check -> title of its panel, name of its axis."""
_WIDTH, _HEIGHT = 5.2, 3.4
"""Size of a panel without its key, inches."""


def coordinate_check_figures(table: pd.DataFrame) -> dict[str, Figure]:
    """Figure of each measured optimizer and tying, by name."""
    return {name: coordinate_check_figure(part) for name, part in by_setting(table).items()}


@styled
def coordinate_check_figure(table: pd.DataFrame) -> Figure:
    """Activation and update size of each layer against the scale, with each layer's slope in the key.

    Along the depth also blocks' distance from linearization. μP is the first column and SP the second.
    """
    scale = scale_of(table)
    fitted = slopes(table).set_index(["parametrization", "quantity", "layer"])["slope"]
    parametrizations = names.ordered(table["parametrization"].unique())
    last = table[table["step"] == table["step"].max()]
    layers, points = list(dict.fromkeys(table["layer"])), sorted(last[scale].unique())
    measured = [quantity for quantity in CHECKED if (last["quantity"] == quantity).any()]
    figure = style.new_figure(_WIDTH * len(parametrizations), _HEIGHT * len(measured))
    shape = (len(measured), len(parametrizations))
    axes = figure.subplots(*shape, sharex=True, sharey="row", squeeze=False)
    for row, quantity in zip(axes, measured, strict=True):
        title, size = CHECKED[quantity]
        for ax, parametrization in zip(row, parametrizations, strict=True):
            chosen = last[(last["parametrization"] == parametrization) & (last["quantity"] == quantity)]
            slope_of = {layer: fitted.get((parametrization, quantity, layer), np.nan) for layer in layers}
            _draw_layers(ax, chosen, scale, slope_of)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log", base=2)
            written = [columns.write(scale, p) for p in points]
            ax.set_xticks(points, written, **ticks.turned(written, _WIDTH))
            ax.minorticks_off()
            ax.set_title(f"{names.label(parametrization)}: {title}")
        row[0].set_ylabel(f"{size} after {last['step'].max()} steps")
        low, high = row[0].get_ylim()
        row[0].set_ylim(low, max(high, 2 * low))  # an octave at least
    for ax in axes[-1]:
        ax.set_xlabel(names.title(scale))
    keys = [
        max(style.panel_key(ax, _WIDTH - 0.6, 0.55 if is_last else 0.15, "slope") for ax in row)
        for row, is_last in zip(axes, [*[False] * (len(axes) - 1), True], strict=True)
    ]
    figure.set_figheight(figure.get_figheight() + sum(keys))
    return figure


def _draw_layers(ax: Axes, chosen: pd.DataFrame, scale: str, slope_of: dict[str, float]) -> None:
    """Draw a line a layer; colour, marker and dashes together tell 72 apart."""
    for i, (layer, slope) in enumerate(slope_of.items()):
        line = chosen[chosen["layer"] == layer].groupby(scale)["rms"].mean()
        line = line[line > 0]
        if not line.empty:
            ax.plot(
                line.index, line, label=f"{names.plain(layer)}: {slope:+.2f}", color=style.categorical(i),
                marker=style.marker(i), ms=4, lw=1.2, ls=("-", "--", ":")[i // 8 % 3],
            )  # fmt: skip
