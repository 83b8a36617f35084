"""Searches under a real local Ray Tune: stored, stopped early, and resumed after kills and full disks."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import psutil
import pytest
from rich.console import Console

from mup_tpu import data
from mup_tpu.cli import main
from mup_tpu.cli.sweep import SearchRun, search_and_show
from mup_tpu.config import RunOptions
from mup_tpu.config.search import Domain, Search, SearchOptions
from mup_tpu.devices import peak
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.files import Folder
from mup_tpu.store import load_curves, load_runs
from mup_tpu.training.loop import run_to_end, train_pack
from mup_tpu.tuning.ray_tune import algorithm as new_algorithm
from mup_tpu.tuning.search import run_search
from mup_tpu.tuning.search_log import ReplayedSearcher, SearchLog

QUIET = Console(quiet=True)
SPACE = {
    "learning_rate": Domain("loguniform", 2.0**-12, 2.0**-3),
    "warmup": Domain("uniform", 0.05, 0.4),
    "weight_decay": Domain("choice", values=(0.0, 0.1)),
}

GOOD_HANGING_LARGE = {
    "num_samples": 3, "algorithm": "random", "seed": 6, "scheduler": "none", "max_failures": 0,
    "max_concurrent": 1,
}  # fmt: skip
"""Options with a seed that draws steps and width: few and small, many and small, then large."""


@pytest.fixture(scope="module")
def search(tiny):
    return Search("small_search", tiny, SPACE)


@pytest.fixture(scope="module")
def searched(local_ray, search, tmp_path_factory):
    """Folder of a finished search of 4 trials, in the precision of a CPU that multiplies in bf16."""
    path = tmp_path_factory.mktemp("searched")
    (path.parent / "cpuinfo").write_text("flags : fpu avx512_bf16\n")
    options = SearchOptions(num_samples=4, track=("tensorboard",))
    auto = dataclasses.replace(search, base=search.base.replace(precision="auto"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "_CPUINFO", path.parent / "cpuinfo")
        outcome = run_search(auto, str(path), options, RunOptions(device="cpu"), False, QUIET)
    assert outcome.unfinished == 0
    return path


@pytest.mark.parametrize("algorithm", ["random", "optuna", "hyperopt"])
def test_a_resumed_algorithm_proposes_what_the_uninterrupted_one_would(algorithm, search, tmp_path):
    options = SearchOptions(algorithm=algorithm, seed=3)

    def searcher(path):
        path.mkdir(exist_ok=True)
        return ReplayedSearcher(new_algorithm(search, options), SearchLog(Folder(path)), "loss")

    def go_on(searcher, start, stop):
        points = []
        for i in range(start, stop):
            point = searcher.suggest(f"trial-{i}")
            searcher.on_trial_complete(f"trial-{i}", {"loss": abs(point["learning_rate"] - 0.01)})
            searcher._log.end(point["_key"], abs(point["learning_rate"] - 0.01))
            points.append(point)
        return points

    whole = go_on(searcher(tmp_path / "whole"), 0, 24)
    first = go_on(searcher(tmp_path / "parts"), 0, 15)
    second = go_on(searcher(tmp_path / "parts"), 15, 24)
    assert first + second == whole


def test_proposals_that_had_not_ended_come_first(search, tmp_path):
    options = SearchOptions()
    first = ReplayedSearcher(new_algorithm(search, options), SearchLog(Folder(tmp_path)), "loss")
    proposed = [first.suggest(name) for name in "abc"]
    first._log.end(1, 2.5)
    with (tmp_path / "log").open("a") as file:
        file.write('{"event": "propo')  # torn by a kill
    second = ReplayedSearcher(new_algorithm(search, options), SearchLog(Folder(tmp_path)), "loss")
    assert [second.suggest(name) for name in "de"] == [proposed[0], proposed[2]]
    assert second.suggest("f")["_key"] == 3


def test_a_log_of_another_search_is_refused(search, tiny, tmp_path):
    SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    SearchLog(Folder(tmp_path)).begin(search, SearchOptions(num_samples=99))
    other = Search("small_search", tiny, SPACE | {"warmup": Domain("uniform", 0.1, 0.4)})
    with pytest.raises(ConfigError, match="space of the search differs from .*log"):
        SearchLog(Folder(tmp_path)).begin(other, SearchOptions())
    with pytest.raises(ConfigError, match="algorithm of the search differs from"):
        SearchLog(Folder(tmp_path)).begin(search, SearchOptions(algorithm="random"))


@pytest.mark.slow
def test_every_trial_is_stored_once_with_its_status_curve_and_precision(searched):
    runs, curves = load_runs(searched), load_curves(searched)
    assert len(runs) == 4
    assert set(runs["status"]) <= {"finished", "stopped", "diverged"}
    assert (runs["status"] == "finished").any()
    assert set(runs["trial_id"]) == set(curves["trial_id"])
    assert set(runs["precision"]) == {"bf16"}
    stopped = runs[runs["status"] == "stopped"]
    assert (stopped["steps_done"] < stopped["steps_planned"]).all()
    assert runs["lr"].between(2.0**-12, 2.0**-3).all()
    assert not list((searched / "checkpoints").glob("*"))
    told = {path.parent.name for path in (searched / "tensorboard").rglob("events.out.tfevents.*")}
    assert told == set(runs["trial_id"])


def test_a_search_takes_no_slices(search, tmp_path):
    options = RunOptions(device="xla", placement="slice")
    with pytest.raises(ConfigError, match="placement 'slice' is for sweeps; a search takes"):
        run_search(search, str(tmp_path), SearchOptions(), options, False, Console(quiet=True))


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


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (place, line)
        for place in ("alone", "after the beginning")
        for line in FOREIGN
        if place == "alone" or '"begun", "space"' not in line  # the first beginning counts
    ],
    ids=itertools.count(),
)
def test_a_log_with_lines_that_are_no_events_is_one_sentence_and_stays(line, place, search, tmp_path):
    log = tmp_path / "search.jsonl"
    if place == "after the beginning":
        SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    with log.open("a") as file:
        file.write(line + "\n")
    before = log.read_bytes()
    with pytest.raises(StoreError, match="search log .*search.jsonl cannot be read: "):
        SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    assert log.read_bytes() == before


def test_a_search_from_before_a_field_existed_goes_on(search, tmp_path):
    """The log lacks the field, which then has its default."""
    SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    (event,) = [json.loads(line) for line in (tmp_path / "search.jsonl").read_text().splitlines()]
    del event["base"]["model"]["base_depth"], event["base"]["model"]["architecture"]
    event["base"]["model"]["growing"] = event["base"]["model"].pop("growing_dimension")
    (tmp_path / "search.jsonl").write_text(json.dumps(event) + "\n")
    SearchLog(Folder(tmp_path)).begin(search, SearchOptions())
    other = dataclasses.replace(search, base=search.base.replace(base_depth=4))
    with pytest.raises(ConfigError, match="base of the search differs from"):
        SearchLog(Folder(tmp_path)).begin(other, SearchOptions())


@pytest.mark.slow
def test_killed_search_is_resumed_with_more_samples_and_repeats_or_loses_no_trial(local_ray, tiny, tmp_path):
    """The driver is killed once a trial has ended; the search is resumed in this process."""
    results, script = tmp_path / "results", tmp_path / "search.py"
    search = Search("killed", tiny.replace(steps=120), {"learning_rate": Domain("loguniform", 0.001, 0.06)})
    options = SearchOptions(num_samples=3, max_concurrent=1)
    script.write_text(
        "import json, sys\nfrom rich.console import Console\nfrom mup_tpu.config import *\n"
        "from mup_tpu.config.search import *\nfrom mup_tpu.config.toml import from_dict\n"
        "from mup_tpu.tuning.search import run_search\n"
        f"base = from_dict(Trial, json.loads({json.dumps(search.base.to_dict())!r}))\n"
        "search = Search('killed', base, {'learning_rate': Domain('loguniform', 0.001, 0.06)})\n"
        "options = SearchOptions(num_samples=3, max_concurrent=1)\n"
        f"run_search(search, {str(results)!r}, options, RunOptions(), False, Console())\n"
    )
    driver = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    log = results / "search.jsonl"
    # On a busy machine two more trials end between two looks that are rare.
    wait_for(driver, lambda: log.exists() and '"ended"' in log.read_text(), every=0.02)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    before, stored = SearchLog(Folder(results)), load_runs(results)
    assert 1 <= len(before.ended) < 3
    with pytest.raises(ConfigError, match=f"holds a search of {len(before.proposals)} trials; go on with"):
        run_search(search, str(results), options, RunOptions(), False, QUIET)
    with pytest.raises(ConfigError, match="holds no search to resume"):
        run_search(search, str(tmp_path), options, RunOptions(), True, QUIET)
    more = dataclasses.replace(options, num_samples=4)
    outcome = run_search(search, str(results), more, RunOptions(), True, QUIET)
    assert sum(outcome.counts.values()) == 4 - len(before.ended)
    after = SearchLog(Folder(results))
    assert after.ended == set(range(4))
    assert {k: after.proposals[k] for k in before.proposals} == before.proposals
    ends = Counter(e["key"] for e in after.events if e["event"] == "ended")
    assert set(ends.values()) == {1}
    runs = load_runs(results)
    kept = runs[runs["trial_id"].isin(stored["trial_id"])]
    assert len(runs) == 4 and kept["finished_at"].tolist() == stored["finished_at"].tolist()


def write_search(path, space, base):
    """Write a search for the command line."""
    lines = ['experiment = "from_a_file"', space]
    for part, values in base.to_dict().items():
        lines.append(f"[base.{part}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def search_file(tiny, tmp_path):
    """File of a search whose trials are long enough to be interrupted."""
    space = "space.learning_rate = {low = 0.001, high = 0.03}"
    return write_search(tmp_path / "search.toml", space, tiny.replace(steps=300))


def start_search(file, results, *options):
    """Start `mup-tpu search` in a process of its own."""
    command = [sys.executable, "-m", "mup_tpu", "search", str(file), "--results", str(results), *options]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(process, condition, seconds=240, every=0.1):
    """Wait until the condition holds, while the process lives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended too soon: {process.communicate()[0]}")
        if condition():
            return
        time.sleep(every)
    raise AssertionError("waited too long")


