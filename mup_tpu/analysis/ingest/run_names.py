"""Settings in names of runs, columns and files: `mup_w256_lr1.2e-04_s0`, `Gemma-3072x12_lr5e-02`."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import (
    ROUNDING,
    Columns,
    means,
    plain_name,
    rough_numbers,
    rows_of_both,
)
from mup_tpu.analysis.reasons import Reason
from mup_tpu.config import parse_number
from mup_tpu.errors import ConfigError, TableError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

NUMBER = r"[0-9]+\^-?[0-9.]+|[0-9]*[.,]?[0-9]+(?:e[+-]?[0-9]+)?"
AXES = {"width": "scale", "depth": "scale", "size": "scale", "lr": "hyperparameter"}
"""Meanings of a setting that are an axis of a table."""

_SHORT = {"w": "width", "d": "width", "l": "depth", "s": "seed"}
"""Meaning of a letter before a number in the name of a run or column."""
_SETTING = re.compile(rf"(?P<name>[a-z][a-z_/.]*?)\s*[-_=: ]?\s*(?P<number>{NUMBER})(?![0-9])", re.IGNORECASE)
_SHAPE = re.compile(r"(?<![0-9a-z.])(?P<width>[0-9]{2,5})x(?P<depth>[0-9]{1,3})(?![0-9a-z])", re.IGNORECASE)
"""Width and depth, as in 3072x12."""

_NAMES = ("run", "name", "run_name", "trial_name", "experiment_name", "display_name", "run_id", "tag", "file")
"""Usual columns of a run's name, the likeliest first."""


def settings(run: str) -> dict[str, Any]:
    """Settings in a run's name, by meaning: `d_model: 64, lr: 0.01` or `w64-lr2^-8-s0`."""
    found: dict[str, Any] = {}
    for match in _SETTING.finditer(run):
        what = meaning_at_end(match["name"])
        if what in (*AXES, "seed") and what not in found:
            with contextlib.suppress(ConfigError):
                found[what] = parse_number(match["number"])
    if (shape := _SHAPE.search(run)) and "width" not in found:
        found = {"width": float(shape["width"]), "depth": float(shape["depth"])} | found
    rules = {word for word in re.split(r"[^a-z]+", run.lower()) if word in PARAMETRIZATIONS}
    return found | ({"parametrization": rules.pop()} if len(rules) == 1 else {})


def meaning_at_end(text: str) -> str:
    """Meaning of a name or its end: `sp_w` means w."""
    words = [word for word in re.split(r"[-_/. ]+", text) if word]
    names = ["_".join(words[i:]) for i in range(len(words))]
    return next((what for name in names if (what := means(name) or _SHORT.get(name.lower(), ""))), "")


def with_settings(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[Reason]]:
    """The table with settings that stand in its runs' names alone as columns, and notes on them."""
    if not table.columns.is_unique:  # refused later, with their names
        return table, []
    there = {means(name) for name in table} - {""}
    there |= {what for what, axis in AXES.items() if getattr(columns, axis) in table}
    there |= {"parametrization"} if columns.parametrization in table else set()
    texts_only = [name for name in table if table[name].dtype.kind not in "iufb"]
    plain = {plain_name(name): name for name in reversed(texts_only)}
    names = [plain[usual] for usual in _NAMES if usual in plain]
    table, notes = _with_set_rates(table, names, columns)
    for name in names:
        if "lr" in there and there & {"width", "depth", "size"}:
            break
        texts = table[name].astype(str)
        found = {text: settings(text) for text in texts.unique()}
        new = [what for what in next(iter(found.values())) if what not in there]
        new = [what for what in new if all(what in told for told in found.values())]
        if set(new) & set(AXES):
            table = table.assign(**{what: [found[text][what] for text in texts] for what in new})
            notes.append(Reason.of("settings in names", settings=new, name=name, example=texts.iloc[0]))
            there |= {*new}
    return table, notes


def _with_set_rates(
    table: pd.DataFrame, names: list[str], columns: Columns
) -> tuple[pd.DataFrame, list[Reason]]:
    """The table with the learning rates that were set, where its only column has values of a schedule.

    What was set stands in the names of the runs, or is the largest value of each run's steps.

    Raises:
        TableError: either the column or the names may be meant.
    """
    logged = [name for name in table if means(name) == "lr"]
    if len(logged) != 1 or not names or columns.hyperparameter in (*set(table) - {"lr"},):
        return table, []
    rate = rough_numbers(table[logged[0]])
    for name in names:
        found = {text: settings(text).get("lr") for text in table[name].astype(str).unique()}
        if any(value is None for value in found.values()):
            continue
        named = table[name].astype(str).map(found).astype(float)
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
