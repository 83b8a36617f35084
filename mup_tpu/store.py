"""The run table on disk: Parquet parts, each written whole or not at all, read back as one pandas table.

A results folder holds one experiment:

    results/lr_transfer/store.json        which experiment, along which axes, which format; of a sequence, the
                                          scales that are planned
    results/lr_transfer/runs/*.parquet    one row a trial
    results/lr_transfer/curves/*.parquet  learning curves, keyed by trial_id

Writers only ever add parts, so any number of them may write at once and a kill leaves no damaged file. A row
written twice (by two drivers, or by a compaction that was killed) is one row when read. Paths may be fsspec
URLs (`gs://`, `memory://`), where a write is one atomic upload.
"""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mup_tpu.columns import COLUMNS, complete
from mup_tpu.config import Sweep
from mup_tpu.errors import StoreError, reason
from mup_tpu.files import Folder

FORMAT = 1

FINAL = ("finished", "diverged", "stopped")
"""Statuses that are results; "failed" and "preempted" trials are run again."""

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_CURVE_TYPES = {
    "trial_id": pa.string(),
    "step": pa.int64(),
    "tokens": pa.int64(),
    "split": pa.string(),
    "loss": pa.float64(),
}
_SCHEMAS = {
    "runs": pa.schema([(column.name, _ARROW[column.type]) for column in COLUMNS.values()]),
    "curves": pa.schema(list(_CURVE_TYPES.items())),
}


@dataclass(frozen=True)
class StoredAxis:
    """An axis of a stored sweep: the column that it is read from, and the fields that change along it."""

    column: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class StoredAxes:
    """The axes of a stored sweep; those of stores that say nothing of them are these."""

    scale: StoredAxis = StoredAxis("width", ("width",))
    tune: StoredAxis = StoredAxis("lr", ("learning_rate",))
    compare: StoredAxis = StoredAxis("parametrization", ("parametrization",))

    @classmethod
    def of(cls, sweep: Sweep) -> StoredAxes:
        """Those of a sweep."""
        return cls(*(StoredAxis(axis.column, axis.fields) for axis in sweep.axes))

    def __str__(self) -> str:
        scale = " with ".join(self.scale.fields)
        return f"{self.tune.fields[0]} by {scale}, comparing {self.compare.fields[0]}"


class Store:
    """A results folder, open for writing.

    Args:
        path: local folder or fsspec URL; made where it is not there.
        experiment: name of the experiment whose rows it takes.
        axes: those of the sweep whose rows it takes; None for rows that are no sweep's.
        planned: scales of the sequence whose rows it takes, besides those that it knows to be planned.

    Raises:
        StoreError: the folder cannot be written, or holds another experiment or a sweep along other axes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        experiment: str,
        axes: StoredAxes | None = None,
        planned: Sequence[float] = (),
    ) -> None:
        self.folder = results_folder(path)
        self.experiment = experiment
        held = _read_header(self.folder)
        if held is None:
            held = {"experiment": experiment, "format": FORMAT} | ({"axes": asdict(axes)} if axes else {})
            if not planned:
                self._write_header(held)
        elif held["experiment"] != experiment:
            raise StoreError(
                f"results folder {self.folder} holds experiment {held['experiment']!r}, not {experiment!r}; "
                "give this one a folder of its own"
            )
        elif axes is not None and axes != (found := _axes(held)):
            raise StoreError(
                f"results folder {self.folder} holds a sweep of {found}, not of {axes}; "
                "give this one a folder of its own"
            )
        if more := sorted({*planned} - {*_planned(held)}):
            self._write_header({**held, "planned": sorted([*_planned(held), *more])})

    def _write_header(self, header: Mapping[str, Any]) -> None:
        _write(self.folder, "store.json", json.dumps(header).encode())

    def append(self, rows: Iterable[Mapping[str, Any]], curves: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add rows of the run table and their curve points; on return they are on disk.

        Curves go first: a row in the run table says that all of its trial is there.

        Raises:
            StoreError: the folder cannot be written; nothing stored before is touched.
        """
        curves, rows = list(curves), [{"experiment": self.experiment, **row} for row in rows]
        part = uuid.uuid4().hex
        for table, records in (("curves", curves), ("runs", rows)):
            if records:
                _write(self.folder, f"{table}/{part}.parquet", _parquet(records, _SCHEMAS[table]))

    def results(self) -> pd.DataFrame:
        """The rows that are results: of whole trials, and of those that were stopped early."""
        runs = _read_table(self.folder, "runs")
        return runs[runs["status"].isin(FINAL)]

    def done(self, stopped: bool = True) -> set[str]:
        """trial_ids whose result is stored, those that were stopped early among them or not."""
        runs = self.results()
        return set(runs.loc[stopped | (runs["status"] != "stopped"), "trial_id"])

    def next_purchase(self) -> int | None:
        """Of a sequence, the number that what is run now comes with; None where the folder holds none."""
        if not load_planned(self.folder):
            return None
        purchases = self.results()["purchase"].dropna()
        return int(purchases.max()) + 1 if len(purchases) else 1

    def compact(self) -> None:
        """Merge all parts into one of each table (a folder to commit is easier to look at)."""
        for table in ("runs", "curves"):
            parts = _parts(self.folder, table)
            if len(parts) > 1:
                merged = pa.Table.from_pandas(_read_table(self.folder, table), preserve_index=False)
                _write(self.folder, f"{table}/{uuid.uuid4().hex}.parquet", _parquet_bytes(merged))
                self.folder.remove(*parts)


