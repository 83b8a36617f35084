"""Tables in files, and their shapes as rows of runs.

Files are CSV and its like, JSON, JSON lines, Parquet; compressed or not, on a disk or at a URL. A table has
columns for values or curves, settings in names, or rows of steps.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import (
    ROUNDING,
    Columns,
    Usual,
    is_configured,
    list_of,
    means,
    plain_name,
    rough_numbers,
    rows_of_both,
)
from mup_tpu.analysis.ingest.table_values import SIZE, has_decimal_commas, numbers, plain_size, plain_sizes
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import each_of, power, run_key
from mup_tpu.config import parse_number, shown
from mup_tpu.config.values import as_number
from mup_tpu.config.yaml import read_yaml
from mup_tpu.errors import ConfigError, TableError, given, not_installed, reason
from mup_tpu.files import MOST_BYTES, bounded, require_size
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

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
    """
    name = str(path).lower()
    kind = _KINDS.get(Path(next((name[: -len(s)] for s in _COMPRESSED if name.endswith(s)), name)).suffix)
    if kind is None and name != STDIN:
        raise TableError(f"table {path} is not of a kind that is read: save it as {KINDS}")
    try:
        if kind == "parquet":
            table = _parquet(_bytes(path))
            if table.index.names != [None] or not isinstance(table.index, pd.RangeIndex):
                table = table.reset_index().drop(columns="index", errors="ignore")
        elif kind == "excel":
            table = _excel(_bytes(path))
        else:
            content = _utf8(bounded(sys.stdin.buffer) if name == STDIN else _bytes(path))
            content = json.dumps(read_yaml(content.decode())).encode() if kind == "yaml" else content
            is_json = kind in ("json", "lines", "yaml") or (
                name == STDIN and content.lstrip()[:1] in (b"{", b"[")
            )
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
    if {*table} == {"Wall time", "Step", "Value"}:  # as TensorBoard's page exports a curve
        table = table.rename(columns={"Value": "loss"})
    return table.rename(columns=lambda name: name.strip() if isinstance(name, str) else name)


def _bytes(path: str | Path) -> bytes:
    import fsspec  # a tenth of a second, which results folders do without

    if str(path).lower().endswith(".zip"):
        with fsspec.open(str(path), "rb", compression=None) as file, zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if not n.endswith("/") and "__MACOSX/" not in n]
        if len(names) != 1:
            listed = ", ".join(names[:3])
            raise ValueError(f"it holds {len(names)} files, not one ({listed}); unpack it, and name one")
    with fsspec.open(str(path), "rb", compression="infer") as file:
        return bounded(file)


def _parquet(content: bytes) -> pd.DataFrame:
    import pyarrow.parquet  # a tenth of a second, which other tables do without

    file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
    # A number in memory has eight bytes; in a file, a million equal ones have none.
    require_size(8 * file.metadata.num_rows * file.metadata.num_columns)
    return pd.read_parquet(io.BytesIO(content))


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
    lines = content.splitlines()
    if framed := next((mark for mark, frame in _FRAMES.items() if frame.search(content)), b""):
        inside = (re.sub(rb"\\\\.*$", b"", line).strip(b"| \t") for line in lines if framed in line)
        lines = [b"\t".join(map(bytes.strip, line.split(framed))) for line in inside]
    _check_columns(1 + max(line.count(sep) for line in lines[:9] or [b""] for sep in (b";", b"\t", b",")))
    skipped = {i for i, line in enumerate(lines) if _NO_HEAD.match(line)}
    heads = [i for i in range(len(lines)) if i not in skipped][:9]
    cells = {i: _cells(lines[i]) for i in heads}
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

    def read(**how: Any) -> pd.DataFrame:
        return pd.read_csv(io.BytesIO(body), sep=delimiter, low_memory=False, **how)

    rows = read()
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


# Mark between the cells of a table, and a line that such tables have
_FRAMES = {
    b"&": re.compile(rb"\\begin\{tabular|&[^\n]*\\\\\s*$", re.M),
    b"|": re.compile(rb"^\s*\+[-=]+\+", re.M),
}


