"""JSON files of a results folder: its header store.json, and predictions.json.

The header names the experiment, the axes, the scales that a sequence plans, the columns of a study, and
conditions on the rows that the verdict uses.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from mup_tpu.config import Axes, on_one_line, parse_number, shown
from mup_tpu.config.columns import COLUMNS, label
from mup_tpu.config.toml import from_dict
from mup_tpu.config.trial import part_of_field
from mup_tpu.config.values import TYPE_NAMES, require_valid
from mup_tpu.errors import ConfigError, StoreError, TableError, raised_as
from mup_tpu.files import Folder, patiently, require_seal, sealed, short_hash

STORE_FILE, PREDICTIONS = "store.json", "predictions.json"
FORMAT = 1
LOCK = "store.lock"  # file that writers of the header or of predictions lock; a bucket has no locks

STUDY_COLUMNS = (
    "experiment", "trial_id", "seed", "loss", "status", "reason", "wall_time_s", "steps_done",
    "purchase", "versions", "config", "finished_at",
)  # fmt: skip
"""Columns of every study's runs; its user's names come beside them."""

_MOST_BYTES = 2**24
_TRIES = 5  # In a bucket another writer may replace a file between our reading and writing it.
_TYPES = {kind.__name__: kind for kind in TYPE_NAMES}


def results_folder(path: str | os.PathLike[str]) -> Folder:
    """Open a results folder by its local path or fsspec URL."""
    with accessed(path, "opened"):
        return Folder(path)


def accessed(
    folder: object, how: Literal["opened", "read", "written"], file: str = ""
) -> AbstractContextManager[None]:
    """Raise errors of the file system as StoreErrors, which name the file where it is known."""
    return raised_as(StoreError, f"results folder {folder} cannot be {how}{file and f': {file}'}")


def read_file(folder: Folder, file: str, most: int | None = None) -> bytes | None:
    with accessed(folder, "read", file):
        try:
            return folder.read(file, most)
        except (FileNotFoundError, NotADirectoryError):
            return None


def write_file(folder: Folder, file: str, content: bytes) -> None:
    with accessed(folder, "written", file):
        patiently(lambda: folder.write(file, content))


@dataclass(frozen=True)
class Condition:
    """A condition on rows: a column equals a value, or lies above or below a number."""

    column: str
    relation: str  # "=", ">=", "<=", ">" or "<"
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse COLUMN=VALUE, or with >=, <=, > or <."""
        match = re.fullmatch(r"\s*([^=<>]+?)\s*(>=|<=|=|>|<)\s*(.*?)\s*", text, re.DOTALL)
        if match is None:
            raise TableError(
                f"where {on_one_line(text)!r} is not COLUMN=VALUE; write for example steps_planned=500, or "
                "width>=64"
            )
        condition = cls(*match.groups())
        if condition.relation != "=":
            condition.bound()
        return condition

    def bound(self) -> float:
        try:
            return parse_number(self.value)
        except (ValueError, ConfigError):
            raise TableError(
                f"where {on_one_line(str(self))!r}: {on_one_line(self.value)!r} is not a number"
            ) from None

    def __str__(self) -> str:
        return f"{self.column}{self.relation}{self.value}"

    @property
    def words(self) -> str:
        relations = {"=": "{} {}", ">=": "{} from {} on", "<=": "{} up to {}"}
        relations |= {">": "{} above {}", "<": "{} below {}"}
        return relations[self.relation].format(label(self.column), self.value)


