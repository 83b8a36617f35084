"""Shapes of tables as rows of runs: columns for values or curves, settings in names, rows of steps."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import (
    ROUNDING,
    Columns,
    list_of,
    means,
    plain_name,
    rough_numbers,
    rows_of_both,
)
from mup_tpu.analysis.ingest.table_values import SIZE, numbers, plain_sizes
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import HISTORY, RUN, power
from mup_tpu.config import parse_number
from mup_tpu.errors import ConfigError, TableError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

NUMBER = r"[0-9]+\^-?[0-9.]+|[0-9]*[.,]?[0-9]+(?:e[+-]?[0-9]+)?"
# Meanings of a setting that are an axis of a table
AXES = {"width": "scale", "depth": "scale", "size": "scale", "lr": "hyperparameter"}

# Meaning of a letter before a number in the name of a run or column
_SHORT = {"w": "width", "d": "width", "l": "depth", "s": "seed"}
_SETTING = re.compile(rf"(?P<name>[a-z][a-z_/.]*?)\s*[-_=: ]?\s*(?P<number>{NUMBER})(?![0-9])", re.IGNORECASE)
# Width and depth, as in 3072x12
_SHAPE = re.compile(r"(?<![0-9a-z.])(?P<width>[0-9]{2,5})x(?P<depth>[0-9]{1,3})(?![0-9a-z])", re.IGNORECASE)

# Usual columns of a run's name, the likeliest first
_NAMES = ("run", "name", "run_name", "trial_name", "experiment_name", "display_name", "run_id", "tag", "file")

_HEADING = re.compile(rf"(?P<before>.*?)(?P<number>{NUMBER})(?P<after>[^0-9]*)", re.IGNORECASE)
_CURVE = re.compile(r"(?P<run>.+) - (?P<metric>\S.*)")
# Suffixes of columns that Weights & Biases exports beside a curve: extremes of a group of steps
_EXTREMES = ("__MIN", "__MAX")


def as_rows(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[Reason]]:
    """Gather the losses of a table in one column; return it with notes.

    Args:
        table: of any shape; one that has a column for the loss is left as it is.
        columns: names that were given.

    Raises:
        TableError: it holds curves, and the names of their runs lack width or learning rate.
    """
    if any(means(name) == "loss" for name in table) or columns.loss in table:
        return table, []
    if (by_step := _metrics_in_rows(table)) is not None:
        return by_step, []
    if (curves := _curves(table)) is not None:
        return curves
    if (headings := _headings(table, columns)) is None:
        return table, []
    axis, values = headings
    named = getattr(columns, axis)
    kept = [name for name in table if name not in values]
    values_C = pd.Series(numbers(plain_sizes(pd.Series([*values.values()])), named).to_numpy(), [*values])
    rows = table.melt(kept, [*values], "heading", columns.loss)
    rows[named] = rows.pop("heading").map(values_C).astype("float64")
    empty = rows[columns.loss].isna()
    notes = [Reason.of("losses in columns", names=[*values], column=named)]
    if empty.any():
        notes.append(Reason.of("empty cells", count=int(empty.sum())))
    return rows[~empty].reset_index(drop=True), notes


# Columns of a table with a row for each metric and step: names and values of metrics, and times of logging
_METRIC, _VALUE = ("metric_name", "metric", "key", "tag"), ("metric_value", "value")
_TIMES = {
    "timestamp",
    "time",
    "wall_time",
    "epoch",
    "offset",
    "duration",
    "run_context",
    "metric_context_subset",
}


def _metrics_in_rows(table: pd.DataFrame) -> pd.DataFrame | None:
    """Make a column of each metric in a table as Comet, MLflow and Aim export it; None for another."""
    plain = {plain_name(name): str(name) for name in table}
    metric, value = (
        next((plain[name] for name in names if name in plain), "") for names in (_METRIC, _VALUE)
    )
    if not metric or not value:
        return None
    names = table[metric].astype(str)
    if "metric_context_subset" in plain:  # Aim's: loss of the subset val
        names = table[plain["metric_context_subset"]].fillna("").str.cat(names, "/").str.strip("/")
    if not any(means(name) == "loss" for name in names.unique()):
        return None
    keys = [name for key, name in plain.items() if key not in _TIMES and name not in (metric, value)]
    values = table.assign(metric=names).groupby([*keys, "metric"], dropna=False, sort=False)[value].last()
    return values.unstack("metric").reset_index().rename_axis(columns=None)


def _headings(table: pd.DataFrame, columns: Columns) -> tuple[str, dict[str, str]] | None:
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in map(str, table):
        if match := _HEADING.fullmatch(name.strip()):
            groups.setdefault((match["before"], match["after"]), {})[name] = match["number"]
    (before, after), values = max(groups.items(), key=lambda group: len(group[1]), default=(("", ""), {}))
    sizes = {name: name for name in map(str, table) if SIZE.fullmatch(name.strip())}  # 130M, 1.3B
    if len(sizes) > len(values):
        return "scale", sizes
    if len(values) < 2:
        return None
    others = [name for name in table if name not in values]
    known = {axis for name in others if (axis := AXES.get(means(name)))}
    known |= {axis for axis in ("scale", "hyperparameter") if getattr(columns, axis) in others}
    meanings = [meaning_at_end(re.sub(r"[\s=:]+", "_", text)) for text in (before, after)]
    named_axes = {AXES[what] for what in meanings if what in AXES}
    missing = {"scale", "hyperparameter"} - known
    if len(named_axes) == 1 and named_axes <= missing and len(missing) == 1:
        return named_axes.pop(), values
    if not named_axes and before.strip() == after.strip(" *x×") == "":
        if len(missing) == 1:
            return missing.pop(), values
        raise TableError(
            f"table has a column for each of {list_of(values)}, but no heading names these values or the "
            f"rows: name the column of the rows {columns.scale} or {columns.hyperparameter}"
        )
    return None


def _curves(table: pd.DataFrame) -> tuple[pd.DataFrame, list[Reason]] | None:
    """Make rows by run and step of columns of curves (`NAME - val/loss`); None without such columns."""
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
    by_column = {name: settings(matches[name]["run"]) for name in losses}
    both = {"scale", "hyperparameter"}
    untold = [
        name for name, in_name in by_column.items() if {AXES.get(what) for what in in_name} & both != both
    ]
    if untold:
        raise TableError(
            f"table holds curves of {len(losses)} runs whose names do not say width and learning rate "
            f"({list_of(untold, 2)}): export the table of runs in their place, or read the project itself "
            "as wandb:ENTITY/PROJECT"
        )
    rows = [
        pd.DataFrame({**in_name, "step": table[steps[0]], "loss": table[name]}).dropna(subset=["loss"])
        for name, in_name in by_column.items()
    ]
    note = Reason.of("curves in columns", count=len(losses), metric=metrics.pop())
    return pd.concat(rows, ignore_index=True), [note]


def settings(run: str) -> dict[str, Any]:
    """Read the settings in a run's name, by meaning: `d_model: 64, lr: 0.01` or `w64-lr2^-8-s0`."""
    values: dict[str, Any] = {}
    for match in _SETTING.finditer(run):
        what = meaning_at_end(match["name"])
        if what in (*AXES, "seed") and what not in values:
            with contextlib.suppress(ConfigError):
                values[what] = parse_number(match["number"])
    if (shape := _SHAPE.search(run)) and "width" not in values:
        values = {"width": float(shape["width"]), "depth": float(shape["depth"])} | values
    rules = {word for word in re.split(r"[^a-z]+", run.lower()) if word in PARAMETRIZATIONS}
    return values | ({"parametrization": rules.pop()} if len(rules) == 1 else {})


