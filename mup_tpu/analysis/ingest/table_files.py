"""Tables in files: CSV and its like, JSON, JSON lines, Parquet; compressed or not, on a disk or at a URL."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from mup_tpu.analysis.ingest.table_columns import means
from mup_tpu.analysis.ingest.table_values import SIZE, plain_size
from mup_tpu.config import shown
from mup_tpu.config.values import as_number
from mup_tpu.errors import TableError, reason

# Suffix of a file -> its kind
_KINDS = {
    ".csv": "text", ".tsv": "text", ".tab": "text", ".txt": "text", ".md": "text", ".json": "json",
    ".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet", ".pq": "parquet", ".xlsx": "excel",
    ".xls": "excel",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")
STDIN = "-"
# Lines before the head: comments, and the line with which spreadsheets name their delimiter
_NO_HEAD = re.compile(rb"\s*$|#|sep=.?\s*$", re.IGNORECASE)
MOST_COLUMNS = 10_000  # columns of a table at most: each is looked at for its meaning

# The head of a table in Markdown, and the line below it
_PIPES = re.compile(
    r"^[^\n]*\|[^\n]*\n[ \t]*\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$", re.MULTILINE
)

KINDS = "CSV, TSV, Markdown, JSON, JSONL, Parquet or Excel"


def without_suffix(path: str | Path) -> str:
    """Strip the suffixes of a file's kind: `runs.csv.gz` becomes runs."""
    name = str(path)
    for suffixes in (_COMPRESSED, tuple(_KINDS)):
        name = next((name[: -len(s)] for s in suffixes if name.lower().endswith(s)), name)
    return name


def is_file(path: str | Path) -> bool:
    return without_suffix(path) != str(path) or str(path) == STDIN or Path(str(path)).is_file()


def read_file(path: str | Path) -> pd.DataFrame:
    """Read a table from a file, by the kind in its suffix, or from standard input.

    Text is UTF-8 or UTF-16 with or without a mark, or else Windows-1252; its delimiter is the one that splits
    the first line into the most columns. Tables in JSON become columns `config/lr`.

    Raises:
        TableError: it cannot be read.
    """
    name = str(path).lower()
    kind = _KINDS.get(Path(next((name[: -len(s)] for s in _COMPRESSED if name.endswith(s)), name)).suffix)
    if kind is None and name != STDIN:
        raise TableError(f"table {path} is not of a kind that is read: save it as {KINDS}")
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is not a regular file")
        if kind == "parquet":
            table = pd.read_parquet(path)
            if table.index.names != [None] or not isinstance(table.index, pd.RangeIndex):
                table = table.reset_index().drop(columns="index", errors="ignore")
        elif kind == "excel":
            table = _excel(path)
        else:
            content = _utf8(sys.stdin.buffer.read() if name == STDIN else _bytes(path))
            is_json = kind in ("json", "lines") or (name == STDIN and content.lstrip()[:1] in (b"{", b"["))
            if not is_json:
                is_piped = b"|" in content and _PIPES.search(content.decode())
                table = _markdown(content.decode()) if is_piped else _delimited(content)
            else:
                has_lines = kind == "lines" or (name == STDIN and b"}\n{" in content)
                lines = [line for line in content.splitlines() if line.strip()] if has_lines else []
                table = _records(list(map(json.loads, lines))) if has_lines else _json(json.loads(content))
        _check_columns(len(table.columns))
    except Exception as error:  # readers raise errors of any kind on damaged files
        shown_path = "on standard input" if name == STDIN else path
        raise TableError(f"table {shown_path} cannot be read: {reason(error)}") from None
    return table.rename(columns=lambda name: name.strip() if isinstance(name, str) else name)


def _bytes(path: str | Path) -> bytes:
    import fsspec  # a tenth of a second, which results folders do without

    if str(path).lower().endswith(".zip"):
        with fsspec.open(str(path), "rb", compression=None) as file, zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if not n.endswith("/") and "__MACOSX/" not in n]
        if len(names) != 1:
            listed = ", ".join(names[:3])
            raise ValueError(f"it holds {len(names)} files, not one ({listed}); unpack it, and name one")
    packed = "zstd" if str(path).lower().endswith(".zst") else None  # fsspec needs a package for it
    with fsspec.open(str(path), "rb", compression=None if packed else "infer") as file:
        return pa.input_stream(file, compression=packed).read() if packed else file.read()


def _check_columns(count: int) -> None:
    if count > MOST_COLUMNS:
        raise ValueError(
            f"it has {count:,} columns, and at most {MOST_COLUMNS:,} are read; keep the columns of the sweep"
        )


def _utf8(content: bytes) -> bytes:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16").encode()
    if b"\0" in content:
        raise ValueError("it holds bytes that are no text")
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        if not content.isascii():
            content.decode()
    except UnicodeDecodeError:  # spreadsheets on Windows
        content = content.decode("cp1252", errors="replace").encode()
    return content if b"\n" in content else content.replace(b"\r", b"\n")


