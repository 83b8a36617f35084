"""Studies: functions that are run, misbehave, are killed, and come to the table of a run left alone."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import psutil
import pytest
import trainers
from rich.console import Console

import mup_tpu
from mup_tpu import Study, octaves
from mup_tpu.analysis import Reading, load_table
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.files import Folder
from mup_tpu.internals.processes import cores
from mup_tpu.store import Store, load_curves, load_runs
from mup_tpu.study.report import Ending, Report, StudyTrial
from mup_tpu.study.trainer import fingerprint

QUIET = Console(quiet=True)
RULES = ("stays", "moves")


def valley_study(folder, **changes):
    grid = {
        "scale": {"width": [256, 512, 1024]}, "tune": {"lr": octaves(-9, -4)}, "compare": {"rule": RULES},
    }  # fmt: skip
    return Study(folder, **(grid | changes))


def one_trial(folder, **more):
    return Study(folder, scale={"width": [64]}, tune={"lr": [0.5]}, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of the whole grid, run once."""
    folder = tmp_path_factory.mktemp("studies") / "valley"
    assert valley_study(folder).run(trainers.valley, workers=2, console=QUIET) == {"finished": 36}
    return folder


def test_a_script_s_cached_function_goes_to_its_workers(tmp_path):
    """Functions under functools.cache have no code of their own, so that pickle takes them by name."""
    script = {"__name__": "__main__"}
    code = "import functools\n@functools.cache\ndef data():\n    return 3.0\ndef train(trial, report):\n"
    exec(code + "    return data() + data() + data.cache_info().hits", script)
    study = one_trial(tmp_path)
    assert study.run(script["train"], workers=1, console=QUIET) == {"finished": 1}
    assert study.to_frame()["loss"].tolist() == [7.0]


def test_a_function_gets_its_verdicts_and_its_figures(whole):
    study = valley_study(whole)
    judged, predicted = study.verdict(), study.predict(width=8192)
    results = {r.compared: r for r in judged.results}
    assert results["stays"].verdict.decision == "TRANSFERS"
    assert results["moves"].verdict.decision == "DRIFTS"
    assert results["moves"].drift.low < -1 < results["moves"].drift.high
    assert str(judged).count(": TRANSFERS: best learning rate") == 1
    for rule, optimum in (("stays", -6), ("moves", -11)):
        low, high = predicted.of(rule).interval
        assert low < optimum < high < optimum + 5
    assert study.plot("optimum").axes
    frame = judged.to_frame()
    assert frame["rule"].tolist() == ["moves"] * 3 + ["stays"] * 3 and set(frame["width"]) == {256, 512, 1024}
    assert frame.set_index(["rule", "width"]).loc[("stays", 256), "x"] == pytest.approx(-6, abs=0.3)
    assert predicted.to_frame().set_index("rule").loc["stays", "x"] == pytest.approx(-6, abs=1)
    assert len(study.to_frame()) == 36
    for shown in (study, judged, predicted):
        assert shown._repr_html_().count("<tr") > 2
    with pytest.raises(ConfigError, match="plot 'nothing' is not one of transfer"):
        study.plot("nothing")


def test_a_loss_of_another_unit_has_its_own_epsilon(whole):
    study = valley_study(whole)
    usual, other, given = (study.verdict(**k) for k in ({}, {"unit": "MSE"}, {"epsilon": 0.5, "unit": "MSE"}))
    assert "nat" in str(usual)
    for shown in (other, given):
        assert " MSE at width 1024" in str(shown) and " nat " not in str(shown)
    assert other.epsilon != usual.epsilon == 0.01 and given.epsilon == 0.5
    assert study.predict(epsilon=0.5, unit="MSE", width=8192).analysis.epsilon == 0.5
    with pytest.raises(ConfigError, match="epsilon 0"):
        study.verdict(epsilon=0)


