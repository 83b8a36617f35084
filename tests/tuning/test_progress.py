"""Bars of a sweep on a terminal: stored trials, and what first reports wait for."""

import io
import os
import shutil
from types import SimpleNamespace

import pytest
from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.jobs.driver import Finished, Preparing, Started, run_jobs
from mup_tpu.jobs.pack_job import PackJob
from mup_tpu.jobs.pools import InProcess
from mup_tpu.store import Store
from mup_tpu.training.record import Report
from mup_tpu.tuning.progress import TrialProgress
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
                    progress.started(job)
                case Preparing():
                    progress.update(job, event.doing)
                case Report():
                    progress.update(job, report=event)
                case Finished():
                    progress.ended(job, event.result.rows)
            with console.capture() as captured:
                console.print(progress)
            found.append((event, captured.get().splitlines()))
    return found


def test_before_its_first_report_a_pack_says_what_it_waits_for(shown):
    words, line = [], 0
    for event, lines in shown:
        if line == 0:
            assert lines[1].rstrip().endswith("waiting for a worker") and "━" not in lines[1]
        match event:
            case Preparing():
                assert event.doing in lines[line] and "━" not in lines[line]
                words.append(event.doing)
            case Report():
                assert "k tokens/s" in lines[line] and words[-1] not in lines[line]
                assert lines[2].startswith("all ")
                assert lines[2].rstrip().endswith(" left") or event.step == event.steps
            case Finished():
                line += 1
    if "importing torch" in words:  # unless another test of this process has imported it
        assert words.pop(0) == "importing torch"
    first, second = words[:3], words[3:]
    for before in (first[0], second[0]):
        assert before.startswith("reading ") and before.endswith("/corpus")
    assert first[1:] == second[1:] == ["initialising parameters", "first steps"]


def test_work_of_a_running_pack_counts_as_much_as_once_it_has_ended(shown):
    bars = [(type(event), lines[2].count("━") / 24) for event, lines in shown]
    first_end = [kind for kind, _ in bars].index(Finished)
    (last_kind, last), (_, ended) = bars[first_end - 1], bars[first_end]
    assert last_kind is Report and 0 < ended < 1
    assert last == pytest.approx(ended, abs=1 / 24)


def test_trials_count_once_they_are_stored_while_the_bar_grows_with_their_steps(shown):
    lengths = []
    for event, (first, *_) in shown:
        stored = "2/2 trials" if isinstance(event, Finished) else "0/2 trials"
        assert stored in first
        if isinstance(event, Report):
            lengths.append(first.count("━") / 24)
            assert lengths[-1] == pytest.approx(event.step / event.steps, abs=1 / 24)
        if isinstance(event, Finished):
            break
    assert len(lengths) == 4
    for line, stored in zip(shown[-1][1], ("2/2", "2/2", "4/4"), strict=True):
        assert f"{stored} trials" in line


def test_the_time_left_is_that_of_training_and_not_of_compiling(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("mup_tpu.tuning.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    job = PackJob([Trial(), Trial()], RunOptions())
    rates = SimpleNamespace(seconds_left=3.0, tokens_per_second=1e3)
    progress = TrialProgress(job.trials, lambda t: "width 64", lambda t: 1.0, terminal())
    progress.started(job)
    clock.now += 30.0
    progress.update(job, report=Report(10, 500, (2.0, 2.0), None, (0.1, 0.1), ("running",) * 2, rates))
    with progress.console.capture() as captured:
        progress.console.print(progress)
    assert captured.get().splitlines()[-1].rstrip().endswith("30 s, 3 s left")
