"""Checkpoints: whole, few, checked, never executed, and written while training goes on."""

import errno
import itertools
import json
import os
import threading
import warnings

import pytest
import torch

from mup_tpu.config import RunOptions
from mup_tpu.errors import StoreError
from mup_tpu.files import Folder
from mup_tpu.training import longer
from mup_tpu.training.checkpoint import CheckpointWriter, begin, load_latest, save
from mup_tpu.training.loop import PackRun

_numbers = itertools.count()


@pytest.fixture(scope="module")
def left(tiny, dataset, tmp_path_factory):
    """Checkpoint of step 4 of a run that was left at step 8."""
    folder = tmp_path_factory.mktemp("left")
    options = RunOptions(checkpoint_every=4, log_every=4)
    next(event for event in PackRun([tiny], dataset, options, folder).steps() if event.step == 8)
    return load_latest(folder)


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    return Folder(tmp_path if request.param == "local" else f"memory://bucket/{next(_numbers)}")


def steps(folder):
    return [int(name.removeprefix("step-")) for name in folder.names()]


def test_round_trip_keeps_the_last_two(folder):
    for step in (5, 10, 15):
        tensors = {"w": torch.full((2, 3), float(step)).T, "n": torch.tensor(step)}
        save(folder.path, step, tensors, {"note": [step]})
    found = load_latest(folder.path)
    assert (found.step, found.meta["note"]) == (15, [15])
    assert torch.equal(found.tensors["w"], torch.full((3, 2), 15.0)) and found.tensors["n"] == 15
    assert steps(folder) == [10, 15]
    assert (folder / "step-00000015").names() == ["meta.json", "tensors.safetensors"]


def test_nothing_there():
    assert load_latest("/nonexistent") is None and load_latest("memory://nowhere/x") is None


def test_while_tensors_are_written_again_they_are_no_checkpoint(folder, monkeypatch):
    """A kill between the two would leave new tensors under the old meta."""
    for step in (5, 10):
        save(folder.path, step, {"w": torch.ones(3) * step}, {})
    writing, there = Folder.writing, []

    def watched(self, *arguments):
        there.extend((folder / "step-00000010").names())
        return writing(self, *arguments)

    monkeypatch.setattr(Folder, "writing", watched)
    save(folder.path, 10, {"w": torch.ones(3) * 11}, {})
    assert set(there) == {"tensors.safetensors"}
    assert torch.equal(load_latest(folder.path).tensors["w"], torch.ones(3) * 11)


def test_checkpoints_of_another_pack_give_way(folder):
    save(folder.path, 20, {"w": torch.ones(1)}, {"trial_ids": ["a", "b"]})
    save(folder.path, 10, {"w": torch.ones(1)}, {"trial_ids": ["a"]})
    assert steps(folder) == [10]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="checkpoint folder .* cannot be written: Not a directory"):
        save(tmp_path / "file" / "checkpoints", 5, {"w": torch.ones(1)}, {})
    with pytest.raises(StoreError, match="checkpoint folder nothing://x cannot be read: Protocol not known"):
        load_latest("nothing://x")


def test_what_changes_after_saving_is_not_in_the_checkpoint(folder, monkeypatch):
    """The writer is held back until tensors and meta have changed, as the next step changes them."""
    changed = threading.Event()
    write = Folder.writing

    def late(self, *arguments):
        assert changed.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(Folder, "writing", late)
    weights, meta, writer = torch.zeros(3), {"statuses": ["running"]}, CheckpointWriter(folder.path)
    writer.save(5, {"w": weights}, meta)
    weights += 1
    meta["statuses"][0] = "diverged"
    changed.set()
    writer.wait()
    found = load_latest(folder.path)
    assert torch.equal(found.tensors["w"], torch.zeros(3)) and found.meta["statuses"] == ["running"]


def test_a_checkpoint_in_flight_is_whole_when_the_run_is_left_or_ends(tiny, dataset, folder, monkeypatch):
    """Writing takes longer than the steps after it; who drops the run, or gets its result, finds it whole."""
    write = Folder.write

    def slowly(self, name, content):
        threading.Event().wait(0.3)
        write(self, name, content)

    monkeypatch.setattr(Folder, "write", slowly)
    trial, options = tiny.replace(steps=12), RunOptions(checkpoint_every=4, log_every=4)
    next(event for event in PackRun([trial], dataset, options, folder.path).steps() if event.step == 8)
    assert steps(folder) == [4]
    assert json.loads(folder.read("step-00000004/meta.json"))["step"] == 4
    PackRun([trial], dataset, RunOptions(checkpoint_every=10, log_every=10), folder.path).finish()
    assert load_latest(folder.path).step == 10


def test_a_finished_run_is_not_lost_to_a_checkpoint_that_cannot_be_written(tiny, dataset, tmp_path):
    """But one before the last is an error."""

    def run(every):
        going = PackRun([tiny.replace(steps=10)], dataset, RunOptions(checkpoint_every=every), tmp_path / "c")
        (tmp_path / "c").write_text("in the way")
        return going.finish()

    with pytest.warns(UserWarning, match="cannot be written"):
        assert run(8).rows[0]["status"] == "finished"
    (tmp_path / "c").unlink()
    with pytest.raises(StoreError, match="cannot be written"):
        run(4)


META, TENSORS = "step-00000010/meta.json", "step-00000010/tensors.safetensors"


