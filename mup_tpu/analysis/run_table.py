"""Any run table, checked before a number is drawn from it.

What is wrong stops the analysis with one sentence naming the column and the values; what is odd but usable is
kept as a note, which every output repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns, find_columns, list_of, short_name
from mup_tpu.analysis.ingest.table_files import is_file, read_file
from mup_tpu.analysis.ingest.table_shapes import as_rows
from mup_tpu.analysis.ingest.table_values import (
    FINISHED,
    NO_STATES,
    STOPPED,
    UNFINISHED,
    States,
    meanings,
    numbers,
)
from mup_tpu.analysis.ingest.trackers import is_tracked, read_tracked
from mup_tpu.config import field_column, on_one_line
from mup_tpu.config.columns import CONFIGURED, label
from mup_tpu.errors import TableError
from mup_tpu.store import load_axes, load_curves, load_planned, load_question, load_runs
from mup_tpu.store.conditions import Condition

MERGE_OCTAVES = 0.02
"""Learning rates closer than this are one: they differ by rounding."""

_RUN = ["parametrization", "scale", "x", "seed"]
_HISTORY = [*_RUN, "step", "loss"]

_COSTS = {"wall_time_s": "s", "flops": "FLOP"}
"""Columns of what a run cost, with their units."""

_SAME = (
    "dataset", "data_fingerprint", "steps_planned", "steps", "batch_size", "sequence_length", "width",
    "depth", "lr", "weight_decay", "init_std", "loss_kind", "optimizer",
)  # fmt: skip
"""Columns of any table that a comparison must hold fixed, unless they are what is compared. In a store, where
every column is known, all that were configured are, but for seeds."""


def default_columns(path: str | Path) -> Columns:
    """The columns of a table where none are named: those of a results folder's sweep, or width and lr."""
    if is_file(path) or is_tracked(path):
        return Columns()
    axes = load_axes(path)
    along = tuple(
        field_column(field) for axis in (axes.scale, axes.tune, axes.compare) for field in axis.fields
    )
    data = {"corpus", "max_documents", "text_column", "tokenizer", "vocab_size", "validation_fraction"}
    along += ("dataset", "data_fingerprint") if data & {*axes.scale.fields, *axes.compare.fields} else ()
    return Columns(axes.scale.column, axes.tune.column, parametrization=axes.compare.column, along=along)


