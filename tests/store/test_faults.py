"""Each write, rename, fsync, listing and lock fails once, in turn: nothing is lost and nothing is double.

Every fifth call in a daily run; MUP_TPU_FAULTS_EVERY=1 takes each.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest
import trainers
from merging import merge_all
from rich.console import Console

from mup_tpu import Study, octaves
from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.errors import MupTpuError
from mup_tpu.store import Store, load_curves, load_runs, tables
from mup_tpu.store.header import KeptPrediction, keep_predictions, load_predictions
from mup_tpu.tuning.sweep import run_sweep

CALLS = {
    "write": (Path, "write_bytes"), "rename": (Path, "replace"), "fsync": (os, "fsync"),
    "list": (os, "listdir"), "lock": (fcntl, "flock"), "open": (os, "open"), "remove": (os, "remove"),
}  # fmt: skip


@contextlib.contextmanager
def failing(kind: str, number: int, folder: Path):
    """The call of this kind with this number fails; the yielded list has an entry for each call.

    Calls outside the folder do not count, nor do those that look at an open file of another place.
    """
    owner, name = CALLS[kind]
    call, calls = getattr(owner, name), []

    def fails(*arguments, **options):
        at = arguments[0]
        if isinstance(at, int) or hasattr(at, "fileno"):
            at = os.readlink(f"/proc/self/fd/{at if isinstance(at, int) else at.fileno()}")
        if str(at).startswith(str(folder)):
            calls.append(at)
            if len(calls) == number + 1:
                raise OSError(errno.EIO, "Input/output error")
        return call(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield calls


EVERY = int(os.environ.get("MUP_TPU_FAULTS_EVERY", "5"))


def each_failure(kind, folder, run, step=EVERY):
    """Run with each call of a kind failing in turn, or each fifth; yields the folder of each run."""
    number, count = 0, 1
    while number < count:
        place = folder / f"{kind}{number}"
        place.mkdir(parents=True)
        with failing(kind, number, place) as calls:
            run(place)
        if len(calls) <= number:
            return
        count = max(count, len(calls))
        yield place
        number += step
    assert number, "no call of this kind was seen"


def until_it_works(call, *arguments):
    """Result of a call that fails once in its life, and in a sentence."""
    for _ in range(3):
        try:
            return call(*arguments)
        except (MupTpuError, OSError) as error:
            assert "Input/output error" in str(error)
    raise AssertionError("it fails again and again")


def prediction(k: int) -> KeptPrediction:
    half, interval = (-7.0, -5.0), (-8.0, -4.0)
    return KeptPrediction(
        "2026", 1, f"{k}", (64.0,), "mup", "width", "lr", 512.0, -6.0, half, interval, None, None
    )


def use_store(folder):
    """Add four rows with merges, a compaction, predictions and planned scales."""
    told = []
    for k in range(4):
        store = until_it_works(Store, folder, "x")
        row = {"trial_id": f"t{k}", "status": "finished", "loss": float(k)}
        point = {"trial_id": f"t{k}", "step": 1, "tokens": 1, "split": "train", "loss": float(k)}
        until_it_works(store.append, [row], [point])
        told.append(f"t{k}")
        assert until_it_works(store.done) == {*told}
        until_it_works(store.plan, [float(k + 1)])
        until_it_works(keep_predictions, folder, [prediction(k)])
    until_it_works(merge_all, store)


@pytest.mark.parametrize("kind", CALLS)
def test_a_store_loses_and_doubles_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MERGE_EVERY", 2)
    for folder in each_failure(kind, tmp_path, use_store):
        assert load_runs(folder)["loss"].tolist() == [0.0, 1, 2, 3]
        assert load_curves(folder)["loss"].tolist() == [0.0, 1, 2, 3]
        assert {p.fingerprint for p in load_predictions(folder)} == {*"0123"}
        store = Store(folder, "x")
        assert store.next_purchase() == 1
        merge_all(store)
        assert not list(folder.rglob(".partial-*")) and len(list((folder / "runs").iterdir())) == 1


def ask_and_tell(folder):
    """A study of four trials, asked for and told by two; the second opens it anew each time."""
    grid = {"scale": {"width": [256, 512]}, "tune": {"lr": octaves(-7, -6)}, "settings": {"rule": "stays"}}
    study, given = Study(folder, **grid), []
    for k in range(9):
        if not (trials := until_it_works(study.ask, 1)):
            break
        given += trials
        other = study if k % 2 else Study(folder, **grid)
        for trial in trials:
            until_it_works(other.tell, trial, trainers.valley(trial))


@pytest.mark.parametrize("kind", CALLS)
def test_asked_trials_are_told_once_each(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MERGE_EVERY", 2)
    for folder in each_failure(kind, tmp_path, ask_and_tell):
        study = Study.load(folder)
        for trial in study.ask(100, patience=1e9):  # a lease of which only the answer was lost
            study.tell(trial, trainers.valley(trial))
        runs = load_runs(folder).set_index("trial_id")["loss"]
        losses = {trial.id: trainers.valley(trial) for trial in study.trials()}
        assert {**losses, **runs.to_dict()} == losses
        leased = {path.stem for path in (folder / "asked").glob("*.json")}
        assert {*runs.index} | leased >= {*losses}, "each trial has a loss or a lease"


def run_to_its_end(run):
    """Run and resume until all trials are stored, as somebody does who is told why it stopped."""
    for _ in range(4):
        with contextlib.suppress(MupTpuError, OSError):
            run()
            return
    raise AssertionError("it does not go on")


def run_study(folder):
    grid = {"scale": {"width": [256, 512]}, "tune": {"lr": [0.5]}, "settings": {"rule": "stays"}}
    study = Study(folder, **grid)
    run_to_its_end(lambda: study.run(trainers.valley, workers=2, console=Console(quiet=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_a_study_that_is_run_again_after_a_failure_is_whole(kind, tmp_path):
    for folder in each_failure(kind, tmp_path, run_study, 3 * EVERY):
        runs = load_runs(folder)
        expected = {trial.id: trainers.valley(trial) for trial in Study.load(folder).trials()}
        assert runs.set_index("trial_id")["loss"].to_dict() == expected


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CALLS)
def test_a_sweep_that_is_run_again_after_a_failure_is_whole(kind, tiny, tmp_path):
    axes = {"scale": {"width": (32,)}, "tune": {"learning_rate": (0.003, 0.01)}}
    sweep, options = Sweep("s", tiny.replace(steps=3), **axes, num_seeds=1), SweepOptions(pack_size=1)

    def run(folder):
        given = sweep, str(folder), options, RunOptions(threads=1), Console(quiet=True)
        run_to_its_end(lambda: run_sweep(*given))

    tables_of = [load_runs(folder) for folder in each_failure(kind, tmp_path, run, step=3)]
    for runs in tables_of:
        assert runs["status"].eq("finished").all() and len(runs) == 4
        assert runs["loss"].tolist() == tables_of[0]["loss"].tolist()
