"""Tables in files: CSV and its like, JSON, JSON lines, Parquet; compressed or not, on a disk or at a URL."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import means
from mup_tpu.analysis.ingest.table_values import SIZE, has_decimal_commas, plain_size
from mup_tpu.config import shown
from mup_tpu.config.values import as_number
from mup_tpu.errors import TableError, not_installed, reason
from mup_tpu.files import MOST_BYTES, MOST_BYTES_OF_CONFIG, bounded, require_size

# Suffix of a file -> its kind
_KINDS = {
    ".csv": "text", ".tsv": "text", ".tab": "text", ".txt": "text", ".md": "text", ".json": "json",
    ".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet", ".pq": "parquet", ".xlsx": "excel",
    ".xls": "excel", ".yaml": "yaml", ".yml": "yaml",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
STDIN = "-"
# Lines before the head: comments, and the line with which spreadsheets name their delimiter
_NO_HEAD = re.compile(rb"\s*$|#|sep=.?\s*$", re.IGNORECASE)
MOST_COLUMNS = 10_000  # columns of a table at most: each is looked at for its meaning

KINDS = "CSV, TSV, Markdown, JSON, JSONL, Parquet or Excel"


def without_suffix(path: str | Path) -> str:
    """Strip the suffixes of a file's kind: `runs.csv.gz` becomes runs."""
    name = str(path)
    for suffixes in (_COMPRESSED, tuple(_KINDS)):
        name = next((name[: -len(s)] for s in suffixes if name.lower().endswith(s)), name)
    return name


def is_file(path: str | Path) -> bool:
    place = Path(str(path))
    return (without_suffix(path) != str(path) and not place.is_dir()) or str(path) == STDIN or place.is_file()


def read_file(path: str | Path) -> pd.DataFrame:
    """Read a table from a file, by the kind in its suffix, or from standard input.

    Text is UTF-8 or UTF-16 with or without a mark, or else Windows-1252; its delimiter is the one that splits
    the first line into the most columns. Tables in JSON become columns `config/lr`.
    """
    name = str(path).lower()
    kind = _KINDS.get(Path(next((name[: -len(s)] for s in _COMPRESSED if name.endswith(s)), name)).suffix)
    if kind is None and name != STDIN:
        raise TableError(f"table {path} is not of a kind that is read: save it as {KINDS}")
    try:
        if kind == "parquet":
            table = _parquet(_bytes(path))
        elif kind == "excel":
            table = _excel(_bytes(path))
        else:
            content = _utf8(bounded(sys.stdin.buffer) if name == STDIN else _bytes(path))
            content = json.dumps(read_yaml(content.decode())).encode() if kind == "yaml" else content
            if name == STDIN and content.lstrip()[:1] in (b"{", b"["):
                kind = "lines" if b"}\n{" in content else "json"
            if kind == "lines":
                table = _records([json.loads(line) for line in content.splitlines() if line.strip()])
            elif kind in ("json", "yaml"):
                table = _json(json.loads(content))
            else:
                table = _delimited(content)
        _check_columns(len(table.columns))
    except Exception as error:  # readers raise errors of any kind on damaged files
        shown_path = "on standard input" if name == STDIN else path
        raise TableError(f"table {shown_path} cannot be read: {reason(error)}") from None
    if {*table} == {"Wall time", "Step", "Value"}:  # as TensorBoard's page exports a curve
        table = table.rename(columns={"Value": "loss"})
    return table.rename(columns=lambda name: name.strip() if isinstance(name, str) else name)


_MOST_VALUES = 200_000
"""Values of a YAML file, each alias written out; the largest tables of labels have 88 000."""


