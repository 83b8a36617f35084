"""Any run table, checked before a number is drawn from it.

What is wrong stops the analysis with one sentence naming the column and the values; what is odd but usable is
kept as a note, which every output repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from mup_tpu.columns import CONFIGURED, label
from mup_tpu.config import field_column, parse_learning_rate
from mup_tpu.errors import ConfigError, TableError
from mup_tpu.store import load_axes, load_curves, load_planned, load_runs

MERGE_OCTAVES = 0.02
"""Learning rates closer than this are one: they differ by rounding."""

_HISTORY = ["parametrization", "scale", "x", "seed", "step", "loss"]

_FILES: dict[str, Callable[..., pd.DataFrame]] = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".pq": pd.read_parquet,
}
"""How to read a table that is a file, by its suffix."""

_NO_LOSS = ("failed", "preempted")
"""Statuses that say nothing of the trial."""

_COSTS = {"wall_time_s": "s", "flops": "FLOP"}
"""Columns of what a run cost, with their units."""

_SAME = (
    "dataset", "data_fingerprint", "steps_planned", "steps", "batch_size", "sequence_length", "width",
    "depth", "lr", "weight_decay", "init_std", "loss_kind", "optimizer",
)  # fmt: skip
"""Columns of any table that a comparison must hold fixed, unless they are what is compared. In a store, where
every column is known, all that were configured are, but for seeds."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a table that is not ours."""

    scale: str = "width"
    """What grows: of the model or of its training."""
    hyperparameter: str = "lr"
    """What is tuned; compared on a log2 axis, where 0 is a point of its own."""
    loss: str = "loss"
    """Result of a run, nat per token; empty or infinite where it diverged."""
    loss_error: str = "loss_err"
    """Standard error of a loss that is a mean already; optional."""
    seed: str = "seed"
    """Replicate; optional."""
    parametrization: str = "parametrization"
    """What to compare; optional."""
    status: str = "status"
    """How a run ended; optional."""
    step: str = "step"
    """Step of a loss, in a table with a row a step; the last is the run's result. Optional."""
    params: str = "params_non_embedding"
    """Parameters without embeddings; optional."""
    tokens: str = "tokens"
    """Tokens a run was trained on; optional."""
    cost: str = ""
    """What a run cost; optional. By default the first of wall_time_s (s) and flops (FLOP) that there is."""
    purchase: str = "purchase"
    """Purchase of a sequence that a run came with; optional."""
    along: tuple[str, ...] = ()
    """Other columns that change along the scale with it, as on a ladder."""


def default_columns(path: str | Path) -> Columns:
    """The columns of a table where none are named: those of a results folder's sweep, or width and lr."""
    if Path(str(path)).suffix.lower() in _FILES:
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


def load_table(
    path: str | Path,
    columns: Columns | None = None,
    chance: float | None = None,
    where: Mapping[str, str] = MappingProxyType({}),
) -> RunTable:
    """Read and check a results folder, a CSV or a Parquet file.

    Args:
        path: results folder (or fsspec URL), or a file.
        columns: names of its columns; a results folder knows its own.
        chance: loss of guessing; runs at or above it count as diverged.
        where: rows to take, as values of columns.

    Raises:
        TableError: it is no table, or cannot be analysed as it is.
        StoreError: the results folder holds no runs.
    """
    name, suffix = Path(str(path)).name, Path(str(path)).suffix.lower()
    columns = columns or default_columns(path)
    if suffix in _FILES:
        try:
            table = _FILES[suffix](path)
        except (OSError, ValueError) as error:
            raise TableError(f"table {path} cannot be read: {error}") from None
        return check_table(select(table, where), columns, chance, name)
    stored, curves = select(load_runs(path), where), load_curves(path)
    checked = check_table(stored, columns, chance, name)
    on_the_way = curves[curves["split"] == "train"][["trial_id", "step", "loss"]]
    history = checked.runs.drop(columns="loss").merge(on_the_way, on="trial_id")[_HISTORY]
    planned = load_planned(path) if columns.scale == load_axes(path).scale.column else ()
    return replace(checked, command=_command(path, stored), history=history, stored=stored, planned=planned)


