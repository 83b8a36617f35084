"""Searches whose trials the driver runs: stored, stopped early, and resumed after kills and full disks."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from mup_tpu import data
from mup_tpu.cli import main
from mup_tpu.cli.sweep import SearchRun, search_and_show
from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.config.options import SearchOptions
from mup_tpu.config.sweep import Domain, Search
from mup_tpu.devices import peak
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.files import Folder
from mup_tpu.store import load_curves, load_runs
from mup_tpu.training.loop import PackRun
from mup_tpu.tuning.chooser import Chooser, SearchLog
from mup_tpu.tuning.search import run_search

SPACE = {
    "learning_rate": Domain("loguniform", 2.0**-12, 2.0**-3),
    "warmup": Domain("uniform", 0.05, 0.4),
    "weight_decay": Domain("choice", values=(0.0, 0.1)),
}
RATES = {"learning_rate": Domain("loguniform", 0.001, 0.06)}
ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options that give a trial all cores, so that it trains in this process."""
NOT_RESULTS = ["wall_time_s", "finished_at", "git_commit"]


def searched_in(path, search, run=ALONE, where=None, resume=False, console=None, **options):
    """Run a search; returns the outcome."""
    console, where = console or Console(quiet=True), where or SweepOptions()
    return run_search(search, str(path), SearchOptions(**options), where, run, resume, console)


@pytest.fixture(scope="module")
def quick(tiny):
    return tiny.replace(steps=10, eval_batches=1)


@pytest.fixture(scope="module")
def search(quick):
    return Search("small_search", quick, SPACE)


@pytest.mark.parametrize("algorithm", ["random", "optuna", "hyperopt"])
def test_a_resumed_algorithm_proposes_what_the_uninterrupted_one_would(algorithm, search, tmp_path):
    options = SearchOptions(algorithm=algorithm, seed=3)

    def points(path, stop):
        log = SearchLog(Folder(path))
        chooser = Chooser(search, options, log)
        while len(log.proposals) < stop:
            key = chooser.propose()
            chooser.end(key, abs(log.proposals[key]["learning_rate"] - 0.01), is_whole=True)
        return log.proposals

    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    points(tmp_path / "parts", 15)
    assert points(tmp_path / "parts", 24) == points(tmp_path / "whole", 24)


def test_proposals_that_had_not_ended_come_first(search, tmp_path):
    log = SearchLog(Folder(tmp_path))
    first = Chooser(search, SearchOptions(), log)
    assert [first.propose() for _ in range(3)] == [0, 1, 2]
    first.end(1, 2.5, is_whole=True)
    with (tmp_path / "search.jsonl").open("a") as file:
        file.write('{"event": "propo')  # torn by a kill
    with pytest.warns(UserWarning, match="line 5 .* is torn"):
        again = SearchLog(Folder(tmp_path))
    second = Chooser(search, SearchOptions(), again)
    assert [second.propose() for _ in range(3)] == [0, 2, 3]
    assert {key: again.proposals[key] for key in range(3)} == log.proposals


def test_asha_stops_what_is_not_among_the_best_third_at_a_rung(search, tmp_path):
    """Rungs at shares 0.2 and 0.6 of the steps; after the first, each trial is compared with those before."""
    chooser = Chooser(search, SearchOptions(grace=0.2), SearchLog(Folder(tmp_path)))
    keys = [chooser.propose() for _ in range(5)]
    losses = [3.0, 2.0, 2.5, 1.9, 1.95]
    assert not any(chooser.stops(key, 0.1, loss) for key, loss in zip(keys, losses, strict=True))
    stopped = [chooser.stops(key, 0.2, loss) for key, loss in zip(keys, losses, strict=True)]
    bests = [np.percentile(losses[:i], 100 / 3) if i else np.inf for i in range(5)]
    assert stopped == [loss > best for loss, best in zip(losses, bests, strict=True)] == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert not chooser.stops(keys[0], 0.4, 9.0), "between two rungs"
    assert not chooser.stops(keys[1], 0.6, 2.0) and chooser.stops(keys[3], 0.6, 2.1)
    patient = Chooser(search, SearchOptions(scheduler="none"), SearchLog(Folder(tmp_path)))
    assert not any(patient.stops(patient.propose(), 0.6, loss) for loss in (1.0, 2.0, 3.0))


