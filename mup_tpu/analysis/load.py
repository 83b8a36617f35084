"""Run tables by where they are: a results folder, a file, or a tracker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mup_tpu.analysis.ingest.table import check_table
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.ingest.table_files import is_file, read_file
from mup_tpu.analysis.ingest.table_values import NO_STATES, States
from mup_tpu.analysis.ingest.trackers import is_tracked, read_tracked
from mup_tpu.analysis.rows import select
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.stored import load_stored, stored_columns
from mup_tpu.store.conditions import Condition


def default_columns(path: str | Path) -> Columns:
    """Names of a table's columns where none are given: a results folder's axes, else width and lr."""
    return Columns() if is_file(path) or is_tracked(path) else stored_columns(path)


def load_table(
    path: str | Path,
    columns: Columns | None = None,
    chance: float | None = None,
    where: Sequence[Condition] | None = None,
    states: States = NO_STATES,
) -> RunTable:
    """Read and check a results folder, a table in a file, or the runs of a tracker.

    Args:
        path: results folder (or fsspec URL), or a file, or what `read_tracked` takes.
        columns: names of its columns; a results folder knows its own.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        where: conditions on rows; by default those that a results folder stores.
        states: meaning of states of runs that are not known.

    Raises:
        TableError: it is no table, or cannot be analysed as it is.
        StoreError: the results folder holds no runs.
    """
    if is_file(path):
        table = read_file(path)
    elif is_tracked(path):
        table = read_tracked(path)
    else:
        return load_stored(path, columns, chance, where, states)
    name = Path(str(path)).name
    return check_table(select(table, where or ()), columns or Columns(), chance, name, states)