def meaning_at_end(text: str) -> str:
    # Of a name or its end: `sp_w` means w.
    words = [word for word in re.split(r"[-_/. ]+", text) if word]
    names = ["_".join(words[i:]) for i in range(len(words))]
    return next((what for name in names if (what := means(name) or _SHORT.get(name.lower(), ""))), "")


def with_settings(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[Reason]]:
    """Add the settings that only the names of runs have as columns; return the table and notes on them."""
    known = {means(name) for name in table} - {""}
    known |= {what for what, axis in AXES.items() if getattr(columns, axis) in table}
    known |= {"parametrization"} if columns.parametrization in table else set()
    texts_only = [str(name) for name in table if table[name].dtype.kind not in "iufb"]
    plain = {plain_name(name): name for name in reversed(texts_only)}
    names = [plain[name_of_run] for name_of_run in _NAMES if name_of_run in plain]
    table, notes = _with_set_rates(table, names, columns)
    for name in names:
        if "lr" in known and known & {"width", "depth", "size"}:
            break
        texts = table[name].astype(str)
        by_text = {text: settings(text) for text in texts.unique()}
        new = [what for what in next(iter(by_text.values())) if what not in known]
        new = [what for what in new if all(what in in_name for in_name in by_text.values())]
        if set(new) & set(AXES):
            table = table.assign(**{what: [by_text[text][what] for text in texts] for what in new})
            notes.append(Reason.of("settings in names", settings=new, name=name, example=texts.iloc[0]))
            known |= {*new}
    return table, notes


