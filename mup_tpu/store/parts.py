"""Parts of a store: Parquet with checksums, verified when read, with known columns in their types.

A part's name ends in a checksum of all of its bytes, so that one wrong bit anywhere is noticed. Checksums of
Parquet's pages serve other readers; they leave out the footer with columns, types and places. Parts of
earlier versions have neither and are read as they are.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from mup_tpu.errors import StoreError, raised_as
from mup_tpu.files import short_hash

_CHECKED_NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{16})\.parquet")


def encode(table: pa.Table) -> bytes:
    """A table as the bytes of a part."""
    sink = io.BytesIO()
    # Statistics are never used. Dictionaries and zstd help large tables; without them a part of a few rows is
    # as small and read in a quarter of the time.
    is_large = table.num_rows > 1000
    pq.write_table(
        table, sink, compression="zstd" if is_large else "snappy", write_page_checksum=True,
        write_statistics=False, use_dictionary=is_large,
    )  # fmt: skip
    return sink.getvalue()


def new_name(content: bytes) -> str:
    """A new name for a part, with the checksum of its content."""
    return f"{uuid.uuid4().hex}-{short_hash(content)}.parquet"


def decode(
    content: bytes,
    name: str,
    where: str,
    schema: pa.Schema,
    keys: Iterable[str],
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return the table of a part, its known columns in the types of `schema`.

    Args:
        content: bytes of the part.
        name: its file name, with the checksum.
        where: its name in errors.
        schema: known columns.
        keys: columns with a value in every row.
        columns: columns to read, those of `keys` among them; None reads all.

    Raises:
        StoreError: the part is damaged, or a column is not of its type.
    """
    named = _CHECKED_NAME.fullmatch(name)
    if named and named[1] != short_hash(content):
        raise StoreError(f"part {where} is damaged: its content does not have the checksum in its name")
    # Damaged bytes make decoders raise errors of any kind.
    with raised_as(StoreError, f"part {where} cannot be read", (Exception,)):
        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        table = file.read(columns, use_threads=False)
        table.validate(full=True)  # without it, wrong bytes in text raise only when the text is used
        names, types = table.column_names, table.schema.types
        known = dict(zip(schema.names, schema.types, strict=True))
        if len(names) > len(set(names)):
            raise ValueError(f"it has two columns {next(n for n in names if names.count(n) > 1)}")
        for key in keys:
            if key not in names or table[key].null_count:
                raise ValueError(f"it does not give {key} in every row")
        for index, name in enumerate(names):
            if name in known and types[index] != known[name]:
                table = table.set_column(index, schema.field(name), _cast(table[name], name, schema))
        return table


def _cast(column: pa.ChunkedArray, name: str, schema: pa.Schema) -> pa.ChunkedArray:
    """A known column in its type; text is never read as numbers."""
    wanted = schema.field(name).type
    if pa.types.is_string(wanted) != _is_text(column.type) and not pa.types.is_null(column.type):
        raise ValueError(f"column {name} is {column.type}, not {wanted}")
    return column.cast(wanted)


def _is_text(kind: pa.DataType) -> bool:
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(values) for is_kind in kinds)
