"""Sweeps in this process, in forked ones and on a real local Ray: the same table, also after a kill."""

import contextlib
import dataclasses
import json
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
    return Sweep(
        "small", tiny.replace(grad_clip=0.0), scale={"width": (32, 64)}, tune={"learning_rate": (0.01, 1e30)}
    )


def one_value(tiny: Trial, *rates: float, **fields: object) -> Sweep:
    base = tiny.replace(**{"steps": 10, "eval_batches": 1} | fields)
    return Sweep(
        "x",
        base,
        scale={"width": (32,)},
        tune={"learning_rate": rates or (0.01,)},
        compare={"parametrization": ("mup",)},
    )


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
    """Forked workers give it below, after a SIGTERM and over batch sizes."""
    sweep = small_sweep(tiny)
    assert swept(sweep, tmp_path, RunOptions(threads=1), address="local").total() == 8
    same_results(tmp_path, in_process)
    assert not swept(sweep, tmp_path, RunOptions(), address="local")


def test_several_hyperparameters_are_swept_as_their_single_trials_and_all_are_analysed(tiny, tmp_path):
    rates = (2**-10, 2**-6, 2**-2)
    tuned = {"learning_rate": rates, "init_std": (1e-3, 0.05, 1.0)}
    rule = {"parametrization": ("mup",)}
    base = tiny.replace(steps=1, eval_batches=1)
    sweep = Sweep("two", base, scale={"width": (32, 64)}, tune=tuned, compare=rule)
    assert swept(sweep, tmp_path) == {"finished": 18} and not swept(sweep, tmp_path)
    runs, corpora = load_runs(tmp_path), Corpora()
    alone = [base.replace(width=64, learning_rate=rate, init_std=0.05) for rate in rates]
    assert {*map(corpora.trial_id, alone)} <= {*runs["trial_id"]}
    assert load_table(tmp_path).columns.tuned == ("lr", "init_std")


def test_three_more_learning_rates_run_alone_and_rows_do_not_depend_on_the_pack_size(tiny, tmp_path):
    swept(one_value(tiny), tmp_path / "one")
    more = one_value(tiny, 0.01, 0.02, 0.04, 0.08)
    assert swept(more, tmp_path / "one") == {"finished": 3}
    assert load_runs(tmp_path / "one")["lr"].tolist() == [0.01, 0.02, 0.04, 0.08]
    swept(more, tmp_path / "three", pack_size=3)
    threads = [set(load_runs(tmp_path / name)["threads"]) for name in ("one", "three")]
    assert threads[0] == threads[1], "losses of other threads are 1e-6 apart"
    same_results(tmp_path / "three", tmp_path / "one")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA as Linux has it")
