"""Searches of somebody's own training: functions and programs, stopped early, killed, taken to a target."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from mup_tpu import Study
from mup_tpu.cli import main
from mup_tpu.cli.watch import Watched
from mup_tpu.config import Domain
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import load_curves, load_runs

QUIET = Console(quiet=True)
SPACE = {"rate": Domain(low=2.0**-10, high=1.0), "batch": {"kind": "choice", "values": [8, 16]}}


def loss_of(trial, step):
    return 3 + (math.log2(trial.rate) + 5) ** 2 / 20 + 1 / step


def train(trial, report):
    """Train 20 steps; after those at which trials are compared, slowly enough to be stopped."""
    for step in range(report.resume_step + 1, 21):
        time.sleep(0.05 if step in (5, 6, 7, 13, 14) else 0)
        report(step=step, steps=trial.told, loss=loss_of(trial, step), saved=True)
    return loss_of(trial, 20)


def study_in(folder, told=20, **search):
    """A search whose trials tell their length, or leave it to be found."""
    options = {"num_samples": 9, "seed": 1} | search
    settings = {"told": told}
    return Study(folder, name="mine", scale={"width": [64]}, space=SPACE, settings=settings, search=options)


@pytest.mark.parametrize(
    ("algorithm", "scheduler", "told"),
    [
        ("hyperopt", "asha", 20),
        ("optuna", "asha", 0),
        pytest.param("random", "median", 20, marks=pytest.mark.nightly),
        pytest.param("bohb", "asha", 20, marks=pytest.mark.nightly),
    ],
)
def test_a_function_is_searched_and_hopeless_trials_are_stopped(algorithm, scheduler, told, tmp_path):
    """Also where only finished trials tell how long a trial is."""
    if algorithm == "bohb":
        pytest.importorskip("hpbandster")
    study = study_in(tmp_path, told, algorithm=algorithm, scheduler=scheduler)
    outcome = study.run(train, workers=2, console=QUIET)
    runs, curves = load_runs(tmp_path), load_curves(tmp_path)
    assert outcome.total() == len(runs) == 9 and outcome["stopped"] and outcome["finished"]
    assert {*runs["batch"]} == {8, 16} and runs["rate"].between(2.0**-10, 1).all()
    stopped = runs[runs["status"] == "stopped"]
    assert stopped["steps_done"].between(4, 19).all()
    last = curves.groupby("trial_id")[["step", "loss"]].last().loc[runs["trial_id"]]
    assert last["step"].tolist() == runs["steps_done"].tolist()
    assert last["loss"].tolist() == runs["loss"].tolist()
    lengths = curves.groupby("trial_id").size().loc[runs["trial_id"]]
    assert lengths.tolist() == runs["steps_done"].tolist(), "each loss is stored"
    assert runs.sort_values("loss")["status"].iloc[0] == "finished"
    assert study.run(train, console=QUIET) == {} and not [*(tmp_path / "work").iterdir()]


def test_a_search_goes_on_with_more_trials_as_if_it_had_not_ended(tmp_path):
    """One worker: the second part knows the rungs of the first."""
    for folder, counts in (("whole", [9]), ("parts", [4, 9])):
        for count in counts:
            study = study_in(tmp_path / folder, algorithm="hyperopt", num_samples=count)
            study.run(train, workers=1, console=QUIET)
            watched = Watched(study.folder)
            assert watched.look() and watched.total == count and watched.is_complete
    points = [json.loads((tmp_path / f / "search.json").read_text())["proposals"] for f in ("whole", "parts")]
    assert points[0] == points[1]
    columns = ["trial_id", "status"]
    whole, parts = (load_runs(tmp_path / f)[columns] for f in ("whole", "parts"))
    # A hopeless trial may do a step more before it is stopped.
    pd.testing.assert_frame_equal(whole, parts)


DRIVER = """
import sys
sys.path.insert(0, {here!r})
from test_search import QUIET, study_in, train
study_in({folder!r}, num_samples=8).run(train, workers=2, console=QUIET)
"""


@pytest.mark.nightly
def test_a_killed_search_loses_no_trial_and_runs_none_twice(tmp_path):
    """By kill -9, again and again; trials go on from what they saved."""
    folder, kills = tmp_path / "out", 0
    code = DRIVER.format(here=str(Path(__file__).parent), folder=str(folder))
    while True:
        driver = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        began = time.monotonic()
        while driver.poll() is None and (kills >= 4 or time.monotonic() - began < 3 + kills):
            time.sleep(0.02)
        if driver.poll() is None:
            os.kill(driver.pid, signal.SIGKILL)
            kills += 1
        _, errors = driver.communicate(timeout=60)
        if driver.returncode == 0:
            break
        assert driver.returncode == -signal.SIGKILL, errors
    proposals = json.loads((folder / "search.json").read_text())["proposals"]
    runs = load_runs(folder)
    rates = sorted(proposal["point"]["rate"] for proposal in proposals)
    assert len(runs) == 8 and runs["rate"].tolist() == rates and {*runs["status"]} <= {"finished", "stopped"}
    counts = load_curves(folder).groupby("trial_id")["step"]
    assert (counts.nunique() == counts.size()).all() and (counts.max() == counts.size()).all()


PROGRAM = """
import math, sys, time
rate, width, steps = float(sys.argv[1]), int(sys.argv[2]), 20
print(f"width {width}, {steps} steps")
for step in range(1, steps + 1):
    time.sleep(0.3 if step in (5, 13) else 0)
    print(f"step {step}/{steps} | loss {3 + (math.log2(rate) + 5) ** 2 / 20 + 1 / step:.4f}", flush=True)
