"""What is no table says what it is; workbooks and standard input are tables (other kinds: test_kinds.py)."""

import gzip
import io
import json
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import check_table, load_table
from mup_tpu.analysis.ingest.files import is_file, read_file, read_yaml, without_suffix
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


def archive():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        for name in ("mup.csv", "sp.csv"):
            zipped.writestr(name, CSV)
    return content.getvalue()


NAMES = [f"c{i}" for i in range(10_001)]
TOO_LARGE = "cannot be read: it has more than 134,217,728 bytes unpacked, the most that is read"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.db", b"", "is a database of neither MLflow nor Optuna"),
        ("x.db", b"no database", "cannot be read: file is not a database"),
        ("out/a/log.txt", b"hello\n", "holds 1 files log.txt, and none has a loss"),
        ("out/a/result.json", b'{broken\n{"loss": 1}\n', "a/result.json cannot be read: line 1 is no JSON"),
        ("out/a/trainer_state.json", b"{}", "cannot be read: "),
        ("out/a/notes.md", b"nothing", "no runs that are read: it is no results folder .*Ray Tune"),
        ("out/a/.hydra/config.yaml", b"lr: 1", "holds no runs that are read"),
        ("out/a/meta.yaml", b"artifact_uri: x", "holds no runs that are read"),
        ("out/a/run-a.wandb", b"", "holds no runs that are read"),
        ("x.csv", b'run.hash,run.hparams.lr,"loss subset=""val"""\n1,0.1,2\n', "no column"),
        ("runs.csv.gz", lambda: gzip.compress(bytes(2**27 + 1), 1), TOO_LARGE),
        ("runs.parquet", lambda: pd.DataFrame({"lr": np.zeros(2**24 + 1, np.int8)}).to_parquet(), TOO_LARGE),
        ("runs.yaml", lambda: b"- 1\n" * 2**19, "it has more than 1,048,576 bytes unpacked"),
        # Rows that reach to a column far away
        pytest.param(
            "runs.xlsx",
            lambda: workbook({f"XFD{i}": 1 for i in range(1, 1100)}),
            TOO_LARGE,
            marks=pytest.mark.nightly,
        ),
        ("runs.xlsx", lambda: workbook({"XFD20000": 1}), "column lr is empty in row 6|states that are not"),
        ("runs.xlsx", lambda: workbook({"C3": "=1+2"}), "cell C3 has a formula without a value: open the"),
        ("runs.json", b'[{"width": [64], "lr": 0.1, "loss": 2}]', r"row 0 has '\[64\]'"),
        ("runs.json", lambda: b"[" * 10**5, "maximum recursion depth exceeded"),
        ("runs.docx", b"PK", "is not of a kind that is read: save it as CSV, .*, Parquet or Excel"),
        ("runs.xlsx", b"PK", "cannot be read: File is not a zip file"),
        ("runs", b"width,lr", "is not of a kind that is read"),
        ("runs.csv", TABLE.to_parquet, "it holds bytes that are no text"),
        ("runs.csv", b"64,0.1,2\n", "its first line holds numbers, not names of columns"),
        ("runs.csv", b"run_name,val_loss\n", "table has no column 'width', 'lr'; it has run_name, val_loss"),
        ("runs.csv", b"lr,width,loss,lr\n0.1,64,2,0.2\n", "table has two columns 'lr'"),
        ("runs.csv", b"lr,width,loss, lr\n0.1,64,2,0.2\n", "table has two columns 'lr'"),
        ("runs.md", b"| lr | loss | loss |\n|--|--|--|\n| 0.1 | 2 | 3 |\n", "table has two columns 'loss'"),
        ("runs.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:40], "be read: Compressed file ended before"),
        ("runs.json", b"3", "cannot be read: it holds 3, where a list of rows by name is needed"),
        ("runs.jsonl", b'{"width": 64}\n{"wid', "cannot be read: Unterminated string"),
        ("runs.pkl", b"\x80\x04N.", "is not of a kind that is read"),
        ("two.csv.zip", archive, r"it holds 2 files, not one \(mup\.csv, sp\.csv\); unpack it"),
        (
            "wide.csv",
            lambda: ",".join(NAMES).encode(),
            "at most 10,000 are read; keep the columns",
        ),
        ("wide.json", lambda: json.dumps([dict.fromkeys(NAMES, 1)]).encode(), "it has 10,001 columns"),
    ],
)
def test_what_is_no_table_says_what_it_is(tmp_path, name, content, sentence):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(TableError, match=sentence) as caught:
        load_table(tmp_path / name.partition("/")[0])
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("content", [CSV, TABLE.to_json(orient="records")], ids=["CSV", "JSON"])
def test_standard_input_is_a_table(content, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    pd.testing.assert_frame_equal(read_file("-"), TABLE)


BY_WIDTH = TABLE.pivot(index="lr", columns="width", values="loss").rename(columns=str)


def test_an_empty_cell_is_no_run_and_inf_a_diverged_one():
    wide = BY_WIDTH.copy()
    wide.loc[2.0**-7, "128"] = np.nan
    table = check_table(wide.reset_index())
    assert len(table.runs) == 5
    assert "1 empty cells left out: write inf where a run diverged" in notes_of(table)
    wide.loc[2.0**-7, "128"] = np.inf
    assert check_table(wide.reset_index()).runs["loss"].tolist()[-1] == np.inf


def curves(name, metrics=("val/loss",)) -> pd.DataFrame:
    runs = TABLE.itertuples()
    curves = {f"{name(run)} - {metric}": [run.loss + 1, run.loss] for run in runs for metric in metrics}
    return pd.DataFrame({"Step": [10, 20], **curves})


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (BY_WIDTH.rename_axis("x").reset_index(), "a column for each of 64, 128, but no heading names these"),
        (TABLE[["width", "lr"]].assign(**{"acc@1": 0.5, "acc@5": 0.9}), "no column 'loss'"),
        (curves(lambda run: f"sun-{run.Index}"), r"of 6 runs whose names do not say .*wandb:ENTITY/PROJECT"),
        (curves(lambda run: f"w{run.width}-lr{run.lr}", ("val/loss", "train/loss")),
         "table holds curves of train/loss, val/loss: export the curves of one loss"),
        (pd.DataFrame({"run_name": ["mup_w64_lr0.1", "mup_base"], "loss": 3.0}),
         "no column 'width', 'lr'; it has run_name, loss"),
    ],
)  # fmt: skip
def test_shapes_and_names_that_nothing_explains_are_refused(table, sentence):
    with pytest.raises(TableError, match=sentence):
        check_table(table)


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


