"""Tables of a store, each in parts that are whole or missing.

Parts are never rewritten. Writers merge small ones as they go, so a folder of many thousand rows has about a
hundred parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pyarrow as pa

from mup_tpu.config.columns import COLUMNS
from mup_tpu.errors import StoreError, raised_as, reason
from mup_tpu.files import Folder, patiently
from mup_tpu.store import parts
from mup_tpu.store.access import accessed
from mup_tpu.store.header import STUDY_COLUMNS
from mup_tpu.store.old_rows import complete

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
"""Columns of a table with a value in every row."""

_MISFITS = (ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException)
"""Errors of tables that do not fit together, or with wrong values."""

LISTINGS = 100
"""Most listings of the parts: a writer may merge a listed part before it is read."""

_AT_ONCE = 16
"""Parts of a bucket that are read at once. On a disk threads cost more than they gain."""

MERGE_EVERY = 64
"""Parts of about one size after which a writer merges them."""

_SMALLEST, _GROWTH = 2**16, 8
"""Bytes of parts of the first size, and factor from one size to the next. The first is a few rows: below it a
part is mostly Parquet's description of its columns."""

Own = Mapping[str, type] | None
"""Columns of a study with their types; None for our own trials."""


def _schema(table: str, own: Own) -> pa.Schema:
    """Schema of a table: of our own trials, or of a study with its own columns."""
    if own is None or table != "runs":
        return _SCHEMAS[table]
    common = {name: _SCHEMAS["runs"].field(name).type for name in STUDY_COLUMNS}
    return pa.schema(common | {name: _ARROW[kind] for name, kind in own.items()})


def part_names(folder: Folder, table: str) -> list[str]:
    """Return the names of a table's parts in a results folder, sorted.

    Raises:
        StoreError: the folder cannot be read.
    """
    with accessed(folder, "read"):
        return [f"{table}/{name}" for name in (folder / table).names() if name.endswith(".parquet")]


def read_parts(
    folder: Folder, table: str, names: Sequence[str], own: Own, columns: Sequence[str] | None = None
) -> list[pa.Table]:
    """Return verified parts of a table, with some or all of their columns.

    Raises:
        FileNotFoundError: a part is gone: it was merged after it was listed.
        StoreError: a part is damaged or cannot be read.
    """
    if not names:
        return []
    schema = _schema(table, own)

    def read(name: str) -> pa.Table:
        try:
            content = folder.read(name)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"part {folder}/{name} cannot be read: {reason(error)}") from None
        return parts.decode(
            content, name.rpartition("/")[2], f"{folder}/{name}", schema, _KEYS[table], columns
        )

    if folder.is_local:
        return [read(name) for name in names]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(read, names))


def read_table(folder: Folder, table: str, own: Own = None) -> pd.DataFrame:
    """Return a table of a results folder, each row and point once.

    Raises:
        StoreError: a part is damaged, or the parts do not fit together.
    """
    for _ in range(LISTINGS):
        names = part_names(folder, table)
        try:
            tables = read_parts(folder, table, names, own)
            break
        except FileNotFoundError:
            continue
    else:
        raise StoreError(f"results folder {folder} cannot be read: its parts are replaced again and again")
    schema = _schema(table, own)
    try:
        return _frame(tables, table, schema)
    except _MISFITS as error:
        for name, rows in zip(names, tables, strict=True):  # a part that cannot be read by itself is named
            with raised_as(StoreError, f"part {folder}/{name} cannot be read", _MISFITS):
                _frame([rows], table, schema)
        raise StoreError(f"parts of {folder}/{table} do not fit together: {reason(error)}") from None


def _frame(tables: Iterable[pa.Table], table: str, schema: pa.Schema) -> pd.DataFrame:
    whole = pa.concat_tables([schema.empty_table(), *tables], promote_options="permissive")
    frame = _each_once(whole, table).to_pandas()
    return complete(frame) if table == "runs" else frame


def rank(status: Any) -> int:
    """Order of rows of one trial: a whole run outranks a stopped one, and a stopped one a failure."""
    return {"finished": 0, "diverged": 0, "stopped": 1}.get(status, 2)


def _each_once(rows: pa.Table, table: str) -> pa.Table:
    """Rows of a run table by rank, of each trial the first; of curves the last point of each step."""
    if table == "curves":
        keys = rows.select(["trial_id", "split", "step"]).to_pandas()
        is_repeated = keys.duplicated(keep="last").to_numpy()
        return rows.filter(pa.array(~is_repeated)) if is_repeated.any() else rows
    keys = rows.select(["trial_id", "status"]).to_pandas()
    order = keys["status"].map(rank).sort_values(kind="stable").index
    return rows.take(pa.array(order[~keys["trial_id"][order].duplicated().to_numpy()]))


def merge(folder: Folder, table: str, own: Own = None, names: Sequence[str] | None = None) -> None:
    """Merge parts of a table into one; by default all of them.

    The new part is whole before the old ones go. A kill in between leaves rows twice, and readers take each
    once.
    """
    names = part_names(folder, table) if names is None else names
    if len(names) < 2:
        return
    try:
        tables = read_parts(folder, table, names, own)
    except FileNotFoundError:
        return  # another writer merges them
    with raised_as(StoreError, f"parts of {folder}/{table} do not fit together", _MISFITS):
        whole = _each_once(pa.concat_tables(tables, promote_options="permissive"), table)
    write_part(folder, table, whole)
    with accessed(folder, "written"):
        folder.remove(*names)


def merge_small(folder: Folder, table: str, own: Own = None) -> None:
    """Merge the parts of about one size where there are many of them."""
    with accessed(folder, "read"):
        sizes = (folder / table).sizes()
    by_size: dict[int, list[str]] = {}
    for name, size in sizes.items():
        if name.endswith(".parquet"):
            level = max(0, math.ceil(math.log(max(size, 1) / _SMALLEST, _GROWTH)))
            by_size.setdefault(level, []).append(f"{table}/{name}")
    for level in sorted(by_size):
        if len(by_size[level]) >= MERGE_EVERY:
            merge(folder, table, own, by_size[level])


def append(folder: Folder, table: str, records: list[Mapping[str, Any]], own: Own = None) -> str:
    """Add records as a part, and return its name; on return the part is on disk."""
    schema = _schema(table, own)
    given = {key for record in records for key, value in record.items() if value is not None}
    # Columns without a value are left out: half of the time of opening a small part goes by its columns.
    fields = [field for field in schema if field.name in given or field.name in _KEYS[table]]
    extra = sorted(given - set(schema.names))
    fields += [pa.field(k, pa.array([r.get(k) for r in records]).type) for k in extra]
    return write_part(folder, table, pa.Table.from_pylist([dict(r) for r in records], pa.schema(fields)))


def write_part(folder: Folder, table: str, rows: pa.Table) -> str:
    """Add rows as a part, and return its name."""
    content = parts.encode(rows)
    name = f"{table}/{parts.new_name(content)}"
    with accessed(folder, "written"):
        patiently(lambda: folder.write(name, content))
    return name
