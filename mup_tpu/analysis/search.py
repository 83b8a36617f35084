"""What a search tried: which hyperparameters varied, and its trials from best to worst."""

from __future__ import annotations

import pandas as pd

from mup_tpu.columns import CONFIGURED

_PARTS = ("optimizer", "train", "model", "data")
"""What is searched first comes first."""


def ranking(runs: pd.DataFrame) -> pd.DataFrame:
    """The trials of a search, finished ones by loss first, then stopped ones by how far they came.

    Args:
        runs: a run table.

    Returns:
        status, steps_done, loss (nat per token) and every configured number that varies, but for seeds.
    """
    columns = sorted(CONFIGURED.values(), key=lambda column: _PARTS.index(column.part))
    varied = [
        c.name
        for c in columns
        if c.type in (int, float) and c.field not in ("seed", "data_seed") and runs[c.name].nunique() > 1
    ]
    order = runs["status"].map({"finished": 0, "stopped": 1, "diverged": 2}).fillna(3)
    ranked = runs.assign(order=order).sort_values(
        ["order", "steps_done", "loss"], ascending=[True, False, True], ignore_index=True
    )
    return ranked[["status", "steps_done", "loss", *varied]]
