"""Coordinate checks, whose layers can be hidden one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.coord_check import scale_of, slopes
from mup_tpu.config import columns
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.coord_check import CHECKED
from mup_tpu.plots.interactive.panel import MARKERS, Entry, Mark, Panel, Panels, named_ticks, power_ticks
from mup_tpu.plots.interactive.tooltips import about

_LINES = ("-", "--", ":")


def coordinate_check_panels(table: pd.DataFrame) -> Panels:
    """Activation and update size of each layer of a setting; one key hides a layer in all panels."""
    scale = scale_of(table)
    last = table[table["step"] == table["step"].max()]
    fitted = {(f["parametrization"], f["quantity"], f["layer"]): f for f in slopes(table).to_dict("records")}
    parametrizations = names.ordered(table["parametrization"].unique())
    panels = Panels(across=len(parametrizations))
    for i, layer in enumerate(dict.fromkeys(table["layer"])):
        mark, dash = Mark(MARKERS[i % len(MARKERS)]), _LINES[i // 8 % len(_LINES)]
        panels.entry(layer, style.categorical(i), mark, dash)
    for quantity in (q for q in CHECKED if (last["quantity"] == q).any()):
        title, size = CHECKED[quantity]
        measured = last[(last["quantity"] == quantity) & (last["rms"] > 0)]
        means = np.log2(measured.groupby(["parametrization", "layer", scale])["rms"].mean())
        low, high = ticks.an_octave(float(means.min()), float(means.max()))
        for parametrization in parametrizations:
            panel = Panel(
                panels, f"{names.name(parametrization)}: {title}", columns.title(scale),
                f"{size} after {last['step'].max()} steps", (low - 0.3, high + 0.3),
            )  # fmt: skip
            own = measured[measured["parametrization"] == parametrization]
            for layer, entry in panels.entries.items():
                key = (parametrization, quantity, layer)
                slope = _slope(fitted[key], scale) if key in fitted else ""
                _draw_layer(panel, entry, own[own["layer"] == layer], scale, slope)
            points = sorted(table[scale].unique())
            named_ticks(panel.figure.xaxis, {float(np.log2(p)): columns.write(scale, p) for p in points})
            power_ticks(panel.figure.yaxis, low - 0.3, high + 0.3)
            panel.done()
    return panels


def _slope(fit: dict[Any, Any], scale: str) -> str:
    if not np.isfinite(fit["slope"]):
        return ""
    interval = f" (95 %: {fit['low']:.2f} to {fit['high']:.2f})" if np.isfinite(fit["low"]) else ""
    return f"grows as {columns.label(scale)}^{fit['slope']:.2f}{interval}"


def _draw_layer(panel: Panel, entry: Entry, own: pd.DataFrame, scale: str, slope: str) -> None:
    """A line through the means over seeds."""
    points, heights, texts = [], [], []
    for point in sorted(own[scale].unique().tolist()):
        group = own[own[scale] == point]
        mean = float(group["rms"].mean())
        seeds = group.sort_values("seed")[["seed", "rms"]].itertuples(index=False)
        runs = [f"seed {seed:g}: {rms:.4g}" for seed, rms in seeds]
        points.append(float(np.log2(point)))
        heights.append(float(np.log2(mean)))
        texts.append(about(f"{entry.name}, {names.point(scale, point)}", f"rms {mean:.4g}", slope, *runs))
    if points:
        panel.line(entry, points, heights)
        panel.marks(entry, points, heights)
        panel.tell(entry, points, heights, texts)