def _cells(line: bytes, delimiter: str = "") -> tuple[str, list[str]]:
    """Split a line at its delimiter, the one that splits it into the most cells; return both."""
    if not delimiter:
        counts = {sep: len(_cells(line, sep)[1]) for sep in ";\t,"}
        # In a heading with decimal commas, commas split no more than semicolons do, which come first.
        delimiter = max(counts, key=lambda sep: counts[sep])
        if counts[delimiter] == 1 and len(line.split()) > 1:
            delimiter = r"\s+"
    text = line.decode()
    return delimiter, text.split() if delimiter == r"\s+" else next(
        csv.reader([text], delimiter=delimiter), []
    )


def _json(content: Any) -> pd.DataFrame:
    """Make a table of rows, of columns, of pandas' orients, or of one of these under a single key."""
    if isinstance(content, dict) and {"columns", "data"} <= set(content):
        return pd.DataFrame(content["data"], columns=content["columns"])
    if isinstance(content, dict) and content and all(as_number(size) is not None for size in content):
        by_rate = {
            (as_number(size) or 0.0, as_number(rate) or math.inf): loss
            for size, losses in content.items()
            if isinstance(losses, dict)
            for rate, loss in losses.items()
        }
        if by_rate and all(rate < 1 <= size for size, rate in by_rate):
            return pd.DataFrame(
                [(*point, loss) for point, loss in by_rate.items()], columns=["width", "lr", "loss"]
            )
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
    """Return the rows of a mapping of sizes to lists of runs, at the top or under one key, or None."""

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
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        rows = [each for row in rows for each in _by_step(row)]
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"it holds {shown(rows)}, where a list of rows by name is needed")
    return pd.json_normalize(rows, sep="/")


def _by_step(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a row for each entry of a run's history; the row itself without one."""
    histories = [
        key for key, value in row.items()
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value)
    ]  # fmt: skip
    if len(histories) != 1:
        return [row]
    return [
        {key: value for key, value in row.items() if key not in histories} | entry
        for entry in row[histories[0]]
    ]


NUMBER = r"[0-9]+\^-?[0-9.]+|[0-9]*[.,]?[0-9]+(?:e[+-]?[0-9]+)?"
# Meanings of a setting that are an axis of a table
AXES = {"width": "scale", "depth": "scale", "size": "scale", "lr": "hyperparameter"}

# Meaning of a letter before a number in the name of a run or column
_SHORT = {"w": "width", "d": "width", "l": "depth", "s": "seed", "h": "width"}
_SETTING = re.compile(rf"(?P<name>[a-z][a-z_/.]*?)\s*[-_=: ]?\s*(?P<number>{NUMBER})(?![0-9])", re.IGNORECASE)
# Width and depth, as in 3072x12
_SHAPE = re.compile(r"(?<![0-9a-z.])(?P<width>[0-9]{2,5})x(?P<depth>[0-9]{1,3})(?![0-9a-z])", re.IGNORECASE)

# Parameters, as in pythia-70m
_SIZE_IN_NAME = re.compile(r"(?<![0-9a-z.])([0-9]+(?:[._][0-9]+)?[mb])(?![0-9a-z])", re.IGNORECASE)

# Usual columns of a run's name, the likeliest first
_NAMES = (
    "run",
    "name",
    "run_name",
    "trial_name",
    "experiment_name",
    "display_name",
    "run_id",
    "tag",
    "file",
    "model",
)

_HEADING = re.compile(rf"(?P<before>.*?)(?P<number>{NUMBER})(?P<after>[^0-9]*)", re.IGNORECASE)
_CURVE = re.compile(r"(?P<run>.+) - (?P<metric>\S.*)")
# Suffixes of columns that Weights & Biases exports beside a curve: extremes of a group of steps
_EXTREMES = ("__MIN", "__MAX")


