"""Trials of a search from best to worst, and the hyperparameters that varied."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mup_tpu.config.columns import CONFIGURED

_PARTS = ("optimizer", "train", "model", "data")
"""Parts of a trial in the order of their columns."""


def varied(runs: pd.DataFrame) -> list[str]:
    """Columns of configured numbers that vary in a run table, without seeds."""
    columns = sorted(CONFIGURED.values(), key=lambda column: _PARTS.index(column.part))
    return [
        c.name
        for c in columns
        if c.type in (int, float) and c.field not in ("seed", "data_seed") and runs[c.name].nunique() > 1
    ]


def ranked(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of a search: finished ones by loss, then stopped ones by their steps, then the others."""
    order = runs["status"].map({"finished": 0, "stopped": 1, "diverged": 2}).fillna(3)
    ordered = runs.assign(order=order).sort_values(
        ["order", "steps_done", "loss"], ascending=[True, False, True], ignore_index=True
    )
    return ordered.drop(columns="order")


def of_status(trials: pd.DataFrame, status: str) -> pd.DataFrame:
    """Trials of a status; of finished and stopped ones, those that have a loss."""
    return trials[(trials["status"] == status) & ((status == "diverged") | np.isfinite(trials["loss"]))]


def ranking(runs: pd.DataFrame) -> pd.DataFrame:
    """Trials of a search in the order of `ranked`, with the columns that compare them.

    Args:
        runs: a run table.

    Returns:
        status, steps_done, loss (nat per token) and every configured number that varies, without seeds.
    """
    return ranked(runs)[["status", "steps_done", "loss", *varied(runs)]]
