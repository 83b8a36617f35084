"""The columns of a run table: one for each field of a trial, and those that only running tells.

Rows, the store's schema, what a search shows, labels of figures and reports all come from here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mup_tpu.config import (
    PARTS,
    Trial,
    field_column,
    format_learning_rate,
    on_one_line,
    parse_learning_rate,
)
from mup_tpu.errors import ConfigError, TableError


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    type: type
    """str, int, float or bool."""
    label: str
    """What people call it."""
    unit: str = ""
    part: str = ""
    """Part of the trial that its field belongs to; "" for columns that are not a field's."""
    field: str = ""
    as_power: bool = False
    """Whether values are written as powers of 2."""

    @property
    def title(self) -> str:
        """Label and unit, as on an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _fields() -> list[Column]:
    """A column for each field of a trial, in their order."""
    columns = []
    for part, cls in PARTS.items():
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            name, about, kind = field_column(f.name), f.metadata, hints[f.name]
            kind = str if typing.get_origin(kind) is typing.Literal else kind
            label = about.get("label") or f.name.replace("_", " ")
            unit, as_power = about.get("unit", ""), about.get("as_power", False)
            columns.append(Column(name, kind, label, unit, part, f.name, as_power))
    return columns


_OUTCOME = [
    Column("experiment", str, "experiment"),
    Column("trial_id", str, "trial"),
    Column("heads", int, "heads"),
    Column("warmup_steps", int, "warm-up", "steps"),
    Column("actual_head_size", int, "head size at this width"),
    Column("params", int, "parameters"),
    Column("params_non_embedding", int, "parameters without embeddings"),
    Column("tokens_planned", int, "training tokens"),
    Column("flops", float, "compute", "FLOP"),
    Column("applied_lr", float, "peak learning rate of hidden matrices, as applied", as_power=True),
    Column("applied_weight_decay", float, "weight decay of hidden matrices, as applied"),
    Column("applied_eps", float, "ε of hidden matrices, as applied"),
    Column("applied_beta1", float, "β₁ as applied"),
    Column("applied_beta2", float, "β₂ as applied"),
    Column("steps_done", int, "steps done"),
    Column("tokens", int, "tokens trained on"),
    Column("dataset", str, "dataset"),
    Column("data_fingerprint", str, "fingerprint of the data"),
    Column("loss", float, "loss", "nat per token"),
    Column("status", str, "status"),
    Column("reason", str, "reason"),
    Column("wall_time_s", float, "time", "s"),
    Column("device", str, "device"),
    Column("pack_size", int, "trials in the pack"),
    Column("purchase", int, "purchase of the sequence"),
    Column("versions", str, "versions"),
    Column("git_commit", str, "git commit"),
    Column("config", str, "configuration"),
    Column("finished_at", str, "finished at"),
]
CONFIGURED = {column.name: column for column in _fields()}
"""Columns that are fields of a trial, by name."""
COLUMNS = CONFIGURED | {column.name: column for column in _OUTCOME}
"""All columns of a run table that this package writes, by name."""


@dataclass(frozen=True)
class Condition:
    """What rows are asked about: those whose column has a value, or one from it on, or up to it."""

    column: str
    relation: str
    """"=", ">=" or "<="."""
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """From COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE.

        Raises:
            TableError: it is not of that form.
        """
        found = re.fullmatch(r"\s*([^=<>]+?)\s*(>=|<=|=)\s*(.*?)\s*", text, re.DOTALL)
        if found is None:
            raise TableError(
                f"where {on_one_line(text)!r} is not COLUMN=VALUE; write for example steps_planned=500, or "
                "width>=64"
            )
        condition = cls(*found.groups())
        if condition.relation != "=":
            condition.bound()
        return condition

    def bound(self) -> float:
        """The value as a number.

        Raises:
            TableError: it is none.
        """
        try:
            return parse_learning_rate(self.value)
        except (ValueError, ConfigError):
            raise TableError(
                f"where {on_one_line(str(self))!r}: {on_one_line(self.value)!r} is not a number"
            ) from None

    def __str__(self) -> str:
        return f"{self.column}{self.relation}{self.value}"

    @property
    def words(self) -> str:
        """For people: "width from 64 on"."""
        name = label(self.column)
        return {
            "=": f"{name} {self.value}",
            ">=": f"{name} from {self.value} on",
            "<=": f"{name} up to {self.value}",
        }[self.relation]


def title(name: str) -> str:
    """Label and unit of a column; of a table that is not ours, its name."""
    return COLUMNS[name].title if name in COLUMNS else name.replace("_", " ")


def label(name: str) -> str:
    """Label of a column; of a table that is not ours, its name."""
    return COLUMNS[name].label if name in COLUMNS else name.replace("_", " ")


def write_scale(name: str, value: float) -> str:
    """A point of a scale for people: widths as they are, FLOP and parameters with a prefix."""
    unit = COLUMNS[name].unit if name in COLUMNS else ""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:g}"


def write(name: str, value: Any) -> str:
    """A value of a column or field for people."""
    column = COLUMNS.get(name) or next((c for c in CONFIGURED.values() if c.field == name), None)
    if column is not None and column.as_power:
        return format_learning_rate(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def configured(trial: Trial) -> dict[str, Any]:
    """The columns of a trial's configuration, and those that follow from it alone."""
    m, d, t = trial.model, trial.data, trial.train
    parts = {name: getattr(trial, name) for name in PARTS}
    values = {c.name: getattr(parts[c.part], c.field) for c in CONFIGURED.values()}
    return values | {
        "heads": m.heads,
        "warmup_steps": t.warmup_steps,
        "actual_head_size": m.actual_head_size,
        "tokens_planned": t.steps * d.batch_size * d.sequence_length,
        "config": json.dumps(trial.to_dict(), sort_keys=True),
    }