def checkpoints(results):
    return list((results / "checkpoints").glob("search-*/step-*/meta.json"))


TWO_TRIALS = ("--num-samples", "2", "--scheduler", "none", "--evaluations", "30")


@pytest.mark.nightly
def test_ctrl_c_twice_ends_at_once(search_file, tmp_path):
    results = tmp_path / "results"
    process = start_search(search_file, results, *TWO_TRIALS)
    wait_for(process, lambda: checkpoints(results))
    os.kill(process.pid, signal.SIGINT)
    for line in process.stdout:  # two signals at once would count as one
        if "stopping" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "go on with" not in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_ctrl_c_checkpoints_and_says_how_to_go_on(local_ray, tiny, tmp_path, capsys):
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
    search = Search("x", tiny.replace(steps=1500), {"learning_rate": Domain("loguniform", 0.001, 0.03)})
    options = SearchOptions(num_samples=2, scheduler="none", evaluations=30)
    try:
        with pytest.raises(KeyboardInterrupt):
            search_and_show(search, SearchRun(str(results), options=options), "mup-tpu search x.toml")
    finally:
        has_ended.set()
        thread.join()
    output = " ".join(capsys.readouterr().out.split())
    assert "stopping: running trials checkpoint" in output
    assert f"2 trials to go; go on with: mup-tpu search x.toml --results {results} --resume" in output
    assert checkpoints(results)
    assert len(SearchLog(Folder(results)).proposals) == 2