def as_rows(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[Reason]]:
    """Gather the losses of a table of any shape in one column; return it with notes."""
    if any(means(name) == "loss" for name in table) or columns.loss in table:
        return table, []
    if (long := _long(table)) is not None:
        return long, []
    if (curves := _curves(table)) is not None:
        return curves
    if (headings := _headings(table, columns)) is None:
        return table, []
    axis, values = headings
    named = getattr(columns, axis)
    kept = [name for name in table if name not in values]
    values_C = pd.Series(numbers(plain_sizes(pd.Series([*values.values()])), named).to_numpy(), [*values])
    rows = table.melt(kept, [*values], "heading", columns.loss)
    rows[named] = rows.pop("heading").map(values_C).astype("float64")
    empty = rows[columns.loss].isna()
    notes = [Reason.of("losses in columns", names=[*values], column=named)]
    if empty.any():
        notes.append(Reason.of("empty cells", count=int(empty.sum())))
    return rows[~empty].reset_index(drop=True), notes


def _long(table: pd.DataFrame) -> pd.DataFrame | None:
    """Make columns of the metrics of a table with a row per metric; None for another table."""
    plain = {plain_name(name): name for name in table}
    metric = next((plain[word] for word in ("metric", "tag", "key", "variable") if word in plain), None)
    if (
        metric is None
        or "value" not in plain
        or "loss" not in {means(text) for text in table[metric].unique()}
    ):
        return None
    others = [name for name in table if name not in (metric, plain["value"]) and not table[name].isna().all()]
    wide = table.pivot_table(plain["value"], others, metric, aggfunc="last", sort=False)
    return wide.reset_index().rename_axis(columns=None)


def _headings(table: pd.DataFrame, columns: Columns) -> tuple[str, dict[str, str]] | None:
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in map(str, table):
        if match := _HEADING.fullmatch(name.strip()):
            groups.setdefault((match["before"], match["after"]), {})[name] = match["number"]
    (before, after), values = max(groups.items(), key=lambda group: len(group[1]), default=(("", ""), {}))
    sizes = {name: name for name in map(str, table) if SIZE.fullmatch(name.strip())}  # 130M, 1.3B
    if len(sizes) > len(values):
        return "scale", sizes
    if len(values) < 2:
        return None
    others = [name for name in table if name not in values]
    known = {axis for name in others if (axis := AXES.get(means(name)))}
    known |= {axis for axis in ("scale", "hyperparameter") if getattr(columns, axis) in others}
    meanings = [meaning_at_end(re.sub(r"[\s=:]+", "_", text)) for text in (before, after)]
    named_axes = {AXES[what] for what in meanings if what in AXES}
    missing = {"scale", "hyperparameter"} - known
    if not missing and "seed" in meanings:
        return "seed", values
    if len(named_axes) == 1 and named_axes <= missing and len(missing) == 1:
        return named_axes.pop(), values
    if not named_axes and before.strip() == after.strip(" *x×") == "":
        if len(missing) == 1:
            return missing.pop(), values
        raise TableError(
            f"table has a column for each of {list_of(values)}, but no heading names these values or the "
            f"rows: name the column of the rows {columns.scale} or {columns.hyperparameter}"
        )
    return None


def _curves(table: pd.DataFrame) -> tuple[pd.DataFrame, list[Reason]] | None:
    """Make rows by run and step of columns of curves (`NAME - val/loss`); None without such columns."""
    matches = {
        name: match
        for name in table
        if not str(name).endswith(_EXTREMES) and (match := _CURVE.fullmatch(str(name)))
    }
    matches = {name: match for name, match in matches.items() if means(match["metric"]) in ("loss", "step")}
    losses = [name for name, match in matches.items() if means(match["metric"]) == "loss"]
    steps = [name for name in table if means(name) == "step"]
    if not losses or not steps:
        return None
    metrics = {matches[name]["metric"] for name in losses}
    if len(metrics) > 1:
        raise TableError(f"table holds curves of {list_of(sorted(metrics))}: export the curves of one loss")
    by_column = {name: settings(matches[name]["run"]) for name in losses}
    both = {"scale", "hyperparameter"}
    untold = [
        name for name, in_name in by_column.items() if {AXES.get(what) for what in in_name} & both != both
    ]
    if untold:
        raise TableError(
            f"table holds curves of {len(losses)} runs whose names do not say width and learning rate "
            f"({list_of(untold, 2)}): export the table of runs in their place, or read the project itself "
            "as wandb:ENTITY/PROJECT"
        )
    rows = [
        pd.DataFrame({**in_name, "step": table[steps[0]], "loss": table[name]}).dropna(subset=["loss"])
        for name, in_name in by_column.items()
    ]
    note = Reason.of("curves in columns", count=len(losses), metric=metrics.pop())
    return pd.concat(rows, ignore_index=True), [note]