@dataclass(frozen=True)
class RunTable:
    """A checked table and what was noticed on the way."""

    runs: pd.DataFrame
    """One row a run: parametrization, scale, x (log2 of the hyperparameter), loss (+inf where diverged or
    stopped), stopped (early, for being behind), seed, purchase (0 where it came with none), and loss_error,
    params, tokens, cost (nan where unknown)."""
    notes: tuple[str, ...]
    columns: Columns
    name: str
    cost_unit: str = ""
    """Of the column cost."""
    command: str | None = None
    """Command line that adds runs to the table, where it is a store that an experiment's script made."""
    history: pd.DataFrame | None = field(default=None, repr=False)
    """Training losses on the way, where known: parametrization, scale, x, seed, step, loss."""
    stored: pd.DataFrame | None = field(default=None, repr=False)
    """The rows as they are stored, where the table is a store; they say how the runs were made."""
    planned: tuple[float, ...] = ()
    """Scales of the sequence that the table is of: it is looked at after each purchase, not once."""
    zeros: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)
    """Runs whose hyperparameter is 0, which has no place on a log2 axis; columns as `runs`, without x."""

    def part(self, keep: Callable[[pd.DataFrame], pd.Series]) -> RunTable:
        """The table of some rows, on the way and at 0 too.

        Args:
            keep: says of a frame of rows which to keep.
        """
        history = None if self.history is None else self.history[keep(self.history)]
        zeros = self.zeros[keep(self.zeros)] if len(self.zeros) else self.zeros
        return replace(self, runs=self.runs[keep(self.runs)], history=history, zeros=zeros)


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
        chance: loss of guessing; runs at or above it count as diverged.
        where: conditions on the rows to take; by default those that a results folder asks for.
        states: what states of runs mean, where they are not known.

    Raises:
        TableError: it is no table, or cannot be analysed as it is.
        StoreError: the results folder holds no runs.
    """
    name = Path(str(path)).name
    columns = columns or default_columns(path)
    if is_file(path) or is_tracked(path):
        table = read_file(path) if is_file(path) else read_tracked(path)
        return check_table(select(table, where or ()), columns, chance, name, states)
    asked = load_question(path) if where is None else ()
    where = where or asked
    stored, curves = select(load_runs(path), where), load_curves(path)
    checked = check_table(stored, columns, chance, name, states)
    if asked:
        note = f"as the folder asks: {', '.join(condition.words for condition in asked)}"
        checked = replace(checked, notes=(*checked.notes, note))
    on_the_way = curves[curves["split"] == "train"][["trial_id", "step", "loss"]]
    history = checked.runs.drop(columns="loss").merge(on_the_way, on="trial_id")[_HISTORY]
    planned = load_planned(path) if columns.scale == load_axes(path).scale.column else ()
    checked = replace(checked, command=_command(path, stored), history=history, stored=stored)
    return _only_planned(checked, asked_about(planned, columns.scale, where)) if planned else checked


def asked_about(scales: Iterable[float], column: str, where: Sequence[Condition]) -> tuple[float, ...]:
    """The scales that meet what the conditions say of their column: no other is to come."""
    left = pd.Series(list(scales), dtype=float)
    for condition in where:
        if condition.column == column:
            left = left[_meets(left, condition)]
    return tuple(left)


def _only_planned(table: RunTable, planned: tuple[float, ...]) -> RunTable:
    """The part of a table that a sequence asks about: its planned scales."""
    part = table.part(lambda frame: frame["scale"].isin(planned))
    left_out = sorted(set(table.runs["scale"]) - set(planned))
    note = f"{table.columns.scale} {', '.join(f'{s:g}' for s in left_out)} left out: the sequence plans none"
    return replace(part, notes=(*table.notes, note) if left_out else table.notes, planned=planned)


def select(table: pd.DataFrame, where: Sequence[Condition]) -> pd.DataFrame:
    """The rows that meet all conditions.

    Raises:
        TableError: there is no such column, or no such row, or a column that is compared has no numbers.
    """
    for condition in where:
        column = condition.column
        if column not in table and len(alike := [c for c in map(str, table) if short_name(c) == column]) == 1:
            column = alike[0]
        if column not in table:
            raise TableError(f"where: {_no_column(table, column)}")
        chosen = _meets(table[column], condition)
        if not chosen.any():
            there = ", ".join(sorted(set(table[column].dropna().astype(object).map(on_one_line)))[:6])
            raise TableError(f"where: no row has {_said(condition)}; there are {there}")
        table = table[chosen]
    return table.reset_index(drop=True)


def _said(condition: Condition) -> str:
    return f"{condition.column} {condition.value}" if condition.relation == "=" else str(condition)


def _meets(values: pd.Series, condition: Condition) -> pd.Series:
    try:
        held = values.astype(float)
        bound = condition.bound()
    except (ValueError, TypeError, TableError):
        if condition.relation != "=":
            raise TableError(
                f"where {str(condition)!r}: column {condition.column!r} has no numbers"
            ) from None
        return values.astype(str).str.lower() == condition.value.lower()
    return (
        held == bound
        if condition.relation == "="
        else held >= bound
        if condition.relation == ">="
        else held <= bound
    )


def _command(path: str | Path, stored: pd.DataFrame) -> str | None:
    """Command line that adds runs to a store, where a script of this checkout made it."""
    experiment = str(stored["experiment"].iloc[0])
    script = Path("experiments") / f"{experiment.removesuffix('_h200')}.py"
    preset = " --preset h200" if experiment.endswith("_h200") else ""
    is_there = (Path(__file__).parents[2] / script).exists()
    return f"python {script}{preset} --results {path}" if is_there else None


def check_table(
    table: pd.DataFrame,
    columns: Columns = Columns(),
    chance: float | None = None,
    name: str = "table",
    states: States = NO_STATES,
) -> RunTable:
    """Check a table and bring it into standard form.

    Args:
        table: one row a run or a step of one, or a column for each width or learning rate.
        columns: names of its columns; those that are not named are told by their usual names.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        name: what to call it.
        states: what states of runs mean, where they are not known.

    Raises:
        TableError: a column is missing, a value is impossible, or runs of different kinds are mixed.
    """
    if chance is not None:
        require_above_zero("chance", chance)
    notes: list[str] = []
    table = table.reset_index(drop=True)
    if not _is_ours(table):
        table, shaped = as_rows(table, columns)
        table, columns, guessed = find_columns(table, columns)
        notes += [*shaped, *guessed]
    _check_columns(table, columns)
    table, status = _with_result(table, columns, states, notes)
    runs = _standard_form(table, status, columns, notes)
    _check_positive(table, runs, columns)
    _check_same(table, columns)
    runs = _at_logged_steps(runs)
    runs = _judge_losses(runs, chance, notes)
    zeros = runs[runs["value"] == 0].drop(columns=["status", "value", "step"])
    runs = runs[runs["value"] > 0].copy()
    if len(zeros):
        notes.append(
            f"{len(zeros)} runs at {columns.hyperparameter} 0 are a point of their own: 0 has no log2, and "
            "no fit uses them"
        )
    if runs.empty:
        raise TableError(f"{columns.hyperparameter} is 0 in every run: give runs above 0 to fit")
    runs["x"] = np.log2(runs["value"])
    _merge_close(runs, notes)
    runs = _drop_duplicates(runs, notes)
    history = None
    if runs["step"].notna().any():
        last = _last_steps(runs, columns.step, notes)
        whole = pd.MultiIndex.from_frame(runs[_RUN]).isin(pd.MultiIndex.from_frame(last[_RUN]))
        history = runs.loc[whole, _HISTORY].sort_values(_HISTORY[:-1], ignore_index=True)
        runs = last
    _note_unequal_seeds(runs, notes)
    runs = runs.drop(columns=["status", "value", "step"]).reset_index(drop=True)
    return RunTable(
        runs,
        tuple(notes),
        _with_short_names(columns),
        name,
        _cost(table, columns)[1],
        history=history,
        zeros=zeros.reset_index(drop=True),
    )


def _is_ours(table: pd.DataFrame) -> bool:
    """Whether a table is of a store, where every column is known."""
    return {"trial_id", "config"} <= set(table)


def _with_short_names(columns: Columns) -> Columns:
    """The names that figures and sentences call a checked table's axes by."""
    scale, tuned = short_name(columns.scale), short_name(columns.hyperparameter)
    return replace(columns, scale=scale, hyperparameter=tuned) if scale != tuned else columns