def read_yaml(text: str) -> Any:
    """Return the plain values of YAML; what has a tag of a program is read without the tag.

    Raises:
        ValueError: the text is no YAML, or aliases make a few bytes of it many values.
        OSError: the text is too long.
    """
    from ruamel.yaml import YAML  # few tables are YAML, or have settings beside them
    from ruamel.yaml.composer import Composer
    from ruamel.yaml.constructor import SafeConstructor
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

    def count(node: Node | None, known: dict[int, float]) -> float:
        # Values below a node, each alias written out; a node that contains itself has infinitely many.
        if not isinstance(node, SequenceNode | MappingNode):
            return 1
        if id(node) not in known:
            known[id(node)] = math.inf
            parts = node.value if isinstance(node, SequenceNode) else itertools.chain(*node.value)
            known[id(node)] = 1 + sum(count(part, known) for part in parts)
        return known[id(node)]

    class Bounded(Composer):
        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if count(node, {}) > _MOST_VALUES:
                raise ValueError(f"it holds more than {_MOST_VALUES:,} values with its aliases written out")
            return node

    class Untagged(SafeConstructor):
        def construct_undefined(self, node: Node) -> Any:
            if isinstance(node, ScalarNode):
                return self.construct_scalar(node)
            of_kind = self.construct_sequence if isinstance(node, SequenceNode) else self.construct_mapping
            return of_kind(node, deep=True)

    # Lightning writes tuples and objects under tags of Python: their contents are read, nothing is called.
    Untagged.add_constructor(None, Untagged.construct_undefined)
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = Bounded, Untagged
    require_size(len(text), MOST_BYTES_OF_CONFIG)
    try:
        return yaml.load(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _bytes(path: str | Path) -> bytes:
    import fsspec  # results folders do not need it, and it takes 0.1 s

    if str(path).lower().endswith(".zip"):
        with fsspec.open(str(path), "rb", compression=None) as file, zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if not n.endswith("/") and "__MACOSX/" not in n]
        if len(names) != 1:
            listed = ", ".join(names[:3])
            raise ValueError(f"it holds {len(names)} files, not one ({listed}); unpack it, and name one")
    with fsspec.open(str(path), "rb", compression="infer") as file:
        return bounded(file)


def _parquet(content: bytes) -> pd.DataFrame:
    import pyarrow.parquet  # other tables do not need it, and it takes 0.1 s

    file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
    # A number takes eight bytes in memory; equal numbers take none in a file.
    require_size(8 * file.metadata.num_rows * file.metadata.num_columns)
    table = pd.read_parquet(io.BytesIO(content))
    if table.index.names == [None] and isinstance(table.index, pd.RangeIndex):
        return table
    return table.reset_index().drop(columns="index", errors="ignore")


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
    except UnicodeDecodeError:  # a spreadsheet on Windows wrote it
        content = content.decode("cp1252", errors="replace").encode()
    return content if b"\n" in content else content.replace(b"\r", b"\n")


