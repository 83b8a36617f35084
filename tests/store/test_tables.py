"""Tables of many parts: read once, remembered by name, size and time, and never another's or damaged."""

import os

import pandas as pd
import pytest

from mup_tpu.errors import StoreError
from mup_tpu.files import Folder
from mup_tpu.store import Store, load_curves, load_runs, tables

PARTS = 6


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path, monkeypatch):
    """A store of as many parts as are remembered."""
    monkeypatch.setenv("MUP_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "_MANY", PARTS)
    url = str(tmp_path / "results") if request.param == "local" else f"memory://bucket/{tmp_path.name}"
    store = Store(url, "x")
    for part in range(PARTS):
        add(store, part)
    return store


def add(store: Store, part: int) -> None:
    name = f"t{part}"
    row = {"trial_id": name, "loss": float(part), "status": "finished", "note": "a" if part % 2 else None}
    point = {"trial_id": name, "step": 1, "tokens": 1, "split": "train", "loss": float(part)}
    store.append([row], [point])


@pytest.fixture
def read_parts(monkeypatch):
    """Names of the parts that are read from now on."""
    names, read = [], Folder.read

    def note(folder, name, *most):
        if name.startswith(("runs/", "curves/")):
            names.append(name)
        return read(folder, name, *most)

    monkeypatch.setattr(Folder, "read", note)
    return names


def test_parts_that_were_verified_are_not_read_again(store, read_parts):
    path = str(store.folder)
    first = load_runs(path), load_curves(path)
    assert len(read_parts) == 2 * PARTS
    read_parts.clear()
    for found, expected in zip((load_runs(path), load_curves(path)), first, strict=True):
        pd.testing.assert_frame_equal(found, expected)
    assert not read_parts
    add(store, PARTS)
    assert load_runs(path)["trial_id"].tolist() == [f"t{part}" for part in range(PARTS + 1)]
    assert len(read_parts) == 1


def test_what_is_remembered_is_the_same_as_what_is_read(store, monkeypatch):
    path = str(store.folder)
    load_runs(path)
    remembered = load_runs(path)
    monkeypatch.setattr(tables, "_MANY", 10**9)
    pd.testing.assert_frame_equal(load_runs(path), remembered)


def test_a_part_that_is_removed_or_merged_is_not_remembered(store):
    path = str(store.folder)
    load_runs(path)
    store.folder.remove(tables.part_names(store.folder, "runs")[0])
    assert len(load_runs(path)) == PARTS - 1
    store.compact()
    assert len(load_runs(path)) == PARTS - 1


def test_a_part_that_changed_is_verified_again(store):
    """One bit, in a file of the same size."""
    if not store.folder.is_local:
        pytest.skip("memory:// has no time of change")
    path = str(store.folder)
    load_runs(path)
    name = tables.part_names(store.folder, "runs")[0]
    content = bytearray(store.folder.read(name))
    content[100] ^= 1
    store.folder.write(name, bytes(content))
    with pytest.raises(StoreError, match="is damaged: its content does not have the checksum"):
        load_runs(path)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "another's", "a folder"])
def test_a_damaged_memory_is_made_again(damage, store, read_parts):
    path = str(store.folder)
    expected = load_runs(path)
    place, file = tables._memory(store.folder, "runs")
    content = bytearray(place.read(file))
    content[-12] ^= 1  # in the footer, which has no checksum of its own
    other = Store("memory://another", "x")
    add(other, 7)
    another = other.folder.read(tables.part_names(other.folder, "runs")[0])
    whole = {"empty": b"", "cut": bytes(content[:99]), "flipped": bytes(content), "another's": another}
    place.remove(file)
    if damage == "a folder":
        os.mkdir(f"{place}/{file}")
    else:
        place.write(file, whole[damage])
    for _ in range(2):
        pd.testing.assert_frame_equal(load_runs(path), expected)
    assert len(read_parts) >= 2 * PARTS
    other.folder.remove_all()


def test_a_cache_that_cannot_be_written_is_no_error(store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MUP_TPU_CACHE", str(tmp_path / "file"))
    assert len(load_runs(str(store.folder))) == PARTS
