"""Run tables, read from a results folder, a file, a tool's folder, a tracker or a data frame.

A table of optima, as papers and logs give them, needs no runs: drift, law and prediction need no more, and a
regret needs losses. The error of an optimum follows from its interval, or from the spacing of its grid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.expressions import with_derived
from mup_tpu.analysis.ingest.files import STDIN
from mup_tpu.analysis.ingest.readers import TOOLS, find_reader, is_log_of_one_run
from mup_tpu.analysis.ingest.table_columns import Columns, Usual, find_columns, find_scale, means, plain_name
from mup_tpu.analysis.ingest.table_values import (
    LossUnit,
    Reading,
    filled_down,
    is_cross_entropy,
    numbers,
    plain_sizes,
    plain_units,
    unit_by_perplexity,
    with_errors,
    without_summaries,
)
from mup_tpu.analysis.ingest.tables import as_rows, with_settings
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import (
    DATA,
    STORED_FIXED,
    RunTable,
    no_column,
    run_key,
    select,
    selected_scales,
)
from mup_tpu.analysis.standard_form import standard_form
from mup_tpu.analysis.trend import NORMAL_95
from mup_tpu.config import Axes
from mup_tpu.config.trial import IN_FINGERPRINT
from mup_tpu.errors import TableError
from mup_tpu.store import load_axes, load_curves, load_header, load_runs, load_values
from mup_tpu.store.header import STORE_FILE

_BEST = re.compile(
    r"(best|opt|optimal|optimum|argmin|tuned)_(?P<of>\w+)|(?P<before>\w+)_(best|opt|optimal|star)"
)
_LOW, _HIGH = r"(95_|ci_|ci95_)?(lo|low|lower|min|left)", r"(95_|ci_|ci95_)?(hi|high|upper|max|right)"
_SPACING = r"(grid_)?(spacing|factor|ratio)"


def read_optima(table: pd.DataFrame, columns: Columns, name: str) -> RunTable | None:
    """Return the optima of a table that has no losses; None for a table of runs."""
    if any(means(column) == "loss" for column in table) or columns.loss in table:
        return None
    plain = {plain_name(column): str(column) for column in table}
    named = [(c, m["of"] or m["before"]) for key, c in plain.items() if (m := _BEST.fullmatch(key))]
    default = columns.hyperparameter, columns.hyperparameter
    best, tuned = next((pair for pair in named if means(pair[1]) == "lr"), default)
    scale = columns.scale if columns.scale in table else find_scale(table, [])
    compared = columns.parametrization if columns.parametrization in table else ""
    if best not in table or scale is None or table.duplicated([scale, *filter(None, [compared])]).any():
        return None
    patterns = (f"{plain_name(best)}_{_LOW}", f"{plain_name(best)}_{_HIGH}", _SPACING)
    *ends, spacing = (next((c for k, c in plain.items() if re.fullmatch(one, k)), "") for one in patterns)
    x = _log2(table, best)
    if all(ends):
        low, high = (_log2(table, end) for end in ends)
        source = Reason.of("optima with intervals", name=best, low=ends[0], high=ends[1])
    else:
        away, steps = (x - x.min()).to_numpy(), (1.0, math.log2(10) / 2, 0.5, 0.25)  # factors of 2, √10, √2
        on_grid = (s for s in steps if np.allclose(away / s, np.round(away / s), atol=0.05))
        step = _log2(table, spacing) if spacing else pd.Series(next(on_grid, math.nan), table.index)
        if step.isna().any():
            raise TableError(
                f"{best} has neither an interval nor a grid: give {best}_lo and {best}_hi, or the factor "
                "between values that were tried as grid_factor"
            )
        low, high = x - step, x + step
        source = Reason.of("optima of a grid", name=best, factor=float(2 ** step.iloc[0]))
    if (wrong := ~x.between(low, high)).any():
        raise TableError(f"{best} of row {table.index[wrong][0]} lies outside its interval")
    sizes = numbers(plain_sizes(table[scale]), scale)
    runs = pd.DataFrame(
        {
            "compared": table[compared].astype(str) if compared else "all",
            "scale": sizes, "x": x, "low": low, "high": high,
            "error": np.maximum((high - low) / (2 * NORMAL_95), 0.01),
            "params": sizes if means(scale) == "size" else math.nan,
            "loss": math.nan, "tokens": math.nan, "cost": math.nan, "seed": 0, "purchase": 0,
        }
    )  # fmt: skip
    if not (runs["scale"] > 0).all():
        raise TableError(f"{scale} must be above 0 in a table of optima")
    return RunTable(runs, (source,), replace(columns, scale=scale, loss="", hyperparameter=tuned), name)


def _log2(table: pd.DataFrame, column: str) -> pd.Series:
    values = numbers(table[column], column, table=table)
    if (wrong := ~(values > 0)).any():
        raise TableError(
            f"{column} must be above 0, but row {table.index[wrong][0]} has {values[wrong].iloc[0]:g}"
        )
    return np.log2(values)


Place = str | Path | Sequence[str | Path]  # one place of runs, or several that are read as one table
Runs = RunTable | pd.DataFrame | str | Path  # a checked table, runs of the usual columns, or where they are


def run_table(runs: Runs) -> RunTable:
    if isinstance(runs, RunTable):
        return runs
    return check_table(runs) if isinstance(runs, pd.DataFrame) else load_table(runs)


def default_columns(path: Place) -> Columns:
    """Return the default names of a table's columns: a results folder's axes, else width and lr."""
    if not isinstance(path, str | Path) or find_reader(path) is not None:
        return Columns()
    folder = Path(str(path))
    if folder.is_dir() and not (folder / STORE_FILE).exists():
        raise TableError(
            f"{path} holds no runs that are read: it is no results folder ({STORE_FILE}), and has no files "
            f"of {TOOLS}; give a table, or the folder with the runs"
        )
    axes = load_axes(path)
    along, tuned = axes.columns((*axes.scale, *axes.compare)), axes.tuned
    along += DATA if {*IN_FINGERPRINT} & {*axes.scale, *axes.compare} else ()
    name, unit = named_loss(load_values(path, "versions") if axes.is_study else ())
    return Columns(
        Usual(axes.size), tuned[0], parametrization=axes.compared, along=along, tuned_beside=tuned[1:],
        is_per_token=not axes.is_study, unit=unit, loss_name=name,
    )  # fmt: skip


def named_loss(versions: Iterable[object]) -> tuple[str, str]:
    """Return name and unit of the loss by the versions that stored rows have.

    A program of a study names what it prints: a loss, bits per byte as nanochat does, or an error.
    """
    names = (json.loads(text).get("loss") for text in versions if isinstance(text, str))
    name: str = next(filter(None, names), "loss")
    if re.search("bpb|bits.per.byte", name, re.IGNORECASE):
        return name, "bpb"
    return name, "nat" if is_cross_entropy(name) else name


def load_table(path: Place, reading: Reading = Reading()) -> RunTable:
    """Read and check a results folder, a table in a file, or the runs of a tracker.

    Args:
        path: results folder (or fsspec URL), a file, or a place of `readers.find_reader`;
            several files or places are read as one table.
        reading: how it is read.

    Raises:
        TableError: it is no table, or cannot be analysed.
        StoreError: the results folder holds no runs.
    """
    rows, named = read_rows(path, reading)
    if not isinstance(path, str | Path) or find_reader(path) is not None:
        return replace(check_table(rows, named), rows=rows)
    header = load_header(path)
    fixed = (*STORED_FIXED, *(header.columns or ()))
    stored, columns = with_derived(rows, named.columns or Columns())
    columns = replace(columns, step="")  # a stored row is a run, not a step
    named = replace(named, columns=columns)
    where = named.where or ()
    if reading.unit != LossUnit() and columns.is_per_token:
        raise TableError(f"unit: the losses of {path} are in nat per token, and no other unit applies")
    table = standard_form(_best_over(stored, named), columns, named, fixed, [])
    is_stored = reading.where is None and header.where
    notes = [Reason.of("rows of the folder's question", conditions=header.where)] if is_stored else []
    is_planned = header.planned and columns.scale == (header.axes or Axes()).size
    planned = selected_scales(header.planned, columns.scale, where) if is_planned else ()
    if is_planned and (left_out := sorted(set(table.runs["scale"]) - set(planned))):
        notes.append(Reason.of("scales not planned", scales=left_out))
    curves = load_curves(path)
    on_the_way = curves[curves["split"] == "train"][["trial_id", "step", "loss"]]
    by_step = table.runs.drop(columns="loss").merge(on_the_way, on="trial_id")
    table = replace(
        table,
        notes=(*table.notes, *notes),
        history=by_step[[*run_key(table.runs), "step", "loss"]],
        rows=rows,
        stored=stored,
        planned=planned,
    )
    return table.part(lambda frame: frame["scale"].isin(planned)) if is_planned else table


def read_rows(table: pd.DataFrame | Place, reading: Reading) -> tuple[pd.DataFrame, Reading]:
    """Read rows as they are, of a data frame, a results folder, files or a tracker.

    Returns:
        The rows that meet the conditions, and the reading with the columns, conditions and name of the place.
    """
    if isinstance(table, pd.DataFrame):
        return select(table, reading.where or ()), reading
    paths = [table] if isinstance(table, str | Path) else [*table]
    name = reading.name or ("table" if str(paths[0]) == STDIN else Path(str(paths[0])).name)
    reading = replace(reading, columns=reading.columns or default_columns(table), name=name)
    if isinstance(table, str | Path) and find_reader(table) is None:
        where = load_header(table).where if reading.where is None else reading.where
        return select(load_runs(table), where), replace(reading, where=where)
    if len(paths) == 1 and is_log_of_one_run(paths[0]):
        raise TableError(
            f"{paths[0]} is the log of one run, which has no optimum: give the logs of several sizes and "
            "rates, or the folder that holds them"
        )
    tables = []
    for one in paths:
        if (read := find_reader(one)) is None:
            raise TableError(
                f"{one} is no table, and stands beside one; give results folders alone, or tables alone"
            )
        tables.append(_named_once(read(one)))
    if len(paths) > 1:
        names = ["/".join(Path(str(path)).parts[-2:]) for path in paths]
        tables = [one.assign(file=name) for one, name in zip(tables, names, strict=True)]
    rows = pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]
    return select(rows, reading.where or ()), reading


def _best_over(rows: pd.DataFrame, reading: Reading) -> pd.DataFrame:
    if not reading.best_over:
        return rows
    columns = reading.columns or Columns()
    if missing := [name for name in (*reading.best_over, *columns.scales, columns.loss) if name not in rows]:
        raise TableError(no_column(rows, *missing))
    point = [c for c in (*columns.scales, columns.hyperparameter, columns.parametrization) if c in rows]
    return rows.loc[rows.groupby(point)[columns.loss].idxmin()].drop(columns=[*reading.best_over])


def _named_once(table: pd.DataFrame) -> pd.DataFrame:
    names = pd.Index([str(name) for name in table.columns])
    if not names.is_unique:
        raise TableError(f"table has two columns {names[names.duplicated()][0]!r}")
    # Lists in JSON become text, as in CSV: an error of a column that must be numbers then names them.
    plain = table.set_axis(names, axis="columns")
    texts = plain[[name for name in names if plain[name].dtype == object]]
    return plain.assign(**texts.map(lambda value: str(value) if isinstance(value, list) else value))


# Columns that have one value in all rows, except along the axes
_USUALLY_FIXED = (
    "dataset", "data_fingerprint", "steps_planned", "steps", "batch_size", "sequence_length", "width",
    "depth", "lr", "unit", "units", "loss_unit", "weight_decay", "init_std", "loss_kind", "optimizer",
)  # fmt: skip


def check_table(table: pd.DataFrame, reading: Reading = Reading()) -> RunTable:
    """Check rows and bring them into standard form.

    A table has one row per run or per step of a run, or one column per width or learning rate. Columns that
    are not named are recognised by common names. Rows have been selected by `reading.where` already.

    Raises:
        TableError: a column is missing, a value is impossible, or runs of different kinds are mixed.
    """
    notes, columns = list[Reason](), reading.columns or Columns()
    table, fixed = _named_once(table).reset_index(drop=True), STORED_FIXED
    if not {"trial_id", "config"} <= set(table):  # a results folder exports these: its columns are known
        fixed = _USUALLY_FIXED
        table = plain_units(as_rows(table, columns, notes), notes)
        table, columns = with_derived(with_settings(table, columns, notes), columns)
        if (optima := read_optima(table, columns, reading.name or "table")) is not None:
            return optima
        table, columns = find_columns(table, columns, notes)
        reading = replace(reading, unit=unit_by_perplexity(table, columns.loss, reading.unit))
        for scale in columns.scales:
            table = table.assign(**{scale: filled_down(table[scale])}) if scale in table else table
        table = without_summaries(table, (columns.seed, *columns.scales, *columns.tuned), notes)
        table, columns = with_errors(table, columns, notes)
    table = _best_over(table, replace(reading, columns=columns))
    checked = standard_form(table, columns, reading, fixed, notes)
    purchases = checked.runs.loc[checked.runs["purchase"] > 0, "purchase"].nunique()
    if not purchases or columns.tuned_beside:
        return checked
    note = Reason.of("sequence", name=columns.purchase, purchases=purchases)
    planned = tuple(sorted(checked.runs["scale"].unique().tolist()))
    return replace(checked, notes=(*checked.notes, note), planned=planned)
