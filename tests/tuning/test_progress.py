"""Bars of a sweep on a terminal: stored trials, and what first reports wait for."""

import io
import math
import os
import shutil

import pytest
from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.jobs.driver import Finished, Preparing, Started, run_jobs
from mup_tpu.jobs.pack_job import PackJob
from mup_tpu.jobs.pools import InProcess
from mup_tpu.store import Store
from mup_tpu.training.record import PackProgress
from mup_tpu.tuning.progress import TrialProgress, cost, starting
from mup_tpu.tuning.runner import Corpora, Packs


def terminal() -> Console:
    """Terminal without colours, on which a bar has one character for each part that is done."""
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)


@pytest.fixture(scope="module")
def shown(tiny, tmp_path_factory) -> list[tuple[object, list[str]]]:
    """Events of a sweep of two sizes, a pack each, run in this process; and the lines shown after each."""
    corpus = shutil.copytree(tiny.data.corpus, tmp_path_factory.mktemp("new") / "corpus")
    tiny = tiny.replace(corpus=str(corpus), width=32, steps=20)
    packs = [[tiny.replace(width=width, seed=s) for s in range(2)] for width in (32, 64)]
    options = RunOptions(threads=os.cpu_count() or 1, log_every=5)
    console, found = terminal(), []
    trials = [trial for pack in packs for trial in pack]
    store = Store(str(tmp_path_factory.mktemp("results")), "shown")
    kind = Packs(store, Corpora(), ("width",), SweepOptions(), options, console)
    progress = TrialProgress(trials, kind.size, kind.work, console)
    jobs = [PackJob(pack, options) for pack in packs]
    with InProcess(None) as pool:
        for job, event in run_jobs(jobs, pool, SweepOptions.heartbeat):
            match event:
                case Started():
                    progress.update(job, "starting")
                case Preparing():
                    progress.update(job, event.doing)
                case PackProgress():
                    progress.update(job, report=event)
                case Finished():
                    progress.ended(job, event.result.rows)
            with console.capture() as captured:
                console.print(progress)
            found.append((event, captured.get().splitlines()))
    return found


@pytest.mark.parametrize(
    "seconds, price, words",
    [(7.46, math.nan, "7.5 s"), (10800, math.nan, "3.0 h"), (10800, 2.5, "3.0 h, 7.50 at 2.5/h")],
)
def test_a_cost_is_time_and_money_where_an_hour_has_a_price(seconds, price, words):
    assert cost(seconds, price) == words
    assert starting("2 trials", seconds, price).startswith(
        f"2 trials, about {words} of training; Ctrl-C stops"
    )


def test_a_bar_says_what_a_pack_does_and_grows_with_its_steps(shown):
    words, line = [], 0
    for event, lines in shown:
        match event:
            case Preparing():
                assert event.doing in lines[line] and "━" not in lines[line]
                words.append(event.doing)
            case PackProgress():
                assert "k tokens/s" in lines[line]
                assert lines[line].count("━") / 24 == pytest.approx(event.step / event.steps, abs=1 / 24)
            case Finished():
                assert "2 finished" in lines[line]
                line += 1
                assert f"{2 * line}/4 trials" in lines[2]
    assert {"initialising parameters", "first steps"} < set(words)


def test_work_of_a_running_pack_counts_as_much_as_once_it_has_ended(shown):
    bars = [(type(event), lines[2].count("━") / 24) for event, lines in shown]
    first_end = [kind for kind, _ in bars].index(Finished)
    (last_kind, last), (_, ended) = bars[first_end - 1], bars[first_end]
    assert last_kind is PackProgress and 0 < ended < 1
    assert last == pytest.approx(ended, abs=1 / 24)


def test_a_log_file_has_a_line_for_each_job(tiny):
    out = io.StringIO()
    trials = [tiny.replace(seed=seed) for seed in range(2)]
    progress = TrialProgress(trials, lambda t: "width 32", lambda t: 1.0, Console(file=out, width=80))
    for k, trial in enumerate(trials):
        job = PackJob([trial], RunOptions())
        progress.update(job, "starting")
        progress.ended(job, [{"status": "finished", "loss": 2.5, "seed": k}])
    first, second = out.getvalue().splitlines()
    assert first.startswith("width 32, seed 0: loss 2.5000; 1 of 2 trials stored")
    assert second == "width 32, seed 1: loss 2.5000; 2 of 2 trials stored"