def test_rows_and_trackers_have_the_study_s_own_names(tmp_path):
    study = valley_study(tmp_path, scale={"width": [256]})
    study.run(trainers.valley, workers=1, track=("tensorboard",), console=QUIET)
    runs = load_runs(tmp_path)
    assert {"width", "lr", "rule", "seed", "loss"} <= set(runs) and "depth" not in runs
    assert runs["width"].dtype == "int64" and runs["lr"].dtype == "float64"
    by_id = {trial.id: trial for trial in study.trials()}
    for row in runs.to_dict("records"):
        trial = by_id[row["trial_id"]]
        assert (row["width"], row["lr"], row["rule"]) == (trial.width, trial.lr, trial.rule)
        assert row["loss"] == trainers.valley(trial)
    told = load_table(tmp_path / "tensorboard", Reading(Columns(parametrization="hparams/rule"))).runs
    key, runs = ["compared", "scale", "x", "seed"], load_table(tmp_path).runs
    both = [table.sort_values(key)[[*key, "loss"]].reset_index(drop=True) for table in (told, runs)]
    pd.testing.assert_frame_equal(*both, check_dtype=False, rtol=1e-6)
    with pytest.raises(ConfigError, match="track 'nothing' needs its package"):
        study.run(trainers.valley, track=("nothing",), console=QUIET)


def test_the_same_lines_again_run_nothing_and_more_values_run_alone(whole, tmp_path):
    assert not valley_study(whole).run(trainers.valley, console=QUIET)
    study = valley_study(tmp_path, scale={"width": [256]}, tune={"lr": [1, 2]}, name="more")
    assert study.run(trainers.valley, workers=1, console=QUIET) == {"finished": 4}
    wider = valley_study(tmp_path, scale={"width": [256.0]}, tune={"lr": [1, 2, 0.5]}, name="more")
    assert wider.run(trainers.valley, workers=1, console=QUIET) == {"finished": 2}
    assert load_runs(tmp_path)["lr"].tolist() == [0.5, 1, 2] * 2


def test_a_study_is_bought_until_it_is_settled(tmp_path):
    study = valley_study(tmp_path)
    study.run(trainers.valley, until_settled=True, workers=2, console=QUIET)
    decisions = {r.compared: r.verdict.decision for r in study.verdict().results}
    assert decisions == {"stays": "TRANSFERS", "moves": "DRIFTS"}
    runs = load_runs(tmp_path)
    assert runs["purchase"].min() == 1 and set(runs.loc[runs["purchase"] == 1, "width"]) == {256}
    assert load_table(tmp_path).planned == (256, 512, 1024)
    assert not study.run(trainers.valley, until_settled=True, workers=2, console=QUIET)


def test_a_trial_is_a_value():
    """Stored rows are found by its id."""
    (trial,) = one_trial("unused", settings={"steps": np.int64(3), "data": "x"}).trials()
    assert (trial.width, trial.lr, trial.steps, trial.data, trial.seed) == (64, 0.5, 3, "x", 0)
    assert type(trial.steps) is int
    assert {trial: 1}[StudyTrial("unused", trial.values)] == 1
    assert StudyTrial("unused", trial.values | {"width": 64.0}) == trial
    others = [StudyTrial("other", trial.values), StudyTrial("unused", trial.values | {"steps": 4})]
    assert trial not in others and len({trial.id, *(other.id for other in others)}) == 3
    with pytest.raises(AttributeError, match="cannot be changed"):
        trial.width = 128
    with pytest.raises(AttributeError, match="trial has no 'depth'; it has width, lr, steps, data, seed"):
        _ = trial.depth
    known = StudyTrial("mine", {"width": 64, "lr": 0.5, "rule": "mup", "tied": True, "seed": 0})
    assert known.id == "49dc513d14dfd2fd"