def select(table: pd.DataFrame, where: Mapping[str, str]) -> pd.DataFrame:
    """The rows whose columns have these values.

    Raises:
        TableError: there is no such column, or no such row.
    """
    for column, value in where.items():
        if column not in table:
            raise TableError(f"where: table has no column {column!r}; it has {', '.join(table.columns)}")
        try:
            chosen = table[column].astype(float) == parse_learning_rate(value)
        except (ValueError, TypeError, ConfigError):
            chosen = table[column].astype(str).str.lower() == value.lower()
        if not chosen.any():
            there = ", ".join(map(str, sorted(table[column].dropna().unique())[:6]))
            raise TableError(f"where: no row has {column} {value}; there are {there}")
        table = table[chosen]
    return table.reset_index(drop=True)


def _command(path: str | Path, stored: pd.DataFrame) -> str | None:
    """Command line that adds runs to a store, where a script of this checkout made it."""
    experiment = str(stored["experiment"].iloc[0])
    script = Path("experiments") / f"{experiment.removesuffix('_h200')}.py"
    preset = " --preset h200" if experiment.endswith("_h200") else ""
    is_there = (Path(__file__).parents[2] / script).exists()
    return f"python {script}{preset} --results {path}" if is_there else None


def check_table(
    table: pd.DataFrame, columns: Columns = Columns(), chance: float | None = None, name: str = "table"
) -> RunTable:
    """Check a table and bring it into standard form.

    Args:
        table: one row a run.
        columns: names of its columns.
        chance: loss of guessing, nat per token; runs at or above it count as diverged.
        name: what to call it.

    Raises:
        TableError: a column is missing, a value is impossible, or runs of different kinds are mixed.
    """
    if chance is not None:
        require_above_zero("chance", chance)
    notes: list[str] = []
    runs = _standard_form(table, columns)
    _check_positive(table, runs, columns)
    has_result = ~runs["status"].isin(_NO_LOSS)
    _note_excluded(runs[~has_result], notes)
    _check_same(table.loc[has_result], columns)
    runs = _judge_losses(runs.loc[has_result].copy(), chance, notes)
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
    history = None
    if runs["step"].notna().any():
        history = runs[_HISTORY].sort_values(_HISTORY[:-1], ignore_index=True)
        runs = _last_steps(runs, columns.step)
    runs = _drop_duplicates(runs, notes)
    _note_unequal_seeds(runs, notes)
    runs = runs.drop(columns=["status", "value", "step"]).reset_index(drop=True)
    return RunTable(
        runs,
        tuple(notes),
        columns,
        name,
        _cost(table, columns)[1],
        history=history,
        zeros=zeros.reset_index(drop=True),
    )


def _cost(table: pd.DataFrame, columns: Columns) -> tuple[str, str]:
    """Column of what a run cost, and its unit; "" where there is none."""
    if columns.cost:
        if columns.cost not in table:
            raise TableError(f"table has no column {columns.cost!r}; it has {', '.join(table.columns)}")
        return columns.cost, _COSTS.get(columns.cost, columns.cost)
    return next(((column, unit) for column, unit in _COSTS.items() if column in table), ("", ""))


