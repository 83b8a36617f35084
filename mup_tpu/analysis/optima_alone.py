"""Tables of optima without runs: a value at each scale, as papers and logs give them.

Drift, law and prediction need no more; a regret needs losses. The error of an optimum follows from its
interval, or from the spacing of the grid that it was read from.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, find_scale, means, plain_name
from mup_tpu.analysis.ingest.table_values import numbers, plain_sizes
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.errors import TableError

_BEST = re.compile(
    r"(best|opt|optimal|optimum|argmin|tuned)_(?P<of>\w+)|(?P<before>\w+)_(best|opt|optimal|star)"
)
_LOW, _HIGH = r"(95_|ci_|ci95_)?(lo|low|lower|min|left)", r"(95_|ci_|ci95_)?(hi|high|upper|max|right)"
_SPACING = re.compile(r"(grid_)?(spacing|factor|ratio)")
_NORMAL_95 = 3.92  # width of a 95 % interval, in standard deviations


def read_optima(table: pd.DataFrame, columns: Columns, name: str) -> RunTable | None:
    """Return the optima of a table that has no losses; None for a table of runs.

    Raises:
        TableError: an optimum has neither an interval nor a known spacing of its grid, or is not above 0.
    """
    if any(means(column) == "loss" for column in table) or columns.loss in table:
        return None
    plain = {plain_name(column): str(column) for column in table}
    of_rates = {column: match for key, column in plain.items() if (match := _BEST.fullmatch(key))}
    of_rates = {column: m for column, m in of_rates.items() if means(m["of"] or m["before"]) == "lr"}
    best = next(iter(of_rates), columns.hyperparameter)
    scale = columns.scale if columns.scale in table else find_scale(table, [])
    compared = columns.parametrization if columns.parametrization in table else ""
    if best not in table or scale is None or table.duplicated([scale, *filter(None, [compared])]).any():
        return None
    ends = [
        next((column for key, column in plain.items() if re.fullmatch(f"{plain_name(best)}_{end}", key)), "")
        for end in (_LOW, _HIGH)
    ]
    x = _log2(table, best)
    spacing = next((column for key, column in plain.items() if _SPACING.fullmatch(key)), "")
    if all(ends):
        low, high = (_log2(table, end) for end in ends)
        source = Reason.of("optima with intervals", name=best, low=ends[0], high=ends[1])
    else:
        step = _log2(table, spacing) if spacing else pd.Series(_grid_step(x), table.index)
        if step.isna().any():
            raise TableError(
                f"{best} has neither an interval nor a grid: give {best}_lo and {best}_hi, or the factor "
                "between values that were tried as grid_factor"
            )
        low, high = x - step, x + step
        source = Reason.of("optima of a grid", name=best, factor=float(2 ** step.iloc[0]))
    if (wrong := ~((low <= x) & (x <= high))).any():
        raise TableError(f"{best} of row {table.index[wrong][0]} lies outside its interval")
    tuned_name = (of_rates[best]["of"] or of_rates[best]["before"]) if best in of_rates else best
    named = replace(columns, scale=scale, loss="", hyperparameter=tuned_name)
    sizes = numbers(plain_sizes(table[scale]), scale)
    runs = pd.DataFrame(
        {
            "compared": table[compared].astype(str) if compared else "all",
            "scale": sizes,
            "x": x,
            "low": low,
            "high": high,
            "error": np.maximum((high - low) / _NORMAL_95, 0.01),
            "loss": math.nan,
            "params": sizes if means(scale) == "size" else math.nan,
            "tokens": math.nan,
            "cost": math.nan,
            "seed": 0,
            "purchase": 0,
        }
    )
    if not (runs["scale"] > 0).all():
        raise TableError(f"{scale} must be above 0 in a table of optima")
    return RunTable(runs, (source,), named, name)


def _log2(table: pd.DataFrame, column: str) -> pd.Series:
    values = numbers(table[column], column, table=table)
    if (wrong := ~(values > 0)).any():
        raise TableError(
            f"{column} must be above 0, but row {table.index[wrong][0]} has {values[wrong].iloc[0]:g}"
        )
    return np.log2(values)


def _grid_step(x: pd.Series) -> float:
    """Return the spacing of the grid that all optima lie on, octaves; nan where they lie on none."""
    away = (x - x.min()).to_numpy()
    for step in (1.0, math.log2(10) / 2, 0.5, 0.25):  # factors of 2, √10, √2
        if np.allclose(away / step, np.round(away / step), atol=0.05):
            return step
    return math.nan