def test_a_log_of_another_search_is_refused(search, quick, tmp_path):
    SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    SearchLog(Folder(tmp_path)).begin(search, SearchOptions(num_samples=99))
    other = Search("small_search", quick, SPACE | {"warmup": Domain("uniform", 0.1, 0.4)})
    with pytest.raises(ConfigError, match="space of the search differs from .*log"):
        SearchLog(Folder(tmp_path)).begin(other, SearchOptions())
    with pytest.raises(ConfigError, match="algorithm of the search differs from"):
        SearchLog(Folder(tmp_path)).begin(search, SearchOptions(algorithm="random"))


def test_every_trial_is_stored_once_with_its_status_curve_and_precision(search, tmp_path):
    """In the precision of a CPU that does not multiply in bf16."""
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2\n")
    auto = dataclasses.replace(search, base=search.base.replace(precision="auto"))
    results, where = tmp_path / "results", SweepOptions(track=("tensorboard",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "_CPUINFO", tmp_path / "cpuinfo")
        outcome = searched_in(results, auto, RunOptions(device="cpu", threads=1), where, num_samples=6)
    runs, curves = load_runs(results), load_curves(results)
    assert len(runs) == 6 and outcome.unfinished == 0
    assert outcome.counts == Counter(runs["status"]) and {"finished"} <= {*runs["status"]}
    assert set(runs["trial_id"]) == set(curves["trial_id"])
    assert set(runs["precision"]) == {"float32"}
    stopped = runs[runs["status"] == "stopped"]
    assert len(stopped) and (stopped["steps_done"] < stopped["steps_planned"]).all()
    assert (runs[runs["status"] == "finished"]["steps_done"] == auto.base.train.steps).all()
    held_out = curves[curves["split"] == "validation"].groupby("trial_id")["loss"].last()
    assert stopped["loss"].tolist() == held_out[stopped["trial_id"]].tolist(), "its last known loss"
    assert runs["lr"].between(2.0**-12, 2.0**-3).all()
    assert not list((results / "checkpoints").glob("*"))
    sent = {path.parent.name for path in (results / "tensorboard").rglob("events.out.tfevents.*")}
    assert sent == set(runs["trial_id"])


def one_by_one(path, search, **where):
    """Run a search on one worker: the same trials are stopped at the same evaluations."""
    outcome = searched_in(path, search, ALONE, SweepOptions(**where), num_samples=5, max_concurrent=1)
    assert {"finished", "stopped"} <= outcome.counts.keys()
    return load_runs(path).drop(columns=NOT_RESULTS)


@pytest.mark.nightly
def test_a_search_on_ray_has_the_rows_of_one_in_this_process(local_ray, search, tmp_path):
    on_ray = one_by_one(tmp_path / "ray", search, ray=True)
    pd.testing.assert_frame_equal(on_ray, one_by_one(tmp_path / "here", search))


def test_packs_of_a_search_train_together_and_members_are_stopped_alone(quick, tmp_path):
    search = Search("packs", quick, RATES | {"width": Domain("choice", values=(32, 64))})
    where = SweepOptions(pack_size=4)
    outcome = searched_in(tmp_path, search, where=where, num_samples=8, grace=0.1, algorithm="random")
    runs = load_runs(tmp_path)
    assert outcome.counts.total() == len(runs) == 8 and outcome.counts["stopped"]
    assert {*runs["width"]} == {32, 64} and runs["pack_size"].max() > 1
    assert (runs.groupby("width")["pack_size"].max() <= 4).all()


def test_a_point_that_is_proposed_again_is_not_trained_again(quick, tmp_path):
    search = Search("again", quick, {"warmup": Domain("choice", values=(0.1, 0.2))})
    outcome = searched_in(tmp_path, search, num_samples=9, scheduler="none", algorithm="random")
    log = SearchLog(Folder(tmp_path))
    assert outcome.counts == {"finished": 2} and len(load_runs(tmp_path)) == 2
    assert outcome.unfinished == 0 and log.ended == set(range(9))
    losses = {(log.proposals[e["key"]]["warmup"], e["loss"]) for e in log.events if e["event"] == "ended"}
    assert len(losses) == 2, "each end has the loss of its point"


def test_a_point_between_two_allowed_ones_that_is_not_allowed_is_left_out(quick, tmp_path, capsys):
    search = Search("between", quick, {"width": Domain("uniform", 32, 64)})
    outcome = searched_in(tmp_path, search, num_samples=2, console=Console(width=400))
    assert outcome.counts == {} and outcome.unfinished == 0
    assert "trial 0 is left out: width" in capsys.readouterr().out


def test_the_best_trial_that_progress_names_is_the_best_finished_one_of_the_store(search, tmp_path, capsys):
    """Also after --resume, and if a stopped trial had a lower loss on the way."""
    first = searched_in(tmp_path, search, num_samples=3, scheduler="none", console=Console(width=400))
    assert first.counts == {"finished": 3}
    best = load_runs(tmp_path)["loss"].min()
    assert f"best {best:.4f} (" in capsys.readouterr().out.splitlines()[-1]
    searched_in(tmp_path, search, resume=True, num_samples=4, scheduler="none", console=Console(width=400))
    after = load_runs(tmp_path)["loss"].min()
    assert f"4 of 4 ended, best {after:.4f} (" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.nightly
def test_after_the_budget_trials_pause_and_a_resumed_search_goes_on_with_them(tiny, tmp_path):
    search = Search("budget", tiny.replace(steps=100), RATES)
    limits = dict(num_samples=2, scheduler="none", evaluations=50)
    first = searched_in(tmp_path, search, budget="0.001s", **limits)
    assert first.counts == {} and first.unfinished == 2
    for budget in ("0.2s", "1s", "4s"):  # on a busy machine nothing may have begun by then
        if not checkpoints(tmp_path):
            first = searched_in(tmp_path, search, resume=True, budget=budget, **limits)
    assert first.unfinished and checkpoints(tmp_path)
    outcome = searched_in(tmp_path, search, resume=True, **limits)
    assert (first.counts + outcome.counts) == {"finished": 2}
    expected = [trained(search.trial(SearchLog(Folder(tmp_path)).proposals[key])) for key in range(2)]
    assert sorted(load_runs(tmp_path)["loss"]) == sorted(expected)


def trained(trial, run=ALONE):
    """Loss of a trial that is not interrupted."""
    return PackRun([trial], data.load(trial.data), run).finish().rows[0]["loss"]


def test_a_search_takes_no_slices(search, tmp_path):
    with pytest.raises(ConfigError, match="placement 'slice' is for sweeps; a search takes"):
        searched_in(tmp_path, search, RunOptions(device="xla", placement="slice"))


def test_a_log_cut_anywhere_in_its_last_line_loses_only_that_line(search, tmp_path):
    """Later events have lines of their own."""
    log = SearchLog(Folder(tmp_path))
    log.begin(search, SearchOptions())
    whole = (tmp_path / "search.jsonl").read_bytes()
    log.propose({"learning_rate": 0.1})
    last = (tmp_path / "search.jsonl").read_bytes()[len(whole) :]
    for cut in range(1, len(last) + 1):
        (tmp_path / "search.jsonl").write_bytes(whole + last[:cut])
        is_torn = cut < len(last) - 1
        with pytest.warns(UserWarning, match="line 2 .* is torn") if is_torn else contextlib.nullcontext():
            again = SearchLog(Folder(tmp_path))
        assert len(again.proposals) == (0 if is_torn else 1)
        key = again.propose({"learning_rate": 0.2})
        again.end(key, 1.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = SearchLog(Folder(tmp_path))
        assert found.proposals[key] == {"learning_rate": 0.2} and found.ended == {key}, cut


FOREIGN = [
    "[1]", "7", "null", '"text"', "{}",
    '{"a": 1}', '{"event": 3}', '{"event": "other"}', '{"event": "begun"}',
    '{"event": "proposed"}', '{"event": "proposed", "key": "0", "point": {}}',
    '{"event": "proposed", "key": 0, "point": [1]}', '{"event": "proposed", "key": 0, "point": {"x": "y"}}',
    '{"event": "proposed", "key": 0, "point": {"nonesuch": 1.0}}', '{"event": "ended", "key": 0}',
    '{"event": "ended", "key": 0, "loss": "low"}', '{"event": "ended", "key": [0], "loss": 1.0}',
    '{"event": "begun", "space": {}, "algorithm": "random", "seed": 0, "base": {"model": 3}}',
    '{"event": "begun", "space": {}, "algorithm": "random", "seed": 0, "base": {"model": {"nonesuch": 3}}}',
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", FOREIGN, ids=itertools.count())
def test_a_log_with_a_line_that_is_no_event_is_one_sentence_and_stays(line, search, tmp_path):
    log = tmp_path / "search.jsonl"
    if '"begun", "space"' not in line:  # the first beginning counts
        SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    with log.open("a") as file:
        file.write(line + "\n")
    before = log.read_bytes()
    with pytest.raises(StoreError, match="search log .*search.jsonl cannot be read: "):
        SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    assert log.read_bytes() == before


def write_search(path, space, base):
    """Write a search for the command line."""
    lines = ['experiment = "from_a_file"', space]
    for part, values in base.to_dict().items():
        lines.append(f"[base.{part}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def checkpoints(results):
    return list((results / "checkpoints").glob("*/step-*/meta.json"))


@pytest.mark.nightly
def test_a_search_that_is_ended_goes_on_and_repeats_or_loses_no_trial(tiny, tmp_path):
    """By SIGTERM, at a checkpoint of its second trial; it goes on in this process."""
    results, base = tmp_path / "results", tiny.replace(steps=150)
    space = "space.learning_rate = {low = 0.001, high = 0.06}"
    file, search = write_search(tmp_path / "search.toml", space, base), Search("from_a_file", base, RATES)
    words = ["--num-samples", "3", "--max-concurrent", "1", "--evaluations", "30"]
    words += ["--results", results, "--threads", str(os.cpu_count())]
    driver = subprocess.Popen(
        [sys.executable, "-m", "mup_tpu", "search", file, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    log, deadline = results / "search.jsonl", time.monotonic() + 240
    while not (log.exists() and log.read_text().count('"proposed"') == 2 and checkpoints(results)):
        assert driver.poll() is None, f"ended too soon: {driver.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.terminate()
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 143 and "go on" in output and "Traceback" not in output
    assert checkpoints(results)
    before, stored = SearchLog(Folder(results)), load_runs(results)
    assert 1 <= len(before.ended) < 3
    with pytest.raises(ConfigError, match=f"holds a search of {len(before.proposals)} trials; go on with"):
        searched_in(results, search)
    with pytest.raises(ConfigError, match="holds no search to resume: leave out --resume"):
        searched_in(tmp_path, search, resume=True)
    outcome = searched_in(results, search, resume=True, num_samples=4, max_concurrent=1)
    assert sum(outcome.counts.values()) == 4 - len(before.ended)
    after = SearchLog(Folder(results))
    assert after.ended == set(range(4))
    assert {k: after.proposals[k] for k in before.proposals} == before.proposals
    ends = Counter(e["key"] for e in after.events if e["event"] == "ended")
    assert set(ends.values()) == {1}
    runs = load_runs(results)
    kept = runs[runs["trial_id"].isin(stored["trial_id"])]
    assert len(runs) == 4 and kept["finished_at"].tolist() == stored["finished_at"].tolist()


def test_a_kill_between_row_and_log_line_costs_no_trial(search, tmp_path):
    """The row is stored, and the log lacks its end."""
    searched_in(tmp_path, search, num_samples=2, scheduler="none")
    log, stored = tmp_path / "search.jsonl", load_runs(tmp_path)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    outcome = searched_in(tmp_path, search, resume=True, num_samples=2, scheduler="none")
    assert outcome.counts == {} and outcome.unfinished == 0
    pd.testing.assert_frame_equal(load_runs(tmp_path), stored)


def test_ctrl_c_checkpoints_and_says_how_to_go_on(tiny, tmp_path, capsys):
    """This process interrupts itself."""
    results, has_ended = tmp_path / "results", threading.Event()

    def interrupt():
        deadline = time.monotonic() + 240
        while not checkpoints(results) and not has_ended.wait(0.05):
            assert time.monotonic() < deadline
        if not has_ended.is_set():  # otherwise pytest would be interrupted
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    search = Search("x", tiny.replace(steps=1500), RATES)
    options = SearchOptions(num_samples=2, scheduler="none", evaluations=30)
    try:
        with pytest.raises(KeyboardInterrupt):
            how = SearchRun(str(results), options=options, run=ALONE)
            search_and_show(search, how, "mup-tpu search x.toml")
    finally:
        has_ended.set()
        thread.join()
    output = " ".join(capsys.readouterr().out.split())
    assert "stopping: running trials checkpoint" in output
    assert (
        f"2 trials are unfinished; continue with: mup-tpu search x.toml --results {results} --resume"
        in output
    )
    assert checkpoints(results)
    assert len(SearchLog(Folder(results)).proposals) == 1, "nothing more is proposed"


def test_a_trial_that_is_too_large_is_failed_with_the_reason_and_the_rest_goes_on(tiny, tmp_path):
    """The seed draws both widths, one too wide for any memory."""
    file = write_search(
        tmp_path / "search.toml", "space.width = {kind = 'choice', values = [32, 1048576]}", tiny
    )
    results = tmp_path / "results"
    options = ["--num-samples", "2", "--algorithm", "random", "--seed", "0", "--threads", str(os.cpu_count())]
    with pytest.raises(SystemExit, match="^1$"):
        main(["search", str(file), "--results", str(results), *options])
    runs = load_runs(results).set_index("width")
    assert runs["status"].to_dict() == {32: "finished", 2**20: "failed"}
    assert "allocate memory" in runs["reason"][2**20]
    assert SearchLog(Folder(results)).ended == {0, 1}


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs processes as Linux has them")
def test_a_trial_whose_process_dies_goes_on_from_its_checkpoint(tiny, tmp_path):
    base, one = tiny.replace(steps=200), RunOptions(threads=1)

    def kill():  # the process of the first trial with a checkpoint
        deadline = time.monotonic() + 240
        while not checkpoints(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.005)
        trial_id = checkpoints(tmp_path)[0].parents[1].name
        (log,) = (path for path in tmp_path.glob("logs/*") if trial_id in path.read_text())
        os.kill(int(log.stem.rpartition("-")[2]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome = searched_in(
        tmp_path, Search("lost", base, {"warmup": Domain("choice", values=(0.1, 0.2))}), one, num_samples=2,
        evaluations=40, seed=0, algorithm="random", scheduler="none",
    )  # fmt: skip
    thread.join()
    runs = load_runs(tmp_path)
    assert outcome.counts == {"finished": 2}
    for warmup, loss in zip(runs["warmup"], runs["loss"], strict=True):
        assert loss == trained(base.replace(warmup=warmup), one)
    assert "".join(log.read_text() for log in tmp_path.glob("logs/*")).count(" goes on from step ") == 1


def test_two_searches_do_not_write_one_folder(search, tmp_path):
    with (
        Folder(tmp_path).locked("search.lock"),
        pytest.raises(StoreError, match="is being written by another search; wait"),
    ):
        searched_in(tmp_path, search)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda tiny: Search("x", tiny, {}), "space of the search is empty"),
        (lambda tiny: Search("x", tiny, {"lr": Domain(low=0.1, high=1)}), "space of lr: unknown key"),
        (lambda tiny: Search("x", tiny, {"warmup": Domain("uniform", 0.0, 40)}), "of warmup: warmup 40"),
        (lambda tiny: Domain("loguniform", 0.0, 1.0), "low 0 of a loguniform is not above 0"),
        (lambda tiny: Domain("uniform", 2.0, 1.0), "low 2 is not below high 1"),
        (lambda tiny: Domain("choice"), "values of a choice are empty"),
        (lambda tiny: SearchOptions(budget="soon"), "budget 'soon' is not a time"),
        (lambda tiny: SearchOptions(grace=0), "grace 0 is not allowed: it must be above 0"),
        (lambda tiny: SearchOptions(num_samples=0), "num_samples 0 is not allowed"),
    ],
)  # fmt: skip
def test_bad_searches_are_refused_in_one_sentence(make, sentence, tiny):
    with pytest.raises(ConfigError, match=sentence):
        make(tiny)
