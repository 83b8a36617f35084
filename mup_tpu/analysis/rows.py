"""Rows of a table: conditions on them, and the order of a search's trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import list_of, plain_name, short_name
from mup_tpu.config import on_one_line
from mup_tpu.config.columns import CONFIGURED
from mup_tpu.errors import TableError
from mup_tpu.store import Condition

DATA = ("dataset", "data_fingerprint")  # columns that change with a field of the data
# Columns of a results folder that have one value in all rows, except along the axes; `DATA` stands for the
# corpus
STORED_FIXED = (*(name for name in CONFIGURED if name not in ("seed", "data_seed", "corpus")), *DATA)


def select(table: pd.DataFrame, where: Sequence[Condition]) -> pd.DataFrame:
    """Select the rows that meet all conditions.

    Raises:
        TableError: a column is missing or holds no numbers to compare, or no row meets a condition.
    """
    for condition in where:
        chosen, column = meets(table, condition)
        if not chosen.any():
            values = ", ".join(sorted(set(table[column].dropna().astype(object).map(on_one_line)))[:6])
            wanted = f"{column} {condition.value}" if condition.relation == "=" else str(condition)
            raise TableError(f"where: no row has {wanted}; there are {values}")
        table = table[chosen]
    return table.reset_index(drop=True)


def meets(table: pd.DataFrame, condition: Condition) -> tuple[pd.Series, str]:
    """Return the rows that meet a condition as a mask, and its column."""
    column = condition.column
    if column not in table and len(alike := [c for c in map(str, table) if short_name(c) == column]) == 1:
        column = alike[0]
    if column not in table:
        raise TableError(f"where: {no_column(table, column)}")
    return _meets(table[column], condition), column


def selected_scales(scales: Iterable[float], column: str, where: Sequence[Condition]) -> tuple[float, ...]:
    """Scales that meet the conditions on their column."""
    left = pd.Series(list(scales), dtype=float)
    for condition in where:
        if condition.column == column:
            left = left[_meets(left, condition)]
    return tuple(left)


def _meets(values: pd.Series, condition: Condition) -> pd.Series:
    try:
        numbers, bound = values.astype(float), condition.bound()
    except (ValueError, TypeError, TableError):
        if condition.relation != "=":
            raise TableError(
                f"where {str(condition)!r}: column {condition.column!r} has no numbers"
            ) from None
        return values.astype(str).str.lower() == condition.value.lower()
    relations = {"=": "eq", ">=": "ge", "<=": "le", ">": "gt", "<": "lt"}
    return getattr(numbers, relations[condition.relation])(bound)


def no_column(table: pd.DataFrame, *missing: str) -> str:
    """Return a sentence about missing columns, with the nearest one of the table."""
    known = {
        plain_name(name).replace("_", ""): column
        for column in map(str, table)
        for name in (column, short_name(column))
    }
    near = [
        known[name]
        for column in missing
        for name in get_close_matches(plain_name(column).replace("_", ""), known, n=1, cutoff=0.75)
    ]
    nearest = f"; the nearest is {', '.join(map(repr, near))}" if near else ""
    has = list_of(table.columns, 20)
    return f"table has no column {', '.join(map(repr, missing))}{nearest}; it has {has}"


_PARTS = ("optimizer", "train", "model", "data")  # parts of a trial in the order of their columns


def varied(runs: pd.DataFrame) -> list[str]:
    """Return the columns of configured numbers that vary in a run table, without seeds."""
    columns = sorted(CONFIGURED.values(), key=lambda column: _PARTS.index(column.part))
    return [
        c.name
        for c in columns
        if c.type in (int, float) and c.field not in ("seed", "data_seed") and runs[c.name].nunique() > 1
    ]


def ranked(runs: pd.DataFrame) -> pd.DataFrame:
    """Sort trials of a search: finished ones by loss, then stopped ones by their steps, then the others."""
    order = runs["status"].map({"finished": 0, "stopped": 1, "diverged": 2}).fillna(3)
    ordered = runs.assign(order=order).sort_values(
        ["order", "steps_done", "loss"], ascending=[True, False, True], ignore_index=True
    )
    return ordered.drop(columns="order")


def of_status(trials: pd.DataFrame, status: str) -> pd.DataFrame:
    return trials[(trials["status"] == status) & ((status == "diverged") | np.isfinite(trials["loss"]))]
