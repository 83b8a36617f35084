"""The header of a results folder, store.json: its experiment, axes, planned scales and question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mup_tpu.config import Sweep, field_column, shown
from mup_tpu.config.columns import COLUMNS
from mup_tpu.config.fields import TYPE_NAMES
from mup_tpu.config.trial import part_of_field
from mup_tpu.errors import StoreError, TableError, raised_as
from mup_tpu.files import Folder, patiently
from mup_tpu.store.access import accessed, read_if_there, write_whole
from mup_tpu.store.conditions import Condition

FILE = "store.json"
FORMAT = 1

MOST_BYTES = 2**24
"""Largest header that is read."""

STUDY_COLUMNS = (
    "experiment", "trial_id", "seed", "loss", "status", "reason", "wall_time_s", "steps_done",
    "purchase", "versions", "config", "finished_at",
)  # fmt: skip
"""Columns of a study's runs besides its own."""

_TYPES = {kind.__name__: kind for kind in TYPE_NAMES}
"""Types of columns by their names in store.json."""


@dataclass(frozen=True)
class StoredAxis:
    """An axis of a stored sweep: its column, and the fields that change along it."""

    column: str
    fields: tuple[str, ...]
    is_study: bool = False
    """Whether the fields are a study's own names, under which its columns go."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the fields."""
        return self.fields if self.is_study else tuple(map(field_column, self.fields))

    @classmethod
    def parse(cls, name: str, found: Any, columns: Mapping[str, type] | None) -> StoredAxis:
        """The axis `name` from JSON; ValueError where its column or a field is unknown.

        `columns` are a study's own; None for our own trials.
        """
        known = COLUMNS if columns is None else {*columns, *STUDY_COLUMNS}
        match found:
            case {"column": str(column), "fields": [*own]} if (
                own
                and column in known
                and all(
                    isinstance(f, str) and f in (part_of_field() if columns is None else known) for f in own
                )
            ):
                return cls(column, tuple(own), columns is not None)
        raise ValueError(f"its axis {name} is not a column and fields that this version knows")


@dataclass(frozen=True)
class StoredAxes:
    """Axes of a stored sweep; stores without axes have the defaults."""

    scale: StoredAxis = StoredAxis("width", ("width",))
    tune: StoredAxis = StoredAxis("lr", ("learning_rate",))
    compare: StoredAxis = StoredAxis("parametrization", ("parametrization",))

    @classmethod
    def of(cls, sweep: Sweep) -> StoredAxes:
        """Axes of a sweep."""
        return cls(*(StoredAxis(axis.column, axis.fields) for axis in sweep.axes))

    @classmethod
    def parse(cls, found: Any, columns: Mapping[str, type] | None) -> StoredAxes:
        """Axes from JSON, of a study with these columns or of our own trials; ValueError as for an axis."""
        usual = [f.name for f in fields(cls)]
        if not isinstance(found, dict) or not set(found) <= set(usual):
            raise ValueError(f"its axes are not {', '.join(usual)}")
        return cls(**{name: StoredAxis.parse(name, axis, columns) for name, axis in found.items()})

    def __str__(self) -> str:
        scale = " with ".join(self.scale.fields)
        return f"{self.tune.fields[0]} by {scale}, comparing {self.compare.fields[0]}"


@dataclass(frozen=True)
class Header:
    """Content of store.json."""

    experiment: str
    axes: StoredAxes | None = None
    """Axes of the sweep; None if none are stored."""
    planned: tuple[float, ...] = ()
    """Scales of the sequence; empty for a fixed grid."""
    where: tuple[Condition, ...] = ()
    """Conditions on the rows that the verdict uses; without any it uses all."""
    columns: Mapping[str, type] | None = None
    """Own columns of a study with their types; None for our own trials."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Entries of later versions, kept as they are."""

    @classmethod
    def parse(cls, content: bytes) -> Header:
        """A header from the bytes of store.json.

        Raises:
            ValueError: an entry is not allowed.
            RecursionError: lists are nested too deeply.
        """
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has {len(content):,} bytes; at most {MOST_BYTES:,} are read")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        if found.pop("format", None) != FORMAT:
            told = shown(json.loads(content).get("format"))
            raise ValueError(f"it has store format {told}; this version reads {FORMAT}")
        if not isinstance(experiment := found.pop("experiment", None), str):
            raise ValueError("it does not name its experiment")
        columns = _types(found.pop("columns")) if "columns" in found else None
        axes = StoredAxes.parse(found.pop("axes"), columns) if "axes" in found else None
        where, planned = _conditions(found.pop("where", [])), _scales(found.pop("planned", []))
        return cls(experiment, axes, planned, where, columns, found)

    def to_json(self) -> bytes:
        """Bytes of store.json."""
        content: dict[str, Any] = {"experiment": self.experiment, "format": FORMAT}
        if self.axes:
            axes = asdict(self.axes).items()
            content["axes"] = {name: {k: axis[k] for k in ("column", "fields")} for name, axis in axes}
        if self.columns is not None:
            content["columns"] = {name: kind.__name__ for name, kind in self.columns.items()}
        if self.planned:
            content["planned"] = self.planned
        if self.where:
            content["where"] = [str(condition) for condition in self.where]
        return json.dumps({**content, **self.others}).encode()


def _types(found: Any) -> dict[str, type]:
    if not isinstance(found, dict) or not all(isinstance(k, str) and k in _TYPES for k in found.values()):
        raise ValueError(f"its columns are not names with types of {', '.join(_TYPES)}")
    return {name: _TYPES[kind] for name, kind in found.items()}


def _conditions(found: Any) -> tuple[Condition, ...]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("its question, where, is not a list of conditions on columns")
    try:
        return tuple(Condition.parse(text) for text in found)
    except TableError as error:
        raise ValueError(f"its question: {error}") from None


def _scales(found: Any) -> tuple[float, ...]:
    if not isinstance(found, list) or not all(type(p) in (int, float) and 0 < p < 2**63 for p in found):
        raise ValueError(f"its planned scales are not numbers above 0: {shown(found)}")
    return tuple(float(scale) for scale in found)


def read_header(folder: Folder) -> Header | None:
    """Header of a results folder; None without a store."""
    said = f"results folder {folder} cannot be read: {FILE}"
    content = read_if_there(folder, FILE, MOST_BYTES)
    with raised_as(StoreError, said, (ValueError, RecursionError)):
        return None if content is None else Header.parse(content)


def create_header(folder: Folder, header: Header) -> Header:
    """Header of a new results folder: this one, or another driver's that was created at the same time."""
    with accessed(folder, "written"):
        try:
            patiently(lambda: folder.create(FILE, header.to_json()))
        except OSError:
            if (found := read_header(folder)) is None:
                raise
            return found
    return read_header(folder) or header


def write_header(folder: Folder, header: Header) -> None:
    """Put a header in place of an earlier one."""
    write_whole(folder, FILE, header.to_json())
