"""Reports of searches."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mup_tpu.analysis.ranking import of_status, ranked, varied
from mup_tpu.config.columns import label, write
from mup_tpu.config.values import counted
from mup_tpu.report.page import Block, Box, Interactive, Page, Section, Text, Values, interactive
from mup_tpu.words.tables import how_made, trials_table


def search_page(name: str, runs: pd.DataFrame) -> Page:
    """Report of a search: best trial, all trials against each hyperparameter, and how they were made.

    Raises:
        TableError: Bokeh is not installed.
    """
    trials, searched = ranked(runs), varied(runs)
    finished, counts = of_status(trials, "finished"), counted(trials["status"].value_counts().items())
    figures: list[Block] = [Text("All trials have the same searched values.")]
    if searched and np.isfinite(trials.loc[trials["status"] != "diverged", "loss"]).any():
        title = "Loss of every trial against each hyperparameter"
        figures = [Interactive(title, interactive().search_panels(trials, searched))]
    return Page(
        f"{name}: a search of {len(trials)} trials",
        [_best(finished, searched, counts)],
        [
            Section("Figure", figures),
            Section(f"The best of {len(finished)} finished trials", [trials_table(runs)]),
            Section("How the runs were made", [Values(how_made(runs))]),
        ],
        "A trial stopped early has the loss of its last step; do not compare it with a finished one.",
    )


def _best(finished: pd.DataFrame, searched: list[str], counts: str) -> Box:
    if finished.empty:
        return Box("No trial has finished.", [counts])
    best = finished.iloc[0]
    values = ", ".join(f"{label(column)} {write(column, best[column])}" for column in searched)
    return Box(f"The best trial: loss {best['loss']:.4f} nat per token", [values, f"trials: {counts}"])