def _excel(path: str | Path) -> pd.DataFrame:
    """Read the only sheet of a workbook that holds a table, with a title above it or none."""
    try:
        sheets = pd.read_excel(path, sheet_name=None, header=None)
    except ImportError as error:
        raise ValueError(f"{reason(error).rstrip('.')}; or save it as CSV") from None
    filled: dict[Any, pd.DataFrame] = {}
    for name, sheet in sheets.items():
        cells = sheet.notna().sum(axis=1)
        below_title = sheet[(cells > 1).cummax() & (cells > 0)].dropna(axis=1, how="all")
        filled |= {name: below_title} if len(below_title) > 1 else {}
    if len(filled) != 1:
        names = ", ".join(map(str, filled)) or "none"
        raise ValueError(f"it has {len(filled)} sheets with rows ({names}), not one: save one as CSV")
    (sheet,) = filled.values()
    return sheet[1:].set_axis(sheet.iloc[0].fillna(""), axis=1).reset_index(drop=True).infer_objects()


def _markdown(text: str) -> pd.DataFrame:
    """Read the first table of Markdown, without marks of bold, italic and code."""
    if (table := _PIPES.search(text)) is None:
        raise ValueError("it holds no table in Markdown")
    lines = text[table.start() :].strip().split("\n\n")[0].splitlines()
    rows = [
        [re.sub(r"^[*_`]+|[*_`]+$", "", cell.strip()) for cell in line.strip().strip("|").split("|")]
        for line in lines
        if "|" in line
    ]
    head, _, *others = rows
    whole = "\n".join("\t".join(row) for row in [head, *others] if len(row) == len(head))
    return pd.read_csv(io.StringIO(whole), sep="\t").set_axis(head, axis=1)  # tells numbers from text


def _delimited(content: bytes) -> pd.DataFrame:
    start, head = next(
        ((i, line) for i, line in enumerate(io.BytesIO(content)) if not _NO_HEAD.match(line)), (0, b"")
    )
    _check_columns(1 + max(head.count(sep) for sep in (b";", b"\t", b",")))
    heads = {sep: len(pd.read_csv(io.BytesIO(head), sep=sep, nrows=0).columns) for sep in ";\t,"}
    # In a heading with decimal commas, commas split no more than semicolons do, which come first.
    delimiter = max(heads, key=lambda sep: heads[sep])
    if heads[delimiter] == 1 and len(head.split()) > 1:
        delimiter = r"\s+"
    rows = pd.read_csv(io.BytesIO(content), sep=delimiter, skiprows=start, low_memory=False)
    table = _with_cells_as_columns(rows)
    if len(table.columns) > 1 and all(as_number(name) is not None for name in table.columns):
        raise ValueError("its first line holds numbers, not names of columns")
    names = pd.read_csv(io.BytesIO(head), sep=delimiter, header=None, dtype=str).iloc[0]
    if len(names) == len(rows.columns) and table is rows:
        # pandas calls the second of two columns x "x.1"; the caller refuses two of one name.
        table.columns = pd.Index(names.where(names.notna(), rows.columns))
    return table


def _with_cells_as_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Turn cells that hold mappings into columns: W&B documents such an export of its API."""
    for name in [name for name in table if table[name].dtype.kind not in "iufb"]:
        cells = table[name].dropna()
        if cells.empty or not str(cells.iloc[0]).startswith("{"):
            continue
        try:
            rows = [ast.literal_eval(cell) if isinstance(cell, str) else {} for cell in table[name]]
        except (ValueError, SyntaxError):
            continue
        nested = pd.json_normalize([{str(name): row} for row in rows], sep="/").set_index(table.index)
        table = pd.concat([table.drop(columns=name), nested], axis=1)
    return table


def _json(content: Any) -> pd.DataFrame:
    """Make a table of rows, of columns, of pandas' orients, or of one of these under a single key."""
    if isinstance(content, dict) and {"columns", "data"} <= set(content):
        return pd.DataFrame(content["data"], columns=content["columns"])
    if isinstance(content, dict):
        if (rows := _rows_by_group(content)) is not None:
            return _records(rows)
        if "schema" in content and "data" in content:
            return _records(content["data"])
        if len(content) == 1 and not any(map(means, content)):
            return _json(*content.values())
        rows = [*content.values()]
        if rows and all(isinstance(row, dict) for row in rows) and not any(map(means, content)):
            return _records(rows)
        if rows and all(isinstance(column, dict | list) for column in rows):
            return pd.DataFrame(content)
    return _records(content)


def _rows_by_group(content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the rows of a mapping with a list of runs a size, by itself or under one key; None otherwise."""

    def holds_lists(value: Any) -> bool:
        is_filled = isinstance(value, dict) and len(value) > 1
        lists = [runs for runs in value.values() if isinstance(runs, list) and runs] if is_filled else []
        return (
            is_filled
            and len(lists) == len(value)
            and all(isinstance(run, dict) for runs in lists for run in runs)
        )

    groups = (
        [content] if holds_lists(content) else [value for value in content.values() if holds_lists(value)]
    )
    if len(groups) != 1:
        return None
    rows = []
    for name, runs in groups[0].items():
        group: dict[str, Any] = {"group": name}
        if SIZE.fullmatch(name):
            group = {"params": float(plain_size(name))}
        rows += [group | run for run in runs]
    return rows


def _records(rows: Any) -> pd.DataFrame:
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"it holds {shown(rows)}, where a list of rows by name is needed")
    return pd.json_normalize(rows, sep="/")
