"""Trials that a results folder holds, with their losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mup_tpu.config import Trial, field_column
from mup_tpu.config.toml import stored_trial
from mup_tpu.errors import StoreError, raised_as
from mup_tpu.store import load_runs


@dataclass(frozen=True)
class Found:
    """Trial of a search, and its loss (nat per token)."""

    trial: Trial
    loss: float


def finished_runs(results: str) -> pd.DataFrame:
    """Rows of finished trials in a results folder.

    Raises:
        StoreError: there are none.
    """
    runs = load_runs(results)
    finished = runs[runs["status"] == "finished"]
    if finished.empty:
        raise StoreError(f"results folder {results} holds no finished trial to transfer from")
    return finished


def best_trials(results: str, count: int = 1, rule: str | None = None) -> list[Found]:
    """Finished trials of least loss in a results folder, of one rule if the folder has any of it."""
    finished = finished_runs(results)
    own = finished[finished[field_column("parametrization")] == rule]
    best = (finished if own.empty else own).nsmallest(count, "loss")
    return [found_in(row, results) for row in best.to_dict("records")]


def found_in(row: Mapping[Any, Any], results: str) -> Found:
    """Trial of a row of a results folder."""
    said = f"results folder {results} has a row whose config is no JSON of a trial"
    with raised_as(StoreError, said, (TypeError, ValueError)):
        return Found(stored_trial(json.loads(row["config"])), float(row["loss"]))
