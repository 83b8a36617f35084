"""What a search tried: which hyperparameters varied, and its trials from best to worst."""

from __future__ import annotations

import pandas as pd

from mup_tpu.config.columns import CONFIGURED

_PARTS = ("optimizer", "train", "model", "data")
"""What is searched first comes first."""


def varied(runs: pd.DataFrame) -> list[str]:
    """Columns of the configured numbers that vary in a run table, but for seeds."""
    columns = sorted(CONFIGURED.values(), key=lambda column: _PARTS.index(column.part))
    return [
        c.name
        for c in columns
        if c.type in (int, float) and c.field not in ("seed", "data_seed") and runs[c.name].nunique() > 1
    ]


def ranked(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of a search, finished ones by loss first, then stopped ones by how far they came."""
    order = runs["status"].map({"finished": 0, "stopped": 1, "diverged": 2}).fillna(3)
    ordered = runs.assign(order=order).sort_values(
        ["order", "steps_done", "loss"], ascending=[True, False, True], ignore_index=True
    )
    return ordered.drop(columns="order")


def ranking(runs: pd.DataFrame) -> pd.DataFrame:
    """The trials of a search in the order of `ranked`, and what they are to be compared by.

    Args:
        runs: a run table.

    Returns:
        status, steps_done, loss (nat per token) and every configured number that varies, but for seeds.
    """
    return ranked(runs)[["status", "steps_done", "loss", *varied(runs)]]