def _cost(table: pd.DataFrame, columns: Columns) -> tuple[str, str]:
    """Column of what a run cost, and its unit; "" where there is none."""
    if columns.cost:
        return columns.cost, _COSTS.get(columns.cost, columns.cost)
    return next(((column, unit) for column, unit in _COSTS.items() if column in table), ("", ""))


def _check_columns(table: pd.DataFrame, columns: Columns) -> None:
    """Columns that are needed, and those that were named, must be there, each once and for one thing."""
    needed = (columns.scale, columns.hyperparameter, columns.loss)
    missing = [column for column in needed if column not in table]
    usual = Columns()
    for f in fields(columns):
        named = getattr(columns, f.name)
        if f.name != "along" and named and named != getattr(usual, f.name) and named not in table:
            missing += [named] if named not in missing else []
    if missing:
        raise TableError(_no_column(table, *missing))
    if len(set(needed)) < len(needed):
        raise TableError(f"scale, hyperparameter and loss must be three columns, not {', '.join(needed)}")
    if not table.columns.is_unique:
        raise TableError(f"table has two columns {table.columns[table.columns.duplicated()][0]!r}")


def _no_column(table: pd.DataFrame, *missing: str) -> str:
    there = list_of(table.columns, 20)
    return f"table has no column {', '.join(map(repr, missing))}; it has {there}"


def _with_result(
    table: pd.DataFrame, columns: Columns, states: States, notes: list[str]
) -> tuple[pd.DataFrame, pd.Series]:
    """The rows of runs that say something of their trial, and what their states mean."""
    column = columns.status
    if column == Columns().status and column not in table:  # trackers export it as State
        alike = [c for c in table.columns if str(c).lower() in ("status", "state")]
        column = alike[0] if alike else ""
    if column == "" or column not in table or table[column].isna().all():
        return table, pd.Series(FINISHED, index=table.index)
    status = meanings(table[column], states)
    left_out = status == UNFINISHED
    if left_out.any():
        counts = table.loc[left_out, column].value_counts()
        named = ", ".join(f"{n} {state}" for state, n in counts.items())
        notes.append(f"{named} runs left out: they say nothing of their trial")
    return table[~left_out], status[~left_out]


