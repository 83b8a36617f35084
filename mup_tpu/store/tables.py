"""Tables of a store in parts: files that are whole or missing, with a checksum in the name.

Parts are never rewritten. Writers merge small ones as they go, so a folder of many thousand rows has about a
hundred parts. A part of a few rows is an Arrow file, which opens in a tenth of Parquet's time; larger ones
are Parquet. The checksum is of all bytes, so that one wrong bit anywhere is noticed; those of Parquet's pages
serve other readers.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mup_tpu.config import PARTS
from mup_tpu.config.columns import COLUMNS, CONFIGURED
from mup_tpu.errors import StoreError, raised_as, reason
from mup_tpu.files import Folder, patiently, short_hash
from mup_tpu.store.header import STUDY_COLUMNS, accessed

MERGE_EVERY = 64  # parts of about one size after which a writer merges them

_SMALLEST, _GROWTH = 2**17, 8  # bytes of parts of the first size (some rows), factor to the next size
_LISTINGS = 100  # attempts at reading all parts of a listing: a merge may replace some before they are read
_AT_ONCE = 16  # parts of a bucket read in parallel; on a disk threads cost more than they gain
_SMALL_ROWS = 1000
_PART_NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{16})\.(?:arrow|parquet)")

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_SCHEMAS = {
    "runs": pa.schema([(column.name, _ARROW[column.type]) for column in COLUMNS.values()]),
    "curves": pa.schema(
        [(name, _ARROW[kind]) for name, kind in (
            ("trial_id", str), ("step", int), ("tokens", int), ("split", str), ("loss", float)
        )]
    ),
}  # fmt: skip
_DEFAULTS = {name: getattr(PARTS[column.part](), column.field) for name, column in CONFIGURED.items()}
"""Values of trials' fields in rows that were stored before there was the field."""
_KEYS = {"runs": ("trial_id", "status"), "curves": ("trial_id", "split", "step")}
"""Columns of a table with a value in every row."""

_MISFITS = (ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException)
"""Errors of tables that do not fit together, or with wrong values."""


def encode(table: pa.Table, is_small: bool) -> tuple[bytes, str]:
    """Return the bytes of a part, as an Arrow file if it is small, and a new name for it."""
    sink = io.BytesIO()
    if is_small:
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    else:  # statistics are never used
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True, write_statistics=False)
    content = sink.getvalue()
    return content, f"{uuid.uuid4().hex}-{short_hash(content)}.{'arrow' if is_small else 'parquet'}"


