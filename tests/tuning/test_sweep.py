"""Sweeps in this process, in forked ones and on a real local Ray: the same table, also after a kill."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
from rich.console import Console

from mup_tpu import data
from mup_tpu.analysis import load_table
from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.config.columns import configured
from mup_tpu.config.toml import write_sweep
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import Store, load_curves, load_runs
from mup_tpu.training.loop import PackRun
from mup_tpu.tuning.runner import Corpora
from mup_tpu.tuning.sweep import measured, run_sweep

ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options that give a pack all cores, so that packs run in this process."""
NOT_RESULTS = ["wall_time_s", "finished_at", "pack_size", "threads", "git_commit"]


def small_sweep(tiny: Trial) -> Sweep:
    """Eight trials, of which half diverge."""
    rates = {"learning_rate": (0.01, 1e30)}
    return Sweep("small", tiny.replace(grad_clip=0.0), scale={"width": (32, 64)}, tune=rates)


def swept(sweep: Sweep, path, run=ALONE, **options):
    return run_sweep(sweep, str(path), SweepOptions(**options), run, Console(quiet=True))


def results_of(path) -> pd.DataFrame:
    return load_runs(path).drop(columns=NOT_RESULTS)


def same_results(path, other) -> None:
    pd.testing.assert_frame_equal(results_of(path), results_of(other))
    pd.testing.assert_frame_equal(load_curves(path), load_curves(other))


@pytest.fixture(scope="module")
def in_process(tiny, tmp_path_factory):
    """Folder of the small sweep, run in this process."""
    path = tmp_path_factory.mktemp("in_process")
    assert swept(small_sweep(tiny), path) == {"finished": 4, "diverged": 4}
    return path


@pytest.mark.slow
def test_ray_gives_the_table_of_this_process_and_a_second_run_runs_nothing(
    local_ray, tiny, in_process, tmp_path
):
    """Forked workers give it below, after a SIGTERM."""
    sweep = small_sweep(tiny)
    assert swept(sweep, tmp_path, RunOptions(threads=1), address="local").total() == 8
    same_results(tmp_path, in_process)
    assert not swept(sweep, tmp_path, RunOptions(), address="local")


def test_several_hyperparameters_are_swept_as_their_single_trials_and_all_are_analysed(tiny, tmp_path):
    rates = (2**-10, 2**-6, 2**-2)
    tuned = {"learning_rate": rates, "init_std": (1e-3, 0.05, 1.0)}
    base = tiny.replace(steps=1, eval_batches=1)
    sweep = Sweep("two", base, scale={"width": (32,)}, tune=tuned, compare={"parametrization": ("mup",)})
    assert swept(sweep, tmp_path) == {"finished": 9} and not swept(sweep, tmp_path)
    runs, corpora = load_runs(tmp_path), Corpora()
    alone = [base.replace(width=32, learning_rate=rate, init_std=0.05) for rate in rates]
    assert {*map(corpora.trial_id, alone)} <= {*runs["trial_id"]}
    assert load_table(tmp_path).columns.tuned == ("lr", "init_std")


def test_more_learning_rates_run_alone_and_rows_do_not_depend_on_the_pack_size(one_width, tiny, tmp_path):
    base = tiny.replace(steps=10, eval_batches=1)
    swept(one_width(base, 0.01), tmp_path / "one")
    more = one_width(base, 0.01, 0.02, 0.04)
    assert swept(more, tmp_path / "one") == {"finished": 2}
    assert load_runs(tmp_path / "one")["lr"].tolist() == [0.01, 0.02, 0.04]
    swept(more, tmp_path / "three", pack_size=3)
    threads = [set(load_runs(tmp_path / name)["threads"]) for name in ("one", "three")]
    assert threads[0] == threads[1], "losses of other threads are 1e-6 apart"
    same_results(tmp_path / "three", tmp_path / "one")


def workers_of(pid: int) -> list[psutil.Process]:
    """Workers of a driver: children of its fork server."""
    workers = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if child.ppid() != pid and "forkserver" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")