def test_a_pack_that_runs_out_of_memory_is_split_and_every_trial_stored(tiny, tmp_path):
    """The process may allocate enough for one member with its optimizer's state, but not for three.

    Three need 1000 MiB. One needs 400 MiB, beside what is left of the three: malloc returns pages, but not
    always their addresses, and the limit counts addresses.
    """
    script = tmp_path / "sweep.py"
    wide = json.dumps(tiny.replace(width=1024, base_width=1024, steps=2, eval_batches=1).to_dict())
    script.write_text(
        "import json, os, resource, sys\nimport torch\nfrom rich.console import Console\nfrom mup_tpu.config "
        "import *\nfrom mup_tpu.config.toml import from_dict\nfrom mup_tpu.training.loop import "
        "PackRun\nfrom mup_tpu.tuning.sweep import run_sweep\nsweep = Sweep('wide', from_dict(Trial, "
        f"json.loads({wide!r})), "
        "scale={'width': (1024,)}, tune={'learning_rate': (0.001, 0.002, 0.003)}, "
        "compare={'parametrization': ('mup',)})\n"
        "used = next(int(l.split()[1]) for l in open('/proc/self/status') if "
        "l.startswith('VmData'))\nresource.setrlimit(resource.RLIMIT_DATA, (1024 * used + 980 * 2**20,) * "
        "2)\noptions = SweepOptions(pack_size=3)\nrun_sweep(sweep, sys.argv[1], options, "
        "RunOptions(threads=os.cpu_count()), Console(width=300))\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "results")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 trials ran out of memory" in ended.stdout and "split into 3 packs" in ended.stdout
    runs = load_runs(tmp_path / "results")
    assert runs["status"].tolist() == ["finished"] * 3
    assert runs["pack_size"].tolist() == [1] * 3


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


@pytest.mark.slow
def test_a_sweep_over_batch_sizes_trains_each_on_its_own_batches(tiny, tmp_path):
    """One text has several DataConfigs, in this process and in forked ones."""
    sweep = Sweep(
        "batches", tiny.replace(steps=10), scale={"batch_size": (2, 4)},
        tune={"weight_decay": (0.0, 0.1)}, num_seeds=2,
    )  # fmt: skip
    for name, run in (("alone", ALONE), ("workers", RunOptions(threads=1))):
        assert swept(sweep, tmp_path / name, run) == {"finished": 8}
    pd.testing.assert_frame_equal(results_of(tmp_path / "alone"), results_of(tmp_path / "workers"))
    runs = load_runs(tmp_path / "alone")
    assert runs.groupby("batch_size")["tokens"].first().to_dict() == {2: 10 * 2 * 32, 4: 10 * 4 * 32}
    assert runs["data_fingerprint"].nunique() == 1
    alone = sweep.base.replace(batch_size=2, weight_decay=0.1, seed=1)
    row = PackRun([alone], data.load(alone.data), RunOptions(threads=1)).finish().rows[0]
    stored = runs.set_index("trial_id").loc[row["trial_id"]]
    assert stored["loss"] == row["loss"]


@pytest.mark.parametrize("measured_by", ["params", "flops", "tokens"])
def test_points_of_a_ladder_measure_what_their_rows_say(tiny, tmp_path, measured_by):
    """Both use the vocabulary of the data: a sequence looks up its rows by the measure."""
    points = ({"width": 32, "steps": 2}, {"width": 64, "steps": 3})
    sweep = Sweep("x", tiny, tune={"learning_rate": (0.01,)}, scale=points, measured_by=measured_by)
    swept(sweep, tmp_path)
    runs = load_runs(tmp_path)
    assert set(runs[sweep.axes.size]) == set(measured(sweep, Corpora())) and len(runs) == 4


def test_points_of_a_ladder_that_measure_the_same_are_refused(tiny, tmp_path):
    points = ({"width": 32, "depth": 1}, {"width": 32, "depth": 2})
    same_tokens = Sweep("x", tiny, scale=points, measured_by="tokens")
    sentence = "width 32 depth 1 and width 32 depth 2 have the same training tokens .3840.*give a measured_by"
    with pytest.raises(ConfigError, match=sentence):
        swept(same_tokens, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sweep_along_other_axes_or_of_another_kind_is_refused_before_it_trains(tiny, tmp_path):
    """The analysis would refuse a folder of two step counts, inits or schedules."""
    sweep = one_value(tiny, steps=30)
    swept(sweep, tmp_path)
    other = Sweep("x", tiny, scale={"depth": (1, 2)})
    with pytest.raises(StoreError, match="holds a sweep of learning_rate by width"):
        swept(other, tmp_path)
    for changes, sentence in (
        ({"steps": 40}, "holds runs with step count 30, and this sweep has 40; .*--where steps_planned=30"),
        ({"init_std": 0.5}, "holds runs with init σ 0.08, and this sweep has 0.5"),
        ({"alpha_out": 2.0}, "holds runs with α_out .logits. 1, and this sweep has 2"),
        ({"base_depth": 1}, "holds runs with base depth 0, and this sweep has 1"),
        ({"batch_size": 2}, "holds runs with batch size 4, and this sweep has 2"),
    ):
        with pytest.raises(StoreError, match=sentence):
            swept(dataclasses.replace(sweep, base=sweep.base.replace(**changes)), tmp_path)
    assert len(load_runs(tmp_path)) == 1
    elsewhere = dataclasses.replace(sweep, tune={"learning_rate": (0.02,)}, num_seeds=2)
    assert swept(elsewhere, tmp_path) == {"finished": 2}


def test_trials_that_were_stopped_early_are_trained_whole(tiny, tmp_path):
    sweep = Sweep(
        "halved", tiny.replace(steps=5), scale={"width": (32,)}, tune={"learning_rate": (0.003, 0.01)}
    )
    swept(sweep, tmp_path / "whole")
    stored = Store(tmp_path / "whole", "halved").results().drop(columns="experiment")
    rows = [{k: v for k, v in row.items() if pd.notna(v)} for row in stored.to_dict("records")]
    chosen = [row for row in rows if row["lr"] == 0.01]
    stopped = [row | ({"status": "stopped", "loss": 9.0} if row in chosen else {}) for row in rows]
    Store(tmp_path / "halved", "halved", sweep.axes).append(stopped)
    assert swept(sweep, tmp_path / "halved") == {"finished": len(chosen)}
    assert set(load_runs(tmp_path / "halved")["status"]) == {"finished"}


def test_checkpoints_stay_until_rows_are_stored(tiny, tmp_path):
    sweep = Sweep("kept", tiny.replace(steps=12), scale={"width": (32,)}, tune={"learning_rate": (0.01,)})
    options = dataclasses.replace(ALONE, checkpoint_every=5)
    (tmp_path / "curves").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        swept(sweep, tmp_path, options)
    assert list(tmp_path.glob("checkpoints/*/step-00000010/meta.json"))
    (tmp_path / "curves").unlink()
    assert set(swept(sweep, tmp_path, options)) == {"finished"} and not list(tmp_path.glob("checkpoints/*/*"))