def _standard_form(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The columns that an analysis needs, under its names for them."""
    needed = (columns.scale, columns.hyperparameter, columns.loss)
    missing = [column for column in needed if column not in table]
    if missing:
        raise TableError(
            f"table has no column {', '.join(map(repr, missing))}; it has {', '.join(table.columns)}"
        )
    numbers = {
        "loss_error": columns.loss_error,
        "params": columns.params,
        "tokens": columns.tokens,
        "step": columns.step,
        "cost": _cost(table, columns)[0],
    }
    return pd.DataFrame(
        {
            "parametrization": _optional(table, columns.parametrization, "all").astype(str),
            "scale": pd.to_numeric(table[columns.scale], errors="coerce"),
            "value": pd.to_numeric(table[columns.hyperparameter], errors="coerce"),
            "loss": pd.to_numeric(table[columns.loss], errors="coerce").astype(float),
            "seed": _optional(table, columns.seed, 0),
            "status": _optional(table, columns.status, "finished").astype(str),
            **{
                part: pd.to_numeric(_optional(table, column, np.nan), errors="coerce")
                for part, column in numbers.items()
            },
            "purchase": pd.to_numeric(_optional(table, columns.purchase, 0), errors="coerce").fillna(0),
            "trial_id": _optional(table, "trial_id", ""),
        }
    )


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
            raise TableError(f"{column} must be {words}, but row {bad[0]} has {value}{_more(bad)}{hint}")


def require_above_zero(name: str, value: float) -> None:
    """A setting of an analysis must be a finite number above 0.

    Raises:
        TableError: it is not.
    """
    if not (value > 0 and np.isfinite(value)):
        raise TableError(f"{name} {value:g} is not allowed: it must be a finite number above 0")


def _note_excluded(runs: pd.DataFrame, notes: list[str]) -> None:
    if len(runs):
        counts = ", ".join(f"{n} {status}" for status, n in runs["status"].value_counts().items())
        notes.append(f"{counts} runs left out: they say nothing of their trial")


def _judge_losses(runs: pd.DataFrame, chance: float | None, notes: list[str]) -> pd.DataFrame:
    """Runs that diverged or were stopped get a loss of +inf; stopped ones are marked."""
    whole = ~runs["status"].isin(("diverged", "stopped"))
    if not whole.any():
        raise TableError("table has no finished run")
    runs["stopped"] = runs["status"] == "stopped"
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


def _last_steps(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """The last row of each run; finished runs must end at the same step."""
    last = runs.sort_values("step").groupby(_HISTORY[:-2], as_index=False).tail(1)
    ends = last.loc[np.isfinite(last["loss"]), "step"]
    if ends.nunique() > 1:
        raise TableError(
            f"runs end at different steps (column {column!r}: {ends.min():g} to {ends.max():g}); "
            "compare runs of one length"
        )
    return last.sort_index()


def _optional(table: pd.DataFrame, column: str, default: object) -> pd.Series:
    return table[column] if column in table else pd.Series(default, index=table.index)


def _more(rows: list) -> str:
    return f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""


def _check_same(table: pd.DataFrame, columns: Columns) -> None:
    """Runs must be of one kind but for what is compared."""
    compared = {columns.scale, columns.hyperparameter, columns.parametrization, columns.seed, *columns.along}
    held: tuple[str, ...] = _SAME
    if {"trial_id", "config"} <= set(table):
        seeds = ("seed", "data_seed", "corpus")  # the fingerprint of the data stands for the corpus
        held = (*_SAME, *(name for name in CONFIGURED if name not in seeds))
    for column in dict.fromkeys(held):
        if column in table and column not in compared and table[column].dropna().nunique() > 1:
            values = ", ".join(map(str, sorted(table[column].dropna().unique())[:4]))
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
    key = ["parametrization", "scale", "x", "seed"]
    doubled = runs.duplicated(key, keep=False)
    if not doubled.any():
        return runs
    distinct = runs[doubled].groupby(key)["loss"].nunique()
    conflicts = distinct[distinct > 1]
    if len(conflicts):
        p, scale, x, seed = conflicts.index[0]
        raise TableError(
            f"two runs of {p}, scale {scale:g}, 2^{x:g}, seed {seed} have different losses"
            f"{_more(list(conflicts))}; give the seed column, or drop one"
        )
    notes.append(f"{int(runs.duplicated(key).sum())} identical duplicate rows dropped")
    return runs.drop_duplicates(key)