@dataclass(frozen=True)
class Header:
    """Content of store.json."""

    experiment: str
    axes: Axes | None = None  # axes of the sweep; None if none are stored
    planned: tuple[float, ...] = ()  # scales of the sequence; empty for a fixed grid
    where: tuple[Condition, ...] = ()  # conditions on the rows of the verdict; () takes all rows
    columns: Mapping[str, type] | None = None  # columns of a study with their types; None for our own trials
    others: Mapping[str, Any] = field(default_factory=dict)  # entries of later versions, kept as they are

    @classmethod
    def parse(cls, content: bytes) -> Header:
        """Parse the bytes of store.json."""
        entries = json.loads(content)
        if not isinstance(entries, dict):
            raise ValueError("it is no JSON object")
        if (version := entries.pop("format", None)) != FORMAT:
            raise ValueError(f"it has store format {shown(version)}; this version reads {FORMAT}")
        if not isinstance(experiment := entries.pop("experiment", None), str):
            raise ValueError("it does not name its experiment")
        columns, axes = entries.pop("columns", None), entries.pop("axes", None)
        where, planned = entries.pop("where", []), entries.pop("planned", [])
        if columns is not None:
            if not isinstance(columns, dict) or not {*map(str, columns.values())} <= _TYPES.keys():
                raise ValueError(f"its columns are not names with types of {', '.join(_TYPES)}")
            columns = {name: _TYPES[kind] for name, kind in columns.items()}
        if not isinstance(where, list) or not all(isinstance(text, str) for text in where):
            raise ValueError("its question, where, is not a list of conditions on columns")
        if not isinstance(planned, list) or not all(
            type(scale) in (int, float) and 0 < scale < (2**63 if type(scale) is int else math.inf)
            for scale in planned
        ):
            raise ValueError(f"its planned scales are not numbers above 0: {shown(planned)}")
        try:
            conditions = tuple(map(Condition.parse, where))
        except TableError as error:
            raise ValueError(f"its question: {error}") from None
        parsed = None if axes is None else _parse_axes(axes, columns)
        return cls(experiment, parsed, tuple(map(float, planned)), conditions, columns, entries)

    def with_planned(self, scales: Iterable[float]) -> Header:
        return replace(self, planned=tuple(sorted({*self.planned, *map(float, scales)})))

    def to_json(self) -> bytes:
        content: dict[str, Any] = {"experiment": self.experiment, "format": FORMAT}
        if axes := self.axes:
            content["axes"] = {
                "scale": {"column": axes.size, "fields": axes.scale},
                "tune": {"column": axes.tuned[0], "fields": axes.tune},
                "compare": {"column": axes.compared, "fields": axes.compare},
            }
        if self.columns is not None:
            content["columns"] = {name: kind.__name__ for name, kind in self.columns.items()}
        if self.planned:
            content["planned"] = self.planned
        if self.where:
            content["where"] = list(map(str, self.where))
        return json.dumps({**content, **self.others}).encode()


def _parse_axes(axes: Any, columns: Mapping[str, type] | None) -> Axes:
    names = ("scale", "tune", "compare")
    if not isinstance(axes, dict) or not set(axes) <= set(names):
        raise ValueError(f"its axes are not {', '.join(names)}")
    # A study's fields are columns; ours are fields of a trial.
    known = COLUMNS.keys() if columns is None else {*columns, *STUDY_COLUMNS}
    known_fields = part_of_field().keys() if columns is None else known
    parsed: dict[str, Any] = {}
    for name, axis in axes.items():
        match axis:
            case {"column": str(column), "fields": [_, *_] as given} if column in known and all(
                isinstance(f, str) and f in known_fields for f in given
            ):
                parsed |= {name: tuple(given)} | ({"size": column} if name == "scale" else {})
            case _:
                raise ValueError(f"its axis {name} is not a column and fields that this version knows")
    return Axes(**parsed, is_study=columns is not None)


def read_header(folder: Folder) -> Header | None:
    content = read_file(folder, STORE_FILE, _MOST_BYTES)
    misfits = (ValueError, RecursionError)
    with raised_as(StoreError, f"results folder {folder} cannot be read: {STORE_FILE}", misfits):
        return None if content is None else Header.parse(content)