MISBEHAVIOUR = {
    "raises": ("failed", "ValueError: no such layer"),
    "floods": ("failed", "ValueError: no such layer"),
    "nan": ("diverged", None),
    "inf": ("diverged", None),
    "text": ("failed", "the returned loss '2.5' is str, not a number"),
    "many": ("failed", "the returned loss array([0., 0., 0.]) is not one number"),
    "exits": ("failed", "exit code 7 and no result"),
    "sysexit": ("failed", "SystemExit: 3"),
    "bad report": ("failed", "step 'two' is str, not a number"),
    "killed": ("failed", "killed by signal 9, the last of 3 attempts"),
    "hangs": ("failed", "no report within the heartbeat"),
    "slow": ("failed", "no result within the time-out of"),
    "parent": ("finished", None),
    "loud": ("finished", None),
    # They harm the processes, pipes and output that they find.
    "kills its group": ("failed", "killed by signal 9, the last of 3 attempts"),
    "terminates its group": ("failed", "got a SIGTERM of its own, the last of 3 attempts"),
    "tears a message": ("failed", "no result within the time-out"),
    "writes into the pipe": ("failed", "wrote to a pipe of mup_tpu"),
    "floods the pipe": ("failed", "wrote to a pipe of mup_tpu"),
    "closes all": ("failed", "exit code 1 and no result"),
    "kills its parent": ("failed", "its process died (exit code -9), the last of 3 attempts"),
    "bad text": ("failed", r"ValueError: \udc80"),
    "steps as text": ("failed", "TypeError: steps '10' is str, not a number"),
    "step of 64 bits": ("failed", "TypeError: step 9.22337e+18 is not a whole number from 0 to"),
    "loss of many digits": ("failed", "too large for a number of 64 bits"),
    "many digits": ("failed", "too large for a number of 64 bits"),
    "closes its output": ("finished", None),
    "closes file 1": ("finished", None),
    "leaves a session": ("finished", None),
}


def test_functions_that_misbehave_have_rows_and_the_others_go_on(tmp_path, patience):
    study = one_trial(tmp_path, compare={"how": [*MISBEHAVIOUR, "is well"]})
    begun, limits = time.monotonic(), {"timeout": f"{6 * patience}s", "heartbeat": 3.0 * patience}
    study.run(trainers.misbehave, workers=4, console=QUIET, **limits)
    runs = load_runs(tmp_path).set_index("how")
    assert 0 < runs["wall_time_s"].max() < time.monotonic() - begun
    for how, (status, reason) in (MISBEHAVIOUR | {"is well": ("finished", None)}).items():
        row = runs.loc[how]
        assert row["status"] == status and (reason is None or reason in row["reason"]), how
        loss = {"finished": 2.5, "diverged": math.inf}.get(status, math.nan)
        assert row["loss"] == pytest.approx(loss, nan_ok=True)
    assert (tmp_path / "work" / runs.loc["killed", "trial_id"] / "attempts").read_text() == "xxx"
    output = {how: f"output/{runs.loc[how, 'trial_id']}.txt" for how in runs.index}
    assert "second line" in (tmp_path / output["raises"]).read_text()
    assert runs.loc["raises", "reason"].endswith(f"| second line ({output['raises']})")
    for how in ("raises", "floods"):  # on one line without escapes, whatever else goes on printing
        reason = runs.loc[how, "reason"]
        assert reason.startswith("ValueError: no such layer; output: ") and reason.isprintable()
        assert reason.endswith(f" ({output[how]})") and len(reason) < 1000
    assert 2**20 <= (tmp_path / output["loud"]).stat().st_size < 2**20 + 100, "it is cut"
    left = [int(pid) for name in ("children", "left") for pid in (tmp_path / name).read_text().split()]
    assert not [p for p in left if psutil.pid_exists(p) and psutil.Process(p).status() != "zombie"]


