"""Tables of many parts: merged by size as they are written, and read again only where they are new."""

import pandas as pd
import pytest

from mup_tpu.errors import StoreError
from mup_tpu.files import Folder
from mup_tpu.store import Store, load_curves, load_runs, tables


def add(store: Store, name: str, loss: float = 1.0, status: str = "finished", **more) -> None:
    row = {"trial_id": name, "loss": loss, "status": status, "lr": 0.1, **more}
    store.append([row], [{"trial_id": name, "step": 1, "tokens": 1, "split": "train", "loss": loss}])


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "results") if request.param == "local" else f"memory://bucket/{tmp_path.name}"


@pytest.fixture
def read_parts(monkeypatch):
    """Names of the parts that are read from now on."""
    names, read = [], Folder.read

    def note(folder, name, *most):
        if name.endswith(".parquet"):
            names.append(name)
        return read(folder, name, *most)

    monkeypatch.setattr(Folder, "read", note)
    return names


def test_parts_of_about_one_size_are_merged_whoever_wrote_them(url, monkeypatch):
    """As `tell` does it: each call opens the folder anew."""
    monkeypatch.setattr(tables, "MERGE_EVERY", 4)
    monkeypatch.setattr(tables, "_SMALLEST", 20_000)
    for k in range(60):
        add(Store(url, "x"), f"t{k:03}", float(k), note="x" * 300 * k)
        for table in ("runs", "curves"):
            sizes = sorted((Folder(url) / table).sizes().values())
            assert sum(size <= 20_000 for size in sizes) <= 4 and len(sizes) < 12
    assert load_runs(url)["loss"].tolist() == [float(k) for k in range(60)]
    assert len(load_curves(url)) == 60


def test_large_parts_are_not_written_again_with_each_small_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MERGE_EVERY", 4)
    store = Store(tmp_path, "x")
    store.append([{"trial_id": "big", "status": "finished", "note": str(list(range(40_000)))}])
    (large,) = (tmp_path / "runs").iterdir()
    assert large.stat().st_size > tables._SMALLEST
    for k in range(20):
        add(Store(tmp_path, "x"), f"t{k}")
    assert large.exists() and len(list((tmp_path / "runs").iterdir())) <= 5


def test_a_merge_keeps_the_best_row_of_a_trial_and_columns_that_are_unknown(tmp_path):
    store = Store(tmp_path, "x")
    for status, loss in (("failed", float("nan")), ("stopped", 2.0), ("finished", 1.0), ("stopped", 0.5)):
        add(store, "a", loss, status, dropout=3)
    add(store, "b", float("nan"), "failed")
    before = load_runs(tmp_path)
    store.compact()
    (part,) = (tmp_path / "runs").iterdir()
    stored = pd.read_parquet(part).set_index("trial_id")
    assert stored["status"].to_dict() == {"a": "finished", "b": "failed"} and stored.loc["a", "loss"] == 1.0
    assert stored.loc["a", "dropout"] == 3
    pd.testing.assert_frame_equal(load_runs(tmp_path), before)


def test_columns_without_a_value_are_left_out_of_a_part_and_come_back_empty(tmp_path):
    add(Store(tmp_path, "x"), "a")
    (part,) = (tmp_path / "runs").iterdir()
    assert set(pd.read_parquet(part)) == {"experiment", "trial_id", "loss", "status", "lr"}
    runs = load_runs(tmp_path)
    assert runs["purchase"].isna().all() and runs["width"].isna().all()


def test_a_writer_reads_only_parts_that_are_new(url, read_parts):
    store, other = Store(url, "x"), Store(url, "x")
    add(store, "a")
    add(store, "p", purchase=7)
    assert store.done() == {"a", "p"} and not read_parts, "it wrote them itself"
    add(other, "b", float("nan"), "failed")
    add(other, "c", 3.0, "stopped")
    assert store.done() == {"a", "p", "c"} and store.done(stopped=False) == {"a", "p"}
    assert len(read_parts) == 2 and store.known()["c"].loss == 3.0 and store.known()["p"].purchase == 7
    add(other, "b")
    other.compact()
    assert store.done() == {"a", "b", "c", "p"}


def test_rows_that_somebody_removes_are_forgotten(url):
    store = Store(url, "x")
    for name in "abc":
        add(store, name)
    assert store.done() == {*"abc"}
    store.folder.remove(tables.part_names(store.folder, "runs")[0])
    assert len(store.done()) == 2
    store.folder.remove("runs")
    assert store.done() == set()


def test_a_part_that_changed_is_damaged_for_each_reader(tmp_path):
    """One bit, in a file of the same size."""
    add(Store(tmp_path, "x"), "a")
    (part,) = (tmp_path / "runs").iterdir()
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    for read in (load_runs, lambda path: Store(path, "x").done()):
        with pytest.raises(StoreError, match="is damaged: its content does not have the checksum"):
            read(tmp_path)
