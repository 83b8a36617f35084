"""Run tables: one row per run, the hyperparameter as its log2, lost runs as +inf; and what runs cost.

`load.py` names the columns of a results folder, `ingest/` of anybody's table; `standard_form.py` does the
rest.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, list_of, means, plain_name, short_name
from mup_tpu.analysis.reasons import Reason
from mup_tpu.config import on_one_line
from mup_tpu.config.columns import CONFIGURED
from mup_tpu.errors import TableError
from mup_tpu.store import STUDY_COLUMNS, Condition

# How a run ended. An unfinished run has no result.
FINISHED, DIVERGED, STOPPED, UNFINISHED = "finished", "diverged", "stopped", "unfinished"
REFUSED = "refused"  # by a condition that an optimum has to meet
ENDS = pd.CategoricalDtype([FINISHED, DIVERGED, STOPPED, UNFINISHED, REFUSED])


def each_of(name: str, runs: pd.DataFrame) -> list[str]:
    """Return the columns of runs for all scales ("scale"), or of all tuned values ("x")."""
    return [name, *(column for column in map(str, runs) if re.fullmatch(name + r"\d", column))]


def run_key(runs: pd.DataFrame) -> list[str]:
    """Return the columns that name a run."""
    return ["compared", *each_of("scale", runs), *each_of("x", runs), "seed"]


@dataclass(frozen=True, repr=False)
class RunTable:
    """A checked table, and notes on it."""

    runs: pd.DataFrame
    """One row per run: compared (as a parametrization), scale, x (log2 of the hyperparameter), loss
    (+inf where diverged or stopped), stopped (early, for being behind, or refused by a condition), refused,
    seed, purchase (0 outside a sequence), and loss_error, params, tokens, cost (nan if unknown). Of several
    scales the others are scale2, scale3 …, of several hyperparameters x2, x3 …."""
    notes: tuple[Reason, ...]
    columns: Columns
    name: str
    cost_unit: str = ""  # Unit of the column cost
    command: str | None = None
    """Command line that adds runs, where one is known."""
    history: pd.DataFrame | None = None
    """Training losses by step, where known: compared, scale, x, seed, step, loss."""
    rows: pd.DataFrame | None = None  # As they were read from a file, folder or tracker, with all columns
    stored: pd.DataFrame | None = None
    """Rows of the results folder, which say how the runs were made; None for other tables."""
    planned: tuple[float, ...] = ()
    """Scales of a sequence, which has a look after each purchase; none for a table with one look."""
    chance: float = math.nan  # Loss of guessing, nat per token; nan if it is not given

    def __repr__(self) -> str:
        scales = ", ".join(f"{scale:g}" for scale in sorted(self.runs["scale"].unique()))
        compared = ", ".join(sorted(self.runs["compared"].unique()))
        return f"{self.name}: {len(self.runs)} runs of {compared} at {self.columns.scale} {scales}"

    @property
    def guessing(self) -> float:
        """Return the loss of guessing: as given, or at least that of the first steps; nan if unknown."""
        if self.history is None or math.isfinite(self.chance):
            return self.chance
        losses = self.history["loss"]
        return float(losses[np.isfinite(losses)].max())

    def alone(self, number: int) -> RunTable:
        """Return the table of one of several hyperparameters alone."""
        columns = replace(self.columns, hyperparameter=self.columns.tuned[number], tuned_beside=())
        runs = self.runs.assign(x=self.runs[each_of("x", self.runs)[number]])
        return replace(self, runs=runs, columns=columns)

    def part(self, keep: Callable[[pd.DataFrame], pd.Series]) -> RunTable:
        """Return the table of the runs that a mask of each frame's rows keeps, with their history."""

        def kept(frame: pd.DataFrame) -> pd.DataFrame:
            return frame[keep(frame)] if len(frame) else frame

        history = None if self.history is None else kept(self.history)
        return replace(self, runs=kept(self.runs), history=history)


def power(x: float) -> str:
    return "0" if x == -np.inf else f"2^{x:.4g}"


DATA = ("dataset", "data_fingerprint")  # columns that change with a field of the data
# Columns of a results folder that have one value in all rows, except along the axes; `DATA` stands for the
# corpus
STORED_FIXED = (*(name for name in CONFIGURED if name not in ("seed", "data_seed", "corpus")), *DATA)


