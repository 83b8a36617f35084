"""A run table: one row a run, its hyperparameter on a log2 axis, lost runs as +inf.

`load.py` makes it from a results folder, `ingest/` from anybody's table. A fault stops with one sentence,
which names column and value; an oddity becomes a note, which every output repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, short_name
from mup_tpu.analysis.rows import cost_column, differences
from mup_tpu.errors import TableError

FINISHED, DIVERGED, STOPPED, UNFINISHED = "finished", "diverged", "stopped", "unfinished"
"""Ends of runs; unfinished ones say nothing of their trial."""

MERGE_OCTAVES = 0.02
"""Distance below which two learning rates are one: they differ by rounding."""

RUN = ["compared", "scale", "x", "seed"]
"""Columns that name a run."""
HISTORY = [*RUN, "step", "loss"]


@dataclass(frozen=True, repr=False)
class RunTable:
    """A checked table, and notes on it."""

    runs: pd.DataFrame
    """One row a run: compared (as a parametrization), scale, x (log2 of the hyperparameter), loss
    (+inf where diverged or stopped), stopped (early, for being behind), seed, purchase (0 outside a
    sequence), and loss_error, params, tokens, cost (nan where unknown)."""
    notes: tuple[str, ...]
    columns: Columns
    name: str
    cost_unit: str = ""
    """Unit of the column cost."""
    command: str | None = None
    """Command line that adds runs; None unless an experiment's script made the results folder."""
    history: pd.DataFrame | None = None
    """Training losses by step, where known: compared, scale, x, seed, step, loss."""
    stored: pd.DataFrame | None = None
    """Rows of the results folder, which say how the runs were made; None for other tables."""
    planned: tuple[float, ...] = ()
    """Scales of a sequence, which has a look after each purchase; none for a table with one look."""
    zeros: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Runs at hyperparameter 0, which has no log2; columns of `runs` without x."""

    def __repr__(self) -> str:
        scales = ", ".join(f"{scale:g}" for scale in sorted(self.runs["scale"].unique()))
        compared = ", ".join(sorted(self.runs["compared"].unique()))
        return f"{self.name}: {len(self.runs)} runs of {compared} at {self.columns.scale} {scales}"

    def part(self, keep: Callable[[pd.DataFrame], pd.Series]) -> RunTable:
        """Table of some of its runs, with their history.

        Args:
            keep: mask of a frame's rows, called with runs, history and zeros.
        """
        history = None if self.history is None else self.history[keep(self.history)]
        zeros = self.zeros[keep(self.zeros)] if len(self.zeros) else self.zeros
        return replace(self, runs=self.runs[keep(self.runs)], history=history, zeros=zeros)


def with_result(
    table: pd.DataFrame, ended: pd.Series, column: str, notes: list[str]
) -> tuple[pd.DataFrame, pd.Series]:
    """Rows of runs that say something of their trial, and how each ended.

    Args:
        table: rows.
        ended: FINISHED, DIVERGED, STOPPED or UNFINISHED of each.
        column: column of the states that this was told by.
        notes: list to add to.
    """
    left_out = ended == UNFINISHED
    if left_out.any():
        counts = table.loc[left_out, column].value_counts()
        named = ", ".join(f"{n} {state}" for state, n in counts.items())
        notes.append(f"{named} runs left out: they say nothing of their trial")
    return table[~left_out], ended[~left_out]


def standard_form(
    table: pd.DataFrame, columns: Columns, ended: pd.Series, read: Callable[[str, str], pd.Series]
) -> pd.DataFrame:
    """Rows of a table under the names that an analysis has for their columns.

    Args:
        table: rows of any names.
        columns: these names.
        ended: FINISHED, DIVERGED or STOPPED of each row.
        read: numbers of a column, called with the name here and the one in the table.

    Returns:
        compared, scale, value (of the hyperparameter), loss, seed, ended, loss_error, step, params, tokens,
        cost, purchase, trial_id.
    """

    def known(part: str, column: str) -> pd.Series:
        return read(part, column) if column in table else pd.Series(np.nan, index=table.index)

    return pd.DataFrame(
        {
            "compared": _names(table, columns.parametrization, "all").astype(str),
            "scale": read("scale", columns.scale),
            "value": read("value", columns.hyperparameter),
            "loss": read("loss", columns.loss),
            "seed": _names(table, columns.seed, 0),
            "ended": ended,
            "loss_error": known("loss_error", columns.loss_error),
            "step": known("step", columns.step),
            "params": known("params", columns.params),
            "tokens": known("tokens", columns.tokens),
            "cost": known("cost", cost_column(table, columns)[0]),
            "purchase": known("purchase", columns.purchase).fillna(0),
            "trial_id": table.get("trial_id", ""),
        }
    )


def _names(table: pd.DataFrame, column: str, default: object) -> pd.Series:
    """A column that tells runs apart: a value in every row, or in none."""
    values = table[column] if column in table else pd.Series(default, index=table.index)
    empty = values.isna()
    if empty.all():
        return pd.Series(default, index=table.index)
    if empty.any():
        raise TableError(f"{column} is empty in row {values.index[empty][0]}{_more(values.index[empty])}")
    return values.map(str) if values.dtype == object else values


def on_axis(
    rows: pd.DataFrame, table: pd.DataFrame, columns: Columns, chance: float | None, notes: list[str]
) -> pd.DataFrame:
    """Rows of `standard_form` with x and stopped, and a loss of +inf where a run was lost.

    A value of 0 has x = -inf.

    Args:
        rows: as `standard_form` returns them; they may be of several steps.
        table: the same rows under their own names.
        columns: these names.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        notes: list to add to.

    Raises:
        TableError: no run finished, a scale or value is out of range, or one run has two losses.
    """
    _require_in_range(rows, columns)
    runs = rows.assign(stopped=rows["ended"] == STOPPED)
    is_lost = (runs["ended"] != FINISHED) | runs["loss"].isna()
    if chance is not None:
        is_lost |= runs["loss"] >= chance
    runs["loss"] = runs["loss"].mask(is_lost, np.inf)
    with np.errstate(divide="ignore"):
        runs["x"] = np.log2(runs["value"])
    runs["x"] = _merged(runs, notes)
    return _distinct(runs, table, columns, notes)


def table_of(
    runs: pd.DataFrame,
    columns: Columns,
    name: str,
    notes: Sequence[str],
    cost_unit: str = "",
    **more: Any,
) -> RunTable:
    """The table of runs on their axis, one row each, with notes on lost runs, zeros and unequal seeds.

    Raises:
        TableError: the hyperparameter is 0 in every run.
    """
    found = [*notes]
    if stopped := int(runs["stopped"].sum()):
        found.append(
            f"{stopped} runs stopped early kept, as +inf: they bound the optimum, and no fit uses their loss"
        )
    if diverged := int((np.isinf(runs["loss"]) & ~runs["stopped"]).sum()):
        found.append(f"{diverged} diverged runs kept, as +inf")
    at_zero = runs["value"] == 0
    if at_zero.any():
        found.append(
            f"{int(at_zero.sum())} runs at {columns.hyperparameter} 0 are a point of their own: "
            "0 has no log2, and no fit uses them"
        )
    if at_zero.all():
        raise TableError(f"{columns.hyperparameter} is 0 in every run: give runs above 0 to fit")
    seeds = runs[~at_zero].groupby(["compared", "scale", "x"])["x"].count()
    if seeds.nunique() > 1:
        found.append(
            f"unequal seeds: cells have {seeds.min()} to {seeds.max()} runs; "
            "means come from a model with an effect of each seed"
        )
    kept = runs.drop(columns=["ended", "value", "step"])
    scale, tuned = short_name(columns.scale), short_name(columns.hyperparameter)
    if scale != tuned:
        columns = replace(columns, scale=scale, hyperparameter=tuned)
    zeros = kept[at_zero].drop(columns="x").reset_index(drop=True)
    kept = kept[~at_zero].reset_index(drop=True)
    return RunTable(kept, tuple(found), columns, name, cost_unit, zeros=zeros, **more)


def _require_in_range(runs: pd.DataFrame, columns: Columns) -> None:
    if not (runs["ended"] == FINISHED).any():
        raise TableError("table has no finished run")
    plain = " (are these log2 values? the column takes plain ones)"
    for column, part, is_allowed, allowed, hint in (
        (columns.loss, "loss", runs["loss"] != -np.inf, "above -inf", ""),
        (columns.scale, "scale", runs["scale"] > 0, "above 0", ""),
        (columns.scale, "scale", np.isfinite(runs["scale"]), "finite", ""),
        (columns.hyperparameter, "value", runs["value"] >= 0, "0 or more", plain),
        (columns.hyperparameter, "value", np.isfinite(runs["value"]), "finite", plain),
    ):
        bad = runs.loc[~is_allowed, part]
        if len(bad):
            raise TableError(
                f"{column} must be {allowed}, but row {bad.index[0]} has {bad.iloc[0]:g}{_more(bad)}{hint}"
            )


def require_above_zero(name: str, value: float) -> None:
    """Check a setting of an analysis.

    Raises:
        TableError: it is not a finite number above 0.
    """
    if not (value > 0 and np.isfinite(value)):
        raise TableError(f"{name} {value:g} is not allowed: it must be a finite number above 0")


def _merged(runs: pd.DataFrame, notes: list[str]) -> pd.Series:
    """X with values within MERGE_OCTAVES of each other at the least of them."""
    values = np.sort(runs["x"].unique())
    merged: dict[float, float] = {}
    current = -np.inf
    for value in values[np.isfinite(values)].tolist():
        if value - current > MERGE_OCTAVES:
            current = value
        else:
            merged[value] = current
    if not merged:
        return runs["x"]
    x = runs["x"].map(merged).fillna(runs["x"])
    same = [x, *(runs[column] for column in ("compared", "scale", "seed", "step"))]
    if (runs["x"].groupby(same, dropna=False).nunique() > 1).any():
        return runs["x"]
    notes.append(f"{len(merged)} values within {MERGE_OCTAVES} octave of another were merged with it")
    return x


def _distinct(runs: pd.DataFrame, table: pd.DataFrame, columns: Columns, notes: list[str]) -> pd.DataFrame:
    """Runs without identical repeats."""
    key = [*RUN, "step"]
    doubled = runs[runs.duplicated(key, keep=False)]
    if doubled.empty:
        return runs
    clashing = doubled[doubled.groupby(key, dropna=False)["loss"].transform("nunique") > 1]
    if len(clashing):
        first = clashing.iloc[0]
        differ = differences(table, clashing.index[(clashing[RUN] == first[RUN]).all(axis=1)], columns)
        raise TableError(
            f"two runs of {first['compared']}, scale {first['scale']:g}, {power(first['x'])}, seed "
            f"{first['seed']} have different losses{_more(clashing.groupby(key, dropna=False).groups)}; they "
            f"differ in {differ or 'nothing but their loss: give the column of the seed, or drop one'}"
        )
    notes.append(f"{int(runs.duplicated(key).sum())} identical duplicate rows dropped")
    return runs.drop_duplicates(key)


def power(x: float) -> str:
    """A value by its log2: "2^-8", or "0"."""
    return "0" if x == -np.inf else f"2^{x:.4g}"


def _more(rows: Sized) -> str:
    return f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