def test_a_trainer_that_changed_since_rows_were_stored_is_said(tmp_path, capsys):
    (tmp_path / "train.py").write_text("print(1.5)")
    runs = [
        ("print(1.5)", [0.5], False),
        ("print(1.5) # x", [0.5, 1], False),
        ("print(2.5)", [0.5, 1, 2], True),
    ]
    for text, lr, is_said in runs:
        (tmp_path / "train.py").write_text(text)
        study = Study(tmp_path / "one", scale={"width": [64]}, tune={"lr": lr})
        study.run(f"{sys.executable} {tmp_path}/train.py {{width}} {{lr}}", workers=1)
        printed = " ".join(capsys.readouterr().out.split())
        assert ("the trainer has changed since 2 of the rows" in printed) == is_said
    assert load_runs(tmp_path / "one")["loss"].tolist() == [1.5, 1.5, 2.5]
    assert fingerprint(trainers.valley) == fingerprint(trainers.gpu) != fingerprint(test_a_trial_is_a_value)


def test_a_trial_is_not_ended_before_it_could_save(tmp_path):
    """The signal comes after the function has looked at `ending`, while it reports."""
    report = Report(str(tmp_path), lambda reported: setattr(report, "ending", True))
    report(step=1, saved=report.ending)
    assert report.ending and not list(tmp_path.iterdir())
    with pytest.raises(Ending):
        report(step=2, saved=report.ending)
    assert Report(str(tmp_path), print).resume_step == 2
    other = Report(str(tmp_path), lambda reported: setattr(other, "ending", True))
    other(step=3)
    with pytest.raises(Ending):  # a function that never looks is ended too
        other(step=4)


