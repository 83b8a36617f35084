"""Standard errors of losses that are means of several seeds: `3.448 ± 0.005`, or a column beside the loss."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, plain_name
from mup_tpu.analysis.ingest.table_values import numbers
from mup_tpu.analysis.reasons import Reason

_WITH_ERROR = re.compile(r"\s*(\S+)\s*(?:±|\+/-|\+-)\s*(\S+)\s*")
_ERROR = "err error se sem stderr std_err std_error standard_error"
_DEVIATION = "std stdev stddev sd std_dev standard_deviation"
_COUNT = "n_seeds num_seeds n_runs num_runs n_repeats replicates n_replicates"


def with_errors(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, Columns, list[Reason]]:
    """The table with the standard error of its losses in a column, if it tells one; its name, and notes.

    A standard deviation needs the number of runs, in a column beside it.
    """
    loss, error = columns.loss, columns.loss_error
    if loss not in table or error in table or not table.columns.is_unique:
        return table, columns, []
    cells = table[loss].astype(object)
    parts = {
        row: m for row, cell in cells.items() if isinstance(cell, str) and (m := _WITH_ERROR.fullmatch(cell))
    }
    if parts:
        errors = pd.Series({row: m[2] for row, m in parts.items()}, dtype=object).reindex(table.index)
        means = pd.Series({row: m[1] for row, m in parts.items()}, dtype=object)
        return (
            table.assign(**{loss: means.reindex(table.index).fillna(cells), error: errors}),
            columns,
            [Reason.of("errors behind ±", name=loss)],
        )
    if named := _column(table, loss, _ERROR):
        return (
            table,
            replace(columns, loss_error=named),
            [Reason.of("errors in a column", name=named, loss=loss)],
        )
    if (deviation := _column(table, loss, _DEVIATION)) is None:
        return table, columns, []
    if (count := _column(table, loss, _COUNT)) is None:
        return table, columns, [Reason.of("deviation without a count", name=deviation)]
    values = numbers(table[deviation], deviation) / np.sqrt(numbers(table[count], count))
    note = Reason.of("errors from deviations", name=deviation, loss=loss, count=count)
    return table.assign(**{error: values}), columns, [note]


def _column(table: pd.DataFrame, loss: str, endings: str) -> str | None:
    """Column with one of some names, alone or after the loss's name."""
    names = {plain_name(name): str(name) for name in table}
    stems = ("", f"{plain_name(loss)}_", "loss_", "val_loss_")
    return next(
        (names[s + e] for s in stems[1:] + stems[:1] for e in endings.split() if s + e in names), None
    )