def complete(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows that an earlier version stored, with the columns that came since, from their configuration.

    In the first version `head_size` was that at the trial's width; now it is the configured one.

    Raises:
        ValueError: a stored configuration is none.
    """
    configured = [column for column in CONFIGURED.values() if column.name in runs]
    old = runs[[column.name for column in configured]].isna().any(axis=1) & runs["config"].notna()
    if not old.any():
        return runs
    runs = runs.copy()
    flat = [_flat(config) for config in runs.loc[old, "config"]]
    first = old & runs["actual_head_size"].isna()
    runs["actual_head_size"] = runs["actual_head_size"].where(~first, runs["head_size"])
    runs["head_size"] = runs["head_size"].where(~first)
    tokens = runs["steps_planned"] * runs["batch_size"] * runs["sequence_length"]
    runs["tokens_planned"] = runs["tokens_planned"].where(~old, tokens)
    for column in configured:
        missing = old & runs[column.name].isna()
        if missing.any():
            default = getattr(PARTS[column.part](), column.field)
            values = [row.get(column.field, default) for row in flat]
            if wrong := [value for value in values if not _is_of(column, value)]:
                raise ValueError(f"config of a row has {column.field} {wrong[0]!r}")
            known = pd.Series(values, runs.index[old])
            runs[column.name] = runs[column.name].astype(object).where(~missing, known)
    return runs.astype({c.name: _PANDAS[c.type] for c in COLUMNS.values() if _is_whole(runs, c)})


_PANDAS = {int: "int64", float: "float64", bool: "bool", str: "str"}


def _is_whole(runs: pd.DataFrame, column: Column) -> bool:
    return column.name in runs and bool(runs[column.name].notna().all())


def _is_of(column: Column, value: Any) -> bool:
    """Whether a value is one of a column's type."""
    is_bool = isinstance(value, bool)
    return is_bool if column.type is bool else isinstance(value, _VALUES[column.type]) and not is_bool


_VALUES: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}


def _flat(config: str) -> dict[str, Any]:
    """The fields of a stored configuration by name."""
    parts = json.loads(config)
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError(f"config of a row is no table of parts: {config[:40]!r}")
    return {name: value for part in parts.values() for name, value in part.items()}
