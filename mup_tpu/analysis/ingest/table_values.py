"""Values of strangers' tables: numbers as text, states of trackers.

A value that can be read in two ways is an error, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.run_table import DIVERGED, FINISHED, STOPPED, UNFINISHED
from mup_tpu.config import shown
from mup_tpu.errors import TableError

_KNOWN = {
    FINISHED: "finished complete completed done success succeeded terminated",
    DIVERGED: "diverged",
    STOPPED: "stopped pruned early-stopped",
    UNFINISHED: "running pending queued scheduled waiting starting paused timeout timed-out failed fail "
    "failure error errored crashed killed cancelled canceled aborted interrupted preempted preempting "
    "out-of-memory oom node-fail",
}
"""States of Weights & Biases, MLflow, Ray Tune, Optuna, Slurm and this package, by their meaning."""


@dataclass(frozen=True)
class States:
    """Meanings of a table's states, beside the known ones or in their place; case does not matter."""

    finished: tuple[str, ...] = ()
    diverged: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    """States of runs that are left out: they say nothing of their trial."""

    def __post_init__(self) -> None:
        given = [_state(state) for f in fields(self) for state in getattr(self, f.name)]
        if twice := next((state for state in given if given.count(state) > 1), None):
            raise TableError(f"state {twice!r} was given two meanings: give it one")


NO_STATES = States()


def meanings(column: pd.Series, states: States) -> pd.Series:
    """Meaning of each run's state: finished, diverged, stopped or unfinished.

    Raises:
        TableError: a state is not known, or one that was given does not occur.
    """
    named = column.astype(object).where(column.notna(), "empty").map(_state)
    meaning = {_state(word): kind for kind, words in _KNOWN.items() for word in words.split()}
    there = named.value_counts()
    for f in fields(states):
        for state in getattr(states, f.name):
            if _state(state) not in there:
                raise TableError(
                    f"no row has the {column.name} {state!r} that was given as {f.name}; "
                    f"there are {_list(map(repr, there.index))}"
                )
            meaning[_state(state)] = f.name
    unknown = [f"{state!r} ({count} rows)" for state, count in there.items() if state not in meaning]
    if unknown:
        raise TableError(
            f"{column.name} has states that are not known: {_list(unknown)}; say what they mean with "
            "--states STATE=finished, diverged or unfinished (which are left out)"
        )
    return named.map(meaning)


def _state(value: object) -> str:
    return re.sub(r"[\s_-]+", "-", str(value).strip().lower())


def numbers(column: pd.Series, name: str, hint: str = "") -> pd.Series:
    """A column as floats, nan if it is empty; decimal commas are read where the whole column has them.

    Args:
        column: values, as numbers or text.
        name: its name, for errors.
        hint: end of the error, with what to write.

    Raises:
        TableError: a value is no number, or could be two.
    """
    if column.dtype.kind in "iuf":
        return column.astype("float64")
    if pd.api.types.is_numeric_dtype(column.dtype) and column.dtype.kind not in "bc":  # nullable types
        return column.astype("Float64").astype("float64") if column.hasnans else column.astype("float64")
    values = column.astype(object).tolist()
    read = [_read(value) for value in values]
    wrong = [(row, v) for row, v, r in zip(column.index, values, read, strict=True) if r is None]
    if wrong:
        raise TableError(f"{name} must be numbers, but {_rows(wrong)}{hint}")
    kinds: dict[str, tuple[Any, Any]] = {}
    for row, value, r in zip(column.index, values, read, strict=True):
        if r is not None:
            kinds.setdefault(r[1], (row, value))
    if "comma" in kinds and ("point" in kinds or "grouped" in kinds):
        mixed = [kinds[kind] for kind in ("comma", "point", "grouped") if kind in kinds]
        raise TableError(f"{name} mixes decimal commas and points: {_rows(mixed)}")
    if "either" in kinds and not {"comma", "grouped"} & set(kinds):
        row, value = kinds["either"]
        one, other = value.replace(",", "."), value.replace(",", "")
        raise TableError(
            f"{name} of row {row} is {value!r}, which may be {one} or {other}: write it with a point"
        )
    found = [_value(*r, with_comma="comma" in kinds) for r in read if r is not None]
    return pd.Series(found, column.index, dtype="float64")


def _read(value: object) -> tuple[str, str] | None:
    """A number as it is written, and its kind; None for anything else.

    Kinds are "plain" (1234), "point" (1.5), "grouped" (1,234.5), "comma" (1.234,5), and "either" of these
    (1,234).
    """
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | float | Decimal | np.integer | np.floating):
        try:
            number = float(value)
        except OverflowError:
            return None
        return repr(number), "point" if math.isfinite(number) and number % 1 else "plain"
    if not isinstance(value, str):
        return ("nan", "plain") if value is None or value is pd.NA or value is pd.NaT else None
    text = value.strip()
    if text.lower() in _EMPTY:
        return "nan", "plain"
    if _INFINITE.fullmatch(text):
        return text, "plain"
    if _SPACED.fullmatch(text):
        text = re.sub(r"[ '\u00a0\u202f]", "", text)
    if _PLAIN.fullmatch(text):
        return text, "point" if "." in text else "plain"
    if _GROUPED.fullmatch(text):
        return text, "grouped" if "." in text or text.count(",") > 1 else "either"
    return (text, "comma") if _COMMA.fullmatch(text) else None


def _value(text: str, kind: str, with_comma: bool) -> float:
    """Value of a number as it is written, with decimal commas or points."""
    if kind == "comma" or (kind == "either" and with_comma):
        text = text.replace(".", "").replace(",", ".")
    return float(text.replace(",", ""))


_EMPTY = {"", "nan", "none", "null", "na", "n/a", "<na>", "-"}
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SPACED = re.compile(r"[+-]?[1-9][0-9]{0,2}([ '\u00a0\u202f][0-9]{3})+([.,][0-9]*)?")
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?")
_COMMA = re.compile(
    r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?|[+-]?[1-9][0-9]{0,2}((\.[0-9]{3})+,[0-9]*|(\.[0-9]{3}){2,})"
)


def _rows(wrong: list[tuple[Any, Any]]) -> str:
    """First rows with their values, and the number of the others."""
    more = f", and {len(wrong) - 3} more rows" if len(wrong) > 3 else ""
    return ", ".join(f"row {row} has {shown(value)}" for row, value in wrong[:3]) + more


def _list(words: Iterable[str]) -> str:
    """First eight words."""
    all_words = [*words]
    return ", ".join(all_words[:8]) + (" ..." if len(all_words) > 8 else "")