def decode(
    content: bytes, where: str, schema: pa.Schema, keys: Sequence[str], columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the table of a part at a path, its known columns in the types of `schema`.

    Columns of `keys` have a value in every row. `columns` to read are some of the schema, `keys` among them.
    """
    match = _PART_NAME.fullmatch(where.rpartition("/")[2])
    if match and match[1] != short_hash(content):
        raise StoreError(f"part {where} is damaged: its content does not have the checksum in its name")
    # Damaged bytes make decoders raise errors of any kind.
    with raised_as(StoreError, f"part {where} cannot be read", (Exception,)):
        if where.endswith(".arrow"):
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        else:
            file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
            table = file.read(columns, use_threads=False)
        table.validate(full=True)  # without it, wrong bytes in text raise only when the text is used
        names = table.column_names
        if len(names) > len(set(names)):
            raise ValueError(f"it has two columns {next(n for n in names if names.count(n) > 1)}")
        for key in keys:
            if key not in names or table[key].null_count:
                raise ValueError(f"it does not give {key} in every row")
        if columns is not None:
            table = table.select([name for name in columns if name in names])
        known = dict(zip(schema.names, schema.types, strict=True))
        for index, field in enumerate(table.schema):
            if (wanted := known.get(field.name, field.type)) != field.type:
                is_coded = pa.types.is_dictionary(field.type)
                kind = field.type.value_type if is_coded else field.type
                is_text = kind in (pa.string(), pa.large_string(), pa.string_view())
                if pa.types.is_string(wanted) != is_text and not pa.types.is_null(field.type):
                    raise ValueError(f"column {field.name} is {field.type}, not {wanted}")
                column = table.column(index).cast(wanted)
                table = table.set_column(index, pa.field(field.name, wanted), column)
        return table


class Parts:
    """Parts of a table, "runs" or "curves", in a results folder.

    `study` are the columns of a study with their types; our own trials have none.
    """

    def __init__(self, results: Folder, table: str, study: Mapping[str, type] | None = None) -> None:
        self._results, self.folder = results, results / table
        self._schema, self._keys = _SCHEMAS[table], _KEYS[table]
        self._has_defaults = table == "runs" and study is None
        if table == "runs" and study is not None:
            common = {name: self._schema.field(name).type for name in STUDY_COLUMNS}
            self._schema = pa.schema(common | {name: _ARROW[kind] for name, kind in study.items()})

    def names(self) -> list[str]:
        with accessed(self._results, "read"):
            return [name for name in self.folder.names() if _PART_NAME.fullmatch(name)]

    def read(self, names: Sequence[str], columns: Sequence[str] | None = None) -> list[pa.Table]:
        """Read and verify parts, some or all of their columns.

        Raises:
            FileNotFoundError: a part is gone: it was merged after it was listed.
            StoreError: a part is damaged or cannot be read.
        """

        def read(name: str) -> pa.Table:
            try:
                content = self.folder.read(name)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise StoreError(f"part {self.folder}/{name} cannot be read: {reason(error)}") from None
            return decode(content, f"{self.folder}/{name}", self._schema, self._keys, columns)

        if self.folder.is_local or not names:
            return [read(name) for name in names]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(read, names))

    def read_new(
        self, known: Collection[str] = (), columns: Sequence[str] | None = None
    ) -> tuple[list[str], dict[str, pa.Table]]:
        """Return the names of all parts, and the contents of those that are not known."""
        for _ in range(_LISTINGS):
            names = self.names()
            new = [name for name in names if name not in known]
            with contextlib.suppress(FileNotFoundError):
                return names, dict(zip(new, self.read(new, columns), strict=True))
        raise StoreError(
            f"results folder {self._results} cannot be read: its parts are replaced again and again"
        )

    def append(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Write records as a part, and return its name; on return the part is on disk."""
        given = {key for record in records for key, value in record.items() if value is not None}
        # Columns without a value are left out, since columns take half of the time of opening a small part.
        fields = [field for field in self._schema if field.name in given or field.name in self._keys]
        extra = sorted(given - set(self._schema.names))
        fields += [pa.field(k, pa.array([r.get(k) for r in records]).type) for k in extra]
        return self._write(pa.Table.from_pylist([dict(r) for r in records], pa.schema(fields)))

    def _write(self, rows: pa.Table) -> str:
        content, name = encode(rows, rows.num_rows <= _SMALL_ROWS)
        with accessed(self._results, "written"):
            patiently(lambda: self.folder.write(name, content))
        return name

    def table(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read all parts, each row and point once; all columns, or some."""
        _, parts = self.read_new(columns=columns)
        empty = self._schema.empty_table() if columns is None else self._schema.empty_table().select(columns)

        def frame(tables: Sequence[pa.Table]) -> pd.DataFrame:
            rows = self._deduplicate(pa.concat_tables([empty, *tables], promote_options="permissive"))
            lacking = [name for name in _DEFAULTS if name in rows.column_names and rows[name].null_count]
            if self._has_defaults and lacking:
                if columns is not None:
                    return self.table()[[*columns]]
                of_trial = rows["config"].is_valid()
                for name in lacking:
                    filled = pc.if_else(of_trial, rows[name].fill_null(_DEFAULTS[name]), rows[name])
                    rows = rows.set_column(rows.column_names.index(name), rows.field(name), filled)
            whole: pd.DataFrame = rows.to_pandas()
            return whole

        try:
            return frame([*parts.values()])
        except _MISFITS as error:
            for name, rows in parts.items():  # name a part that cannot be read alone
                with raised_as(StoreError, f"part {self.folder}/{name} cannot be read", _MISFITS):
                    frame([rows])
            raise StoreError(f"parts of {self.folder} do not fit together: {reason(error)}") from None

    def _deduplicate(self, rows: pa.Table) -> pa.Table:
        """Keep the best row of each trial, in a table of curves the last point of each step."""
        keys = rows.select(self._keys).to_pandas()
        if "status" not in keys:
            repeated = keys.duplicated(keep="last").to_numpy()
            return rows.filter(pa.array(~repeated)) if repeated.any() else rows
        if keys["trial_id"].is_unique:
            return rows
        order = keys["status"].map(rank).sort_values(kind="stable").index
        return rows.take(pa.array(order[~keys["trial_id"][order].duplicated().to_numpy()]))

    def merge(self, names: Sequence[str]) -> None:
        """Merge parts into one.

        The new part is whole before the old ones go. A kill in between leaves rows twice, and readers take
        each once.
        """
        try:
            tables = self.read(names)
        except FileNotFoundError:
            return  # another writer merges them
        with raised_as(StoreError, f"parts of {self.folder} do not fit together", _MISFITS):
            rows = self._deduplicate(pa.concat_tables(tables, promote_options="permissive"))
        self._write(rows)
        with accessed(self._results, "written"):
            self.folder.remove(*names)

    def merge_small(self) -> None:
        """Merge the parts of about one size where there are many of them."""
        with accessed(self._results, "read"):
            sizes = self.folder.sizes()
        by_size: dict[int, list[str]] = {}
        for name, size in sizes.items():
            if _PART_NAME.fullmatch(name):
                level = max(0, math.ceil(math.log(max(size, 1) / _SMALLEST, _GROWTH)))
                by_size.setdefault(level, []).append(name)
        for level in sorted(by_size):
            if len(by_size[level]) >= MERGE_EVERY:
                self.merge(by_size[level])


def rank(status: Any) -> int:
    # One row a trial is kept: a whole run before a stopped one, and that before a failure.
    return {"finished": 0, "diverged": 0, "stopped": 1}.get(status, 2)