def rows_of(rows: pd.DataFrame, column: str, rule: str) -> pd.DataFrame:
    """Return the rows whose column has the rule, or all rows where none has it."""
    is_rule = rows[column].astype(str) == rule if column in rows else None
    return rows if is_rule is None or not is_rule.any() else rows[is_rule]


def select(table: pd.DataFrame, where: Sequence[Condition]) -> pd.DataFrame:
    """Select the rows that meet all conditions."""
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
    values = table[column]
    try:
        numbers, bound = values.astype(float), condition.bound()
    except (ValueError, TypeError, TableError):
        if condition.relation != "=":
            raise TableError(f"where {str(condition)!r}: column {column!r} has no numbers") from None
        return values.astype(str).str.lower() == condition.value.lower(), column
    relations = {"=": "eq", ">=": "ge", "<=": "le", ">": "gt", "<": "lt"}
    return getattr(numbers, relations[condition.relation])(bound), column


def selected_scales(scales: Iterable[float], column: str, where: Sequence[Condition]) -> tuple[float, ...]:
    """Return the scales that meet the conditions on their column."""
    left = pd.DataFrame({column: [*scales]}, dtype=float)
    for condition in where:
        left = left[meets(left, condition)[0]] if condition.column == column else left
    return tuple(left[column])


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


_PARTS = ("optimizer", "train", "model", "data")  # parts of a trial in the order of their columns


def varied(runs: pd.DataFrame) -> list[str]:
    """Return the columns of configured numbers that vary in a run table, without seeds."""
    columns = sorted(CONFIGURED.values(), key=lambda column: _PARTS.index(column.part))
    if "data_fingerprint" in runs:  # our networks
        names = [c.name for c in columns if c.type in (int, float) and c.field not in ("seed", "data_seed")]
    else:
        names = [c for c in map(str, runs) if c not in STUDY_COLUMNS and runs[c].dtype.kind in "if"]
    return [name for name in names if runs[name].nunique() > 1]


def ranked(runs: pd.DataFrame) -> pd.DataFrame:
    """Sort trials of a search: finished ones by loss, then stopped ones by their steps, then the others."""
    order = runs["status"].map({"finished": 0, "stopped": 1, "diverged": 2}).fillna(3)
    keys = pd.DataFrame({"order": order, "steps": -runs["steps_done"], "loss": runs["loss"]})
    return runs.loc[keys.sort_values([*keys]).index].reset_index(drop=True)


def of_status(trials: pd.DataFrame, status: str) -> pd.DataFrame:
    return trials[(trials["status"] == status) & ((status == "diverged") | np.isfinite(trials["loss"]))]


_MOST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Cost:
    """Cost of a run as a power of its scale."""

    exponent: float
    at_one: float  # Cost at scale 1
    unit: str  # "s", "FLOP", a column of the table, or "runs": of the smallest scale
    scale: str = ""  # Column of the scale
    smallest: float = math.nan
    """Scale of one run of the unit "runs"; nan with another unit, or before anything was run."""

    @property
    def is_measured(self) -> bool:
        return self.unit != "runs"

    def of(self, scale: float) -> float:
        return _exp(math.log(self.at_one) + self.exponent * math.log(scale))


def run_cost(table: RunTable) -> Cost:
    """Return the cost of a run by scale: measured where the table says, else ∝ width² or the scale itself."""
    exponent = 2.0 if means(table.columns.scale) == "width" else 1.0
    smallest = float(table.runs["scale"].min())
    known = table.runs[(table.runs["cost"] > 0) & np.isfinite(table.runs["loss"])]
    mean_costs = known.groupby("scale")["cost"].mean()
    if mean_costs.empty:
        at_one = _exp(-exponent * math.log(smallest))
        return Cost(exponent, at_one, "runs", table.columns.scale, smallest)
    if len(mean_costs) > 1:
        exponent = max(0.0, float(np.polyfit(np.log2(mean_costs.index), np.log2(mean_costs), 1)[0]))
    at_one = _exp(float(np.mean(np.log(mean_costs) - exponent * np.log(mean_costs.index))))
    return Cost(exponent, at_one, table.cost_unit, table.columns.scale)


def _exp(x: float) -> float:
    return math.inf if x > _MOST else max(math.exp(x), sys.float_info.min)
