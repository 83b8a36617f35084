"""Columns of a run table: one for each field of a trial, and one for each outcome of running it; and tables
for people.

Rows, the store's schema, tables of searches, and labels of figures and reports all come from here.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mup_tpu.config.trial import PARTS, Trial, field_column
from mup_tpu.config.values import about, format_learning_rate, typed_fields

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    type: type  # str, int, float or bool
    label: str  # name for people
    unit: str = ""
    part: str = ""  # part of the trial that has the field; "" for columns without one
    field: str = ""
    as_power: bool = False  # whether values are written as powers of 2


_OUTCOME = [
    Column("experiment", str, "experiment"),
    Column("trial_id", str, "trial"),
    Column("heads", int, "heads"),
    Column("warmup_steps", int, "warm-up", "steps"),
    Column("actual_head_size", int, "head size at this width"),
    Column("params", int, "parameters"),
    Column("params_non_embedding", int, "parameters without embeddings"),
    Column("params_active", int, "parameters that a token uses, without embeddings"),
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
    Column("threads", int, "CPU threads of the pack"),
    Column("purchase", int, "purchase of the sequence"),
    Column("versions", str, "versions"),
    Column("git_commit", str, "git commit"),
    Column("config", str, "configuration"),
    Column("finished_at", str, "finished at"),
]
# Columns that are fields of a trial, by name
CONFIGURED = {
    field_column(f.name): Column(
        field_column(f.name), str if typing.get_origin(hint) is typing.Literal else hint,
        about(f).label or f.name.replace("_", " "), about(f).unit, part, f.name, about(f).as_power,
    )
    for part, cls in PARTS.items() for f, hint in typed_fields(cls)
}  # fmt: skip
_OF_FIELD = {column.field: column for column in CONFIGURED.values()}
# All columns of a run table that this package writes, by name
COLUMNS = CONFIGURED | {column.name: column for column in _OUTCOME}


def _column(name: str) -> Column:
    # A study may call its hyperparameter as a field of our trials, whose column has another name.
    return COLUMNS.get(name) or _OF_FIELD.get(name) or Column(name, str, name)


def is_power(name: str) -> bool:
    return _column(name).as_power


def title(name: str) -> str:
    unit = _column(name).unit
    return f"{label(name)} ({unit})" if unit else label(name)


def label(name: str) -> str:
    return _column(name).label


def plural(name: str) -> str:
    """Write "widths", or "values of hidden" of a name that is not ours."""
    written = label(name)
    is_word = (name in COLUMNS or name in _OF_FIELD) and re.fullmatch("[a-z ]*[a-rt-z]", written)
    return f"{written}s" if is_word and written != "compute" else f"values of {written}"


def write_scale(name: str, value: float) -> str:
    """Write a point of a scale: 512, 1.3B parameters, 2 GFLOP."""
    unit = _column(name).unit
    for power, prefix in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G" if unit else "B"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.3g}{' ' * bool(unit)}{prefix}{unit}"
    return f"{value:.4g}" if value % 1 and value < 1e4 else f"{value:g}"


def write(name: str, value: Any) -> str:
    if is_power(name):
        return format_learning_rate(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def configured(trial: Trial) -> dict[str, Any]:
    """Return the columns that follow from a trial's configuration."""
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


@dataclass(frozen=True)
class Table:
    """A table for people, printed or written into a report. In 80 columns long cells wrap; none is cut."""

    kind: ClassVar[str] = "table"
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Collection[str] = ()
    """Headings of columns of text, which stand at the left; numbers stand at the right."""
    whole: Collection[str] = ()  # headings of columns whose cells stay on one line

    def between(self, first: int, last: int | None, title: str) -> Table:
        rows = [row[first:last] for row in self.rows]
        return replace(self, headings=self.headings[first:last], rows=rows, title=title)

    def __rich__(self) -> rich.table.Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as Shown

        made = Shown(
            title=self.title or None, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
            title_justify="left",
        )  # fmt: skip
        for heading in self.headings:
            justify = "left" if heading in self.left else "right"
            made.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in self.whole)  # type: ignore[arg-type]
        for row in self.rows:
            made.add_row(*row)
        return made
