"""Rows of earlier versions: newer columns are filled from the stored configuration."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from mup_tpu.config import PARTS
from mup_tpu.config.columns import COLUMNS, CONFIGURED, Column


def complete(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of an earlier version with newer columns filled from their configuration.

    The first version stored the head size at the trial's width in `head_size`; today that column holds the
    configured one.

    Raises:
        ValueError: a stored configuration cannot be read.
    """
    configured = [column for column in CONFIGURED.values() if column.name in runs]
    old = runs[[column.name for column in configured]].isna().any(axis=1) & runs["config"].notna()
    if not old.any():
        return runs
    runs = runs.copy()
    flat = [_flat(config) for config in runs.loc[old, "config"]]
    first = old & runs["actual_head_size"].isna()
    runs["actual_head_size"] = runs["actual_head_size"].where(~first, runs["head_size"])
    runs["head_size"] = runs["head_size"].where(~first)
    tokens = runs["steps_planned"] * runs["batch_size"] * runs["sequence_length"]
    runs["tokens_planned"] = runs["tokens_planned"].where(~old, tokens)
    for column in configured:
        missing = old & runs[column.name].isna()
        if missing.any():
            known = pd.Series(_values(column, flat), runs.index[old])
            runs[column.name] = runs[column.name].astype(object).where(~missing, known)
    whole = [c for c in COLUMNS.values() if c.name in runs and runs[c.name].notna().all()]
    return runs.astype({column.name: _PANDAS[column.type] for column in whole})


_PANDAS = {int: "int64", float: "float64", bool: "bool", str: "str"}


def _values(column: Column, flat: list[dict[str, Any]]) -> list[Any]:
    """Values of a column in stored configurations; its field's default where they are older."""
    default = getattr(PARTS[column.part](), column.field)
    values = [row.get(column.field, default) for row in flat]
    allowed = (int, float) if column.type is float else (column.type,)
    if wrong := [value for value in values if type(value) not in allowed]:
        raise ValueError(f"config of a row has {column.field} {wrong[0]!r}")
    return values


def _flat(config: str) -> dict[str, Any]:
    """Fields of a stored configuration by name."""
    parts = json.loads(config)
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError(f"config of a row is no table of parts: {config[:40]!r}")
    return {name: value for part in parts.values() for name, value in part.items()}
