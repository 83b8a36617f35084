"""Wide tables as long ones: a column for each width or learning rate, or a column for each run's curve."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.run_names import AXES, NUMBER, meaning_at_end, settings
from mup_tpu.analysis.ingest.table_columns import Columns, list_of, means
from mup_tpu.analysis.ingest.table_values import numbers
from mup_tpu.analysis.reasons import Reason
from mup_tpu.config import parse_number
from mup_tpu.errors import TableError

_HEADING = re.compile(rf"(?P<before>.*?)(?P<number>{NUMBER})(?P<after>[^0-9]*)", re.IGNORECASE)
_CURVE = re.compile(r"(?P<run>.+) - (?P<metric>\S.*)")
_EXTREMES = ("__MIN", "__MAX")
"""Suffixes of columns that Weights & Biases exports beside a curve: extremes of a group of steps."""


def as_rows(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[Reason]]:
    """Bring the losses of a table into one column; return it with notes.

    Args:
        table: of any shape; one that has a column for the loss is left as it is.
        columns: names that were given.

    Raises:
        TableError: it holds curves, and the names of their runs lack width or learning rate.
    """
    if not table.columns.is_unique or any(means(name) == "loss" for name in table) or columns.loss in table:
        return table, []
    if (curves := _curves(table)) is not None:
        return curves
    if (headings := _headings(table, columns)) is None:
        return table, []
    axis, values = headings
    named = getattr(columns, axis)
    kept = [name for name in table if name not in values]
    values_C = pd.Series(_numbers([*values.values()], named), [*values])
    rows = table.melt(kept, [*values], "heading", columns.loss)
    rows[named] = rows.pop("heading").map(values_C).astype("float64")
    empty = rows[columns.loss].isna()
    notes = [Reason.of("losses in columns", names=[*values], column=named)]
    if empty.any():
        notes.append(Reason.of("empty cells", count=int(empty.sum())))
    return rows[~empty].reset_index(drop=True), notes


def _headings(table: pd.DataFrame, columns: Columns) -> tuple[str, dict[str, str]] | None:
    """Axis with its values in the headings, and the number of each heading; None if there is no such axis."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in map(str, table):
        if match := _HEADING.fullmatch(name.strip()):
            groups.setdefault((match["before"], match["after"]), {})[name] = match["number"]
    (before, after), values = max(groups.items(), key=lambda group: len(group[1]), default=(("", ""), {}))
    if len(values) < 2:
        return None
    others = [name for name in table if name not in values]
    there = {axis for name in others if (axis := AXES.get(means(name)))}
    there |= {axis for axis in ("scale", "hyperparameter") if getattr(columns, axis) in others}
    told = {AXES[what] for text in (before, after) if (what := _meaning(text)) in AXES}
    missing = {"scale", "hyperparameter"} - there
    if len(told) == 1 and told <= missing and len(missing) == 1:
        return told.pop(), values
    if not told and before.strip() == after.strip() == "":
        if len(missing) == 1:
            return missing.pop(), values
        raise TableError(
            f"table has a column for each of {list_of(values)}, but no heading names these values or the "
            f"rows: name the column of the rows {columns.scale} or {columns.hyperparameter}"
        )
    return None


def _meaning(text: str) -> str:
    """Axis that the words beside a number name; "" for none."""
    what = meaning_at_end(re.sub(r"[\s=:]+", "_", text))
    return what if what in AXES else ""


def _numbers(texts: list[str], name: str) -> np.ndarray:
    """Numbers from headings, which may be powers."""
    if any("^" in text for text in texts):
        return np.array([parse_number(text) for text in texts])
    return numbers(pd.Series(texts, dtype=object), name).to_numpy()


def _curves(table: pd.DataFrame) -> tuple[pd.DataFrame, list[Reason]] | None:
    """Rows by run and step from columns of curves (`NAME - val/loss`); None without such columns."""
    matches = {
        name: match
        for name in table
        if not str(name).endswith(_EXTREMES) and (match := _CURVE.fullmatch(str(name)))
    }
    matches = {name: match for name, match in matches.items() if means(match["metric"]) in ("loss", "step")}
    losses = [name for name, match in matches.items() if means(match["metric"]) == "loss"]
    steps = [name for name in table if means(name) == "step"]
    if not losses or not steps:
        return None
    metrics = {matches[name]["metric"] for name in losses}
    if len(metrics) > 1:
        raise TableError(f"table holds curves of {list_of(sorted(metrics))}: export the curves of one loss")
    told = {name: settings(matches[name]["run"]) for name in losses}
    both = {"scale", "hyperparameter"}
    untold = [name for name, found in told.items() if {AXES.get(what) for what in found} & both != both]
    if untold:
        raise TableError(
            f"table holds curves of {len(losses)} runs whose names do not say width and learning rate "
            f"({list_of(untold, 2)}): export the table of runs in their place, or read the project itself "
            "as wandb:ENTITY/PROJECT"
        )
    rows = [
        pd.DataFrame({**found, "step": table[steps[0]], "loss": table[name]}).dropna(subset=["loss"])
        for name, found in told.items()
    ]
    note = Reason.of("curves in columns", count=len(losses), metric=metrics.pop())
    return pd.concat(rows, ignore_index=True), [note]
