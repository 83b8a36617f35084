"""Trials of a search with tooltips; a clicked one stands out in every panel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from bokeh.models import CDSView, ColumnDataSource, IndexFilter

from mup_tpu.config import columns
from mup_tpu.plots import style, ticks
from mup_tpu.plots.interactive.panel import Mark, Panel, Panels, named_ticks, power_ticks, room_for
from mup_tpu.plots.interactive.tooltips import about, loss_text
from mup_tpu.plots.search import is_logarithmic

_KINDS = (
    ("finished", "finished", Mark("circle", 7), 0),
    ("stopped", "stopped early, loss at its last step", Mark("square", 7, hollow=True), 1),
    ("diverged", "diverged", Mark("x", 7), 1),
)
"""Status, its name in the key, mark, colour."""


def search_panels(trials: pd.DataFrame, varied: list[str]) -> Panels:
    """Loss of every trial of a search against each hyperparameter it varied, the best one marked.

    Args:
        trials: from `mup_tpu.analysis.ranking.ranked`.
        varied: columns of the hyperparameters.
    """
    has_loss = np.isfinite(trials["loss"])
    shown = trials[
        (has_loss & trials["status"].isin(["finished", "stopped"])) | (trials["status"] == "diverged")
    ]
    losses = shown["loss"][np.isfinite(shown["loss"]) & (shown["status"] != "diverged")]
    low, high = room_for(losses)
    rail = high + 0.02 * (high - low)
    heights = np.where(shown["status"] == "diverged", rail, shown["loss"])
    top = rail + 0.04 * (high - low) if (shown["status"] == "diverged").any() else high
    panels, texts = Panels(), [_about(trial, varied) for trial in shown.to_dict("records")]
    names = shown["status"].map({status: name for status, name, *_ in _KINDS})
    curves = [f"{n} ({(names == n).sum()})" for n in names]
    # One source for all panels, so that a trial clicked in one is chosen in all.
    places = {column: _place(shown[column], column) for column in varied}
    source = ColumnDataSource({**places, "y": heights, "curve": np.array(curves), "about": np.array(texts)})
    for column in varied:
        panel = Panel(panels, "", columns.title(column), style.LOSS, (low, top))
        for status, name, mark, color in _KINDS:
            chosen = np.flatnonzero(shown["status"] == status)
            if not len(chosen):
                continue
            entry = panels.entry(f"{name} ({len(chosen)})", style.categorical(color), mark)
            view = CDSView(filter=IndexFilter(indices=chosen.tolist()))
            panel.marks_of(source, entry, column, view, mark)
        best = np.flatnonzero(shown["status"] == "finished")[:1]
        if len(best):
            star = panels.entry("best", style.INK, Mark("star", 18))
            panel.marks(star, places[column][best], heights[best])
        if top > high:
            panel.level(rail)
        _ticks(panel, shown[column], column)
        panel.done(source, column)
    return panels


def _about(trial: dict[Any, Any], varied: list[str]) -> str:
    """Tooltip of a trial."""
    loss = loss_text(trial["loss"]) if np.isfinite(trial["loss"]) else "no loss"
    head = f"trial {trial['trial_id']}" if isinstance(trial.get("trial_id"), str) else "trial"
    seed = f", seed {trial['seed']:g}" if "seed" in trial else ""
    values = (f"{columns.label(c)} {columns.write(c, trial[c])}" for c in varied)
    return about(head, loss + seed, f"{trial['status']} after {trial['steps_done']:g} steps", *values)


def _place(values: pd.Series, column: str) -> np.ndarray:
    return np.log2(values.to_numpy(float)) if is_logarithmic(values, column) else values.to_numpy(float)


def _ticks(panel: Panel, values: pd.Series, column: str) -> None:
    if not is_logarithmic(values, column):
        return
    low, high = np.log2(values.min()), np.log2(values.max())
    if columns.COLUMNS[column].as_power:
        power_ticks(panel.figure.xaxis, low, high)
        return
    places = ticks.log_ticks(float(values.min()), float(values.max()), least=3)
    named_ticks(panel.figure.xaxis, {float(np.log2(t)): f"{t:g}" for t in places})