def _excel(content: bytes) -> pd.DataFrame:
    """Read the only sheet of a workbook that holds a table, with a title above it or none."""
    try:
        import openpyxl
    except ImportError:
        raise ValueError(f"it {not_installed('openpyxl')}; or save it as CSV") from None
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # openpyxl reads 2 MB a second.
        require_size(sum(file.file_size for file in archive.infolist()), MOST_BYTES // 4)
    computed = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    filled: dict[str, pd.DataFrame] = {}
    for sheet in computed.worksheets:
        sheet.reset_dimensions()
        size, rows = 0, []
        for row in sheet.values:
            require_size(size := size + 8 * len(row))  # a row reaches to its last cell, however far away
            rows += [row] if any(value is not None for value in row) else []
        cells = pd.DataFrame(rows).dropna(axis=1, how="all")
        below_title = cells[(cells.notna().sum(axis=1) > 1).cummax()]
        filled |= {sheet.title: below_title} if len(below_title) > 1 else {}
    if len(filled) != 1:
        names = ", ".join(filled) or "none"
        raise ValueError(f"it has {len(filled)} sheets with rows ({names}), not one: save one as CSV")
    ((name, cells),) = filled.items()
    if cells.isna().any(axis=None):
        formulas = openpyxl.load_workbook(io.BytesIO(content), read_only=True)[name]
        for row, values in zip(formulas.rows, computed[name].values, strict=False):
            for cell, value in zip(row, values, strict=False):
                if cell.data_type == "f" and value is None:
                    raise ValueError(
                        f"cell {cell.coordinate} has a formula without a value: open the workbook in a "
                        "spreadsheet and save it, which computes them"
                    )
    whole = cells[1:].to_csv(index=False, header=False)
    return pd.read_csv(io.StringIO(whole), header=None).set_axis(cells.iloc[0].fillna(""), axis=1)


def _delimited(content: bytes) -> pd.DataFrame:
    frames = ((mark, frame.search(content)) for mark, frame in _FRAMES.items())
    framed = next((_framed(content, mark, match.start()) for mark, match in frames if match), None)
    lines = content.splitlines() if framed is None else framed
    _check_columns(1 + max(line.count(sep) for line in lines[:9] or [b""] for sep in (b";", b"\t", b",")))
    skipped = {i for i, line in enumerate(lines) if framed is None and _NO_HEAD.match(line)}
    heads = [i for i in range(len(lines)) if i not in skipped][:9]
    cells = {i: _cells(lines[i], "" if framed is None else "\t") for i in heads}
    # A title, or the names of groups of columns, may stand above the names of columns.
    known = {i: len({*map(means, cells[i][1])} - {""}) for i in heads}
    head = next((i for i in heads if known[i] > 1), heads[0] if heads else 0)
    skipped |= {i for i in heads if i < head}
    delimiter, names = cells.get(head, (",", []))
    if len(set(names)) < len(names) and head - 1 in cells and len(cells[head - 1][1]) == len(names):
        names = [f"{group}/{name}" for group, name in zip(cells[head - 1][1], names, strict=True)]
    # Rows without a number are no runs: units below the names, and a source at the end.
    edges = [i for i in range(head + 1, len(lines)) if i not in skipped]
    for i in [*edges[:2], *edges[-3:]]:
        of = _cells(lines[i], delimiter)[1]
        if not any(as_number(cell.replace(",", ".")) is not None for cell in of) or len(of) == 1 < len(names):
            skipped.add(i)
    body = b"\n".join(line for i, line in enumerate(lines) if i not in skipped)

    shape: dict[str, Any] = {}

    def read(**how: Any) -> pd.DataFrame:
        return pd.read_csv(io.BytesIO(body), sep=delimiter, low_memory=False, **shape, **how)

    rows = read()
    # pandas takes the first cells of lines that are longer than the heading for names of rows, as R writes.
    if more := 0 if isinstance(rows.index, pd.RangeIndex) else rows.index.nlevels:
        if rows.iloc[:, -more:].isna().all(axis=None):  # a delimiter ends each line
            shape["index_col"] = False
            rows = read()
        elif more > 1 or not rows.index.is_unique:
            raise ValueError(f"its lines have {more} more cells than the one with the names of columns")
    # A file has one convention: where its numbers have decimal commas, a point separates thousands.
    if any(map(has_decimal_commas, map(rows.get, rows))):
        texts = read(dtype=str).stack().str.strip()
        pointed = texts[texts.str.fullmatch(r"[+-]?\d*\.\d[\d.,]*(e[+-]?\d+)?", case=False)]
        if pointed.str.fullmatch(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?").all():
            rows = read(decimal=",", thousands=".")
    if len(rows.columns) > 1 and all(as_number(name) is not None for name in rows.columns):
        raise ValueError("its first line holds numbers, not names of columns")
    if len(names) == len(rows.columns):
        # pandas calls the second of two columns x "x.1"; the caller refuses two of one name.
        rows.columns = pd.Index([name or known for name, known in zip(names, rows.columns, strict=True)])
    return rows


_RULE = r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$"  # below a head in Markdown
# Mark between the cells of a table, and what such tables have
_FRAMES = {
    b"&": re.compile(rb"\\begin\{tabular|&[^\n]*\\\\\s*$", re.M),
    b"|": re.compile(rf"^[^\n]*\|[^\n]*\n{_RULE}|^\s*\+[-=]+\+".encode(), re.M),
}


def _framed(content: bytes, mark: bytes, start: int) -> list[bytes]:
    """Return the lines of a table in Markdown, LaTeX or a frame, with tabs between cells."""
    if mark == b"|":  # text may stand below a table in Markdown
        content = content[start:].lstrip().split(b"\n\n")[0]
    lines = (re.sub(rb"\\\\.*$|^\s*\||\|\s*$", b"", line) for line in content.splitlines() if mark in line)
    rows = [[re.sub(rb"^[*_`]+|[*_`]+$", b"", cell.strip()) for cell in line.split(mark)] for line in lines]
    rows = [row for row in rows if b"".join(row).strip(b":-")]
    return [b"\t".join(row) for row in rows if mark == b"&" or len(row) == len(rows[0])]


def _cells(line: bytes, delimiter: str = "") -> tuple[str, list[str]]:
    """Split a line at its delimiter, the one that splits it into the most cells; return both."""
    if not delimiter:
        counts = {sep: len(_cells(line, sep)[1]) for sep in ";\t,"}
        # In a heading with decimal commas, commas split no more than semicolons do, which come first.
        delimiter = max(counts, key=lambda sep: counts[sep])
        if counts[delimiter] == 1 and len(line.split()) > 1:
            delimiter = r"\s+"
    text = line.decode()
    rows = iter([text.split()]) if delimiter == r"\s+" else csv.reader([text], delimiter=delimiter)
    return delimiter, next(rows, [])


def _json(content: Any) -> pd.DataFrame:
    """Make a table of rows, of columns, of pandas' orients, or of one of these under a single key."""
    if not isinstance(content, dict):
        return _records(content)
    if {"columns", "data"} <= {*content}:
        return pd.DataFrame(content["data"], columns=content["columns"])
    if {"schema", "data"} <= {*content}:
        return _records(content["data"])
    values, is_named = [*content.values()], any(map(means, content))
    if values and all(isinstance(value, dict) for value in values):
        points = [(as_number(n), as_number(lr), loss) for n, of in content.items() for lr, loss in of.items()]
        if points and all(n and lr and lr < 1 <= n for n, lr, _ in points):
            return pd.DataFrame(points, columns=["width", "lr", "loss"])
    # Groups, such as sizes, with lists of runs
    groups = [value for value in (content, *values) if isinstance(value, dict) and len(value) > 1]
    by_group = [value for value in groups if all(map(_is_list_of_rows, value.values()))]
    if len(by_group) == 1:
        rows = []
        for name, runs in by_group[0].items():
            group = {"params": float(plain_size(name))} if SIZE.fullmatch(name) else {"group": name}
            rows += [group | run for run in runs]
        return _records(rows)
    if len(values) == 1 and not is_named:
        return _json(*values)
    if values and all(isinstance(row, dict) for row in values) and not is_named:
        return _records(values)
    if values and all(isinstance(column, dict | list) for column in values):
        return pd.DataFrame(content)
    return _records(content)


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _records(rows: Any) -> pd.DataFrame:
    """Make a table of rows, or of runs that each hold a list of rows, such as a history."""
    if not (rows == [] or _is_list_of_rows(rows)):
        raise ValueError(f"it holds {shown(rows)}, where a list of rows by name is needed")
    by_step: list[dict[str, Any]] = []
    for row in rows:
        histories = [name for name, value in row.items() if _is_list_of_rows(value)]
        run = {name: value for name, value in row.items() if name not in histories}
        by_step += [run | entry for entry in row[histories[0]]] if len(histories) == 1 else [row]
    return pd.json_normalize(by_step, sep="/")
