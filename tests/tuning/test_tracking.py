"""Trackers hold each trial that ended, with its settings and curve, and agree with the table."""

import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mup_tpu.analysis import load_table
from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import ConfigError
from mup_tpu.store import Store, load_curves, load_runs
from mup_tpu.tuning.sweep import run_sweep
from mup_tpu.tuning.tracking import Tracking

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Store of six finished trials, a diverged one, and a failed one that runs again."""
    folder = tmp_path_factory.mktemp("stored")
    runs, curves = load_runs(RESULTS / "quickstart"), load_curves(RESULTS / "quickstart")
    chosen = runs[(runs["parametrization"] == "mup") & runs["width"].isin([64, 128, 256])]
    chosen = chosen.groupby("width").head(3).reset_index(drop=True)
    rows = [
        {k: v.item() if hasattr(v, "item") else v for k, v in row.items() if v == v and v is not None}
        for row in chosen.to_dict("records")
    ]
    rows[0] |= {"status": "diverged", "loss": math.inf}
    rows[1] |= {"status": "failed"}
    store = Store(folder, "quickstart")
    store.append(rows, curves[curves["trial_id"].isin(chosen["trial_id"])].to_dict("records"))
    return store


def send(tracker, store, which=lambda rows: rows["status"] != ""):
    """Send stored trials, as a sweep does when each ends."""
    rows = store.results()
    rows = rows[which(rows)]
    rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    Tracking([tracker], store).add(rows, load_curves(store.folder.path).to_dict("records"))


def found(table):
    runs = table.runs.sort_values(["scale", "x", "loss"])
    return [(run.scale, run.x, run.loss) for run in runs.itertuples()]


def expected(store):
    return found(load_table(store.folder.path))


@pytest.fixture(scope="module")
def boards(stored):
    """Folder of TensorBoard's files of the stored trials."""
    pytest.importorskip("tensorboard")
    send("tensorboard", stored)
    return Path(stored.folder.path, "tensorboard")


def test_tensorboard_holds_the_table_and_hyperparameters(stored, boards):
    final = load_runs(stored.folder.path).query("status != 'failed'")
    assert {path.name for path in boards.iterdir()} == set(final["trial_id"])
    table = load_table(boards)
    assert (table.columns.scale, table.columns.hyperparameter) == ("width", "lr")
    np.testing.assert_allclose(found(table), expected(stored), rtol=1e-6)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    name = final["trial_id"].iloc[-1]
    events = EventAccumulator(str(boards / name))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "validation/loss", "loss"}
    curve = load_curves(stored.folder.path).query(f"trial_id == '{name}' and split == 'train'")
    points = [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("train/loss")]
    assert points == list(zip(curve["step"], curve["loss"], strict=True))


def test_wandb_without_a_login_asks_for_nothing(stored, tmp_path, monkeypatch, request):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it would keep this environment for the next test
    request.addfinalizer(wandb.teardown)
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with pytest.warns(
        UserWarning, match="wandb gets no more trials: nobody is logged in: `wandb login`"
    ) as said:
        send("wandb", stored)
    assert len(said) == 1


@pytest.mark.slow
def test_wandb_offline_holds_each_trial_once(stored, monkeypatch):
    """A finished one, and a diverged one."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    one = load_runs(stored.folder.path).query("status == 'finished'").dropna(axis="columns").iloc[-1]
    send("wandb", stored, lambda rows: (rows["trial_id"] == one["trial_id"]) | (rows["status"] == "diverged"))
    folders = list(Path(stored.folder.path, "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    (file,) = Path(stored.folder.path, "wandb").glob(f"offline-run-*-{one['trial_id']}/*.wandb")
    records, limit = list(records_of(file)), time.monotonic() + 60
    while not any(r.HasField("exit") for r in records):  # its service writes after `finish` returned
        assert time.monotonic() < limit
        time.sleep(0.1)
        records = list(records_of(file))
    config = {u.key: u.value_json for r in records if r.HasField("run") for u in r.run.config.update}
    assert float(config["lr"]) == one["lr"] and int(config["width"]) == one["width"]
    keys = {i.key or "/".join(i.nested_key) for r in records for i in r.history.item}
    assert {"train/loss", "validation/loss"} <= keys
    summary = {i.key or "/".join(i.nested_key): i.value_json for r in records for i in r.summary.update}
    assert float(summary["loss"]) == pytest.approx(one["loss"]) and summary["status"] == '"finished"'


def records_of(file):
    """Records of an offline run, in LevelDB's log format; its package has no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, begun = file.read_bytes()[7:], b""  # after the magic
    at = 0
    while at + 7 <= len(content):
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        begun += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(begun)
            begun = b""
        if (left := 32768 - (at + 7) % 32768) < 7:  # headers are not split over blocks
            at += left


def test_a_sweep_sends_its_trials_and_stores_them_whatever_a_tracker_does(one_width, tiny, tmp_path):
    pytest.importorskip("tensorboard")
    base, alone = tiny.replace(steps=3, eval_batches=1), RunOptions(threads=os.cpu_count() or 1)
    sweep = one_width(base, 0.01, 0.02)
    options = SweepOptions(track=("tensorboard",))
    run_sweep(sweep, str(tmp_path / "a"), options, alone, Console(quiet=True))
    names = set(load_runs(tmp_path / "a")["trial_id"])
    assert {path.name for path in (tmp_path / "a" / "tensorboard").iterdir()} == names and len(names) == 2
    Store(tmp_path / "b", "x")
    (tmp_path / "b" / "tensorboard").touch()  # a file in place of its folder
    with pytest.warns(UserWarning, match="tensorboard gets no more trials: "):
        run_sweep(one_width(base, 0.01), str(tmp_path / "b"), options, alone, Console(quiet=True))
    assert len(load_runs(tmp_path / "b")) == 1


def test_a_tracker_that_is_not_installed_is_refused_in_a_sentence(one_width, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options, run = SweepOptions(track=("wandb",)), RunOptions(threads=1)
    with pytest.raises(ConfigError, match=r"track 'wandb' needs its package: pip install '.\[wandb\]'"):
        run_sweep(one_width(tiny, 0.01), str(tmp_path / "c"), options, run, Console(quiet=True))


@pytest.mark.parametrize(("how", "place"), [("cut", 0.0), ("cut", 0.7), ("flipped", 0.999)])
def test_a_run_whose_event_file_is_damaged_is_left_out_with_a_word(boards, tmp_path, place, how):
    """TensorBoard's reader stops at the damage, and says nothing."""
    told = shutil.copytree(boards, tmp_path / "tensorboard")
    file = sorted(told.rglob("events*"))[2]
    content = bytearray(file.read_bytes())
    at = int(place * len(content))
    if how == "cut":
        file.write_bytes(content[:at])
    else:
        content[at] ^= 1
        file.write_bytes(content)
    with pytest.warns(UserWarning, match=f"1 of 8 runs in .* left out, the first {file.parent.name}"):
        table = load_table(told)
    assert len(table.runs) == 7
