"""What a search tried: which hyperparameters varied, and its trials from best to worst."""

from __future__ import annotations

import pandas as pd

SEARCHED = (
    "lr", "warmup_steps", "weight_decay", "init_std", "alpha_in", "alpha_out", "alpha_attn", "eps", "beta1",
    "beta2", "grad_clip", "steps_planned", "batch_size", "depth", "width",
)  # fmt: skip
"""Columns of the run table that a space may hold."""


def ranking(runs: pd.DataFrame) -> pd.DataFrame:
    """The trials of a search, finished ones by loss first, then stopped ones by how far they came.

    Args:
        runs: a run table.

    Returns:
        status, steps_done, loss (nat per token) and every column of `SEARCHED` that varies.
    """
    varied = [column for column in SEARCHED if runs[column].nunique() > 1]
    order = runs["status"].map({"finished": 0, "stopped": 1, "diverged": 2}).fillna(3)
    ranked = runs.assign(order=order).sort_values(
        ["order", "steps_done", "loss"], ascending=[True, False, True], ignore_index=True
    )
    return ranked[["status", "steps_done", "loss", *varied]]
