"""Rows of a table, ours or a stranger's: conditions on them, and checks of their columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, list_of, means, plain_name, short_name
from mup_tpu.analysis.reasons import Reason
from mup_tpu.config import on_one_line
from mup_tpu.config.columns import CONFIGURED, label
from mup_tpu.errors import TableError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.store import Condition

DATA = ("dataset", "data_fingerprint")  # columns that change with a field of the data
# Columns of a results folder that have one value in all rows, except along the axes; `DATA` stands for the
# corpus
STORED_FIXED = (*(name for name in CONFIGURED if name not in ("seed", "data_seed", "corpus")), *DATA)
_MOST_RULES = 8  # most values of a column that is compared; one with more names runs
# Columns of a run's cost, with their units; the first that a table has is taken
_COSTS = {"wall_time_s": "s", "flops": "FLOP"}


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


def require_columns(table: pd.DataFrame, columns: Columns) -> None:
    """Check that the needed columns and the named ones are there, each once and for one thing.

    Raises:
        TableError: one is missing, occurs twice, or was named for two things.
    """
    needed = (columns.scale, columns.hyperparameter, columns.loss)
    missing = [column for column in needed if column not in table]
    defaults = Columns()
    for f in fields(columns):
        named = getattr(columns, f.name)
        for column in (named,) if isinstance(named, str) else ():
            if column and column != getattr(defaults, f.name) and column not in (*table, *missing):
                missing.append(column)
    if missing:
        hints = {
            defaults.scale: "--scale names the scale",
            defaults.hyperparameter: "--tune the tuned column",
        }
        numeric = [str(name) for name in table if table[name].dtype.kind == "f" and not means(name)]
        if columns.loss in missing and numeric:
            hints[columns.loss] = f"--columns loss={numeric[0]} takes {' or '.join(numeric[:4])} for the loss"
        hint = ", ".join(hints[column] for column in missing if column in hints)
        raise TableError(no_column(table, *missing) + (f"; {hint}" if hint else ""))
    if len(set(needed)) < len(needed):
        raise TableError(f"scale, hyperparameter and loss must be three columns, not {', '.join(needed)}")
    if not table.columns.is_unique:
        raise TableError(f"table has two columns {table.columns[table.columns.duplicated()][0]!r}")


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


def require_one_kind(table: pd.DataFrame, columns: Columns, fixed: Iterable[str]) -> None:
    """Check that runs differ in nothing that a comparison holds fixed.

    Args:
        table: rows of runs.
        columns: axes, along which they may differ.
        fixed: columns that have one value.

    Raises:
        TableError: such a column has several values.
    """
    axes = {columns.scale, columns.hyperparameter, columns.parametrization, columns.seed, *columns.along}
    for column in dict.fromkeys(fixed):
        if column not in table or column in axes:
            continue
        known = table[column].dropna()
        distinct = (known.map(str) if known.dtype == object else known).unique()
        if len(distinct) > 1:
            values = ", ".join(map(on_one_line, sorted(distinct)[:4]))
            follows = table[column].map(str).groupby(table[columns.scale]).nunique().max() == 1
            ladder = f"; if it changes with {columns.scale}, --along {column}" if follows else ""
            if known.dtype.kind in "iuf":
                other = f"if it grows, --scale {column}, at one {columns.scale}"
            else:
                other = f"--compare {column} compares them"
            raise TableError(
                f"table mixes several {label(column)}s (column {column!r}: {values}); compare runs of one "
                f"kind, e.g. by filtering that column first: --where {column}=VALUE{ladder}; {other}"
            )


# Names of columns with which runs of different scales may differ in more than the scale
_CONFOUNDING = re.compile(
    r"(^|_)(steps|iters|iterations|epochs?|tokens|batch|batch_size|bs|seq_len|sequence_length|context|commit|git|"
    r"sha|version|tokenizer|vocab|vocab_size|dataset|data|corpus|warmup|schedule)(_|$)"
)


def confounded(table: pd.DataFrame, runs: pd.DataFrame, columns: Columns) -> list[Reason]:
    """Return notes on lengths, batches, commits and the like that change with the scale, or inside one.

    Args:
        table: rows under their own names.
        runs: the same runs as `on_axis` returns them.
        columns: names of the table.
    """
    notes = []
    for column in _settings(table, columns):
        values = table.loc[runs.index, column].dropna()
        if not _CONFOUNDING.search(plain_name(column)) or values.nunique() < 2 or means(column) == "step":
            continue
        by_scale = values.map(str).groupby(runs["scale"])
        if by_scale.nunique().max() == 1:
            pairs = ", ".join(f"{scale:g}: {value}" for scale, value in by_scale.first().head(3).items())
            notes.append(Reason.of("confounded", name=column, pairs=pairs))
        else:
            first, *others = sorted(values.map(str).unique())
            listed = list_of([first, *others], 4)
            notes.append(Reason.of("mixed", name=column, listed=listed, first=first))
    return notes


def differences(table: pd.DataFrame, rows: pd.Index, columns: Columns) -> str:
    """Return settings in which rows of one cell and seed differ, each with its option; "" for none."""
    shown = []
    for column in _settings(table, columns):
        if table.loc[rows, column].map(str).nunique() < 2:
            continue
        if table[column].dtype.kind in "iuf":
            one, *others = [f"{value:g}" for value in table.loc[rows, column].unique()]
            options = (
                f"--where {column}={one} holds it",
                f"--columns seed={column} takes it for replicates",
                f"mup-tpu predict --scale {columns.scale},{column} fits both",
            )
            shown.append(f"{column} ({', '.join([one, *others][:4])}: {', '.join(options)})")
        else:
            values = table[column].map(str)
            is_rule = values.nunique() <= _MOST_RULES
            shown.append(f"{column} ({_rule_options(column, values) if is_rule else 'a name a run'})")
    return ", ".join(shown)


def varying(table: pd.DataFrame, runs: pd.DataFrame, columns: Columns) -> list[Reason]:
    """Return notes on settings with several values inside a cell.

    Args:
        table: rows under their own names.
        runs: the same runs as `on_axis` returns them.
        columns: names of the table.
    """
    notes = []
    cells = [runs["compared"], runs["scale"], runs["x"]]
    for column in _settings(table, columns):
        values = table.loc[runs.index, column].map(str)
        is_rule = {*values.str.lower()} <= {*PARAMETRIZATIONS} or table[column].dtype.kind == "b"
        is_setting = is_rule or (column in CONFIGURED and table[column].dtype.kind not in "iu")
        if not is_setting or not 1 < values.nunique() <= _MOST_RULES:
            continue
        if values.groupby(cells).nunique().max() > 1:
            notes.append(Reason.of("varies inside cells", name=column, listed=sorted(values.unique())))
    return notes


def _settings(table: pd.DataFrame, columns: Columns) -> list[str]:
    """Columns that may tell runs apart besides the named ones: text, whole numbers, a few other numbers."""
    named = {*asdict(columns).values()} - {columns.along} | {*columns.along}
    is_ours = {"trial_id", "config"} <= set(table)
    return [
        column
        for column in map(str, table)
        if column not in named
        and (column in CONFIGURED if is_ours else means(column) != "loss")
        and table[column].dtype.kind not in "cmM"
        and (table[column].dtype.kind != "f" or table[column].nunique() <= _MOST_RULES)
    ]


def _rule_options(column: str, values: pd.Series) -> str:
    first, *others = sorted(values.unique())
    listed = ", ".join(map(repr, [first, *others][:4]))
    return f"{listed}: --compare {column} compares them, --where {column}={first} takes one"


def cost_column(table: pd.DataFrame, columns: Columns) -> tuple[str, str]:
    if columns.cost:
        return columns.cost, _COSTS.get(columns.cost, columns.cost)
    return next(((column, unit) for column, unit in _COSTS.items() if column in table), ("", ""))


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


def ranking(runs: pd.DataFrame) -> pd.DataFrame:
    """Trials of a search in the order of `ranked`, with the columns that compare them.

    Args:
        runs: a run table.

    Returns:
        status, steps_done, loss (nat per token) and every configured number that varies, without seeds.
    """
    return ranked(runs)[["status", "steps_done", "loss", *varied(runs)]]