def settings(run: str) -> dict[str, Any]:
    """Read the settings in a run's name, by meaning: `d_model: 64, lr: 0.01` or `w64-lr2^-8-s0`."""
    values: dict[str, Any] = {}
    for match in _SETTING.finditer(run):
        what = meaning_at_end(match["name"])
        if what in (*AXES, "seed") and what not in values:
            with contextlib.suppress(ConfigError):
                values[what] = parse_number(match["number"])
    if (size := _SIZE_IN_NAME.search(run)) and "width" not in values:
        values.setdefault("size", float(plain_size(size[1])))
    if (shape := _SHAPE.search(run)) and "width" not in values:
        values = {"width": float(shape["width"]), "depth": float(shape["depth"])} | values
    rules = {word for word in re.split(r"[^a-z]+", run.lower()) if word in PARAMETRIZATIONS}
    return values | ({"parametrization": rules.pop()} if len(rules) == 1 else {})


def meaning_at_end(text: str) -> str:
    # Of a name or its end: `sp_w` means w.
    words = [word for word in re.split(r"[-_/. ]+", text) if word]
    names = ["_".join(words[i:]) for i in range(len(words))]
    return next((what for name in names if (what := means(name) or _SHORT.get(name.lower(), ""))), "")


def with_settings(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[Reason]]:
    """Add the settings that only the names of runs have as columns; return the table and notes on them."""
    empty = [name for name in table if len(table) and means(name) in AXES and table[name].isna().all()]
    known = {means(name) for name in table if name not in empty} - {""}
    known |= {what for what, axis in AXES.items() if getattr(columns, axis) in {*table} - {*empty}}
    known |= {"parametrization"} if columns.parametrization in table else set()
    texts_only = [str(name) for name in table if table[name].dtype.kind not in "iufb"]
    plain = {plain_name(name): name for name in reversed(texts_only)}
    names = [plain[name_of_run] for name_of_run in _NAMES if name_of_run in plain]
    table, notes = _with_set_rates(table, names, columns)
    for name in names:
        if "lr" in known and known & {"width", "depth", "size"}:
            break
        texts = table[name].astype(str)
        by_text = {text: settings(text) for text in texts.unique()}
        new = [what for what in next(iter(by_text.values())) if what not in known]
        new = [what for what in new if all(what in in_name for in_name in by_text.values())]
        if set(new) & set(AXES):
            table = table.drop(columns=empty, errors="ignore").assign(
                **{what: [by_text[text][what] for text in texts] for what in new}
            )
            notes.append(Reason.of("settings in names", settings=new, name=name, example=texts.iloc[0]))
            known |= {*new}
    return table, notes