def create_header(folder: Folder, header: Header) -> Header:
    """Create store.json with this header; return it, or the header that another driver has just created."""
    with accessed(folder, "written"):
        try:
            patiently(lambda: folder.create(STORE_FILE, header.to_json()))
        except OSError:
            if read_header(folder) is None:
                raise
    return read_header(folder) or header


def change_header(folder: Folder, experiment: str, change: Callable[[Header], Header]) -> Header:
    """Apply a change to the header as it is at this time, and return the new one."""
    header = read_header(folder) or Header(experiment)
    if change(header) == header:
        return header
    with folder.locked(LOCK):
        for _ in range(_TRIES):
            changed = change(read_header(folder) or Header(experiment))
            write_file(folder, STORE_FILE, changed.to_json())
            if folder.is_local or read_header(folder) == changed:
                return changed
    raise StoreError(f"results folder {folder}: another process changes {STORE_FILE} again and again")


@dataclass(frozen=True)
class KeptPrediction:
    """A prediction of one rule's optimum at one scale."""

    made_at: str  # ISO time
    rows: int  # number of rows behind it
    fingerprint: str  # hash of the rows' trial_ids
    scales: tuple[float, ...]  # scales of the rows
    compared: str  # name of the rule
    scale_column: str
    hyperparameter: str
    scale: float  # scale of the target
    x: float  # log2 of the predicted optimum
    half: tuple[float, float]  # 50 % interval of x
    interval: tuple[float, float]  # 95 % interval of x
    expected_cost: float | None  # expected cost of taking x, nat per token; None if it is unknown
    loss: tuple[float, float, float] | None
    """Expected loss at the optimum and its 95 % interval; None if it is unknown."""

    @property
    def subject(self) -> tuple[Any, ...]:
        return self.fingerprint, self.compared, self.scale_column, self.hyperparameter, self.scale


def _parse_prediction(entry: Any) -> KeptPrediction:
    if not isinstance(entry, dict):
        raise ValueError(f"{shown(entry)} is no prediction")
    # Entries of later versions are left out.
    given = {f.name: entry[f.name] for f in fields(KeptPrediction) if f.name in entry}
    prediction = from_dict(KeptPrediction, given, "prediction")
    require_valid(prediction)
    require_seal(entry, f"the prediction of {prediction.made_at} for {prediction.compared}")
    for name, count in (("half", 2), ("interval", 2), ("loss", 3)):
        values = getattr(prediction, name)
        if values is not None and len(values) != count:
            raise ValueError(f"{name} has not {count} numbers")
    return prediction


def fingerprint(trial_ids: Iterable[str]) -> str:
    return short_hash("\n".join(sorted(map(str, trial_ids))))


def load_predictions(path: str | os.PathLike[str]) -> tuple[KeptPrediction, ...]:
    """Load the predictions kept in a results folder, the oldest first."""
    folder = results_folder(path)
    content = read_file(folder, PREDICTIONS, _MOST_BYTES)
    misfits = (ConfigError, ValueError, TypeError, KeyError, RecursionError, AttributeError)
    sentence = f"results folder {folder} cannot be read: {PREDICTIONS} is no list of predictions"
    with raised_as(StoreError, sentence, misfits):
        return () if content is None else tuple(map(_parse_prediction, json.loads(content)))


def keep_predictions(path: str | os.PathLike[str], made: Sequence[KeptPrediction]) -> None:
    """Add predictions to a results folder, without those of the same rows, rule and target."""
    folder = results_folder(path)
    for _ in range(_TRIES):
        with folder.locked(LOCK):
            kept = load_predictions(path)
            subjects = {prediction.subject for prediction in kept}
            more = [prediction for prediction in made if prediction.subject not in subjects]
            if not more:
                return
            entries = [sealed(asdict(prediction)) for prediction in (*kept, *more)]
            write_file(folder, PREDICTIONS, json.dumps(entries, indent=1).encode() + b"\n")
        if folder.is_local:
            return  # in a bucket another writer may have replaced the predictions: look again
