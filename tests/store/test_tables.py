"""Tables in parts: a damaged part is named and never read as other numbers, merges lose nothing."""

import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from merging import merge_all

from mup_tpu.config import Trial, columns
from mup_tpu.errors import StoreError
from mup_tpu.files import Folder
from mup_tpu.store import Store, load_curves, load_runs, tables

LOADERS = {"runs": load_runs, "curves": load_curves}


def add(store: Store, name: str, loss: float = 1.0, status: str = "finished", **more) -> None:
    row = {"trial_id": name, "loss": loss, "status": status, "lr": 0.1, **more}
    store.append([row], [{"trial_id": name, "step": 1, "tokens": 1, "split": "train", "loss": loss}])


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "results") if request.param == "local" else f"memory://bucket/{tmp_path.name}"


@pytest.fixture
def parts_read(monkeypatch):
    """Names of the parts that are read from now on."""
    names, read = [], Folder.read

    def note(folder, name, *most):
        if folder.path.endswith("/runs"):
            names.append(name)
        return read(folder, name, *most)

    monkeypatch.setattr(Folder, "read", note)
    return names


@pytest.mark.parametrize("table", LOADERS)
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_no_flipped_bit_is_read_as_another_number(table, kind, tmp_path, monkeypatch):
    store, load = Store(tmp_path, "x"), LOADERS[table]
    for k in range(4):
        add(store, f"t{k}", 1.5 + k)
    if kind == "parquet":
        monkeypatch.setattr(tables, "_SMALL_ROWS", 0)
        merge_all(store)
    part = sorted((tmp_path / table).iterdir())[0]
    assert part.suffix == f".{kind}"
    before, whole = load(tmp_path), part.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 30):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        part.write_bytes(damaged)
        with pytest.raises(StoreError, match="is damaged: its content does not have the checksum") as error:
            load(tmp_path)
        assert part.name in str(error.value) and "\n" not in str(error.value)
        if table == "runs":
            with pytest.raises(StoreError, match="is damaged"):
                Store(tmp_path, "x").done()
    part.write_bytes(whole)
    pd.testing.assert_frame_equal(load(tmp_path), before)


def test_pages_have_checksums_that_any_reader_can_verify(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_SMALL_ROWS", 0)
    store = Store(tmp_path, "x")
    for name in "ab":
        add(store, name)
    merge_all(store)
    (part,) = (tmp_path / "curves").iterdir()
    content = bytearray(part.read_bytes())
    loss = pq.ParquetFile(part).metadata.row_group(0).column(4)
    assert loss.path_in_schema == "loss"
    first = loss.dictionary_page_offset or loss.data_page_offset
    content[first + loss.total_compressed_size - 1] ^= 1
    part.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(part, page_checksum_verification=True)


def test_files_that_are_no_parts_are_not_read(tmp_path):
    """An Arrow file has no checksum but that of its name."""
    add(Store(tmp_path, "x"), "a")
    for name in (".partial-1234", "notes.txt", "copied.arrow", "copied.parquet", f"{'0' * 32}.arrow"):
        (tmp_path / "runs" / name).write_bytes(b"ARROW1 torn")
    assert load_runs(tmp_path)["trial_id"].tolist() == ["a"]
    merge_all(Store(tmp_path, "x"))


SCHEMA = pa.schema([("trial_id", pa.string()), ("step", pa.int64()), ("loss", pa.float64())])


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"step": [1]}, "cannot be read: it does not give trial_id in every row"),
        ({"trial_id": ["a", None], "loss": [1.0, 2.0]}, "does not give trial_id in every row"),
        ({"trial_id": ["a"], "loss": ["1,45"]}, "column loss is string, not double"),
        ({"trial_id": ["a"], "loss": [[1.0]]}, "Unsupported cast from list"),
        ({"trial_id": ["a"], "step": [1.5]}, "was truncated"),
        ({"trial_id": [3]}, "column trial_id is int64, not string"),
    ],
)
def test_what_is_no_part_of_its_kind_is_refused(columns, sentence, is_small):
    with pytest.raises(StoreError, match=sentence):
        tables.decode(*tables.encode(pa.table(columns), is_small), SCHEMA, ["trial_id"])
    doubled = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["trial_id", "loss", "loss"])
    with pytest.raises(StoreError, match="cannot be read: it has two columns loss"):
        tables.decode(*tables.encode(doubled, is_small), SCHEMA, ["trial_id"])


@pytest.mark.parametrize("is_small", [False, True])
def test_known_columns_come_in_their_types_and_others_as_they_are(is_small):
    table = pa.table({"trial_id": ["a"], "step": pa.array([3], pa.int8()), "dropout": [1]})
    part = tables.encode(table, is_small)
    decoded = tables.decode(*part, SCHEMA, ["trial_id"])
    assert decoded.schema.field("step").type == pa.int64()
    assert decoded.to_pylist() == [{"trial_id": "a", "step": 3, "dropout": 1}]
    assert tables.decode(*part, SCHEMA, ["trial_id"], ["trial_id", "step"]).to_pylist() == [
        {"trial_id": "a", "step": 3}
    ]


