"""Anybody's table as a run table: shape, columns, states and numbers are told from what it holds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.loss_errors import with_errors
from mup_tpu.analysis.ingest.run_names import with_settings
from mup_tpu.analysis.ingest.steps import at_logged_steps, last_steps
from mup_tpu.analysis.ingest.table_columns import Columns, find_columns
from mup_tpu.analysis.ingest.table_shapes import as_rows
from mup_tpu.analysis.ingest.table_values import NO_STATES, States, meanings, numbers
from mup_tpu.analysis.ingest.units import AUTO, LossUnit
from mup_tpu.analysis.rows import STORED_FIXED, cost_column, require_columns, require_one_kind, varying
from mup_tpu.analysis.run_table import (
    FINISHED,
    RunTable,
    on_axis,
    require_above_zero,
    standard_form,
    table_of,
    with_result,
)
from mup_tpu.errors import TableError

_USUALLY_FIXED = (
    "dataset", "data_fingerprint", "steps_planned", "steps", "batch_size", "sequence_length", "width",
    "depth", "lr", "weight_decay", "init_std", "loss_kind", "optimizer",
)  # fmt: skip
"""Columns that have one value in all rows, except along the axes."""
_NEEDED = ("scale", "value", "loss", "loss_error", "step")


def check_table(
    table: pd.DataFrame,
    columns: Columns = Columns(),
    chance: float | None = None,
    name: str = "table",
    states: States = NO_STATES,
    unit: LossUnit = AUTO,
) -> RunTable:
    """Check a table and bring it into standard form.

    Args:
        table: one row a run or a step of one, or a column for each width or learning rate.
        columns: names of its columns; others are told by their usual names.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        name: name of the table, for titles.
        states: meaning of states of runs that are not known.
        unit: of the loss; rows of a results folder are in nat per token.

    Raises:
        TableError: a column is missing, a value is impossible, or runs of different kinds are mixed.
    """
    if chance is not None:
        require_above_zero("chance", chance)
    notes: list[str] = []
    table = table.reset_index(drop=True)
    is_exported = {"trial_id", "config"} <= set(table)  # rows of a results folder, whose columns are known
    if not is_exported:
        table, shaped = as_rows(table, columns)
        table, named = with_settings(table, columns)
        table, columns, guessed = find_columns(table, columns)
        table, columns, errors = with_errors(table, columns)
        notes += [*shaped, *named, *guessed, *errors]
    require_columns(table, columns)
    table, ended = _ended(table, columns, states, notes)
    rows = standard_form(table, columns, ended, lambda part, column: _read(table, part, column, notes))
    factor, converted = unit.factor(columns.loss)
    if converted:
        rows[["loss", "loss_error"]] *= factor
        notes.append(converted)
    require_one_kind(table, columns, STORED_FIXED if is_exported else _USUALLY_FIXED)
    runs, history = on_axis(at_logged_steps(rows), table, columns, chance, notes), None
    if runs["step"].notna().any():
        runs, history = last_steps(runs, columns.step, notes)
    notes += varying(table, runs, columns)
    planned = _planned(runs, columns, notes)
    return table_of(
        runs, columns, name, notes, cost_column(table, columns)[1], history=history, planned=planned
    )


def _planned(runs: pd.DataFrame, columns: Columns, notes: list[str]) -> tuple[float, ...]:
    """Scales of the sequence that numbered purchases tell of; none without them."""
    purchases = runs.loc[runs["purchase"] > 0, "purchase"].nunique()
    if not purchases:
        return ()
    notes.append(
        f"{columns.purchase} numbers the {purchases} purchases of a sequence: its looks are counted, and its "
        f"planned {columns.scale}s are taken to be those of the table"
    )
    return tuple(sorted(runs["scale"].unique().tolist()))


def _ended(
    table: pd.DataFrame, columns: Columns, states: States, notes: list[str]
) -> tuple[pd.DataFrame, pd.Series]:
    """Rows of runs that say something of their trial, and how they ended."""
    column = columns.status
    if column == Columns().status and column not in table:  # trackers export it as State
        alike = [c for c in table.columns if str(c).lower() in ("status", "state")]
        column = alike[0] if alike else ""
    if column == "" or column not in table or table[column].isna().all():
        return table, pd.Series(FINISHED, index=table.index)
    return with_result(table, meanings(table[column], states), column, notes)


def _read(table: pd.DataFrame, part: str, column: str, notes: list[str]) -> pd.Series:
    """Numbers of a column; one that is not needed and holds none becomes a note."""
    hint = "; leave it empty, or inf, where a run diverged" if part == "loss" else ""
    try:
        values = numbers(table[column], column, hint)
        if part == "purchase":
            _require_counted(values, column)
    except TableError as error:
        if part in _NEEDED:
            raise
        notes.append(f"{error}; the column is not used")
        return pd.Series(np.nan, index=table.index)
    return values


def _require_counted(values: pd.Series, column: str) -> None:
    bad = values.index[values.notna() & ~((values >= 0) & (values % 1 == 0) & (values < 2**31))]
    if len(bad):
        raise TableError(f"{column} must be whole and 0 or more, but row {bad[0]} has {values[bad[0]]:g}")
