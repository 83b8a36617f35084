"""Rows of earlier versions: later columns are filled from the stored configuration."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from mup_tpu.config import PARTS
from mup_tpu.config.columns import COLUMNS, CONFIGURED, Column


def complete(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of an earlier version with later columns filled from their configuration.

    The first version stored the head size at the trial's width in `head_size`; now it is the configured one.

    Raises:
        ValueError: a stored configuration is none.
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
            default = getattr(PARTS[column.part](), column.field)
            values = [row.get(column.field, default) for row in flat]
            if wrong := [value for value in values if not _is_of(column, value)]:
                raise ValueError(f"config of a row has {column.field} {wrong[0]!r}")
            known = pd.Series(values, runs.index[old])
            runs[column.name] = runs[column.name].astype(object).where(~missing, known)
    return runs.astype({c.name: _PANDAS[c.type] for c in COLUMNS.values() if _is_whole(runs, c)})


_PANDAS = {int: "int64", float: "float64", bool: "bool", str: "str"}


def _is_whole(runs: pd.DataFrame, column: Column) -> bool:
    return column.name in runs and bool(runs[column.name].notna().all())


def _is_of(column: Column, value: Any) -> bool:
    """Whether a value is one of a column's type."""
    is_bool = isinstance(value, bool)
    return is_bool if column.type is bool else isinstance(value, _VALUES[column.type]) and not is_bool


_VALUES: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}


def _flat(config: str) -> dict[str, Any]:
    """The fields of a stored configuration by name."""
    parts = json.loads(config)
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError(f"config of a row is no table of parts: {config[:40]!r}")
    return {name: value for part in parts.values() for name, value in part.items()}