def test_parts_of_about_one_size_are_merged_whoever_wrote_them(url, monkeypatch):
    """As `tell` does it: each call opens the folder anew."""
    monkeypatch.setattr(tables, "MERGE_EVERY", 4)
    monkeypatch.setattr(tables, "_SMALLEST", 20_000)
    for k in range(24):
        add(Store(url, "x"), f"t{k:03}", float(k), note="x" * 500 * k)
        for table in LOADERS:
            sizes = sorted((Folder(url) / table).sizes().values())
            assert sum(size <= 20_000 for size in sizes) <= 4 and len(sizes) < 10
    assert load_runs(url)["loss"].tolist() == [float(k) for k in range(24)]
    assert len(load_curves(url)) == 24


def test_large_parts_are_not_written_again_with_each_small_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MERGE_EVERY", 4)
    store = Store(tmp_path, "x")
    store.append([{"trial_id": "big", "status": "finished", "note": str(list(range(40_000)))}])
    (large,) = (tmp_path / "runs").iterdir()
    assert large.stat().st_size > tables._SMALLEST
    for k in range(20):
        add(Store(tmp_path, "x"), f"t{k}")
    assert large.exists() and len(list((tmp_path / "runs").iterdir())) <= 5


def test_a_merge_keeps_the_best_row_of_a_trial_and_columns_that_are_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_SMALL_ROWS", 0)
    store = Store(tmp_path, "x")
    for status, loss in (("failed", float("nan")), ("stopped", 2.0), ("finished", 1.0), ("stopped", 0.5)):
        add(store, "a", loss, status, dropout=3)
    add(store, "b", float("nan"), "failed")
    before, curves = load_runs(tmp_path), load_curves(tmp_path)
    assert before["dropout"].isna().tolist() == [False, True], "unknown columns are kept"
    merge_all(store)
    (part,) = (tmp_path / "runs").iterdir()
    stored = pd.read_parquet(part).set_index("trial_id")
    assert stored["status"].to_dict() == {"a": "finished", "b": "failed"} and stored.loc["a", "loss"] == 1.0
    pd.testing.assert_frame_equal(load_runs(tmp_path), before)
    pd.testing.assert_frame_equal(load_curves(tmp_path), curves)
    assert len(list((tmp_path / "curves").iterdir())) == 1


def test_columns_without_a_value_are_left_out_of_a_part_and_come_back_empty(tmp_path):
    add(Store(tmp_path, "x"), "a")
    (part,) = (tmp_path / "runs").iterdir()
    assert {*pa.ipc.open_file(part).schema.names} == {"experiment", "trial_id", "loss", "status", "lr"}
    runs = load_runs(tmp_path)
    assert runs["purchase"].isna().all() and runs["width"].isna().all()


def test_a_writer_reads_only_parts_that_are_new(url, parts_read):
    store, other = Store(url, "x"), Store(url, "x")
    add(store, "a")
    add(store, "p", purchase=7)
    assert store.done() == {"a", "p"} and not parts_read, "it wrote them itself"
    add(other, "b", float("nan"), "failed")
    add(other, "c", 3.0, "stopped")
    assert store.done() == {"a", "p", "c"} and store.done(stopped=False) == {"a", "p"}
    assert len(parts_read) == 2 and store.known()["c"].loss == 3.0 and store.known()["p"].purchase == 7
    add(other, "b")
    merge_all(other)
    assert store.done() == {"a", "b", "c", "p"}


def test_rows_that_somebody_removes_are_forgotten(url):
    store = Store(url, "x")
    for name in "abc":
        add(store, name)
    assert store.done() == {*"abc"}
    store.runs.folder.remove(store.runs.names()[0])
    assert len(store.done()) == 2
    store.folder.remove("runs")
    assert store.done() == set()


def test_a_row_that_is_older_than_a_field_has_its_default(tmp_path):
    store, row = Store(tmp_path, "x"), columns.configured(Trial().replace(width=256))
    add(store, "new", **row)
    add(store, "old", **{name: value for name, value in row.items() if name not in ("eps", "corpus")})
    add(store, "without a configuration")
    for load in (load_runs, lambda folder: load_runs(folder, ["eps", "corpus"])):
        runs = load(tmp_path).set_index("trial_id")
        assert runs.loc[["new", "old"], "eps"].tolist() == [1e-8, 1e-8]
        assert runs.index[runs["corpus"].notna()].tolist() == ["new", "old"]