def meta(change):
    """Change of the meta.json of a checkpoint."""
    return META, lambda content: json.dumps(change(json.loads(content))).encode()


DAMAGES = {
    "flip": (TENSORS, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "truncate": (TENSORS, lambda content: content[:-10]),
    "no tensors": (TENSORS, None),
    "no meta": (META, None),
    "torn meta": (META, lambda content: content[:-5]),
    "a list": meta(lambda meta: [meta]),
    "a step more": meta(lambda meta: meta | {"step": meta["step"] + 1}),
    "other trials": meta(lambda meta: meta | {"trial_ids": ["b"]}),
    "no checksum of itself": meta(lambda meta: {n: v for n, v in meta.items() if n != "checksum"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over_for_the_one_before_it(damage, tmp_path):
    folder, (name, change) = Folder(tmp_path), DAMAGES[damage]
    for step in (5, 10):
        save(folder.path, step, {"w": torch.arange(100.0) * step}, {"trial_ids": ["a"]})
    if change is None:
        folder.remove(name)
    else:
        folder.write(name, change(folder.read(name)))
    with pytest.warns(UserWarning, match="step-00000010 is damaged .*taking the one before it"):
        found = load_latest(folder.path)
    assert found.step == 5 and torch.equal(found.tensors["w"], torch.arange(100.0) * 5)
    save(folder.path, 7, {"w": torch.ones(1)}, {"trial_ids": ["a"]})
    assert steps(folder) == [5, 7], "what is damaged would stand in the way again"


def test_every_flipped_bit_of_a_meta_is_seen_or_changes_nothing(tmp_path):
    save(tmp_path, 10, {"w": torch.ones(3)}, {"trial_ids": ["a"], "wall_time": 12.5, "ended_at": [3]})
    file = tmp_path / "step-00000010" / "meta.json"
    content = file.read_bytes()
    whole = {name: value for name, value in json.loads(content).items() if name != "checksum"}
    for bit in range(0, 8 * len(content), 13):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = load_latest(tmp_path)
        assert found is None or whole.items() <= found.meta.items()


@pytest.mark.parametrize(
    "change",
    [{"members": "x"}, {"records": None}, {"records": [3]}, {"records": [{"step": 3}]}, {"wall_time": "x"}],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_one_sentence(change, tiny, dataset, left, tmp_path):
    """Whole, of this very trial, and not as this version writes it."""
    save(tmp_path, left.step, left.tensors, left.meta | change)
    with pytest.raises(StoreError, match="checkpoint of step 4 in .* is not one that this version wrote"):
        PackRun([tiny], dataset, RunOptions(checkpoint_every=5), tmp_path)


@pytest.mark.parametrize("times", [1, 99])
def test_a_folder_that_is_removed_while_it_is_made_is_made_again_some_times(tmp_path, monkeypatch, times):
    """`os.makedirs` finds it, looks whether it is a folder, and it is gone: seen with six drivers."""
    make, calls = os.makedirs, []

    def found_and_gone(path, *args, **options):
        calls.append(path)
        if len(calls) <= times:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        make(path, *args, **options)

    monkeypatch.setattr(os, "makedirs", found_and_gone)
    if times > 1:
        with pytest.warns(UserWarning, match="was removed each of 5 times"):
            save(tmp_path / "pack", 1, {"w": torch.ones(9)}, {"trial_ids": ["a"]})
        return
    save(tmp_path / "pack", 1, {"w": torch.ones(9)}, {"trial_ids": ["a"]})
    assert len(calls) > 1
    assert load_latest(tmp_path / "pack").step == 1


@pytest.mark.slow
def test_a_continued_run_is_bit_identical_to_one_of_its_length(tiny, dataset, tmp_path):
    """One of the pack diverges at once; the checkpoint of the shorter one is kept."""
    base = tiny.replace(steps=16, warmup=3, schedule="wsd", cooldown=0.25)
    short = [base.replace(learning_rate=lr) for lr in (0.01, 1e30, 0.003)]
    run = RunOptions(device="cpu", checkpoint_every=5, eval_every=8, log_every=4)
    PackRun(short, dataset, run, tmp_path / "short").finish()
    assert "step-00000012" in Folder(tmp_path / "short").names()
    long = [longer(trial, 24) for trial in short]

    def trial_id(trial):
        return trial.trial_id(dataset.fingerprint)

    assert not {*map(trial_id, long)} & {*map(trial_id, short)}

    def begun(shorter, folder):
        return begin(str(tmp_path / "short"), shorter, str(tmp_path / folder), long, trial_id)

    assert begun([trial.replace(seed=1) for trial in short], "other") == 0
    for _ in range(2):  # again, as after a kill
        assert begun(short, "pack") == 12, "not from one that was written during the cooldown"
    going = PackRun(long, dataset, run, tmp_path / "pack")
    assert going.pack.steps_done == 12
    continued, whole = going.finish(), PackRun(long, dataset, run).finish()
    for row, expected in zip(continued.rows, whole.rows, strict=True):
        assert {k for k in row if row[k] != expected[k]} <= {"wall_time_s", "finished_at"}
    assert [row["status"] for row in continued.rows] == ["finished", "diverged", "finished"]
    for k in (0, 2):
        theirs = whole.pack.member_parameters(k)
        for name, p in continued.pack.member_parameters(k).items():
            assert torch.equal(p, theirs[name]), name
    points = [
        [point for point in result.curves if point["split"] == "train"] for result in (continued, whole)
    ]
    assert points[0] == points[1]
