"""The command `plan`, and its way to a trained target."""

import json
import re

import pytest

from mup_tpu.analysis import load_table

MODEL = """experiment = "tiny"
tune = {learning_rate = ["2^-10", "2^-9", "2^-8", "2^-7", "2^-6", "2^-5", "2^-4", "2^-3"]}
[base.model]
head_size = 4
base_width = 8
depth = 1
init_std = 0.1
[base.data]
sequence_length = 16
batch_size = 4
[base.train]
steps = 10
eval_batches = 1
"""


TRAINER = """import numpy as np


def train(trial, report):
    if getattr(trial, "broken", 0) or trial.width == 999:
        raise ValueError("no such luck")
    generator, away = np.random.default_rng(trial.seed), np.log2(trial.learning_rate) + 5
    for _ in range(trial.steps):
        generator.standard_normal((trial.width, 64)).sum()
    return 2.0 + 0.05 * away**2 + 0.001 * generator.standard_normal()
"""
STUDY = """experiment = "mine"
trainer = "own_trainer:train"
scale = {width = [8, 16, 32]}
tune = {learning_rate = ["2^-8", "2^-7", "2^-6", "2^-5", "2^-4", "2^-3"]}
[settings]
steps = 10
batch = 4
"""


@pytest.mark.slow
def test_a_plan_is_swept_and_answers_for_its_target_as_it_is(
    tmp_path, outcome, monkeypatch, printed, refused
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.toml").write_text(MODEL)
    out = printed("plan", "model.toml", "--at", "width=64", "--budget", "5e11")
    first = re.search(r"─\n +8 +(\d+) +\d", out)
    assert first is not None and "wrote plan.toml; next:" in out
    commands = [line.split()[1:] for line in out.splitlines() if line.startswith("  mup-tpu")]
    assert commands == [["sweep", "plan.toml"], ["predict", "results/tiny_plan"]]
    assert "the plan's sizes are run" in printed(*commands[0])
    rows = load_table("results/tiny_plan").runs
    assert (rows["purchase"] == 1).sum() == int(first[1])
    out = printed(*commands[1])
    assert "at the target (width 64)" in out
    assert "what came (in brackets: as planned)" in out
    assert f"({first[1]})" in out, "the runs that were planned stand beside those that were made"
    assert outcome("predict", "plan.toml")[1] == out, "its file stands for its folder"
    assert "model.toml is no plan with a [target]" in refused("predict", "model.toml")
    assert json.loads(outcome("predict", "results/tiny_plan", "--json")[1])["sizes"] == {"width": 64.0}
    assert "the prediction of a plan takes --at" in refused("predict", "results/tiny_plan", "--figures")
    assert "at the target (width 64)" in printed("transfer", "results/tiny_plan", "--at", "width=64")


@pytest.mark.slow
def test_a_trainer_of_one_s_own_is_timed_planned_swept_and_predicted(
    tmp_path, outcome, monkeypatch, printed, refused
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_trainer.py").write_text(TRAINER)
    (tmp_path / "study.toml").write_text(STUDY)
    timed = ("plan", "study.toml", "--at", "width=128", "steps=40", "--budget", "10h", "--probe", "0.5s")
    out = printed(*timed)
    assert "timed width 8: " in out
    assert "mup-tpu sweep plan.toml --until-settled --budget 10h" in out
    out = printed("sweep", "plan.toml")
    assert "the plan's sizes are run" in out
    predicted = json.loads(outcome("predict", "results/mine_plan", "--json")[1])
    assert predicted["interval"][0] < -5 < predicted["interval"][1] and predicted["known"] >= 3
    for command in (("analyze", "results/mine_plan"), ("watch", "results/mine_plan", "--once")):
        out = printed(*command)
        assert "what came (in brackets: as planned)" in out and "DRIFTS" not in out
    code, out, err = outcome("ask", "plan.toml", "2", "--until-settled")
    assert code == 0 and "no trial" in err
    (tmp_path / "study.toml").write_text(STUDY.replace("[settings]", "[settings]\nbroken = 1"))
    for arguments, sentence in (
        (timed, "probe: the trainer failed at width 8"),
        (timed[:-2], "give --probe 60s, which times your training (--trainer"),
        ((*timed[:2], "--at", "wide=3", *timed[5:]), "target: unknown key 'wide'; the nearest known key"),
        (("plan", "--at", "params=1B", "--budget", "1h", "--probe", "2s"), "probe 2s times a --trainer"),
    ):
        err = refused(*arguments, "--out", "other.toml")
        assert sentence in err and len(err.strip().splitlines()) <= 3


def test_a_plan_says_time_by_its_machine_and_keeps_files(tmp_path, monkeypatch, printed, refused):
    monkeypatch.chdir(tmp_path)
    arguments = ("plan", "--at", "params=1.3B", "--budget", "200h", "--on")
    out = printed(*arguments, "8xA100", "--mfu", "0.5", "--json")
    found = json.loads(out)
    assert found["unit"] == "s" and found["budget"] == 200 * 3600
    flops = 6 * 12 * 24 * 2112**2 * 49005 * 524288
    assert found["target_cost"] == pytest.approx(flops / (8 * 312e12 * 0.5))  # in bf16
    assert found["cost"] <= found["budget"] and not (tmp_path / "plan.toml").exists()
    out = printed(*arguments, "8x312T", "--mfu", "0.5", "--json", "--price", "2/h")
    assert json.loads(out)["target_cost"] == found["target_cost"]
    err = refused(*arguments, "8xA100", "--price", "cheap")
    assert "price 'cheap' is not that of an hour: write 2.5/h" in err
    (tmp_path / "plan.toml").write_text("mine")
    assert "out 'plan.toml' exists already" in refused(*arguments, "8xA100")
    assert (tmp_path / "plan.toml").read_text() == "mine"
