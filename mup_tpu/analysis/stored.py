"""The run table of a results folder: its columns are typed, and its axes known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.ingest.table_values import NO_STATES, States, meanings
from mup_tpu.analysis.rows import cost_column, require_columns, require_one_kind, select, selected_scales
from mup_tpu.analysis.run_table import (
    HISTORY,
    UNFINISHED,
    RunTable,
    on_axis,
    require_above_zero,
    standard_form,
    table_of,
)
from mup_tpu.config import field_column, on_one_line
from mup_tpu.config.columns import CONFIGURED
from mup_tpu.config.trial import IN_FINGERPRINT
from mup_tpu.errors import TableError
from mup_tpu.store import load_axes, load_curves, load_planned, load_question, load_runs
from mup_tpu.store.conditions import Condition

DATA = ("dataset", "data_fingerprint")
"""Columns that change with a field of the data."""
FIXED = (
    *(name for name in CONFIGURED if name not in ("seed", "data_seed", "corpus")),
    *DATA,  # which stand for the corpus
)
"""Columns that have one value in all rows, except along the axes."""


def stored_columns(path: str | Path) -> Columns:
    """Names of the axes' columns in a results folder."""
    axes = load_axes(path)
    along = tuple(
        field_column(name) for axis in (axes.scale, axes.tune, axes.compare) for name in axis.fields
    )
    along += DATA if {*IN_FINGERPRINT} & {*axes.scale.fields, *axes.compare.fields} else ()
    return Columns(axes.scale.column, axes.tune.column, parametrization=axes.compare.column, along=along)


def load_stored(
    path: str | Path,
    columns: Columns | None = None,
    chance: float | None = None,
    where: Sequence[Condition] | None = None,
    states: States = NO_STATES,
) -> RunTable:
    """Read the run table of a results folder.

    Args:
        path: local folder or fsspec URL.
        columns: names of its axes' columns; by default those of its sweep.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        where: conditions on rows; by default those that the folder stores.
        states: meaning of statuses; failed ones are left out by default.

    Raises:
        TableError: a column is missing, or runs of different kinds are mixed.
        StoreError: the folder holds no runs.
    """
    if chance is not None:
        require_above_zero("chance", chance)
    columns = columns or stored_columns(path)
    asked = load_question(path) if where is None else ()
    where = where or asked
    stored, notes = select(load_runs(path), where), list[str]()
    require_columns(stored, columns)
    require_one_kind(stored, columns, FIXED)
    ended = meanings(stored[columns.status], states)
    if (left_out := ended == UNFINISHED).any():
        counts = stored.loc[left_out, columns.status].value_counts()
        notes.append(left_out_note(counts))
    rows = stored[~left_out]
    form = standard_form(rows, columns, ended[~left_out], lambda part, column: _numbers(rows, column))
    table = table_of(
        on_axis(form, columns, chance, notes),
        columns,
        Path(str(path)).name,
        notes,
        cost_column(rows, columns)[1],
    )
    if asked:
        note = f"as the folder asks: {', '.join(condition.words for condition in asked)}"
        table = replace(table, notes=(*table.notes, note))
    curves = load_curves(path)
    on_the_way = curves[curves["split"] == "train"][["trial_id", "step", "loss"]]
    history = table.runs.drop(columns="loss").merge(on_the_way, on="trial_id")[HISTORY]
    table = replace(table, command=_command(path, stored), history=history, stored=stored)
    planned = load_planned(path) if columns.scale == load_axes(path).scale.column else ()
    return _only_planned(table, selected_scales(planned, columns.scale, where)) if planned else table


def left_out_note(counts: pd.Series) -> str:
    """Note on unfinished runs, from the number of each state."""
    named = ", ".join(f"{n} {state}" for state, n in counts.items())
    return f"{named} runs left out: they say nothing of their trial"


def _numbers(rows: pd.DataFrame, column: str) -> pd.Series:
    held = rows[column]
    if held.dtype.kind not in "iuf" and len(held):
        raise TableError(f"{column} must be numbers, but row {held.index[0]} has {on_one_line(held.iloc[0])}")
    return held.astype("float64")


def _only_planned(table: RunTable, planned: tuple[float, ...]) -> RunTable:
    """Part of a table at the scales that its sequence plans."""
    part = table.part(lambda frame: frame["scale"].isin(planned))
    left_out = sorted(set(table.runs["scale"]) - set(planned))
    note = f"{table.columns.scale} {', '.join(f'{s:g}' for s in left_out)} left out: the sequence plans none"
    return replace(part, notes=(*table.notes, note) if left_out else table.notes, planned=planned)


def _command(path: str | Path, stored: pd.DataFrame) -> str | None:
    """Command line that adds runs to a results folder, if a script of this checkout made it."""
    experiment = str(stored["experiment"].iloc[0])
    script = Path("experiments") / f"{experiment.removesuffix('_h200')}.py"
    preset = " --preset h200" if experiment.endswith("_h200") else ""
    is_there = (Path(__file__).parents[2] / script).exists()
    return f"python {script}{preset} --results {path}" if is_there else None