def _with_set_rates(
    table: pd.DataFrame, names: list[str], columns: Columns
) -> tuple[pd.DataFrame, list[Reason]]:
    # In place of a schedule's values, in the table's only column, come the rates that were set: those in the
    # names of the runs, or the largest value of each run's steps.
    logged = [str(name) for name in table if means(name) == "lr"]
    if len(logged) != 1 or not names or columns.hyperparameter in (*set(table) - {"lr"},):
        return table, []
    rate = rough_numbers(table[logged[0]])
    for name in names:
        by_text = {text: settings(text).get("lr") for text in table[name].astype(str).unique()}
        if not all(by_text.values()):  # Ray Tune's names round small rates to 0
            continue
        named = table[name].astype(str).map(by_text).astype(float)
        share = (rate / named).dropna()
        if (share - 1).abs().max() < ROUNDING:  # names round
            return table, []
        if share.max() > 1 + ROUNDING:
            raise TableError(
                f"column {logged[0]} and the names of the runs (column {name}) may both be the learning rate "
                f"({rows_of_both(rate, named)}): say which with --tune, or take one away"
            )
        settings_note = Reason.of(
            "settings in names", settings=["lr"], name=name, example=table[name].iloc[0]
        )
        return table.assign(**{logged[0]: named}), [settings_note]
    runs = table.groupby(names[0])[logged[0]]
    if any(means(name) == "step" for name in table) and (runs.nunique() > 1).mean() > 0.5:
        peak = rate.groupby(table[names[0]]).transform("max")
        return table.assign(**{logged[0]: peak}), [Reason.of("peak of a schedule", name=logged[0])]
    return table, []


def at_logged_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Select steps at which some run has a loss; at others an empty held-out loss is no divergence."""
    if rows["step"].isna().all():
        return rows
    is_logged = rows["loss"].notna().groupby(rows["step"]).transform("any")
    return rows[is_logged.fillna(True).astype(bool)] if is_logged.any() else rows


def last_steps(runs: pd.DataFrame, column: str, notes: list[Reason]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the last row of each run, and the history of these runs.

    Finished runs that end at another step than most are left out, with a note.

    Raises:
        TableError: most runs end at no single step.
    """
    last = runs.sort_values("step").groupby(RUN, as_index=False).tail(1).sort_index()
    is_finite = np.isfinite(last["loss"])
    ends = last.loc[is_finite, "step"].value_counts()
    if len(ends) > 1:
        if 2 * ends.iloc[0] <= ends.sum():
            raise TableError(
                f"runs end at different steps (column {column!r}: {ends.index.min():g} to "
                f"{ends.index.max():g}), and most at no single one; compare runs of one length"
            )
        is_cut = is_finite & (last["step"] != ends.index[0])
        cut = [
            f"{run.compared + ' ' if run.compared != 'all' else ''}{run.scale:g} at {power(run.x)} "
            f"(step {run.step:g})"
            for run in last[is_cut].itertuples()
        ]
        notes.append(Reason.of("other last step", step=float(ends.index[0]), runs=cut))
        last = last[~is_cut]
    is_whole = pd.MultiIndex.from_frame(runs[RUN]).isin(pd.MultiIndex.from_frame(last[RUN]))
    history = runs.loc[is_whole & np.isfinite(runs["x"]), HISTORY]
    return last, history.sort_values(HISTORY[:-1], ignore_index=True)