def _standard_form(
    table: pd.DataFrame, status: pd.Series, columns: Columns, notes: list[str]
) -> pd.DataFrame:
    """The columns that an analysis needs, under its names for them."""
    optional = {"params": columns.params, "tokens": columns.tokens, "cost": _cost(table, columns)[0]}
    optional["purchase"] = columns.purchase
    known = {}
    for part, column in optional.items():
        try:
            known[part] = _numbers(table, column, np.nan)
            if part == "purchase":
                _check_counted(known[part], column)
        except TableError as error:
            known[part] = pd.Series(np.nan, index=table.index)
            notes.append(f"{error}; the column is not used")
    known["purchase"] = known["purchase"].fillna(0)
    loss = numbers(table[columns.loss], columns.loss, "; leave it empty, or inf, where a run diverged")
    if (loss == -np.inf).any():
        raise TableError(
            f"{columns.loss} must be above -inf, but row {loss.index[loss == -np.inf][0]} has -inf"
        )
    return pd.DataFrame(
        {
            "parametrization": _names(table, columns.parametrization, "all").astype(str),
            "scale": numbers(table[columns.scale], columns.scale),
            "value": numbers(table[columns.hyperparameter], columns.hyperparameter),
            "loss": loss,
            "seed": _names(table, columns.seed, 0),
            "status": status,
            "loss_error": _numbers(table, columns.loss_error, np.nan),
            "step": _numbers(table, columns.step, np.nan),
            **known,
            "trial_id": _optional(table, "trial_id", ""),
        }
    )


def _check_counted(values: pd.Series, column: str) -> None:
    """Numbers of purchases: they are counted from 0 or 1, and empty where a run came with none."""
    bad = values.index[values.notna() & ~((values >= 0) & (values % 1 == 0) & (values < 2**31))]
    if len(bad):
        raise TableError(f"{column} must be whole and 0 or more, but row {bad[0]} has {values[bad[0]]:g}")


def _numbers(table: pd.DataFrame, column: str, default: float) -> pd.Series:
    return numbers(_optional(table, column, default), column)


def _names(table: pd.DataFrame, column: str, default: object) -> pd.Series:
    """A column that tells runs apart: a value in every row, or in none."""
    values = _optional(table, column, default)
    empty = values.isna()
    if empty.all():
        return pd.Series(default, index=table.index)
    if empty.any():
        raise TableError(f"{column} is empty in row {values.index[empty][0]}{_more(values.index[empty])}")
    return values.map(str) if values.dtype == object else values


def _check_positive(table: pd.DataFrame, runs: pd.DataFrame, columns: Columns) -> None:
    """Scales must be above 0, values of the hyperparameter 0 or more, and both finite."""
    for column, part, allowed, words in (
        (columns.scale, "scale", runs["scale"] > 0, "above 0"),
        (columns.scale, "scale", np.isfinite(runs["scale"]), "finite"),
        (columns.hyperparameter, "value", runs["value"] >= 0, "0 or more"),
        (columns.hyperparameter, "value", np.isfinite(runs["value"]), "finite"),
    ):
        bad = table.index[~allowed].tolist()
        if bad:
            value = table.loc[bad[0], column]
            hint = " (are these log2 values? the column takes plain ones)" if part == "value" else ""
            raise TableError(
                f"{column} must be {words}, but row {bad[0]} has {on_one_line(value)}{_more(bad)}{hint}"
            )


def require_above_zero(name: str, value: float) -> None:
    """A setting of an analysis must be a finite number above 0.

    Raises:
        TableError: it is not.
    """
    if not (value > 0 and np.isfinite(value)):
        raise TableError(f"{name} {value:g} is not allowed: it must be a finite number above 0")


def _judge_losses(runs: pd.DataFrame, chance: float | None, notes: list[str]) -> pd.DataFrame:
    """Runs that diverged or were stopped get a loss of +inf; stopped ones are marked."""
    whole = runs["status"] == FINISHED
    if not whole.any():
        raise TableError("table has no finished run")
    runs["stopped"] = runs["status"] == STOPPED
    runs["loss"] = runs["loss"].where(whole, np.inf).fillna(np.inf)
    if runs["stopped"].any():
        notes.append(
            f"{int(runs['stopped'].sum())} runs stopped early kept, as +inf: they bound the optimum, "
            "and no fit uses their loss"
        )
    diverged = ~np.isfinite(runs["loss"]) & ~runs["stopped"]
    if chance is not None:
        at_chance = (runs["loss"] >= chance) & ~runs["stopped"]
        diverged |= at_chance
        runs.loc[at_chance, "loss"] = np.inf
    if diverged.any():
        notes.append(f"{int(diverged.sum())} diverged runs kept, as +inf")
    return runs


