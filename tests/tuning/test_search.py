"""Searches under a real local Ray Tune: stored, stopped early, resumed after anything."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import ray
from rich.console import Console

from mup_tpu.config import RunOptions
from mup_tpu.config_search import Domain, Search, SearchOptions
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import load_curves, load_runs
from mup_tpu.tuning.search import ReplayedSearcher, SearchLog, _algorithm, _only_one, run_search

QUIET = Console(quiet=True)
SPACE = {
    "learning_rate": Domain("loguniform", 2.0**-12, 2.0**-3),
    "warmup": Domain("uniform", 0.05, 0.4),
    "weight_decay": Domain("choice", values=(0.0, 0.1)),
}


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all searches of this file."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def search(tiny):
    return Search("small_search", tiny, SPACE)


@pytest.fixture(scope="module")
def searched(cluster, search, tmp_path_factory):
    """A finished search of 8 trials."""
    path = tmp_path_factory.mktemp("searched")
    outcome = run_search(search, str(path), SearchOptions(num_samples=8), RunOptions(), False, QUIET)
    assert outcome.unfinished == 0
    return path


@pytest.mark.parametrize("algorithm", ["random", "optuna", "hyperopt"])
def test_a_resumed_algorithm_proposes_what_the_uninterrupted_one_would(algorithm, search, tmp_path):
    options = SearchOptions(algorithm=algorithm, seed=3)

    def searcher(path):
        return ReplayedSearcher(_algorithm(search, options), SearchLog(path), "loss")

    def go_on(searcher, start, stop):
        points = []
        for i in range(start, stop):
            point = searcher.suggest(f"trial-{i}")
            searcher.on_trial_complete(f"trial-{i}", {"loss": abs(point["learning_rate"] - 0.01)})
            searcher._log.end(point["_key"], abs(point["learning_rate"] - 0.01))
            points.append(point)
        return points

    whole = go_on(searcher(tmp_path / "whole.jsonl"), 0, 24)
    first = go_on(searcher(tmp_path / "parts.jsonl"), 0, 15)
    second = go_on(searcher(tmp_path / "parts.jsonl"), 15, 24)
    assert first + second == whole


def test_what_had_not_ended_comes_first(search, tmp_path):
    options = SearchOptions()
    first = ReplayedSearcher(_algorithm(search, options), SearchLog(tmp_path / "log"), "loss")
    proposed = [first.suggest(name) for name in "abc"]
    first._log.end(1, 2.5)
    with (tmp_path / "log").open("a") as file:
        file.write('{"event": "propo')  # torn by a kill
    second = ReplayedSearcher(_algorithm(search, options), SearchLog(tmp_path / "log"), "loss")
    assert [second.suggest(name) for name in "de"] == [proposed[0], proposed[2]]
    assert second.suggest("f")["_key"] == 3


def test_a_log_begun_differently_is_not_gone_on_with(search, tiny, tmp_path):
    SearchLog(tmp_path / "log").begin(search, SearchOptions())
    SearchLog(tmp_path / "log").begin(search, SearchOptions(num_samples=99))
    other = Search("small_search", tiny, SPACE | {"warmup": Domain("uniform", 0.1, 0.4)})
    with pytest.raises(ConfigError, match="space of the search is not that of .*log"):
        SearchLog(tmp_path / "log").begin(other, SearchOptions())
    with pytest.raises(ConfigError, match="algorithm of the search is not that of"):
        SearchLog(tmp_path / "log").begin(search, SearchOptions(algorithm="random"))


@pytest.mark.slow
def test_every_trial_is_stored_once_with_its_status_and_curve(searched, search):
    runs, curves = load_runs(searched), load_curves(searched)
    assert len(runs) == 8
    assert set(runs["status"]) <= {"finished", "stopped", "diverged"}
    assert (runs["status"] == "finished").any()
    assert set(runs["trial_id"]) == set(curves["trial_id"])
    stopped = runs[runs["status"] == "stopped"]
    assert (stopped["steps_done"] < stopped["steps_planned"]).all()
    assert runs["lr"].between(2.0**-12, 2.0**-3).all()
    assert not list((searched / "checkpoints").glob("*"))
    assert list((searched / "tensorboard").rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_more_samples_go_on_where_the_search_was(searched, search, cluster, tmp_path):
    before = load_runs(searched)
    with pytest.raises(ConfigError, match="holds a search of 8 trials; go on with --resume"):
        run_search(search, str(searched), SearchOptions(num_samples=10), RunOptions(), False, QUIET)
    with pytest.raises(ConfigError, match="holds no search to resume"):
        run_search(search, str(tmp_path), SearchOptions(), RunOptions(), True, QUIET)
    outcome = run_search(search, str(searched), SearchOptions(num_samples=10), RunOptions(), True, QUIET)
    after = load_runs(searched)
    assert sum(outcome.counts.values()) == 2
    assert len(after) == 10
    kept = after[after["trial_id"].isin(before["trial_id"])]
    assert kept["finished_at"].tolist() == before["finished_at"].tolist()


@pytest.mark.slow
def test_trials_that_need_too_much_memory_or_hang_are_failed_with_the_reason(cluster, tiny, tmp_path):
    widths = Search("wide", tiny, {"width": Domain("choice", values=(32.0, 2.0**20))})
    options = SearchOptions(num_samples=4, algorithm="random", scheduler="none", max_failures=0)
    outcome = run_search(widths, str(tmp_path / "wide"), options, RunOptions(), False, QUIET)
    assert outcome.counts["failed"] >= 1
    assert outcome.counts["finished"] >= 1
    failed = load_runs(tmp_path / "wide").query("status == 'failed'")
    assert failed["reason"].str.contains("allocate memory").all()

    lengths = Search("long", tiny, {"steps": Domain("choice", values=(20.0, 10.0**6))})
    options = SearchOptions(
        num_samples=3, algorithm="random", scheduler="none", max_failures=0, heartbeat=8, evaluations=2
    )
    outcome = run_search(lengths, str(tmp_path / "long"), options, RunOptions(), False, QUIET)
    assert outcome.counts["failed"] >= 1
    hung = load_runs(tmp_path / "long").query("status == 'failed'")
    assert hung["reason"].str.contains("hung").all()


@pytest.mark.slow
def test_killed_search_is_resumed_without_repeating_or_losing_a_trial(search, tiny, tmp_path):
    """kill -9 of the driver once two trials have ended, then --resume."""
    results, script = tmp_path / "results", tmp_path / "search.py"
    slow = json.dumps(tiny.replace(steps=120).to_dict())
    script.write_text(
        "import json, sys\nfrom rich.console import Console\nfrom mup_tpu.config import *\n"
        "from mup_tpu.config_search import *\nfrom mup_tpu.config_io import from_dict\n"
        "from mup_tpu.tuning.search import run_search\n"
        f"base = from_dict(Trial, json.loads({slow!r}))\n"
        "search = Search('killed', base, {'learning_rate': Domain('loguniform', 2.0**-10, 2.0**-4)})\n"
        f"run_search(search, {str(results)!r}, SearchOptions(num_samples=8), RunOptions(),\n"
        "           '--resume' in sys.argv, Console())\n"
    )
    driver = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    log, deadline = results / "search.jsonl", time.monotonic() + 240
    while driver.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_text().count('"ended"') >= 2:
            break
        time.sleep(0.2)
    assert driver.poll() is None, "the search ended before it could be killed"
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    before = SearchLog(log)
    assert 2 <= len(before.ended) < 8
    subprocess.run([sys.executable, str(script), "--resume"], check=True, timeout=400)
    after = SearchLog(log)
    assert after.ended == set(range(8))
    assert {k: after.proposals[k] for k in before.proposals} == before.proposals
    ends = Counter(e["key"] for e in after.events if e["event"] == "ended")
    assert set(ends.values()) == {1}
    assert len(load_runs(results)) == 8


def test_two_searches_do_not_write_one_folder(tmp_path):
    with (
        _only_one(tmp_path),
        pytest.raises(StoreError, match="is being written by another search"),
        _only_one(tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda tiny: Search("x", tiny, {}), "space of the search is empty"),
        (lambda tiny: Search("x", tiny, {"lr": Domain(low=0.1, high=1)}), "space of lr: unknown key"),
        (
            lambda tiny: Search("x", tiny, {"warmup": Domain("uniform", 0.0, 40)}),
            "of warmup: warmup 40",
        ),
        (lambda tiny: Domain("loguniform", 0.0, 1.0), "low 0 of a loguniform is not above 0"),
        (lambda tiny: Domain("uniform", 2.0, 1.0), "low 2 is not below high 1"),
        (lambda tiny: Domain("choice"), "values of a choice are empty"),
        (
            lambda tiny: SearchOptions(time_budget="soon"),
            "time_budget 'soon' is not a time",
        ),
        (lambda tiny: SearchOptions(grace=0), "grace 0 is not above 0"),
        (lambda tiny: SearchOptions(num_samples=0), "num_samples 0 is not allowed"),
    ],
)
def test_bad_searches_are_refused_in_one_sentence(make, sentence, tiny):
    with pytest.raises(ConfigError, match=sentence):
        make(tiny)


def test_time_budgets():
    budgets = [SearchOptions(time_budget=t).seconds for t in (None, "90s", "1.5m", "2h")]
    assert budgets == [None, 90, 90, 7200]