"""
FILE = """
experiment = "program"
trainer = "{python} {folder}/train.py {{rate}} {{width}}"
scale = {{width = [64]}}
space.rate = {{low = "2^-10", high = 1}}
search = {{algorithm = "hyperopt", num_samples = 8}}
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "study.toml").write_text(FILE.format(python=sys.executable, folder=tmp_path))
    return tmp_path / "study.toml"


def test_a_program_is_searched_by_its_log_then_taken_to_a_wider_one(program, capsys):
    main(["search", "study.toml", "--num-samples", "9", "--workers", "2"])
    out = " ".join(capsys.readouterr().out.split())
    runs = load_runs("results/program")
    assert len(runs) == 9 and {*runs["status"]} == {"finished", "stopped"}
    assert "9 of 9 ended" in out and "/results/program --at width=256" in out
    best = runs[runs["status"] == "finished"].nsmallest(1, "loss").iloc[0]
    assert f"best: loss {best['loss']:.4f} nat at rate" in out
    main(["analyze", "results/program", "--figures"])
    assert "best of 9 trials" in capsys.readouterr().out
    assert Path("results/program/figures/search.png").exists()
    trainer = f"{sys.executable} train.py {{rate}} {{width}}"
    main(["transfer", "results/program", "--at", "width=256", "--trainer", trainer])
    (target,) = load_runs("results/program_transfer").to_dict("records")
    assert target["width"] == 256 and target["rate"] == best["rate"] and target["status"] == "finished"


@pytest.mark.nightly
def test_a_search_on_ray_takes_any_training(program, local_ray, monkeypatch):
    main(["search", "study.toml", "--address", "local", "--max-concurrent", "1"])
    assert {*load_runs("results/program")["status"]} == {"finished", "stopped"}
    study_in("function", num_samples=6).run(train, address="local", console=QUIET)
    assert len(load_runs("function")) == 6


def reports_once(trial, report):
    return trial.rate


def test_asha_needs_losses_on_the_way(tmp_path):
    """What has finished is stored; without a scheduler the search goes on."""
    sentence = r"scheduler 'asha' stops trials by .* Trial\(width=64.* reported none"
    with pytest.raises(ConfigError, match=sentence):
        study_in(tmp_path).run(reports_once, workers=1, console=QUIET)
    assert len(load_runs(tmp_path)) == 1
    assert study_in(tmp_path, scheduler="none", num_samples=3).run(reports_once, console=QUIET).total() == 2


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"space": {}}, "space {} is not names with domains"),
        ({"space": {"rate": {"kind": "choice", "values": [1]}}}, r"space of rate: values .* leave nothing"),
        ({"space": {"rate": {"low": 1, "high": 1}}}, "space of rate: low 1 is not below high 1"),
        ({"space": {"loss": {"low": 1, "high": 2}}}, "name 'loss' is not allowed"),
        ({"scale": {"width": [64, 128]}}, "scale with 2 points: a search has one size"),
        ({"seeds": 2}, "several num_seeds: a search has one size and one seed"),
        ({"tune": {"rate": [1, 2]}}, "tune is for a sweep, and space for a search"),
        ({"compare": {"rule": ["a", "b"]}}, "compare is for a sweep"),
        ({"search": {"algorithm": "grid"}}, "search: algorithm 'grid' is not one of 'random', 'hyperopt'"),
        ({"search": {"trials": 3}}, "search: unknown key 'trials'"),
        ({"space": None, "tune": {"rate": [1, 2]}}, "needs a space"),
    ],
)
def test_what_is_wrong_with_a_search_is_one_sentence(changed, sentence, tmp_path):
    arguments = {"scale": {"width": [64]}, "space": SPACE, "search": {"num_samples": 4}} | changed
    with pytest.raises(ConfigError, match=sentence):
        Study(tmp_path, **arguments)


def test_what_a_search_cannot_do_is_one_sentence(program, tmp_path, outcome):
    study = study_in(tmp_path / "x", num_samples=2)
    with pytest.raises(ConfigError, match="a search gives no trials away"):
        study.ask()
    with pytest.raises(ConfigError, match="until_settled is for a sweep"):
        study.run(train, until_settled=True)
    study.run(train, workers=2, console=QUIET)
    with pytest.raises(ConfigError, match="seed of the search differs from that in .*search.json"):
        study_in(tmp_path / "x", seed=2).run(train, console=QUIET)
    with pytest.raises(StoreError, match="holds runs with told 20, and this study has 0"):
        study_in(tmp_path / "x", told=0).run(train, console=QUIET)
    code, _, err = outcome("sweep", "study.toml")
    assert code == 2
    assert "study.toml is the file of a search, not of a sweep: `mup-tpu search study.toml`" in err
    program.with_name("train.py").write_text("print('hello')")
    code, _, err = outcome("search", "study.toml")
    assert code == 2 and "no line of the output has a loss" in err
    text = program.read_text()
    program.write_text(text.replace("space.rate", "tune.rate").replace("search =", "settings ="))
    code, _, err = outcome("search", "study.toml")
    assert code == 2, err
