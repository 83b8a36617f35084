"""Files of any kind hold the same table; what is no table says what it is."""

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
import pyarrow as pa
import pytest

from mup_tpu.analysis import load_table
from mup_tpu.analysis.ingest.table_files import is_file, read_file, without_suffix
from mup_tpu.errors import TableError

TABLE = pd.DataFrame(
    [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20) for w in (64, 128) for x in (-9, -8, -7)],
    columns=["width", "lr", "loss"],
)
CSV = TABLE.to_csv(index=False)
ROWS = TABLE.to_dict("records")
NESTED = [{"config": {"model": {"width": r["width"]}, "lr": r["lr"]}, "loss": r["loss"]} for r in ROWS]


def packed(kind: str) -> bytes:
    with pa.BufferOutputStream() as sink:
        with pa.CompressedOutputStream(sink, kind) as file:
            file.write(CSV.encode())
        return sink.getvalue().to_pybytes()


TEXTS = {
    "tabs.tsv": TABLE.to_csv(index=False, sep="\t"),
    "columns.txt": TABLE.to_string(index=False),
    "comma.csv": TABLE.to_csv(index=False, sep=";", decimal=","),
    "spreadsheet.csv": "sep=;\n" + TABLE.to_csv(index=False, sep=";", decimal=","),
    "comment.csv": "# by hand\n\n" + CSV,
    "spaces.csv": CSV.replace("width,lr,loss", " width , lr ,loss "),
    "rows.jsonl": "\n".join(map(json.dumps, ROWS)) + "\n",
    "rows.json": json.dumps(ROWS),
    "under_a_key.json": json.dumps({"runs": ROWS}),
    "by_run.json": json.dumps({f"run-{i}": row for i, row in enumerate(ROWS)}),
    "columns.json": TABLE.to_json(orient="columns", double_precision=15),
    "split.json": TABLE.to_json(orient="split", double_precision=15),
    "schema.json": TABLE.to_json(orient="table", index=False, double_precision=15),
    "nested.ndjson": "\n".join(map(json.dumps, NESTED)),
}
BYTES = {
    "mark.csv": CSV.encode("utf-8-sig"),
    "utf16.csv": CSV.encode("utf-16"),
    "windows.csv": TABLE.assign(note="für").to_csv(index=False).encode("cp1252"),
    "packed.csv.gz": gzip.compress(CSV.encode(), mtime=0),
    "packed.csv.bz2": packed("bz2"),
    "packed.csv.zst": packed("zstd"),
    "PACKED.JSONL.GZ": gzip.compress(TEXTS["rows.jsonl"].encode()),
    **{name: text.encode() for name, text in TEXTS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_a_table_is_the_same_in_every_kind_of_file(tmp_path, name):
    (tmp_path / name).write_bytes(BYTES[name])
    read = load_table(tmp_path / name).runs
    assert read["scale"].tolist() == TABLE["width"].tolist()
    np.testing.assert_allclose(read["x"], np.log2(TABLE["lr"]), rtol=1e-4)
    np.testing.assert_allclose(read["loss"], TABLE["loss"], rtol=1e-5)


@pytest.mark.parametrize("name", ["zipped.csv.zip", "packed.tsv.xz", "brackets[1].csv", "star*.csv"])
def test_pandas_files_of_any_name_are_read(tmp_path, name):
    TABLE.to_csv(tmp_path / name, index=False, sep="\t" if "tsv" in name else ",")
    pd.testing.assert_frame_equal(read_file(tmp_path / name), TABLE)


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
        ("runs.csv", b"lr,width,loss,lr\n0.1,64,2,0.2\n", "cannot be read: it has two columns 'lr'"),
        ("runs.csv", b"lr,width,loss, lr\n0.1,64,2,0.2\n", "table has two columns 'lr'"),
        ("runs.md", b"| lr | loss | loss |\n|--|--|--|\n| 0.1 | 2 | 3 |\n", "it has two columns 'loss'"),
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


def test_a_workbook_is_read_with_its_package_or_refused_in_a_sentence(tmp_path):
    try:
        TABLE.to_excel(tmp_path / "runs.xlsx", index=False)
    except ImportError:
        with zipfile.ZipFile(tmp_path / "runs.xlsx", "w") as archive:
            archive.writestr("xl/workbook.xml", "<workbook/>")
        with pytest.raises(TableError, match=r"cannot be read: .*openpyxl.*; or save it as CSV"):
            read_file(tmp_path / "runs.xlsx")
    else:
        pd.testing.assert_frame_equal(read_file(tmp_path / "runs.xlsx"), TABLE)
        pd.concat([TABLE, TABLE[["lr"]]], axis=1).to_excel(tmp_path / "runs.xlsx", index=False)
        with pytest.raises(TableError, match="it has two columns 'lr'"):
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