def _note_unequal_seeds(runs: pd.DataFrame, notes: list[str]) -> None:
    seeds = runs.groupby(["parametrization", "scale", "x"])["x"].count()
    if seeds.nunique() > 1:
        notes.append(
            f"unequal seeds: cells have {seeds.min()} to {seeds.max()} runs; "
            "means come from a model with an effect of each seed"
        )


def _at_logged_steps(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of steps at which some run has a loss: at others a held-out loss is empty, not diverged."""
    is_logged = runs["loss"].notna().groupby(runs["step"]).transform("any")
    return runs[is_logged.fillna(True).astype(bool)] if is_logged.any() else runs


def _last_steps(runs: pd.DataFrame, column: str, notes: list[str]) -> pd.DataFrame:
    """The last row of each run. Finished ones that end at another step than most are left out."""
    last = runs.sort_values("step").groupby(_RUN, as_index=False).tail(1).sort_index()
    is_finite = np.isfinite(last["loss"])
    ends = last.loc[is_finite, "step"].value_counts()
    if len(ends) < 2:
        return last
    if 2 * ends.iloc[0] <= ends.sum():
        raise TableError(
            f"runs end at different steps (column {column!r}: {ends.index.min():g} to {ends.index.max():g}), "
            "and most at no single one; compare runs of one length"
        )
    end = ends.index[0]
    cut = is_finite & (last["step"] != end)
    named = [
        f"{run.parametrization + ' ' if run.parametrization != 'all' else ''}{run.scale:g} at 2^{run.x:.4g} "
        f"(step {run.step:g})"
        for run in last[cut].itertuples()
    ]
    notes.append(
        f"{len(named)} runs left out, since they do not end at step {end:g} as most do: {list_of(named)}; "
        "write inf as the last loss of one that diverged"
    )
    return last[~cut]


def _optional(table: pd.DataFrame, column: str, default: object) -> pd.Series:
    return table[column] if column in table else pd.Series(default, index=table.index)


def _more(rows: Sized) -> str:
    return f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""


def _check_same(table: pd.DataFrame, columns: Columns) -> None:
    """Runs must be of one kind but for what is compared."""
    compared = {columns.scale, columns.hyperparameter, columns.parametrization, columns.seed, *columns.along}
    fixed: tuple[str, ...] = _SAME
    if _is_ours(table):
        seeds = ("seed", "data_seed", "corpus")  # the fingerprint of the data stands for the corpus
        fixed = (*_SAME, *(name for name in CONFIGURED if name not in seeds))
    for column in dict.fromkeys(fixed):
        if column not in table or column in compared:
            continue
        held = table[column].dropna()
        there = (held.map(str) if held.dtype == object else held).unique()
        if len(there) > 1:
            values = ", ".join(map(on_one_line, sorted(there)[:4]))
            raise TableError(
                f"table mixes several {label(column)}s (column {column!r}: {values}); "
                f"compare runs of one kind, e.g. by filtering that column first: --where {column}=VALUE"
            )


def _merge_close(runs: pd.DataFrame, notes: list[str]) -> None:
    """Give hyperparameter values within MERGE_OCTAVES of each other the first one's x."""
    values = np.sort(runs["x"].unique())
    representative, merged = {}, 0
    current = -np.inf
    for x in values:
        if x - current > MERGE_OCTAVES:
            current = x
        elif x != current:
            merged += 1
        representative[x] = current
    runs["x"] = runs["x"].map(representative)
    if merged:
        notes.append(f"{merged} values within {MERGE_OCTAVES} octave of another were merged with it")


def _drop_duplicates(runs: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    key = [*_RUN, "step"]
    doubled = runs.duplicated(key, keep=False)
    if not doubled.any():
        return runs
    distinct = runs[doubled].groupby(key, dropna=False)["loss"].nunique()
    conflicts = distinct[distinct > 1]
    if len(conflicts):
        p, scale, x, seed, _ = conflicts.index[0]
        raise TableError(
            f"two runs of {p}, scale {scale:g}, 2^{x:g}, seed {seed} have different losses"
            f"{_more(conflicts)}; give the seed column, or drop one"
        )
    notes.append(f"{int(runs.duplicated(key).sum())} identical duplicate rows dropped")
    return runs.drop_duplicates(key)
