"""What is no table says what it is; workbooks and standard input are tables (other kinds: test_kinds.py)."""

import gzip
import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import check_table, load_table
from mup_tpu.analysis.ingest.files import is_file, read_file, without_suffix
from mup_tpu.analysis.ingest.tables import settings
from mup_tpu.cli import main
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

TABLE = pd.DataFrame(
    [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20) for w in (64, 128) for x in (-9, -8, -7)],
    columns=["width", "lr", "loss"],
)
CSV = TABLE.to_csv(index=False)


def workbook(cells):
    """A workbook of the table, with other values in some cells."""
    book = pytest.importorskip("openpyxl").Workbook()
    for row in [[*TABLE], *TABLE.to_numpy().tolist()]:
        book.active.append(row)
    for place, value in cells.items():
        book.active[place] = value
    content = io.BytesIO()
    book.save(content)
    return content.getvalue()


TOO_LARGE = "cannot be read: it has more than 134,217,728 bytes unpacked, the most that is read"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("runs.csv.gz", lambda: gzip.compress(bytes(2**27 + 1), 1), TOO_LARGE),
        ("runs.parquet", lambda: pd.DataFrame({"lr": np.zeros(2**24 + 1, np.int8)}).to_parquet(), TOO_LARGE),
        ("runs.yaml", lambda: b"- 1\n" * 2**19, "it has more than 1,048,576 bytes unpacked"),
        # Rows that reach to a column far away
        ("runs.xlsx", lambda: workbook({f"XFD{i}": 1 for i in range(1, 1100)}), TOO_LARGE),
        ("runs.xlsx", lambda: workbook({"XFD1048576": 1}), "column lr is empty in row 6|states that are not"),
        ("runs.xlsx", lambda: workbook({"C3": "=1+2"}), "cell C3 has a formula without a value: open the"),
        (
            "runs.json",
            TABLE.assign(width=[[64]] * 6).to_json(orient="records").encode(),
            r"row 0 has '\[64\]'",
        ),
        ("runs.json", lambda: b"[" * 10**5, "maximum recursion depth exceeded"),
        (
            "runs.docx",
            b"PK",
            "is not of a kind that is read: save it as CSV, TSV, Markdown, JSON, JSONL, Parquet or Excel",
        ),
        ("runs.xlsx", b"PK", "cannot be read: File is not a zip file"),
        ("runs", b"width,lr", "is not of a kind that is read"),
        ("runs.csv", TABLE.to_parquet, "it holds bytes that are no text"),
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
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(TableError, match=sentence) as caught:
        load_table(tmp_path / name)
    assert "\n" not in str(caught.value)


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
    (tmp_path / "parts.parquet").mkdir()
    for path in (tmp_path, tmp_path / "parts.parquet", "gs://bucket/lr_transfer", "results/v1.2"):
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
    code = "from mup_tpu.analysis.ingest.files import read_file; print(read_file('-').to_csv(index=False))"
    run = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=True)
    pd.testing.assert_frame_equal(pd.read_csv(io.BytesIO(run.stdout)), TABLE)


RUNS = pd.DataFrame(
    [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20 + w / 1000) for w in (64, 128) for x in (-9, -8, -7)],
    columns=["width", "lr", "loss"],
)
BY_WIDTH = RUNS.pivot(index="lr", columns="width", values="loss")


def test_an_empty_cell_is_no_run_and_inf_a_diverged_one():
    wide = BY_WIDTH.rename(columns=str)
    wide.loc[2.0**-7, "128"] = np.nan
    table = check_table(wide.reset_index())
    assert len(table.runs) == 5
    assert "1 empty cells left out: write inf where a run diverged" in notes_of(table)
    wide.loc[2.0**-7, "128"] = np.inf
    assert check_table(wide.reset_index()).runs["loss"].tolist()[-1] == np.inf


def test_headings_that_nothing_explains_are_refused():
    wide = BY_WIDTH.rename(columns=str).rename_axis("x").reset_index()
    with pytest.raises(
        TableError, match="column for each of 64, 128, but no heading names these values or the rows"
    ):
        check_table(wide)
    with pytest.raises(TableError, match="no column 'loss'"):  # metrics, no axis
        check_table(RUNS[["width", "lr"]].assign(**{"acc@1": 0.5, "acc@5": 0.9}))


def curves(name, metrics=("val/loss",)) -> pd.DataFrame:
    columns = {
        f"{name(run)} - {metric}": [run.loss + 1, run.loss] for run in RUNS.itertuples() for metric in metrics
    }
    return pd.DataFrame({"Step": [10, 20], **columns})


def test_curves_of_runs_that_say_nothing_are_refused():
    with pytest.raises(TableError, match=r"curves of 6 runs whose names do not say .*wandb:ENTITY/PROJECT"):
        check_table(curves(lambda run: f"lively-sun-{run.Index}"))
    both = curves(lambda run: f"w{run.width}-lr{run.lr}", ("val/loss", "train/loss"))
    with pytest.raises(
        TableError, match="table holds curves of train/loss, val/loss: export the curves of one loss"
    ):
        check_table(both)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mup_w256_lr1.2e-04_s0", {"width": 256, "lr": 1.2e-4, "seed": 0, "parametrization": "mup"}),
        ("PyGemma-3072x12_bs2M_lr5e-02", {"width": 3072, "depth": 12, "lr": 0.05}),
        ("d_model: 64, learning_rate: 0.01", {"width": 64, "lr": 0.01}),
        ("sp/w64-lr2^-8-s1", {"width": 64, "lr": 2**-8, "seed": 1, "parametrization": "sp"}),
        ("n_layer=4 lr=0.5", {"depth": 4, "lr": 0.5}),
        ("gpt2-baseline", {}),
        ("20261126_final", {}),
    ],
)
def test_settings_are_read_from_a_run_s_name(name, found):
    assert settings(name) == found


def named_runs(rule="mup"):
    rows = [(w, 2.0**e, 3 - w / 640 + 0.05 * (e + 8) ** 2) for w in (64, 128, 256) for e in range(-10, -5)]
    return pd.DataFrame(
        [(f"{rule}_w{w}_lr{lr:.6e}", loss) for w, lr, loss in rows], columns=["run_name", "loss"]
    )


def test_named_columns_are_not_replaced_by_names(tmp_path):
    named_runs().assign(width=64, seed=range(15)).to_csv(tmp_path / "runs.csv", index=False)
    assert set(load_table(tmp_path / "runs.csv").runs["scale"]) == {64}


def test_names_that_say_a_setting_of_some_runs_alone_are_not_taken(tmp_path):
    runs = named_runs()
    runs.loc[3, "run_name"] = "mup_base"
    runs.to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(TableError, match="no column 'width', 'lr'; it has run_name, loss"):
        load_table(tmp_path / "runs.csv")


def test_several_tables_are_one_whose_files_say_what_their_rows_do_not(tmp_path, capsys):
    runs = named_runs()
    for width in (64, 128, 256):
        part = runs[runs["run_name"].str.contains(f"w{width}_")]
        names = part["run_name"].str.replace(f"mup_w{width}_", "")
        part.assign(run_name=names).to_csv(tmp_path / f"mup_w{width}.csv", index=False)
    main(["analyze", str(tmp_path / "mup_w*.csv")])
    out = " ".join(capsys.readouterr().out.split())
    assert "read from the names of the runs: width, parametrization" in out and "μP: " in out
