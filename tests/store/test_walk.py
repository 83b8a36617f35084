"""A random walk of operations on one study by several processes, against a model of what they stored.

A short walk in a daily run, always the same; MUP_TPU_WALK_S=600 walks for so many seconds with other seeds,
printed with each walk: MUP_TPU_SEED=... walks one again.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import trainers
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from merging import merge_all

from mup_tpu import Study, octaves
from mup_tpu.errors import StoreError
from mup_tpu.store import Condition, Store, load_header, load_runs, tables
from mup_tpu.store.header import KeptPrediction, keep_predictions, load_predictions

SECONDS = float(os.environ.get("MUP_TPU_WALK_S", "0"))

TELLER = """
import sys, time
import trainers
from test_walk import study_in
study = study_in(sys.argv[1])
while trials := study.ask(1, patience=0.01):
    study.tell(trials[0], trainers.valley(trials[0]))
    print(trials[0].id, flush=True)
"""


def study_in(folder):
    grid = {"scale": {"width": [64, 128, 256]}, "tune": {"lr": octaves(-9, -4)}, "seeds": 2}
    return Study(folder, **grid, settings={"rule": "stays"})


def prediction(name):
    half, interval = (-7.0, -5.0), (-8.0, -4.0)
    return KeptPrediction(
        "2026", 1, name, (64.0,), "mup", "width", "lr", 512.0, -6.0, half, interval, None, None
    )


class Walk(RuleBasedStateMachine):
    """Operations of a long-lived study, of studies that are opened anew, and of processes that are killed."""

    place = None
    walks = 0

    @initialize()
    def begin(self):
        Walk.walks += 1
        self.folder = self.place / f"{os.getpid()}-{Walk.walks}"
        self.study = study_in(self.folder)
        self.study.ask(1, patience=1e-9)  # the folder is there
        self.stored, self.failed, self.planned, self.kept = {}, set(), set(), set()
        self.teller = None

    def some(self, is_new):
        return study_in(self.folder) if is_new else self.study

    @rule(is_new=st.booleans(), count=st.integers(1, 4))
    def ask_and_tell(self, is_new, count):
        given = self.some(is_new).ask(count, patience=1e-9)
        assert not {trial.id for trial in given} & {*self.stored}, "a stored trial is not given again"
        for trial in given:
            self.tell(trial, not is_new)

    def tell(self, trial, is_new):
        try:
            self.some(is_new).tell(trial, trainers.valley(trial))
        except StoreError as error:
            assert "has a loss already" in str(error) and self.teller is not None
        self.stored[trial.id] = trainers.valley(trial)

    @rule(is_new=st.booleans())
    def tell_a_failure(self, is_new):
        for trial in self.some(is_new).ask(1, patience=1e-9):
            try:
                self.study.tell(trial, failed="the node was lost")
                self.failed.add(trial.id)
            except StoreError:
                assert self.teller is not None

    @rule(data=st.data())
    def tell_twice(self, data):
        if self.stored:
            name = data.draw(st.sampled_from(sorted(self.stored)))
            try:
                self.study.tell(name, 1.0)
            except StoreError as error:
                assert "has a loss already" in str(error)
            else:
                raise AssertionError("a loss is told once")

    @rule()
    def merge(self):
        merge_all(Store(self.folder, self.study.grid.experiment))

    @rule(scale=st.integers(1, 9))
    def plan(self, scale):
        Store(self.folder, self.study.grid.experiment, planned=(float(scale),))
        self.planned.add(float(scale))

    @rule(scale=st.sampled_from([64, 128]))
    def ask_about(self, scale):
        self.where = (Condition("width", ">=", str(scale)),)
        Store(self.folder, self.study.grid.experiment).ask(self.where)

    @rule(name=st.sampled_from("abcdef"))
    def keep(self, name):
        keep_predictions(self.folder, [prediction(name)])
        self.kept.add(name)

    @rule()
    def start_another(self):
        if self.teller is None:
            self.teller = subprocess.Popen(
                [sys.executable, "-c", TELLER, self.folder], stdout=subprocess.PIPE, text=True
            )

    @rule(pause=st.floats(0, 0.3))
    def kill_the_other(self, pause):
        if self.teller is not None:
            time.sleep(5 * pause if SECONDS else 0.0)  # importing takes it seconds
            self.teller.send_signal(signal.SIGKILL)
            told = self.teller.communicate()[0].split("\n")[:-1]
            assert self.teller.returncode in (0, -signal.SIGKILL)
            trials = {trial.id: trial for trial in self.study.trials()}
            self.stored |= {name: trainers.valley(trials[name]) for name in told}
            self.teller = None

    @invariant()
    def all_that_was_confirmed_is_there_once(self):
        if not hasattr(self, "folder"):
            return
        if self.stored or self.failed:
            runs = load_runs(self.folder)
            assert runs["trial_id"].is_unique
            losses = runs[runs["status"] == "finished"].set_index("trial_id")["loss"].to_dict()
            expected = {trial.id: trainers.valley(trial) for trial in self.study.trials()}
            assert losses.items() >= self.stored.items() and expected.items() >= losses.items()
            assert {*runs["trial_id"]} >= self.failed
            assert self.some(False)._open()[0].done() >= {*self.stored}
        assert {p.fingerprint for p in load_predictions(self.folder)} == self.kept
        header = load_header(self.folder)
        assert {*header.planned} == self.planned and header.where == getattr(self, "where", ())

    def teardown(self):
        if getattr(self, "teller", None) is not None:
            self.kill_the_other(0.0)
        if hasattr(self, "folder"):
            for trial in self.study.ask(1000, patience=1e-9):
                self.tell(trial, False)
            merge_all(Store(self.folder, self.study.grid.experiment))
            assert load_runs(self.folder)["status"].tolist() == ["finished"] * 36
            assert not list(self.folder.rglob(".partial-*"))


def test_a_random_walk_of_operations_loses_and_doubles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Walk, "place", tmp_path)
    monkeypatch.setattr(tables, "MERGE_EVERY", 3)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    ends, first = (
        time.monotonic() + SECONDS,
        int(os.environ.get("MUP_TPU_SEED", time.time() if SECONDS else 0)),
    )
    for number in range(first, first + 10**9):
        print(f"seed {number}, {Walk.walks} walks", flush=True)
        machine = seed(number)(Walk)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=10 if SECONDS else 3, stateful_step_count=40 if SECONDS else 12, deadline=None,
                database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            ),
        )  # fmt: skip
        if time.monotonic() >= ends:
            return
