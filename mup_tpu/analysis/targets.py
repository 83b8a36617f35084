"""Targets: scales that are asked about, as `width=4096`, or by a column that the table's scale measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import means, short_name
from mup_tpu.analysis.ingest.table_values import plain_size
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.config import on_one_line, parse_number
from mup_tpu.config.columns import CONFIGURED, write_scale
from mup_tpu.errors import ConfigError, TableError

# Most relative error of a measure's polynomial: sizes of networks are polynomials of their widths
_MISFIT = 0.02
_FARTHEST = 40  # most octaves of a target beyond the largest scale


@dataclass(frozen=True)
class Target:
    """A scale to predict at."""

    text: str
    """The target as it was asked for: "width=4096"."""
    scale: float
    """Value of the table's scale at the target."""


def read_targets(table: RunTable, at: Sequence[str]) -> tuple[Target, ...]:
    """Read the targets of a prediction.

    Args:
        table: its scale, and columns that may measure it.
        at: NAME=VALUE each, or several with commas: the scale itself, or a column with one value a scale,
            such as params or flops.

    Raises:
        TableError: there is none, one is not NAME=VALUE above 0, or its column does not measure the scale.
    """
    if not at:
        raise TableError(f"a prediction needs a target: give --at {table.columns.scale}=VALUE")
    for text in at:
        if not all(part.partition("=")[0].strip() and "=" in part for part in text.split(",")):
            raise TableError(f"at {on_one_line(text)} is not NAME=VALUE; write for example width=4096")
    return tuple(_read(table, part.strip()) for text in at for part in text.split(","))


def _read(table: RunTable, text: str) -> Target:
    name, _, written = (part.strip() for part in text.partition("="))
    try:
        value = parse_number(plain_size(written).replace("_", ""))
    except ConfigError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise TableError(f"at {on_one_line(text)} is not allowed: its value must be a finite number above 0")
    scale_column, largest = table.columns.scale, float(table.runs["scale"].max())
    if table.stored is not None:
        name = next((c.name for c in CONFIGURED.values() if c.field == name), name)
    is_scale = name in {scale_column, short_name(scale_column)} or (
        means(name) != "" and means(name) == means(scale_column)
    )
    scale = value if is_scale else _inverse(table, name, value)
    if abs(math.log2(scale / largest)) > _FARTHEST:
        raise TableError(
            f"at {on_one_line(text)} lies {math.log2(scale / largest):.0f} octaves from the largest "
            f"{scale_column}, {write_scale(scale_column, largest)}; at most {_FARTHEST} are predicted"
        )
    return Target(text, scale)


def _inverse(table: RunTable, name: str, value: float) -> float:
    """Scale at which a column has a value.

    The column is a polynomial of the scale with coefficients of 0 or more, as parameters and FLOP are; else a
    power between its points.
    """
    from scipy import optimize  # slow to import, and seldom needed

    scale_S, value_S = _measure(table, name)
    terms_ST = (scale_S[:, None] / scale_S[-1]) ** np.arange(4)
    coefficients, _ = optimize.nnls(terms_ST / value_S[:, None], np.ones(len(scale_S)))
    misfit = float(np.abs(terms_ST @ coefficients / value_S - 1).max())
    log_S, log_value_S = np.log2(scale_S), np.log2(value_S)

    def log_measure(log_scale: float) -> float:
        if misfit < _MISFIT:
            return float(np.log2(((2**log_scale / scale_S[-1]) ** np.arange(4)) @ coefficients))
        i = int(np.clip(np.searchsorted(log_S, log_scale), 1, len(log_S) - 1))
        slope = (log_value_S[i] - log_value_S[i - 1]) / (log_S[i] - log_S[i - 1])
        return float(log_value_S[i] + slope * (log_scale - log_S[i]))

    ends = log_S[0] - 2 * _FARTHEST, log_S[-1] + 2 * _FARTHEST
    if not log_measure(ends[0]) < math.log2(value) < log_measure(ends[1]):
        raise TableError(f"at {name}={value:g} is not reached at any {table.columns.scale}")
    return float(2 ** optimize.brentq(lambda log_scale: log_measure(log_scale) - math.log2(value), *ends))


def _measure(table: RunTable, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales of a table, and the value of a column at each.

    Raises:
        TableError: there is no such column, or it does not grow with the scale.
    """
    scale_column = table.columns.scale
    rows, known = _columns(table)
    if name not in known or rows[name].dtype.kind not in "iuf" or not (rows[name] > 0).all():
        grow = [scale_column]
        for column in known:
            values = rows.groupby("scale")[column]
            first, is_one = values.first(), bool((values.nunique() <= 1).all())
            if column != scale_column and is_one and first.is_monotonic_increasing and first.nunique() > 1:
                grow += [column] if first.is_unique else []
        listed = ", ".join(f"{column}=VALUE" for column in grow[:6])
        has_sizes = table.stored is not None or bool(rows[table.columns.params].notna().all())
        hint = "" if has_sizes else " (--columns params=COLUMN names a table's parameters)"
        raise TableError(
            f"at {name!r}: the table does not say how {name} follows {scale_column}{hint}; give {listed}"
        )
    by_scale = rows.groupby("scale")[name]
    if (by_scale.nunique() > 1).any():
        counts = by_scale.nunique()
        mixed = float(counts.index[int(counts.argmax())])
        raise TableError(
            f"at {name!r}: runs of {scale_column} {write_scale(scale_column, mixed)} differ in {name}; give "
            f"{scale_column}=VALUE"
        )
    value_S = by_scale.first()
    if value_S.nunique() == 1:
        raise TableError(
            f"at {name!r}: all runs have {name} {value_S.iloc[0]:g}, so the table says nothing of another; "
            f"give {scale_column}=VALUE"
        )
    if len(value_S) < 2 or not value_S.is_monotonic_increasing or not value_S.is_unique:
        shown = ", ".join(f"{v:g}" for v in list(value_S)[:4])
        raise TableError(
            f"at {name!r}: {name} does not grow with {scale_column} ({shown}); give {scale_column}=VALUE"
        )
    return value_S.index.to_numpy(float), value_S.to_numpy(float)


def _columns(table: RunTable) -> tuple[pd.DataFrame, list[str]]:
    names, measures = table.columns, ("params", table.columns.params, "tokens", table.columns.tokens, "flops")
    if table.stored is not None and names.scale in table.stored:
        rows = table.stored.assign(scale=table.stored[names.scale].astype(float))
        rows = rows[rows["scale"].isin(table.runs["scale"])]
        params = rows["params_active"].fillna(rows["params_non_embedding"])
    else:
        rows = table.runs.assign(**{names.params: table.runs["params"], names.tokens: table.runs["tokens"]})
        rows["flops"] = rows["cost"] if table.cost_unit == "FLOP" else math.nan
        params = rows["params"]
    if "flops" not in rows or rows["flops"].isna().any():
        rows = rows.assign(flops=6.0 * params * rows["tokens"])
    sizes = [c.name for c in CONFIGURED.values() if c.type in (int, float)]
    return rows, [c for c in dict.fromkeys((*measures, *sizes)) if c in rows]