def test_each_gpu_has_a_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("mup_tpu.jobs.this_machine.gpus_of_the_machine", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    study = Study(tmp_path, scale={"width": [64]}, tune={"lr": [1.0]}, seeds=6)
    study.run(trainers.gpu, console=QUIET)
    assert set(load_runs(tmp_path)["loss"]) == {0.0, 1.0}


def test_an_import_in_a_function_is_made_once_a_worker(tmp_path):
    study = Study(tmp_path, scale={"width": [64]}, tune={"lr": [0.5, 1.0, 2.0]})
    study.run(trainers.imports, workers=1, console=QUIET)
    assert sorted(load_runs(tmp_path)["loss"]) == [1.0, 1.0, 2.0]


def test_libraries_of_functions_share_the_cores(tmp_path, monkeypatch):
    for name in (names := ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")):
        monkeypatch.delenv(name, raising=False)
    train = lambda trial, report: sum(int(os.environ[name]) for name in names)  # noqa: E731
    one_trial(tmp_path).run(train, workers=1, console=QUIET)
    assert load_runs(tmp_path)["loss"].tolist() == [3 * cores()]


RUN = """
import sys, trainers
from mup_tpu import Study
Study.load(sys.argv[1]).run(getattr(trainers, sys.argv[2]), workers=int(sys.argv[3]))
"""


def killed_study(folder):
    """A study of six trials of about a second."""
    return Study(
        folder, scale={"width": [256, 512]}, tune={"lr": octaves(-7, -5)}, compare={"rule": ["stays"]},
        settings={"pause": 0.02}, name="killed",
    )  # fmt: skip


def start(folder, train="resumable", workers=2):
    """Start a driver of the study; what it prints is on its standard output."""
    killed_study(folder).to_frame()  # writes the folder
    words = [sys.executable, "-c", RUN, folder, train, str(workers)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def starts(folder):
    """Return the step of each start of a function, its process and the worker."""
    lines = [line for file in folder.glob("starts-*") for line in file.read_text().splitlines()]
    return [tuple(map(int, line.split())) for line in lines]


def wait_for_functions(driver, folder, are_there):
    """Wait for a function that runs, and return it and its worker; or wait for the end of all."""
    deadline = time.monotonic() + 240
    while bool(running := [of for _, *of in starts(folder) if psutil.pid_exists(of[0])]) != are_there:
        assert time.monotonic() < deadline and (driver.poll() is None or not are_there)
        time.sleep(0.02)
    return running[-1] if running else None


def table(folder):
    """Return rows without what differs from run to run."""
    return load_runs(folder).drop(columns=["wall_time_s", "finished_at"])


def kill(whom, driver, folder):
    """Kill in the middle of a trial."""
    while True:
        function, worker = wait_for_functions(driver, folder, True)
        time.sleep(0.2)
        with contextlib.suppress(ProcessLookupError):  # it had just ended
            os.kill({"worker": worker, "function": function}[whom], signal.SIGKILL)
            return


ENDS = {
    signal.SIGKILL: "", signal.SIGINT: "stopped; finished trials are stored",
    signal.SIGTERM: "the same command goes on",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ends", [[signal.SIGKILL], pytest.param([*ENDS], marks=pytest.mark.nightly)])
def test_kills_leave_the_table_of_a_run_that_was_left_alone(ends, tmp_path):
    """Drivers are killed, interrupted and ended; then a worker and a function of another one."""
    alone, killed = tmp_path / "alone" / "killed", tmp_path / "killed"
    assert killed_study(alone).run(trainers.resumable, workers=2, console=QUIET) == {"finished": 6}
    for sent in ends:
        driver = start(killed)
        wait_for_functions(driver, killed, True)
        driver.send_signal(sent)
        output = driver.communicate(timeout=240)[0]
        assert driver.returncode and ENDS[sent] in output, output
        wait_for_functions(driver, killed, False)
    driver = start(killed)
    for one in ("worker", "function"):
        kill(one, driver, killed)
    output = driver.communicate(timeout=240)[0]
    wait_for_functions(driver, killed, False)
    assert driver.returncode == 0, output
    assert load_runs(killed)["status"].eq("finished").all()
    pd.testing.assert_frame_equal(table(killed), table(alone))
    pd.testing.assert_frame_equal(load_curves(killed), load_curves(alone))
    assert len(starts(killed)) > 6 and {step % 10 for step, *_ in starts(killed)} == {0}
    assert not list((killed / "work").iterdir())


@pytest.mark.slow
def test_a_function_has_time_to_save_once_more_when_its_machine_is_taken_away(tmp_path):
    driver = start(tmp_path / "one", train="sleepy", workers=1)
    deadline = time.monotonic() + 120
    # The signal comes in the midst of steps: before the second one a busy machine may not have begun to save.
    while not (steps := [f for f in tmp_path.glob("one/work/*/step") if f.read_text() not in ("", "0", "1")]):
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.05)
    driver.terminate()
    driver.wait(60)
    (row,) = load_runs(tmp_path / "one").to_dict("records")
    assert row["status"] == "preempted"
    resume = json.loads((steps[0].parent / "resume.json").read_text())
    assert resume["step"] == int(steps[0].read_text()) == row["steps_done"]


def of_lengths(folder, **changes):
    points = [{"width": 64, "steps": steps} for steps in (8, 2, 4)] + [{"width": 128, "steps": 3}]
    grid = {"scale": points, "measured_by": "steps", "tune": {"rate": [0.1, 0.2]}, "continued": "steps"}
    return Study(folder, **(grid | changes))


@pytest.mark.parametrize("kind", ["function", "program"])
def test_longer_runs_go_on_from_shorter_ones_of_their_size(kind, tmp_path):
    """Widths 64 at 2, 4 and 8 steps cost 8 in all, 128 its own 3; losses are those of whole runs."""
    program = f"{sys.executable} {trainers.__file__} {{folder}} {{steps}} {{rate}}"
    train = trainers.constant_rate if kind == "function" else program
    study = of_lengths(tmp_path / "s")
    assert study.run(train, workers=2, console=QUIET) == {"finished": 8}
    done = [line.split() for line in (tmp_path / "s" / "steps_done").read_text().splitlines()]
    made = {"function": len(done), "program": sum(int(steps) for _, steps in done)}[kind]
    assert made == 2 * (8 + 3), "and not 2 · (2 + 4 + 8 + 3)"
    for row in load_runs(tmp_path / "s").itertuples():
        assert row.loss == pytest.approx((10 * (1 - row.rate) ** row.steps) ** 2)
    assert Study.load(tmp_path / "s").grid.continued == "steps"
    kept = {(t.width, t.steps) for t in study.trials() if t.id in os.listdir(tmp_path / "s" / "work")}
    assert kept == {(64, 2), (64, 4), (128, 3)}, "what no longer run needs is removed"
    more = of_lengths(tmp_path / "s", scale=[*study.grid.points, {"width": 64, "steps": 10}])
    assert more.run(train, workers=2, console=QUIET) == {"finished": 2}
    done = [line.split() for line in (tmp_path / "s" / "steps_done").read_text().splitlines()]
    assert {"function": len(done), "program": sum(int(n) for _, n in done)}[kind] == made + 2 * (10 - 4)


@pytest.mark.parametrize("spoiled", ["diverged", "resume.json", "state.json"])
def test_longer_runs_do_not_go_on_from_a_diverged_or_damaged_one(spoiled, tmp_path, caplog):
    """The driver was killed between the row of a diverged run and the removal of its folder."""
    longer = of_lengths(tmp_path, scale=[{"steps": steps} for steps in (2, 4, 8)], tune={"rate": [0.1]})
    two, four, eight = longer.trials()
    longer.tell(four, math.inf if spoiled == "diverged" else 1.0)
    work = tmp_path / "work" / four.id
    work.mkdir(parents=True)
    (work / "x").write_text("nan")
    (work / "resume.json").write_text(json.dumps({"step": 4, "points": [], "stride": 1, "seen": 0}))
    (work / "log.json").write_text('{"step": 1}\n{"step": 2}\n')  # JSON lines are whole
    if spoiled != "diverged":
        (work / spoiled).write_text('{"step": 4, "x": ')
    longer.run(trainers.constant_rate, workers=1, console=QUIET)
    assert len((tmp_path / "steps_done").read_text().splitlines()) == 2 + (8 - 2), "from the shortest"
    damage = "" if spoiled == "diverged" else f"{spoiled} is damaged: longer runs do not go on"
    assert damage in caplog.text and ("is damaged" in caplog.text) == bool(damage)
    assert longer.shorter(eight) == two


def test_longer_runs_are_given_once_the_shorter_have_a_loss(tmp_path):
    study = of_lengths(tmp_path)
    first = study.ask(100)
    assert {(t.width, t.steps) for t in first} == {(64, 2), (128, 3)} and study.ask(100) == []
    study.tell(first[0], 1.0)
    (second,) = study.ask(100)
    assert (second.steps, second.rate) == (4, first[0].rate) and study.shorter(second) == first[0]
    assert study.shorter(first[0]) is None


def test_two_drivers_of_one_study_and_another_study_are_refused(whole, tmp_path):
    lock = Folder(str(whole)).locked("driver.lock")
    with lock, pytest.raises(StoreError, match="is being run by another process; wait"):
        valley_study(whole).run(trainers.valley, console=QUIET)
    before = table(whole)
    with pytest.raises(StoreError, match="holds a study of lr by width, comparing rule, not of lr by depth"):
        valley_study(whole, scale={"depth": [1, 2, 4]}).run(trainers.valley, console=QUIET)
    with pytest.raises(StoreError, match="holds a study of width, rule, lr, not of width, rule, lr, steps"):
        valley_study(whole, settings={"steps": 3}).run(trainers.valley, console=QUIET)
    with pytest.raises(StoreError, match="width is a whole number|rule is text, and this study's is true or"):
        valley_study(whole, compare={"rule": [True, False]}).run(trainers.valley, console=QUIET)
    with pytest.raises(StoreError, match="holds experiment 'valley', not 'other'"):
        valley_study(whole, name="other").run(trainers.valley, console=QUIET)
    with pytest.raises(StoreError, match="holds a study of lr by width"):
        Store(whole, "valley", mup_tpu.config.Axes())
    pd.testing.assert_frame_equal(table(whole), before)


def test_a_definition_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "study.json").write_text("[" * 100_000)
    with pytest.raises(
        StoreError, match=r"study\.json cannot be read: (maximum recursion depth|Stack overflow)"
    ):
        Study.load(tmp_path)


def test_other_settings_are_refused(tmp_path):
    def study(steps):
        return valley_study(tmp_path, scale={"width": [256]}, tune={"lr": [1.0]}, settings={"steps": steps})

    study(3).run(trainers.valley, workers=1, console=QUIET)
    with pytest.raises(StoreError, match="holds runs with steps 3, and this study has 4"):
        study(4).run(trainers.valley, workers=1, console=QUIET)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"scale": {"width": []}}, "scale width .* is not a list of values"),
        ({"scale": {"width": [64, -1]}}, "scale width -1 is not allowed: it must be above 0"),
        ({"scale": {"a b": [64]}}, "name 'a b' is not allowed: it must be a word"),
        ({"scale": {"loss": [64]}}, "name 'loss' is not allowed: every run has its own"),
        ({"scale": [{"a": 1}, {"b": 1}]}, "does not set a as the first does"),
        ({"scale": [{"a": 1, "b": 1}, {"a": 1, "b": 2}]}, "two points have the same a"),
        ({"measured_by": "depth"}, "measured_by 'depth' is not one of 'width'"),
        ({"tune": {"lr": [1], "wd": [1]}}, "lr has fewer than three values: hyperparameters"),
        ({"tune": {"lr": ["a"]}}, "tune lr 'a' is not a number; write"),
        ({"tune": {"lr": [math.nan]}}, "tune lr nan is not allowed"),
        ({"tune": {"lr": [-1.0]}}, "tune lr -1.0 is not allowed: it must be 0 or more"),
        ({"tune": {}}, "tune {} is not names with values"),
        ({"tune": {"width": [1]}}, "width is on two axes: each name may be in one place"),
        ({"compare": {"rule": ["a", 1]}}, "compare rule mixes int and str"),
        ({"compare": {"rule": [{}]}}, "is not text, a number, True or False"),
        ({"settings": {"data": [1]}}, r"data \[1\] is not text"),
        ({"seeds": 0}, "seeds 0 is not allowed"),
        ({"seeds": 10**5}, "trials; at most"),
        ({"name": "a/b"}, "experiment 'a/b' is not allowed"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        valley_study(tmp_path, **changes)


def test_until_settled_needs_three_scales_and_a_real_number(tmp_path):
    with pytest.raises(ConfigError, match="has 1 widths: until_settled needs 3 at least"):
        valley_study(tmp_path, scale={"width": [256]}).run(trainers.valley, until_settled=True)
    with pytest.raises(ConfigError, match="tune lr is a whole number: until_settled needs a real one"):
        valley_study(tmp_path, tune={"lr": [1, 2]}).ask(until_settled=True)


def test_a_study_runs_on_ray(local_ray, tmp_path):
    """In a process of its own on an actor, a function of this file, which workers cannot import."""

    def train(trial, report):
        (report.folder / "seen").write_text("x")
        report(step=1, steps=1, loss=3.0)
        return trial.lr / 2 if trial.rule == "stays" else os._exit(3)

    study = valley_study(tmp_path, scale={"width": [256]}, tune={"lr": [1.0]}, seeds=1)
    outcome = study.run(train, address="local", resources={"CPU": 1}, console=QUIET)
    runs = load_runs(tmp_path).set_index("rule")
    assert outcome == {"finished": 1, "failed": 1}
    assert runs.loc["stays", "loss"] == 0.5 and "exit code 3" in runs.loc["moves", "reason"]
    with pytest.raises(ConfigError, match="one trial asks for CPU 1, GPU 7, and no node has that"):
        study.run(train, address="local", resources={"GPU": 7}, console=QUIET)
    with pytest.raises(ConfigError, match="resources CPU -1 is not allowed"):
        study.run(train, resources={"CPU": -1}, console=QUIET)