def _with_set_rates(
    table: pd.DataFrame, names: list[str], columns: Columns
) -> tuple[pd.DataFrame, list[Reason]]:
    # In place of a schedule's values, in the table's only column, come the rates that were set: those in the
    # names of the runs, or the largest value of each run's steps.
    logged = [str(name) for name in table if means(name) == "lr"]
    is_chosen = columns.hyperparameter in table and not isinstance(columns.hyperparameter, Usual)
    is_set = len(logged) == 1 and is_configured(logged[0])  # names round it
    if len(logged) != 1 or not names or is_chosen or is_set:
        return table, []
    rate = rough_numbers(table[logged[0]])
    for name in names:
        by_text = {text: settings(text).get("lr") for text in table[name].astype(str).unique()}
        if not all(by_text.values()):  # Ray Tune's names round small rates to 0
            continue
        named = table[name].astype(str).map(by_text).astype(float)
        share = (rate / named).dropna()
        if (share - 1).abs().max() < ROUNDING:  # names round
            return table, []
        if share.max() > 1 + ROUNDING:
            raise TableError(
                f"column {logged[0]} and the names of the runs (column {name}) may both be the learning rate "
                f"({rows_of_both(rate, named)}): give {given('hyperparameter', logged[0])}"
            )
        settings_note = Reason.of(
            "settings in names", settings=["lr"], name=name, example=table[name].iloc[0]
        )
        return table.assign(**{logged[0]: named}), [settings_note]
    steps = next((rough_numbers(table[name]) for name in table if means(name) == "step"), None)
    by_run = pd.DataFrame({"run": table[names[0]], "step": steps, "rate": rate}).dropna()
    if steps is None or (by_run.groupby("run")["rate"].nunique() > 1).mean() <= 0.5:
        return table, []
    length = float(by_run["step"].max())
    peaks = {
        run: set_rate(of["step"].to_numpy(), of["rate"].to_numpy(), length)
        for run, of in by_run.groupby("run")
    }
    if lost := next((run for run, peak in peaks.items() if peak is None), None):
        raise TableError(
            f"{logged[0]} of run {shown(str(lost))} has values of a schedule, from which the rate that was "
            "set does not follow: name the runs such as width64-lr0.001"
        )
    first = by_run.loc[by_run.groupby("run")["rate"].idxmax(), "step"].min()
    note = Reason.of("peak of a schedule", name=logged[0], step=f"{first:g}")
    return table.assign(**{logged[0]: table[names[0]].map(peaks)}), [note]


_FITS = 0.01  # relative error of a schedule's values, which logs round
# Share of the decay that is left, by the share of the steps that are done
_DECAYS = (lambda u: 1 - u, lambda u: (1 + np.cos(np.pi * u)) / 2)


def set_rate(steps: np.ndarray, rates: np.ndarray, length: float | None) -> float | None:
    """Return the peak of the schedule with these values at these steps; None if none fits.

    A schedule rises in a straight line, and decays linearly or as a cosine; logs may begin after its peak.
    """
    order = np.argsort(steps)
    steps, rates = steps[order], rates[order]
    highest, top = float(rates.max()), int(rates.argmax())
    is_flat = np.isclose(rates[top:], highest, rtol=1e-3).sum() > 1
    length = max(float(steps[-1]), length or 0.0)
    if len(rates) < 2 or is_flat or highest <= 0:
        return highest if highest > 0 else None
    # Of a warm-up that ends before the first step of the log only a round peak tells that there was none.
    begins = np.linspace(steps[top - 1] if top else 0.0, steps[top], 101).tolist()
    peaks = []
    for begin, decay, end in itertools.product(begins, _DECAYS, (0.0, 0.01, 0.1, None)):
        left = decay((steps[top:] - begin) / max(length - begin, 1.0))
        columns = np.column_stack([left, 1 - left]) if end is None else (end + (1 - end) * left)[:, None]
        if len(left) <= columns.shape[1]:
            continue
        (peak, *_), *_ = np.linalg.lstsq(columns, rates[top:])
        fitted = columns @ np.linalg.lstsq(columns, rates[top:])[0]
        misses = np.abs(fitted - rates[top:])
        if top:
            misses = np.append(misses, abs(peak * steps[top - 1] / max(begin, 1e-9) - rates[top - 1]))
        if misses.max() < _FITS * peak:
            if not top and not begin and _is_round(float(peak)):
                return float(peak)
            peaks.append((float(misses.max()), float(peak)))
    if peaks and max(p for _, p in peaks) < (1 + ROUNDING) * min(p for _, p in peaks):
        return min(peaks)[1]
    return highest if top or steps[0] <= ROUNDING * length else None


