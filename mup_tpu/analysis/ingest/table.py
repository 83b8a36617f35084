"""Anybody's table as a run table: its content tells shape, columns, states and numbers."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from mup_tpu.analysis.ingest.loss_errors import with_errors
from mup_tpu.analysis.ingest.run_names import with_settings
from mup_tpu.analysis.ingest.table_columns import Columns, find_columns
from mup_tpu.analysis.ingest.table_shapes import as_rows
from mup_tpu.analysis.ingest.table_values import NO_STATES, States
from mup_tpu.analysis.ingest.units import AUTO, LossUnit
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.rows import STORED_FIXED
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.standard_form import standard_form

_USUALLY_FIXED = (
    "dataset", "data_fingerprint", "steps_planned", "steps", "batch_size", "sequence_length", "width",
    "depth", "lr", "unit", "units", "loss_unit", "weight_decay", "init_std", "loss_kind", "optimizer",
)  # fmt: skip
"""Columns that have one value in all rows, except along the axes."""


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
    notes: list[Reason] = []
    table, fixed = table.reset_index(drop=True), STORED_FIXED
    if not {"trial_id", "config"} <= set(table):  # a results folder exports these: its columns are known
        table, shaped = as_rows(table, columns)
        table, named = with_settings(table, columns)
        table, columns, guessed = find_columns(table, columns)
        table, columns, errors = with_errors(table, columns)
        notes, fixed = [*shaped, *named, *guessed, *errors], _USUALLY_FIXED
    return _planned(standard_form(table, columns, fixed, notes, name, chance, states, unit))


def _planned(table: RunTable) -> RunTable:
    """Table with the planned scales of its sequence, if its purchases are numbered."""
    purchases = table.runs.loc[table.runs["purchase"] > 0, "purchase"].nunique()
    if not purchases:
        return table
    note = Reason.of("sequence", name=table.columns.purchase, purchases=purchases)
    planned = tuple(sorted(table.runs["scale"].unique().tolist()))
    return replace(table, notes=(*table.notes, note), planned=planned)