@pytest.mark.parametrize(
    "sign",
    [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.nightly) for s in (signal.SIGKILL, signal.SIGINT))],
)
def test_a_sweep_that_is_ended_leaves_no_process_and_goes_on_to_the_same_table(
    sign, tiny, in_process, tmp_path
):
    """At SIGTERM packs checkpoint at once, and the same command goes on from there."""
    results, file, sweep = tmp_path / "results", tmp_path / "sweep.toml", small_sweep(tiny)
    file.write_text(write_sweep(sweep))
    words = ["--results", results, "--threads", "1", "--pack-size", "2", "--checkpoint-every", "10"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "mup_tpu", "sweep", file, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(results.glob("runs/*.arrow")):
        assert driver.poll() is None and time.monotonic() < deadline, "it ended before it could be ended"
        time.sleep(0.02)
    processes = workers_of(driver.pid)
    driver.send_signal(sign)
    printed, _ = driver.communicate(timeout=120)
    assert len(processes) == 2 and not psutil.wait_procs(processes, timeout=120)[1]
    assert "Traceback" not in printed
    assert 0 < load_runs(results)["status"].isin(["finished", "diverged"]).sum() < 8
    if sign == signal.SIGTERM:
        assert driver.returncode == 143 and "preempted in a pack of 2 trials of width" in printed
        runs = load_runs(results)  # a pack preempted before its first step has nothing to keep
        stepped = (runs.loc[runs["status"] == "preempted", "steps_done"] > 0).any()
        assert stepped == any(results.glob("checkpoints/*/step-*"))
    swept(sweep, results, RunOptions(checkpoint_every=10, threads=1), pack_size=2)
    assert load_runs(results)["trial_id"].is_unique
    pd.testing.assert_frame_equal(results_of(results), results_of(in_process))
    if sign == signal.SIGKILL:  # at SIGTERM a curve has a point more, at the step of its checkpoint
        same_results(results, in_process)
    assert not (results / "checkpoints").exists(), "checkpoints of finished packs were left behind"


@pytest.mark.parametrize(
    ("error", "sentence", "run", "options"),
    [
        (ConfigError, "device 'cuda' is not available", {"device": "cuda"}, {}),
        (ConfigError, "placement 'chip' needs Ray: add --address ADDRESS", {"placement": "chip"}, {}),
        (ConfigError, "no Ray cluster answers at address '127.0.0.1:1'", {}, {"address": "127.0.0.1:1"}),
        (StoreError, "holds experiment 'other', not 'small'", {}, {}),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(error, sentence, run, options, tiny, tmp_path):
    if error is StoreError:
        Store(tmp_path, "other")
    with pytest.raises(error, match=sentence):
        swept(small_sweep(tiny), tmp_path, RunOptions(**run), **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        swept(small_sweep(tiny), tmp_path / "file/x")


def test_a_sweep_over_batch_sizes_trains_each_on_its_own_batches(tiny, tmp_path):
    """One text has several DataConfigs."""
    sweep = Sweep(
        "batches", tiny.replace(steps=10), scale={"batch_size": (2, 4)},
        tune={"weight_decay": (0.1,)}, num_seeds=2,
    )  # fmt: skip
    assert swept(sweep, tmp_path) == {"finished": 4}
    runs = load_runs(tmp_path)
    assert runs.groupby("batch_size")["tokens"].first().to_dict() == {2: 10 * 2 * 32, 4: 10 * 4 * 32}
    assert runs["data_fingerprint"].nunique() == 1
    alone = sweep.base.replace(batch_size=2, weight_decay=0.1, seed=1)
    row = PackRun([alone], data.load(alone.data), RunOptions(threads=1)).finish().rows[0]
    stored = runs.set_index("trial_id").loc[row["trial_id"]]
    assert stored["loss"] == row["loss"]


def test_points_of_a_ladder_measure_what_their_rows_say(tiny, tmp_path):
    """Both use the vocabulary of the data: a sequence looks up its rows by the measure."""
    points = ({"width": 32, "steps": 2}, {"width": 64, "steps": 3})
    sweep = Sweep("x", tiny, tune={"learning_rate": (0.01,)}, scale=points)
    swept(sweep, tmp_path)
    runs = load_runs(tmp_path)
    for name in ("params", "flops", "tokens"):
        by = dataclasses.replace(sweep, measured_by=name)
        assert set(runs[by.axes.size]) == set(measured(by, Corpora())) and len(runs) == 4


def test_points_of_a_ladder_that_measure_the_same_are_refused(tiny, tmp_path):
    points = ({"width": 32, "depth": 1}, {"width": 32, "depth": 2})
    same_tokens = Sweep("x", tiny, scale=points, measured_by="tokens")
    sentence = "width 32 depth 1 and width 32 depth 2 have the same training tokens .3840.*give a measured_by"
    with pytest.raises(ConfigError, match=sentence):
        swept(same_tokens, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sweep_along_other_axes_or_of_another_kind_is_refused_before_it_trains(one_width, tiny, tmp_path):
    """The analysis would refuse a folder of two step counts, inits or schedules."""
    sweep = one_width(tiny.replace(eval_batches=1), 0.01)
    swept(sweep, tmp_path)
    other = Sweep("x", tiny, scale={"depth": (1, 2)})
    with pytest.raises(StoreError, match="holds a sweep of learning_rate by width"):
        swept(other, tmp_path)
    for changes, sentence in (
        ({"steps": 40}, "holds runs with step count 30, and this sweep has 40; .*--where steps_planned=30"),
        ({"init_std": 0.5}, "holds runs with init σ 0.08, and this sweep has 0.5"),
        ({"base_depth": 1}, "holds runs with base depth 0, and this sweep has 1"),
    ):
        with pytest.raises(StoreError, match=sentence):
            swept(dataclasses.replace(sweep, base=sweep.base.replace(**changes)), tmp_path)
    assert len(load_runs(tmp_path)) == 1
    elsewhere = dataclasses.replace(sweep, tune={"learning_rate": (0.02,)}, num_seeds=2)
    assert swept(elsewhere, tmp_path) == {"finished": 2}


def test_trials_that_were_stopped_early_are_trained_whole(one_width, tiny, tmp_path):
    sweep, corpora = one_width(tiny.replace(steps=5), 0.003, 0.01), Corpora()
    rows = [configured(t) | {"trial_id": corpora.trial_id(t), "device": "cpu"} for t in sweep.trials()]
    ends = ({"status": "stopped", "loss": 9.0}, {"status": "finished", "loss": 3.0})
    Store(tmp_path, "x", sweep.axes).append([row | end for row, end in zip(rows, ends, strict=True)])
    assert swept(sweep, tmp_path) == {"finished": 1}
    assert set(load_runs(tmp_path)["status"]) == {"finished"}


def test_checkpoints_stay_until_rows_are_stored(one_width, tiny, tmp_path):
    sweep = one_width(tiny.replace(steps=12), 0.01)
    options = dataclasses.replace(ALONE, checkpoint_every=5)
    (tmp_path / "curves").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        swept(sweep, tmp_path, options)
    assert list(tmp_path.glob("checkpoints/*/step-00000010/meta.json"))
    (tmp_path / "curves").unlink()
    assert set(swept(sweep, tmp_path, options)) == {"finished"} and not list(tmp_path.glob("checkpoints/*/*"))
