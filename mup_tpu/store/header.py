"""The header of a results folder, store.json: its experiment, axes, planned scales and question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mup_tpu.config import Sweep, shown
from mup_tpu.config.columns import COLUMNS
from mup_tpu.config.trial import part_of_field
from mup_tpu.errors import StoreError, TableError, reason
from mup_tpu.files import Folder, patiently
from mup_tpu.store.access import accessed
from mup_tpu.store.conditions import Condition

FILE = "store.json"
FORMAT = 1

MOST_BYTES = 2**24
"""Largest header that is read."""


@dataclass(frozen=True)
class StoredAxis:
    """An axis of a stored sweep: its column, and the fields that change along it."""

    column: str
    fields: tuple[str, ...]

    @classmethod
    def parse(cls, name: str, found: Any) -> StoredAxis:
        """An axis from JSON.

        Raises:
            ValueError: the column or a field is unknown.
        """
        match found:
            case {"column": str(column), "fields": [*own]} if (
                own and column in COLUMNS and all(isinstance(f, str) and f in part_of_field() for f in own)
            ):
                return cls(column, tuple(own))
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
    def parse(cls, found: Any) -> StoredAxes:
        """Axes from JSON.

        Raises:
            ValueError: an entry is not allowed.
        """
        usual = [f.name for f in fields(cls)]
        if not isinstance(found, dict) or not set(found) <= set(usual):
            raise ValueError(f"its axes are not {', '.join(usual)}")
        return cls(**{name: StoredAxis.parse(name, axis) for name, axis in found.items()})

    def __str__(self) -> str:
        scale = " with ".join(self.scale.fields)
        return f"{self.tune.fields[0]} by {scale}, comparing {self.compare.fields[0]}"


@dataclass(frozen=True)
class Header:
    """Content of store.json."""

    experiment: str
    axes: StoredAxes | None = None
    """Axes of the sweep; None where none are stored."""
    planned: tuple[float, ...] = ()
    """Scales of the sequence; empty for a fixed grid."""
    where: tuple[Condition, ...] = ()
    """Conditions on the rows that the verdict uses; without any it uses all."""
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
        axes = StoredAxes.parse(found.pop("axes")) if "axes" in found else None
        where, planned = _conditions(found.pop("where", [])), _scales(found.pop("planned", []))
        return cls(experiment, axes, planned, where, found)

    def to_json(self) -> bytes:
        """Bytes of store.json."""
        content: dict[str, Any] = {"experiment": self.experiment, "format": FORMAT}
        if self.axes:
            content["axes"] = asdict(self.axes)
        if self.planned:
            content["planned"] = self.planned
        if self.where:
            content["where"] = [str(condition) for condition in self.where]
        return json.dumps({**content, **self.others}).encode()


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
    """Header of a results folder; None without a store.

    Raises:
        StoreError: the header cannot be read, or an entry is not allowed.
    """
    try:
        with accessed(folder, "read"):
            try:
                return Header.parse(folder.read(FILE, MOST_BYTES))
            except (FileNotFoundError, NotADirectoryError):
                return None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"results folder {folder} cannot be read: {FILE}: {reason(error)}") from None


def create_header(folder: Folder, header: Header) -> Header:
    """Header of a new results folder: this one, or another driver's that was created at the same time.

    Raises:
        StoreError: the header cannot be written.
    """
    with accessed(folder, "written"):
        try:
            patiently(lambda: folder.create(FILE, header.to_json()))
        except OSError:
            if (found := read_header(folder)) is None:
                raise
            return found
    return read_header(folder) or header


def write_header(folder: Folder, header: Header) -> None:
    """Put a header in place of an earlier one.

    Raises:
        StoreError: the header cannot be written.
    """
    with accessed(folder, "written"):
        patiently(lambda: folder.write(FILE, header.to_json()))