def runs_a_trial(process):
    with contextlib.suppress(psutil.Error):  # it has ended
        # Tune's wrapper of the trial's class has one of these names.
        return process.name().startswith(("ray::TrialTrain", "ray::ResourceTr"))
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")
def test_a_trial_that_hangs_or_is_too_large_is_failed_with_the_reason_and_leaves_no_process(
    local_ray, tiny, tmp_path, patience
):
    """The seed draws one that ends well, one that would train for hours and one too wide for any memory."""
    space = (
        "space.steps = {kind = 'choice', values = [20, 1000000]}\n"
        "space.width = {kind = 'choice', values = [32, 1048576]}"
    )
    file, results = write_search(tmp_path / "search.toml", space, tiny), tmp_path / "results"
    words = {"heartbeat": 3 * patience, "evaluations": 2} | GOOD_HANGING_LARGE
    options = [word for k, v in words.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    with pytest.raises(SystemExit, match="^1$"):
        main(["search", str(file), "--results", str(results), *options])
    runs = load_runs(results).sort_values("width")
    ended = sorted(zip(runs["width"], runs["steps_planned"], runs["status"], strict=True))
    assert ended[:2] == [(32, 20, "finished"), (32, 10**6, "failed")]
    assert [(width, status) for width, _, status in ended[2:]] == [(2**20, "failed")]
    failed = runs[runs["status"] == "failed"].set_index("width")["reason"]
    assert failed[32] == "hung: no evaluation within the heartbeat"
    assert "allocate memory" in failed[2**20]
    left = [p for p in psutil.Process().children(recursive=True) if runs_a_trial(p)]
    assert not psutil.wait_procs(left, timeout=60)[1], "the trial that hung is still there"


@contextlib.contextmanager
def a_worker_killed_at_its_first_checkpoint(results):
    """Kill the only worker of a search in this process, from a thread."""
    killed = []

    def worker():
        return next(filter(runs_a_trial, psutil.Process().children(recursive=True)), None)

    def kill():
        deadline = time.monotonic() + 240
        found = None  # found early: looking for it may take as long as the trial
        while not killed and time.monotonic() < deadline:
            found = found if found and found.is_running() else worker()
            if found and checkpoints(results):
                found.kill()
                killed.append(found.pid)
            time.sleep(0.01 if found else 0.1)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    thread.join()
    assert len(killed) == 1


@pytest.mark.slow
def test_a_killed_worker_s_trial_goes_on_from_its_checkpoint(local_ray, tiny, tmp_path):
    base = tiny.replace(steps=250)
    search = Search("killed_worker", base, {"learning_rate": Domain("choice", values=(0.01,))})
    options = SearchOptions(num_samples=1, evaluations=15, max_failures=1)
    with a_worker_killed_at_its_first_checkpoint(tmp_path):
        outcome = run_search(search, str(tmp_path), options, RunOptions(), False, QUIET)
    assert outcome.counts == {"finished": 1}
    uninterrupted = run_to_end(train_pack([base], data.load(base.data), RunOptions(threads=1)))
    assert load_runs(tmp_path)["loss"].tolist() == [uninterrupted.rows[0]["loss"]]


@pytest.mark.nightly
def test_a_worker_killed_too_often_leaves_a_failed_trial_and_the_rest_goes_on(local_ray, tiny, tmp_path):
    search = Search("killed_worker", tiny.replace(steps=450), SPACE)
    options = SearchOptions(num_samples=2, evaluations=15, max_failures=0, max_concurrent=1, scheduler="none")
    with a_worker_killed_at_its_first_checkpoint(tmp_path):
        outcome = run_search(search, str(tmp_path), options, RunOptions(), False, QUIET)
    assert outcome.counts == {"failed": 1, "finished": 1}
    assert "died" in load_runs(tmp_path).query("status == 'failed'")["reason"].item()


@pytest.fixture
def full_disk(tmp_path):
    """Folder on a disk of 2 MB, which can be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.nightly
def test_a_full_disk_ends_in_a_sentence_and_resume_works_once_there_is_room(
    local_ray, search_file, full_disk, capfd
):
    results, filler = full_disk / "results", full_disk / "filler"
    stored = []
    options = ("--num-samples", "2", "--scheduler", "none", "--max-concurrent", "1", "--evaluations", "4")
    options += ("--max-failures", "0")
    log = results / "search.jsonl"

    def fill():
        """Fill the disk once the first of two trials has ended."""
        deadline = time.monotonic() + 240
        while not (log.exists() and '"ended"' in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        stored.append(load_runs(results))
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"0" * 4096)
                file.flush()

    thread = threading.Thread(target=fill)
    thread.start()
    with pytest.raises(SystemExit, match="^2$"):
        main(["search", str(search_file), "--results", str(results), *options])
    thread.join()
    (before,) = stored
    output = "".join(capfd.readouterr())
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert load_runs(results)["trial_id"].tolist() == before["trial_id"].tolist()

    filler.unlink()
    main(["search", str(search_file), "--results", str(results), *options, "--resume"])
    runs = load_runs(results)
    assert runs["status"].tolist() == ["finished"] * 2
    assert set(before["trial_id"]) <= set(runs["trial_id"])


def test_two_searches_do_not_write_one_folder(tiny, tmp_path):
    with (
        Folder(tmp_path).locked("search.lock"),
        pytest.raises(StoreError, match=r"is being written by another search \(process \d+ of"),
    ):
        run_search(Search("x", tiny, SPACE), str(tmp_path), SearchOptions(), RunOptions(), False, QUIET)


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
            lambda tiny: SearchOptions(budget="soon"),
            "budget 'soon' is not a time",
        ),
        (lambda tiny: SearchOptions(grace=0), "grace 0 is not allowed: it must be above 0"),
        (lambda tiny: SearchOptions(num_samples=0), "num_samples 0 is not allowed"),
    ],
)
def test_bad_searches_are_refused_in_one_sentence(make, sentence, tiny):
    with pytest.raises(ConfigError, match=sentence):
        make(tiny)


def test_budgets():
    budgets = [SearchOptions(budget=t).seconds for t in (None, "90s", "1.5m", "14 min", "2h")]
    assert budgets == [None, 90, 90, 840, 7200]
