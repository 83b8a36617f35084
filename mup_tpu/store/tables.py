"""Tables of a store, each in parts that are read in parallel.

The cache folder remembers a table of many parts as one file, with the size and the time of each part.
Unchanged parts are taken from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pyarrow as pa

from mup_tpu.config.columns import COLUMNS
from mup_tpu.errors import StoreError, raised_as, reason
from mup_tpu.files import Folder, cache_root, patiently, short_hash
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

_LISTINGS = 100
"""Most listings of the parts: a compaction may merge a listed part before it is read."""

_AT_ONCE = {False: 16, True: min(4, os.cpu_count() or 1)}
"""Parts that are read at once, by whether their folder is local."""

_MANY = 64
"""Least number of parts of a table that is remembered."""

_NOTE = b"mup_tpu parts"
"""Entry of the remembered file's schema: name, state and rows of each part, in its order."""


Own = Mapping[str, type] | None
"""Columns of a study with their types; None for our own trials."""


def _schema(table: str, own: Own) -> pa.Schema:
    """Schema of a table: of our own trials, or of a study with its own columns."""
    if own is None or table != "runs":
        return _SCHEMAS[table]
    common = {name: _SCHEMAS["runs"].field(name).type for name in STUDY_COLUMNS}
    return pa.schema(common | {name: _ARROW[kind] for name, kind in own.items()})


def part_names(folder: Folder, table: str) -> list[str]:
    """Names of a table's parts in a results folder."""
    return [f"{table}/{name}" for name in _states(folder, table)]


def _states(folder: Folder, table: str) -> dict[str, str]:
    """Size and time of each part, by file name."""
    states = (folder / table).states()
    return {name: state for name, state in states.items() if name.endswith(".parquet")}


def read_table(folder: Folder, table: str, own: Own = None) -> pd.DataFrame:
    """A table of a results folder, each row and point once."""
    schema = _schema(table, own)
    for _ in range(_LISTINGS):
        tables = _read_parts(folder, table, schema)
        if tables is not None:
            break
    else:
        raise StoreError(f"results folder {folder} cannot be read: its parts are replaced again and again")
    try:
        frame = _frame([rows for _, rows in tables], table, schema)
    except _MISFITS as error:
        for name, rows in tables:  # a part that cannot be read by itself is named
            with raised_as(StoreError, f"part {folder}/{table}/{name} cannot be read", _MISFITS):
                _frame([rows], table, schema)
        raise StoreError(f"parts of {folder}/{table} do not fit together: {reason(error)}") from None
    if table == "curves":
        return frame.drop_duplicates(["trial_id", "split", "step"], keep="last", ignore_index=True)
    # A whole run outranks a stopped one, and a stopped one a failure; of two equals the first stays.
    rank = frame["status"].map({"finished": 0, "diverged": 0, "stopped": 1}).fillna(2)
    return frame.iloc[rank.argsort(kind="stable")].drop_duplicates("trial_id", ignore_index=True)


def _frame(tables: Iterable[pa.Table], table: str, schema: pa.Schema) -> pd.DataFrame:
    whole = pa.concat_tables([schema.empty_table(), *tables], promote_options="permissive")
    return complete(whole.to_pandas()) if table == "runs" else whole.to_pandas()


def _read_parts(folder: Folder, table: str, schema: pa.Schema) -> list[tuple[str, pa.Table]] | None:
    """Parts of a table in the order of their names; None if a listed one is gone."""
    with accessed(folder, "read"):
        states = _states(folder, table)
    known = _remembered(folder, table, schema, states) if len(states) >= _MANY else {}
    new = [name for name in states if name not in known]

    def read(name: str) -> pa.Table:
        where = f"{folder}/{table}/{name}"
        try:
            content = folder.read(f"{table}/{name}")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"part {where} cannot be read: {reason(error)}") from None
        return parts.decode(content, name, where, schema, _KEYS[table])

    try:
        with ThreadPoolExecutor(_AT_ONCE[folder.is_local]) as pool:
            known |= zip(new, pool.map(read, new), strict=True)
    except FileNotFoundError:
        return None
    tables = [(name, known[name]) for name in states]
    if len(states) >= _MANY and len(new) > len(states) // 10:
        _remember(folder, table, states, tables)
    return tables


def _memory(folder: Folder, table: str) -> tuple[Folder, str]:
    """Folder and name of the file that remembers a table. It holds a checksum, then a part."""
    return Folder(cache_root() / "stores"), f"{short_hash(folder.path)}-{table}"


def _remembered(
    folder: Folder, table: str, schema: pa.Schema, states: Mapping[str, str]
) -> dict[str, pa.Table]:
    """Tables of unchanged parts from the cache; none if the file is damaged."""
    place, file = _memory(folder, table)
    try:
        kept = place.read(file)
        digest, content = kept[:32], kept[32:]
        if hashlib.sha256(content).digest() != digest:
            return {}
        whole = parts.decode(content, file, file, schema, _KEYS[table])
        found, at = {}, 0
        for name, state, rows in json.loads(whole.schema.metadata[_NOTE]):
            if states.get(name) == state:
                found[name] = whole.slice(at, rows)
            at += rows
    except (OSError, StoreError, ValueError, TypeError, KeyError):
        return {}
    return found if at == whole.num_rows else {}


def _remember(
    folder: Folder, table: str, states: Mapping[str, str], tables: list[tuple[str, pa.Table]]
) -> None:
    """Write parts to the cache, unless it cannot be written or the parts do not fit together."""
    note = json.dumps([(name, states[name], rows.num_rows) for name, rows in tables])
    place, file = _memory(folder, table)
    try:
        whole = pa.concat_tables((rows for _, rows in tables), promote_options="permissive")
        content = parts.encode(whole.replace_schema_metadata({_NOTE: note}))
        place.write(file, hashlib.sha256(content).digest() + content)
    except (OSError, pa.ArrowException):
        return


def merge(folder: Folder, table: str, own: Own = None) -> None:
    """Merge all parts of a table into one."""
    before = part_names(folder, table)
    if len(before) > 1:
        write_part(folder, table, pa.Table.from_pandas(read_table(folder, table, own), preserve_index=False))
        folder.remove(*before)


def append(folder: Folder, table: str, records: list[Mapping[str, Any]], own: Own = None) -> None:
    """Add records as a part; on return the part is on disk."""
    schema = _schema(table, own)
    extra = sorted({key for record in records for key in record} - set(schema.names))
    all_fields = [*schema, *(pa.field(k, pa.array([r.get(k) for r in records]).type) for k in extra)]
    write_part(folder, table, pa.Table.from_pylist([dict(r) for r in records], pa.schema(all_fields)))


def write_part(folder: Folder, table: str, rows: pa.Table) -> None:
    """Add rows as a part."""
    content = parts.encode(rows)
    name = f"{table}/{parts.new_name(content)}"
    with accessed(folder, "written"):
        patiently(lambda: folder.write(name, content))