def results_folder(path: str | os.PathLike[str]) -> Folder:
    """A results folder by its local path or fsspec URL.

    Raises:
        StoreError: the URL is of a kind that is not known, or whose package is not installed.
    """
    try:
        return Folder(path)
    except OSError as error:
        raise StoreError(f"results folder {path} cannot be opened: {reason(error)}") from None


def load_runs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The run table of a results folder, one row a trial.

    Args:
        path: local folder or fsspec URL.

    Raises:
        StoreError: there is no such folder, or it holds no runs.
    """
    folder = results_folder(path)
    if _read_header(folder) is None:
        raise StoreError(f"results folder {path} holds no store (no store.json in it)")
    runs = _read_table(folder, "runs")
    if runs.empty:
        raise StoreError(f"results folder {path} holds no runs yet")
    axes = load_axes(path)
    order = [axes.compare.column, axes.scale.column, axes.tune.column, "seed", "trial_id"]
    return runs.sort_values(order, ignore_index=True)


def load_axes(path: str | os.PathLike[str]) -> StoredAxes:
    """The axes of the sweep that a results folder holds; of older ones, width and learning rate."""
    return _axes(_read_header(results_folder(path)) or {})


def load_planned(path: str | os.PathLike[str] | Folder) -> tuple[float, ...]:
    """Scales of the sequence that a results folder holds; none where its sweep is a fixed grid."""
    folder = path if isinstance(path, Folder) else results_folder(path)
    return _planned(_read_header(folder) or {})


def load_curves(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Learning curves of a results folder: trial_id, step, tokens, split, loss (nat per token)."""
    return _read_table(results_folder(path), "curves").sort_values(
        ["trial_id", "split", "step"], ignore_index=True
    )


def _axes(header: Mapping[str, Any]) -> StoredAxes:
    named = header.get("axes", {})
    return StoredAxes(**{name: StoredAxis(a["column"], tuple(a["fields"])) for name, a in named.items()})


def _planned(header: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(float(scale) for scale in header.get("planned", ()))


def _read_header(folder: Folder) -> dict[str, Any] | None:
    try:
        header = json.loads(folder.read("store.json"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise StoreError(f"results folder {folder} cannot be read: store.json: {error}") from None
    if header.get("format") != FORMAT:
        raise StoreError(
            f"results folder {folder} has store format {header.get('format')!r}; this version reads {FORMAT}"
        )
    return header


def _parts(folder: Folder, table: str) -> list[str]:
    return [f"{table}/{name}" for name in (folder / table).names() if name.endswith(".parquet")]


def _read_table(folder: Folder, table: str) -> pd.DataFrame:
    tables = None
    for _ in range(_LISTINGS):
        tables = _read_parts(folder, table)
        if tables is not None:
            break
    if tables is None:
        raise StoreError(f"results folder {folder} cannot be read: its parts are replaced again and again")
    whole = pa.concat_tables([_SCHEMAS[table].empty_table(), *tables], promote_options="permissive")
    frame = whole.to_pandas()
    if table == "curves":
        return frame.drop_duplicates(["trial_id", "split", "step"], keep="last", ignore_index=True)
    frame = complete(frame)
    # A whole run outranks one that was stopped early, and that a failure; of two equals the first stays.
    rank = frame["status"].map({"finished": 0, "diverged": 0, "stopped": 1}).fillna(2)
    return frame.iloc[rank.argsort(kind="stable")].drop_duplicates("trial_id", ignore_index=True)


_LISTINGS = 100
"""Times that parts are listed where one is gone when it is read, merged into another by a compaction."""


def _read_parts(folder: Folder, table: str) -> list[pa.Table] | None:
    """All parts of a table; None if one that was listed is gone."""
    try:
        parts = _parts(folder, table)
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None
    tables = []
    for part in parts:
        try:
            tables.append(pq.read_table(io.BytesIO(folder.read(part))))
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"part {folder}/{part} of the results folder cannot be read: {error}") from None
    return tables


def _parquet(records: list[Mapping[str, Any]], schema: pa.Schema) -> bytes:
    extra = sorted({key for record in records for key in record} - set(schema.names))
    fields = [*schema, *(pa.field(k, pa.array([r.get(k) for r in records]).type) for k in extra)]
    return _parquet_bytes(pa.Table.from_pylist([dict(r) for r in records], pa.schema(fields)))


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _write(folder: Folder, name: str, content: bytes) -> None:
    try:
        folder.write(name, content)
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be written: {reason(error)}") from None
