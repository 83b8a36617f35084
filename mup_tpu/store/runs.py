"""The run table on disk: Parquet parts, each written whole or not at all, read back as one pandas table.

A results folder holds one experiment:

    results/lr_transfer/store.json        which experiment, along which axes, which format; of a sequence, the
                                          scales that are planned; which rows its verdict is asked of
    results/lr_transfer/runs/*.parquet    one row a trial
    results/lr_transfer/curves/*.parquet  learning curves, keyed by trial_id

What a part holds is verified when it is read (`parts.py`). Writers only ever add parts, so any number of them
may write at once and a kill leaves no damaged file. A row written twice (by two drivers, or by a compaction
that was killed) is one row when read. Paths may be fsspec URLs (`gs://`, `memory://`), where a write is one
atomic upload.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd
import pyarrow as pa

from mup_tpu.config import Sweep, is_field, shown
from mup_tpu.config.columns import COLUMNS
from mup_tpu.errors import StoreError, TableError, reason
from mup_tpu.files import Folder, patiently
from mup_tpu.store import parts
from mup_tpu.store.conditions import Condition
from mup_tpu.store.old_rows import complete

FORMAT = 1

LOG_FILE, LOG_OBJECTS = "search.jsonl", "search"
"""The log of a search in its results folder: a file, in a bucket a folder of objects."""

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
_KEYS = {"runs": ("trial_id", "status"), "curves": ("trial_id", "split", "step")}
"""Columns of a table that have a value in every row."""


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
        self.folder.remove_leftovers()
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

    def ask(self, where: Sequence[Condition]) -> None:
        """Have the folder's verdict be of the rows that meet these conditions, or with none of all rows."""
        header = {key: value for key, value in (_read_header(self.folder) or {}).items() if key != "where"}
        self._write_header({**header, "where": [str(c) for c in where]} if where else header)

    def append(self, rows: Iterable[Mapping[str, Any]], curves: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add rows of the run table and their curve points; on return they are on disk.

        Curves go first: a row in the run table says that all of its trial is there.

        Raises:
            StoreError: the folder cannot be written; nothing stored before is touched.
        """
        curves, rows = list(curves), [{"experiment": self.experiment, **row} for row in rows]
        for table, records in (("curves", curves), ("runs", rows)):
            if records:
                _write_part(self.folder, table, _from_records(records, _SCHEMAS[table]))

    def results(self) -> pd.DataFrame:
        """The rows that are results: of whole trials, and of those that were stopped early."""
        runs = _read_table(self.folder, "runs")
        return runs[runs["status"].isin(FINAL)]

    def done(self, stopped: bool = True) -> set[str]:
        """trial_ids whose result is stored, those that were stopped early among them or not."""
        return done_of(self.results(), stopped)

    def next_purchase(self) -> int | None:
        """Of a sequence, the number that what is run now comes with; None where the folder holds none."""
        if not load_planned(self.folder):
            return None
        purchases = self.results()["purchase"].dropna()
        return int(purchases.max()) + 1 if len(purchases) else 1

    def compact(self) -> None:
        """Merge all parts into one of each table (a folder to commit is easier to look at)."""
        for table in ("runs", "curves"):
            before = _parts(self.folder, table)
            if len(before) > 1:
                merged = pa.Table.from_pandas(_read_table(self.folder, table), preserve_index=False)
                _write_part(self.folder, table, merged)
                self.folder.remove(*before)


def done_of(results: pd.DataFrame, stopped: bool = True) -> set[str]:
    """trial_ids of `Store.results`, those that were stopped early among them or not."""
    return set(results.loc[stopped | (results["status"] != "stopped"), "trial_id"])


def results_folder(path: str | os.PathLike[str]) -> Folder:
    """A results folder by its local path or fsspec URL.

    Raises:
        StoreError: the URL is of a kind that is not known, or whose package is not installed.
    """
    try:
        return Folder(path)
    except OSError as error:
        raise StoreError(f"results folder {path} cannot be opened: {reason(error)}") from None


def is_search(path: str | os.PathLike[str]) -> bool:
    """Whether a results folder holds a search.

    Raises:
        StoreError: it cannot be read.
    """
    folder = results_folder(path)
    try:
        return not {LOG_FILE, LOG_OBJECTS}.isdisjoint(folder.names())
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None


def load_runs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The run table of a results folder, one row a trial.

    Examples:
        >>> runs = load_runs("results/quickstart")
        >>> runs.groupby(["parametrization", "width"])["loss"].min().unstack().round(2)
        width             64    128   256   384
        parametrization
        mup              2.37  2.35  2.35  2.34
        sp               2.37  2.39  2.43  2.45

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


def load_question(path: str | os.PathLike[str]) -> tuple[Condition, ...]:
    """Conditions on the rows that a results folder's verdict is of; none where it is of all."""
    header = _read_header(results_folder(path)) or {}
    return tuple(Condition.parse(text) for text in header.get("where", ()))


def load_curves(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Learning curves of a results folder: trial_id, step, tokens, split, loss (nat per token).

    Examples:
        >>> curves = load_curves("results/quickstart")
        >>> curves[curves["split"] == "train"].groupby("step")["loss"].mean().round(2).tail(3).to_dict()
        {80: 2.56, 90: 2.52, 100: 2.46}
    """
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
        _check_header(header)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"results folder {folder} cannot be read: store.json: {reason(error)}") from None
    return header


def _check_header(header: Any) -> None:
    """What store.json holds must be what this version writes there.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(header, dict):
        raise ValueError("it is no JSON object")
    if header.get("format") != FORMAT:
        raise ValueError(f"it has store format {shown(header.get('format'))}; this version reads {FORMAT}")
    if not isinstance(header.get("experiment"), str):
        raise ValueError("it does not name its experiment")
    axes, planned = header.get("axes", {}), header.get("planned", [])
    usual = [f.name for f in fields(StoredAxes)]
    if not isinstance(axes, dict) or not set(axes) <= set(usual):
        raise ValueError(f"its axes are not {', '.join(usual)}")
    for name, axis in axes.items():
        column, own = (axis.get("column"), axis.get("fields")) if isinstance(axis, dict) else (None, None)
        is_named = isinstance(own, list) and own and all(isinstance(f, str) and is_field(f) for f in own)
        if not (isinstance(column, str) and column in COLUMNS and is_named):
            raise ValueError(f"its axis {name} is not a column and fields that this version knows")
    where = header.get("where", [])
    if not isinstance(where, list) or not all(isinstance(text, str) for text in where):
        raise ValueError("its question, where, is not a list of conditions on columns")
    try:
        for text in where:
            Condition.parse(text)
    except TableError as error:
        raise ValueError(f"its question: {error}") from None
    numbers = isinstance(planned, list) and all(type(p) in (int, float) and 0 < p < 2**63 for p in planned)
    if not numbers:
        raise ValueError(f"its planned scales are not numbers above 0: {shown(planned)}")


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
    try:
        frame = _frame(tables.values(), table)
    except _MISFITS as error:
        for name, rows in tables.items():
            _check_alone(rows, table, f"{folder}/{name}")
        raise StoreError(f"parts of {folder}/{table} do not fit together: {reason(error)}") from None
    if table == "curves":
        return frame.drop_duplicates(["trial_id", "split", "step"], keep="last", ignore_index=True)
    # A whole run outranks one that was stopped early, and that a failure; of two equals the first stays.
    rank = frame["status"].map({"finished": 0, "diverged": 0, "stopped": 1}).fillna(2)
    return frame.iloc[rank.argsort(kind="stable")].drop_duplicates("trial_id", ignore_index=True)


def _frame(tables: Iterable[pa.Table], table: str) -> pd.DataFrame:
    whole = pa.concat_tables([_SCHEMAS[table].empty_table(), *tables], promote_options="permissive")
    return complete(whole.to_pandas()) if table == "runs" else whole.to_pandas()


def _check_alone(rows: pa.Table, table: str, part: str) -> None:
    """Name the part that cannot be read by itself, if it is this one."""
    try:
        _frame([rows], table)
    except _MISFITS as error:
        raise StoreError(f"part {part} cannot be read: {reason(error)}") from None


_MISFITS = (ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException)
"""What tables raise that do not fit together, or whose rows do not hold what they should."""

_LISTINGS = 100
"""Times that parts are listed where one is gone when it is read, merged into another by a compaction."""


def _read_parts(folder: Folder, table: str) -> dict[str, pa.Table] | None:
    """All parts of a table by name; None if one that was listed is gone."""
    try:
        names = _parts(folder, table)
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None
    tables = {}
    for name in names:
        try:
            content = folder.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"part {folder}/{name} cannot be read: {reason(error)}") from None
        file = name.removeprefix(f"{table}/")
        tables[name] = parts.decode(content, file, f"{folder}/{name}", _SCHEMAS[table], _KEYS[table])
    return tables


def _from_records(records: list[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    extra = sorted({key for record in records for key in record} - set(schema.names))
    all_fields = [*schema, *(pa.field(k, pa.array([r.get(k) for r in records]).type) for k in extra)]
    return pa.Table.from_pylist([dict(r) for r in records], pa.schema(all_fields))


def _write_part(folder: Folder, table: str, rows: pa.Table) -> None:
    content = parts.encode(rows)
    _write(folder, f"{table}/{parts.new_name(content)}", content)


def _write(folder: Folder, name: str, content: bytes) -> None:
    try:
        patiently(lambda: folder.write(name, content))
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be written: {reason(error)}") from None
