"""Learning curves; each point names its runs."""

from __future__ import annotations

import pandas as pd

from mup_tpu.analysis.transfer import LearningCurve, TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.interactive.panel import Entry, Panel, Panels, named_ticks, room_for
from mup_tpu.plots.interactive.tooltips import about, loss_text, run_names
from mup_tpu.words.names import bound

_POINTS = 120
"""Most points of a curve that answer to the pointer, which cannot tell closer ones apart."""


def learning_curve_panels(analysis: TransferAnalysis, runs: pd.DataFrame) -> Panels:
    """Training loss against step, at the grid point nearest to each scale's optimum.

    Points name `runs` of the checked table that the analysis was made from.
    """
    results = [r for r in names.results_of(analysis) if r.learning_curves]
    scales = sorted({c.scale for r in results for c in r.learning_curves})
    losses = [loss for r in results for c in r.learning_curves for loss in c.losses]
    is_log = ticks.is_wide(losses)
    low, high = room_for(losses, is_log)
    panels = Panels()
    for scale in scales:
        panels.entry(names.point(analysis.scale, scale), style.sequential(scales, scale), dash="-")
    for result in results:
        panel = Panel(
            panels, names.name(result.compared, analysis.compares), "step", "training loss (nat per token)",
            (low, high), log_y=is_log,
        )  # fmt: skip
        if is_log:
            named_ticks(panel.figure.yaxis, {t: f"{t:g}" for t in ticks.log_ticks(low, high, least=5)})
        own = runs[runs["compared"] == result.compared]
        for curve in result.learning_curves:
            entry = panels.entries[names.point(analysis.scale, curve.scale)]
            here = own[(own["scale"] == curve.scale) & ((own["x"] - curve.x).abs() < 1e-6)]
            head = f"{entry.name}, {columns.label(analysis.hyperparameter)} {bound(curve.x)}"
            _draw_curve(panel, entry, curve, head, run_names(here))
        panel.done()
    return panels


def _draw_curve(panel: Panel, entry: Entry, curve: LearningCurve, head: str, runs: str) -> None:
    panel.line(entry, curve.steps, curve.losses)
    every = -(-len(curve.steps) // _POINTS)
    steps, means = curve.steps[::every], curve.losses[::every]
    texts = (
        about(head, f"step {step:g}: {loss_text(loss)}", runs)
        for step, loss in zip(steps, means, strict=True)
    )
    panel.tell(entry, steps, means, texts)
