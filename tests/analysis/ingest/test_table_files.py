"""What is no table says what it is; workbooks and standard input are tables (other kinds: test_kinds.py)."""

import gzip
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import load_table
from mup_tpu.analysis.ingest.table_files import is_file, read_file, without_suffix
from mup_tpu.errors import TableError

TABLE = pd.DataFrame(
    [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20) for w in (64, 128) for x in (-9, -8, -7)],
    columns=["width", "lr", "loss"],
)
CSV = TABLE.to_csv(index=False)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "runs.docx",
            b"PK",
            "is not of a kind that is read: save it as CSV, TSV, Markdown, JSON, JSONL, Parquet",
        ),
        ("runs.xlsx", b"PK", "cannot be read: Excel file format cannot be determined"),
        ("runs", b"width,lr", "is not of a kind that is read"),
        ("runs.csv", TABLE.to_parquet(), "it holds bytes that are no text"),
        ("runs.csv", b"64,0.1,2\n", "its first line holds numbers, not names of columns"),
        ("runs.csv", b"lr,width,loss,lr\n0.1,64,2,0.2\n", "table has two columns 'lr'"),
        ("runs.csv", b"lr,width,loss, lr\n0.1,64,2,0.2\n", "table has two columns 'lr'"),
        ("runs.md", b"| lr | loss | loss |\n|--|--|--|\n| 0.1 | 2 | 3 |\n", "table has two columns 'loss'"),
        (
            "runs.csv.gz",
            gzip.compress(CSV.encode(), mtime=0)[:40],
            "cannot be read: Compressed file ended before",
        ),
        ("runs.json", b"3", "cannot be read: it holds 3, where a list of rows by name is needed"),
        ("runs.jsonl", b'{"width": 64}\n{"wid', "cannot be read: Unterminated string"),
        ("runs.pkl", b"\x80\x04N.", "is not of a kind that is read"),
    ],
)
def test_what_is_no_table_says_what_it_is(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError, match=sentence) as caught:
        load_table(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["runs.csv", "runs.parquet", "runs/one/metrics.csv", "runs/one/result.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_not_read(name, make, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    make(file)
    with pytest.raises(TableError, match="is not a regular file"):
        load_table(tmp_path / Path(name).parts[0])


def test_an_archive_of_several_tables_and_a_table_of_too_many_columns_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "two.csv.zip", "w") as archive:
        for name in ("mup.csv", "sp.csv"):
            archive.writestr(name, CSV)
    with pytest.raises(TableError, match=r"it holds 2 files, not one \(mup\.csv, sp\.csv\); unpack it"):
        read_file(tmp_path / "two.csv.zip")
    names = ",".join(f"c{i}" for i in range(1_000_000))
    (tmp_path / "wide.csv").write_text(names + "\n")
    (tmp_path / "wide.json").write_text(json.dumps([dict.fromkeys(names.split(",")[:20_000], 1)]))
    with pytest.raises(
        TableError, match="it has 1,000,000 columns, and at most 10,000 are read; keep the columns"
    ):
        read_file(tmp_path / "wide.csv")
    with pytest.raises(TableError, match="it has 20,000 columns"):
        read_file(tmp_path / "wide.json")


def test_a_file_is_told_from_a_results_folder(tmp_path):
    (tmp_path / "noted").touch()
    for path in ("gs://bucket/runs.CSV", "runs.jsonl.gz", tmp_path / "noted"):
        assert is_file(path)
    for path in (tmp_path, "gs://bucket/lr_transfer", "results/v1.2"):
        assert not is_file(path)
    assert without_suffix("a.b/runs.csv.gz") == "a.b/runs"


def test_the_only_sheet_with_rows_of_a_workbook_is_read_wherever_its_table_begins(tmp_path, monkeypatch):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.create_sheet("empty")
    sheet = book.active
    sheet["B2"] = "Runs of the summer"
    cells = [[*TABLE], *TABLE.to_numpy().tolist(), [128, 2.0**-6, None], [128, 2.0**-5, "diverged"]]
    for i, row in enumerate(cells, 4):
        for j, value in enumerate(row, 2):
            sheet.cell(i + (i > 6), j, value)  # a blank row in between
    book.save(tmp_path / "runs.xlsx")
    table = load_table(tmp_path / "runs.xlsx").runs
    assert table["scale"].tolist() == [64] * 3 + [128] * 5
    np.testing.assert_allclose(table["x"], [*np.log2(TABLE["lr"]), -6, -5])
    np.testing.assert_allclose(table["loss"], [*TABLE["loss"], np.inf, np.inf])
    sheet["E4"] = "lr"
    book.save(tmp_path / "runs.xlsx")
    with pytest.raises(TableError, match="table has two columns 'lr'"):
        load_table(tmp_path / "runs.xlsx")
    book["empty"]["A1"], book["empty"]["A2"] = "a", "b"
    book["empty"]["B1"], book["empty"]["B2"] = "c", "d"
    book.save(tmp_path / "runs.xlsx")
    with pytest.raises(TableError, match=r"it has 2 sheets with rows \(Sheet, empty\), not one"):
        read_file(tmp_path / "runs.xlsx")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(TableError, match="openpyxl.*; or save it as CSV"):
        read_file(tmp_path / "runs.xlsx")


@pytest.mark.parametrize(
    "content", [CSV.encode(), TABLE.to_json(orient="records").encode()], ids=["CSV", "JSON"]
)
def test_standard_input_is_a_table(content):
    code = (
        "from mup_tpu.analysis.ingest.table_files import read_file; print(read_file('-').to_csv(index=False))"
    )
    run = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=True)
    pd.testing.assert_frame_equal(pd.read_csv(io.BytesIO(run.stdout)), TABLE)