def _is_round(rate: float) -> bool:
    """Return whether a person may have set a rate: two digits, or 2 to the power of a half."""
    octaves = 2 * math.log2(rate)
    return math.isclose(rate, float(f"{rate:.1e}"), rel_tol=2e-3) or abs(octaves - round(octaves)) < 6e-3


def at_logged_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Select steps at which some run has a loss; at others an empty held-out loss is no divergence."""
    if rows["step"].isna().all():
        return rows
    is_logged = rows["loss"].notna().groupby(rows["step"]).transform("any")
    return rows[is_logged.fillna(True).astype(bool)] if is_logged.any() else rows


def last_steps(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each run."""
    if runs["step"].isna().all():
        return runs
    return runs.sort_values("step").groupby(run_key(runs), as_index=False).tail(1).sort_index()


def history_of(runs: pd.DataFrame, by_step: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by step of these runs."""
    key = run_key(runs)
    is_kept = pd.MultiIndex.from_frame(by_step[key]).isin(pd.MultiIndex.from_frame(runs[key]))
    is_kept &= np.isfinite(by_step["x"]) & (by_step["scale"] > 0)
    return by_step.loc[is_kept, [*key, "step", "loss"]].sort_values([*key, "step"], ignore_index=True)


_WHOLE = 0.9  # share of its peers' steps from which a run counts as finished


def without_early_ends(
    runs: pd.DataFrame, counters: Mapping[str, pd.Series], notes: list[Reason]
) -> pd.DataFrame:
    """Count runs that ended before their peers as stopped, if several ended at one rung; else leave them out.

    Peers are the other runs of a scale. A scheduler such as ASHA stops runs for being behind, at a few rungs.
    """
    groups = [runs[name] for name in ("compared", *each_of("scale", runs))]
    is_finite = np.isfinite(runs["loss"]) & (runs["x"] > -np.inf)
    for name, counts in counters.items():
        shared = counts.where(is_finite & (counts.map(counts[is_finite].value_counts()) > 1))
        most = shared.groupby(groups).transform("max")
        early, longer = is_finite & (counts < _WHOLE * most), is_finite & (_WHOLE * counts > most)
        if not early.any() and not longer.any():
            continue
        best = runs["loss"].where(is_finite & (counts >= _WHOLE * most)).groupby(groups).transform("min")
        if (runs["loss"] < best)[early].any():  # it counts something else, such as a setting
            continue
        ends = counts[early | longer]
        shown = {"name": name, "count": len(ends), "most": f"{most.max():g}"}
        shown["listed"] = list_of([f"{end:g}" for end in sorted(ends.unique())], 4)
        if 2 * ends.nunique() > len(ends):
            notes.append(Reason.of("ended at odd steps", **shown))
            return runs[~(early | longer)]
        notes.append(Reason.of("ended early", **shown))
        return runs.assign(loss=runs["loss"].mask(early, np.inf), stopped=runs["stopped"] | early)
    return runs


def require_one_length(runs: pd.DataFrame, column: str, notes: list[Reason]) -> pd.DataFrame:
    """Leave out runs that end at another step than most, with a note; an error where most end at none."""
    is_finite = np.isfinite(runs["loss"])
    ends = runs.loc[is_finite, "step"].value_counts()
    if len(ends) < 2:
        return runs
    if 2 * ends.iloc[0] <= ends.sum():
        raise TableError(
            f"runs end at different steps (column {column!r}: {ends.index.min():g} to "
            f"{ends.index.max():g}), and most at no single one; compare runs of one length"
        )
    is_cut = is_finite & (runs["step"] != ends.index[0])
    cut = [
        f"{run.compared + ' ' if run.compared != 'all' else ''}{run.scale:g} at {power(run.x)} "
        f"(step {run.step:g})"
        for run in runs[is_cut].itertuples()
    ]
    notes.append(Reason.of("other last step", step=float(ends.index[0]), runs=cut))
    return runs[~is_cut]