def named_runs():
    names = [f"mup_w{w}_lr{lr:.6e}" for w, lr in zip(TABLE["width"], TABLE["lr"], strict=True)]
    return pd.DataFrame({"run_name": names, "loss": TABLE["loss"]})


def test_named_columns_are_not_replaced_by_names():
    assert set(check_table(named_runs().assign(width=32, seed=range(6))).runs["scale"]) == {32}


def test_several_tables_are_one_whose_files_say_what_their_rows_do_not(tmp_path, capsys):
    for width, runs in named_runs().groupby(TABLE["width"]):
        names = runs["run_name"].str.replace(f"mup_w{width}_", "")
        runs.assign(run_name=names).to_csv(tmp_path / f"mup_w{width}.csv", index=False)
    main(["analyze", str(tmp_path / "mup_w*.csv")])
    out = " ".join(capsys.readouterr().out.split())
    assert "read from the names of the runs: width, parametrization" in out and "μP: " in out


def bomb(line):
    """Nine levels, each of which holds the one before nine times."""
    levels = "bcdefghi"
    return "a: &a {x: 1}\n" + "".join(
        line.format(name=name, nine=",".join([f"*{before}"] * 9))
        for before, name in zip("a" + levels, levels, strict=False)
    )


@pytest.mark.parametrize(
    "text, sentence",
    [
        (bomb("{name}: &{name} [{nine}]\n"), "more than 200,000 values with its aliases written out"),
        (bomb("{name}: &{name}\n  <<: [{nine}]\n"), "more than 200,000 values"),
        ("a: &a [*a]", "more than 200,000 values"),
        ("- " * 1500, "nested too deeply"),
        ("a: b: c", r"mapping values are not allowed here .*line 1"),
        ("a: 1\na: 2", "duplicate key"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_yaml_that_cannot_be_read_gets_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        read_yaml(text)
    assert "\n" not in str(error.value)


def test_tags_of_programs_are_read_as_their_contents_and_nothing_is_called():
    text = (
        "a: !!python/tuple [1, 2]\nb: !!python/object:x.Y {z: 1e-3}\nc: !!python/object/apply:os.abort []\n"
    )
    assert read_yaml(f"{text}d: &d !Name text\ne: *d\n") == {
        "a": [1, 2], "b": {"z": 0.001}, "c": [], "d": "text", "e": "text"
    }  # fmt: skip
