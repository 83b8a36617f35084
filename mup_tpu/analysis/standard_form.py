"""Tables of named columns in standard form: one way for our own rows and for anybody's.

A fault stops with one sentence, which names column and value; an oddity becomes a note, which every output
repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, means, short_name
from mup_tpu.analysis.ingest.table_shapes import at_logged_steps, last_steps
from mup_tpu.analysis.ingest.table_values import (
    AUTO,
    NO_STATES,
    LossUnit,
    States,
    meanings,
    numbers,
    plain_sizes,
)
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.rows import (
    confounded,
    cost_column,
    differences,
    meets,
    require_columns,
    require_one_kind,
    varying,
)
from mup_tpu.analysis.run_table import (
    FINISHED,
    REFUSED,
    RUN,
    STOPPED,
    UNFINISHED,
    RunTable,
    power,
    require_above_zero,
)
from mup_tpu.errors import TableError
from mup_tpu.store import Condition

MERGE_OCTAVES = 0.02  # distance below which two learning rates are one: they differ by rounding
_NEEDED = ("scale", "value", "loss", "loss_error", "step")


def standard_form(
    table: pd.DataFrame,
    columns: Columns,
    fixed: Iterable[str],
    notes: list[Reason],
    name: str = "table",
    chance: float | None = None,
    states: States = NO_STATES,
    unit: LossUnit = AUTO,
    only: Sequence[Condition] = (),
) -> RunTable:
    """Check rows and bring them into standard form.

    Args:
        table: rows of runs, or of steps of runs.
        columns: names of their columns.
        fixed: columns that have one value, except along the axes.
        notes: list to add to.
        name: name of the table, for titles.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        states: meaning of states of runs that are not known.
        unit: of the loss.
        only: conditions on an optimum: runs that fail one count as lost.

    Raises:
        TableError: a column is missing, a value is impossible, or runs of different kinds are mixed.
    """
    if chance is not None:
        require_above_zero("chance", chance)
    require_columns(table, columns)
    table, ended = _with_result(table, columns, states, notes)
    table, ended = _with_metrics(table, ended, columns, notes)
    for condition in only:
        refused = (ended == FINISHED) & ~meets(table, condition)[0]
        ended = ended.mask(refused, REFUSED)
        notes.append(Reason.of("refused by conditions", count=int(refused.sum()), conditions=str(condition)))
    rows = _named(table, columns, ended, notes)
    require_one_kind(table, columns, fixed)
    rows, columns, converted = unit.convert(rows, columns)
    notes += [] if converted is None else [converted]
    chance = -chance if chance is not None and columns.maximized else chance
    _require_in_range(rows, columns)
    runs, history = _on_axis(at_logged_steps(rows), table, columns, chance, notes), None
    if runs["step"].notna().any():
        runs, history = last_steps(runs, columns.step, notes)
    notes += varying(table, runs, columns)
    notes += [] if {"trial_id", "config"} <= set(table) else confounded(table, runs, columns)
    notes += _oddities(runs, columns)
    scale, tuned = short_name(columns.scale), short_name(columns.hyperparameter)
    named = replace(columns, scale=scale, hyperparameter=tuned) if scale != tuned else columns
    kept = runs.drop(columns=["ended", "value", "step"])
    is_zero, is_first = runs["value"] == 0, runs["scale"] == 0
    return RunTable(
        kept[~is_zero & ~is_first].reset_index(drop=True),
        tuple(notes),
        named,
        name,
        cost_column(table, columns)[1],
        history=None if history is None else history[history["scale"] > 0],
        zeros=kept[is_zero].drop(columns="x").reset_index(drop=True),
        at_scale_0=kept[~is_zero & is_first].reset_index(drop=True),
    )


def _with_result(
    table: pd.DataFrame, columns: Columns, states: States, notes: list[Reason]
) -> tuple[pd.DataFrame, pd.Series]:
    column = columns.status
    if column == Columns().status and column not in table:  # trackers export it as State
        alike = [c for c in table.columns if str(c).lower() in ("status", "state")]
        column = alike[0] if alike else ""
    if column == "" or column not in table or table[column].isna().all():
        return table, pd.Series(FINISHED, index=table.index)
    ended = meanings(table[column], states)
    left_out = ended == UNFINISHED
    if left_out.any():
        counts = table.loc[left_out, column].value_counts()
        notes.append(Reason.of("states left out", counts={str(s): int(n) for s, n in counts.items()}))
    return table[~left_out], ended[~left_out]


def _with_metrics(
    table: pd.DataFrame, ended: pd.Series, columns: Columns, notes: list[Reason]
) -> tuple[pd.DataFrame, pd.Series]:
    """Rows of runs that have a metric at all: a tracker that lost a run's summary says nothing of its end.

    A run that diverged has some metric, such as its training loss.
    """
    metrics = [name for name in table if means(name) == "loss"]
    if len(metrics) < 2 or columns.step in table:
        return table, ended
    is_lost = table[metrics].isna().all(axis=1) & (ended == FINISHED)
    if not is_lost.any() or is_lost.all():
        return table, ended
    notes.append(Reason.of("runs without a metric", count=int(is_lost.sum())))
    return table[~is_lost], ended[~is_lost]


def _named(table: pd.DataFrame, columns: Columns, ended: pd.Series, notes: list[Reason]) -> pd.DataFrame:
    def known(part: str, column: str) -> pd.Series:
        if column not in table:
            return pd.Series(np.nan, index=table.index)
        return _numbers(table, part, column, notes)

    return pd.DataFrame(
        {
            "compared": _names(table, columns.parametrization, "all").astype(str),
            "scale": known("scale", columns.scale),
            "value": known("value", columns.hyperparameter),
            "loss": known("loss", columns.loss),
            "seed": _names(table, columns.seed, 0),
            "ended": ended,
            "loss_error": known("loss_error", columns.loss_error),
            "step": known("step", columns.step),
            "params": known("params", columns.params),
            "tokens": known("tokens", columns.tokens),
            "cost": known("cost", cost_column(table, columns)[0]),
            "purchase": known("purchase", columns.purchase).fillna(0),
            **({"trial_id": table["trial_id"]} if "trial_id" in table else {}),
        }
    )


def _names(table: pd.DataFrame, column: str, default: object) -> pd.Series:
    values = table[column] if column in table else pd.Series(default, index=table.index)
    empty = values.isna()
    if empty.all():
        return pd.Series(default, index=table.index)
    if empty.any():
        raise TableError(f"{column} is empty in row {values.index[empty][0]}{_more(values.index[empty])}")
    return values.map(str) if values.dtype == object else values


def _numbers(table: pd.DataFrame, part: str, column: str, notes: list[Reason]) -> pd.Series:
    hint = "; leave it empty, or inf, where a run diverged" if part == "loss" else ""
    try:
        is_size = part in ("scale", "params", "tokens")
        values = numbers(plain_sizes(table[column]) if is_size else table[column], column, hint, table)
        if part == "purchase":
            _require_counted(values, column)
    except TableError as error:
        if part in _NEEDED:
            raise
        notes.append(Reason.of("column not used", error=str(error)))
        return pd.Series(np.nan, index=table.index)
    return values


def _require_counted(values: pd.Series, column: str) -> None:
    bad = values.index[values.notna() & ~((values >= 0) & (values % 1 == 0) & (values < 2**31))]
    if len(bad):
        raise TableError(f"{column} must be whole and 0 or more, but row {bad[0]} has {values[bad[0]]:g}")


def _require_in_range(rows: pd.DataFrame, columns: Columns) -> None:
    if not (rows["ended"] == FINISHED).any():
        raise TableError("table has no finished run")
    plain = " (are these log2 values? the column takes plain ones)"
    is_size = means(columns.scale) in ("width", "depth", "size")
    scale_allowed = (rows["scale"] > 0, "above 0") if is_size else (rows["scale"] >= 0, "0 or more")
    for column, part, is_allowed, allowed, hint in (
        (columns.loss, "loss", rows["loss"] != -np.inf, "above -inf", ""),
        (columns.scale, "scale", *scale_allowed, ""),
        (columns.scale, "scale", np.isfinite(rows["scale"]), "finite", ""),
        (columns.hyperparameter, "value", rows["value"] >= 0, "0 or more", plain),
        (columns.hyperparameter, "value", np.isfinite(rows["value"]), "finite", plain),
    ):
        bad = rows.loc[~is_allowed, part]
        if len(bad):
            raise TableError(
                f"{column} must be {allowed}, but row {bad.index[0]} has {bad.iloc[0]:g}{_more(bad)}{hint}"
            )
    for column, part in ((columns.hyperparameter, "value"), (columns.scale, "scale")):
        if (rows[part] == 0).all():
            raise TableError(f"{column} is 0 in every run: give runs above 0 to fit")


def _on_axis(
    rows: pd.DataFrame, table: pd.DataFrame, columns: Columns, chance: float | None, notes: list[Reason]
) -> pd.DataFrame:
    """Distinct rows with x and stopped, and a loss of +inf if a run was lost.

    A value of 0 has x = -inf. The rows may be of several steps.

    Raises:
        TableError: one run has two losses.
    """
    runs = rows.assign(stopped=rows["ended"].isin([STOPPED, REFUSED]))
    is_lost = (runs["ended"] != FINISHED) | runs["loss"].isna()
    if chance is not None:
        is_lost |= runs["loss"] >= chance
    runs["loss"] = runs["loss"].mask(is_lost, np.inf)
    with np.errstate(divide="ignore"):
        runs["x"] = np.log2(runs["value"])
    runs["x"] = _merged(runs, notes)
    return _distinct(runs, table, columns, notes)


def _merged(runs: pd.DataFrame, notes: list[Reason]) -> pd.Series:
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
    notes.append(Reason.of("values merged", count=len(merged), octaves=MERGE_OCTAVES))
    return x


def _distinct(runs: pd.DataFrame, table: pd.DataFrame, columns: Columns, notes: list[Reason]) -> pd.DataFrame:
    """Runs without identical repeats."""
    key = [*RUN, "step"]
    varying_key = [name for name in key if runs[name].nunique(dropna=False) > 1] or key
    doubled = runs[runs.duplicated(varying_key, keep=False)]
    if doubled.empty:
        return runs
    clashing = doubled[doubled.groupby(key, dropna=False)["loss"].transform("nunique") > 1]
    if len(clashing):
        first = clashing.iloc[0]
        differ = differences(table, clashing.index[(clashing[RUN] == first[RUN]).all(axis=1)], columns)
        if not differ and columns.seed not in table and runs["step"].isna().all():
            notes.append(Reason.of("repeats are seeds"))
            return runs.assign(seed=runs.groupby(RUN).cumcount())
        raise TableError(
            f"two runs of {first['compared']}, scale {first['scale']:g}, {power(first['x'])}, seed "
            f"{first['seed']} have different losses{_more(clashing.groupby(key, dropna=False).groups)}; they "
            f"differ in {differ or 'nothing but their loss: give the column of the seed, or drop one'}"
        )
    notes.append(Reason.of("duplicates dropped", count=int(runs.duplicated(key).sum())))
    return runs.drop_duplicates(key)


def _oddities(runs: pd.DataFrame, columns: Columns) -> list[Reason]:
    notes = []
    if stopped := int((runs["ended"] == STOPPED).sum()):
        notes.append(Reason.of("runs stopped early", count=stopped))
    if diverged := int((np.isinf(runs["loss"]) & ~runs["stopped"]).sum()):
        notes.append(Reason.of("runs diverged", count=diverged))
    at_zero = runs["value"] == 0
    if at_zero.any():
        notes.append(Reason.of("runs at 0", count=int(at_zero.sum()), column=columns.hyperparameter))
    if (runs["scale"] == 0).any():
        count = int((runs["scale"] == 0).sum())
        notes.append(Reason.of("runs at scale 0", count=count, column=columns.scale))
    seeds = runs[~at_zero].groupby(["compared", "scale", "x"])["x"].count()
    if seeds.nunique() > 1:
        notes.append(Reason.of("unequal seeds", least=int(seeds.min()), most=int(seeds.max())))
    return notes


def _more(rows: Sized) -> str:
    return f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
