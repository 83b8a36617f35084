"""Trials of a search against each hyperparameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mup_tpu.analysis.ranking import of_status
from mup_tpu.config import columns
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.style import INK, LOSS, styled


@styled
def search_figure(trials: pd.DataFrame) -> Figure:
    """Loss of every trial of a search against each hyperparameter it varied.

    Trials that were stopped early are hollow, at their last loss; diverged ones lie on a line above.

    Args:
        trials: from `mup_tpu.analysis.ranking.ranking`.
    """
    varied = list(trials.columns[3:])
    finished, stopped, diverged = (of_status(trials, s) for s in ("finished", "stopped", "diverged"))
    axes = style.panels(len(varied), 3.4, 2.7, share_x=False)
    losses = trials["loss"][finished.index.union(stopped.index)]
    low, high = losses.min(), losses.max()
    rail = high + 0.08 * ((high - low) or 1.0)
    whole: dict[str, Any] = {"color": style.categorical(0), "ms": 5}
    hollow: dict[str, Any] = {"mfc": "none", "mec": style.categorical(1), "ms": 4.5}
    lost: dict[str, Any] = {"color": style.categorical(1), "ms": 5}
    for ax, name in zip(axes, varied, strict=True):
        x = _places(ax, trials[name], name)
        ax.plot(x[stopped.index], stopped["loss"], "s", **hollow)
        ax.plot(x[finished.index], finished["loss"], "o", **whole)
        ax.plot(
            x[finished.index[:1]], finished["loss"][:1], "*", ms=13, color=INK, mec="white", mew=0.7, zorder=3
        )
        if len(diverged):
            ax.plot(x[diverged.index], np.full(len(diverged), rail), "x", **lost)
            ax.axhline(rail, color=INK, lw=0.5, alpha=0.4)
        ax.set_xlabel(names.title(name))
        ax.yaxis.set_major_formatter(ticks.PlainTicks())
    style.label_rows(axes, LOSS)
    marks = (
        (finished[:1], "*", "best", {"ms": 12}),
        (finished, "o", f"finished ({len(finished)})", whole),
        (stopped, "s", f"stopped early, loss at its last step ({len(stopped)})", hollow),
        (diverged, "x", f"diverged ({len(diverged)})", lost),
    )
    entries = [style.mark(marker, text, **look) for of, marker, text, look in marks if len(of)]
    return style.with_key(axes, entries)


def is_logarithmic(values: pd.Series, name: str) -> bool:
    """Whether an axis of trials is logarithmic: for powers, and for a range beyond a factor of 5."""
    if values.min() <= 0:
        return False
    return columns.COLUMNS[name].as_power or (values.dtype.kind == "f" and values.max() > 5 * values.min())


def _places(ax: Axes, values: pd.Series, name: str) -> pd.Series:
    """Places of trials on an axis; powers stand at their exponents."""
    if not is_logarithmic(values, name):
        return values
    if columns.COLUMNS[name].as_power:
        ticks.log2_axis(ax)
        logarithms: pd.Series = np.log2(values)
        return logarithms
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    return values
