"""Ask and tell: trials for a scheduler that is not ours."""

import json
import math
import os
import sys
import time

import numpy as np
import pytest
import trainers

from mup_tpu import Study, octaves
from mup_tpu.cli import main
from mup_tpu.cli.study import StudyOptions
from mup_tpu.errors import ConfigError, StoreError, TableError
from mup_tpu.store import load_runs
from mup_tpu.study.attempt import Outcome
from mup_tpu.study.calls import rows_of


def study_in(folder, **changes):
    grid = {"scale": {"width": [256, 512]}, "tune": {"lr": octaves(-7, -5)}, "compare": {"rule": ["stays"]}}
    return Study(folder, **(grid | changes))


def ask_and_tell(study, loss, noise, rounds=99, until_settled=True, seed=0):
    """Answer what a study asks for by a loss with noise; return the number of trials in each round."""
    generator, counts = np.random.default_rng(seed), []
    while len(counts) < rounds and (trials := study.ask(100, until_settled=until_settled)):
        for trial in trials:
            study.tell(trial, loss(trial) + generator.normal(0, noise))
        counts.append(len(trials))
    return counts


def bowl(trial, slope=0.0):
    """Loss whose best rate moves with the width's power `slope`, and that interacts with the decay."""
    a, b = math.log2(trial.rate) + 7 - slope * math.log2(trial.width / 64), math.log2(trial.decay) + 3
    return 3 - trial.width / 1e3 + 0.02 * a * a + 0.015 * b * b + 0.01 * a * b


WIDTHS = {"width": [64, 128, 256]}


def test_what_was_asked_is_not_asked_twice_until_patience_ends(tmp_path):
    study = study_in(tmp_path)
    first, second = study.ask(4), study.ask(4)
    assert len(first) == 4 and len(second) == 2 and not study.ask(4)
    assert {*first, *second} == {*study.trials()}
    for trial in first:
        study.tell(trial, trainers.valley(trial))
    study.tell(second[0], failed="the node was lost")
    assert study.ask(4) == [second[0]]
    runs = load_runs(tmp_path).set_index("trial_id")
    assert runs.loc[second[0].id, "reason"] == "the node was lost"
    assert runs.loc[first[0].id, "loss"] == trainers.valley(first[0])
    assert study.ask(4, patience=0.01) == []
    impatient = study_in(tmp_path / "other")
    (given,) = impatient.ask(1, patience=0.01)
    time.sleep(0.02)
    assert impatient.ask(1) == [given]


def test_a_study_along_steps_is_analysed_and_predicted_though_runs_of_one_length_alone_have_curves(tmp_path):
    """`steps` is a field of our own trials too, and a loss that is told has no curve."""
    study = study_in(tmp_path, scale={"steps": [20, 40, 80]})
    for trial in study.ask(9):
        valley = 3 + 0.05 * (math.log2(trial.lr) + 6) ** 2 - trial.steps / 100
        if trial.steps == 20:
            study._open()[0].append(*rows_of(trial, Outcome.of(valley, points=((1, 4.0), (2, valley)))))
        else:
            study.tell(trial, valley)
    assert [curve.scale for curve in study.verdict().results[0].learning_curves] == [20]
    assert study.predict(steps=320).predictions[0].x == pytest.approx(-6, abs=0.2)
    with pytest.raises(TableError, match="the table does not say how params follows steps; give steps=VALUE"):
        study.predict(params=1e9)


def test_a_sequence_is_asked_for_until_it_is_settled(tmp_path):
    study = study_in(tmp_path, scale={"width": [256, 512, 1024]}, tune={"lr": octaves(-9, -3)})
    while trials := study.ask(100, until_settled=True):
        assert not study.ask(100, until_settled=True)
        for trial in trials:
            study.tell(trial.id, trainers.valley(trial))
    (result,) = study.verdict().results
    assert result.verdict.decision == "TRANSFERS" and load_runs(tmp_path)["purchase"].max() >= 3


def test_several_hyperparameters_of_known_optimum_are_asked_for_told_and_predicted(tmp_path, capsys):
    """The rate's optimum falls by half an octave for each octave of width, and by ¼ for one of decay."""
    tuned = {"rate": octaves(-10, -4), "decay": octaves(-5, -1)}
    study = study_in(tmp_path, scale=WIDTHS, tune=tuned)
    ask_and_tell(study, lambda trial: bowl(trial, -0.5), 0.001, until_settled=False)
    assert len(load_runs(tmp_path)) == 27, "a grid would have 105"
    study = Study.load(tmp_path)
    verdict = study.verdict()
    rate, decay = (part.results[0].drift for part in verdict.parts)
    assert rate.low < -0.5 < rate.high < 0 and decay.low < 0 < decay.high
    assert verdict.results[0].pairs[0].shift == pytest.approx(-0.25, abs=0.1)
    assert "rate and decay interact" in str(verdict)
    made = study.predict(width=1024).predictions
    for one, x in zip(made, (-9, -3), strict=True):
        low, high = one.interval
        assert low < x < high and one.x == pytest.approx(x, abs=0.3)
    main(["predict", str(tmp_path), "--at", "width=1024", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [one["x"] for one in printed["predictions"]] == pytest.approx([-9, -3], abs=0.2)
    main(["watch", str(tmp_path), "--once"])
    shown = capsys.readouterr().out
    assert "rate: OPEN" in shown and "27 of 27 trials stored" in shown
    figure = study.plot("transfer_decay")
    assert len(figure.axes[0].lines) > 3
    with pytest.raises(
        ConfigError, match="plot 'transfer' is not one of transfer_rate, optimum_rate, regret"
    ):
        study.plot()
    with pytest.raises(StoreError, match="rate by width"):
        study_in(tmp_path, scale=WIDTHS, tune={"rate": octaves(-7, -5)}).ask()


def test_a_run_leaves_alone_what_was_asked_for_elsewhere(tmp_path, capsys):
    study = study_in(tmp_path)
    (asked,) = study.ask(1)
    assert study.run(trainers.valley, workers=1) == {"finished": 5}
    assert "1 asked for elsewhere" in " ".join(capsys.readouterr().out.split())
    study.tell(asked, math.inf)
    assert load_runs(tmp_path)["status"].value_counts().to_dict() == {"finished": 5, "diverged": 1}


@pytest.mark.parametrize("slope", [0.0, pytest.param(-0.7, marks=pytest.mark.nightly)])
def test_several_hyperparameters_are_asked_for_until_their_verdict_is_settled(slope, tmp_path, capsys):
    """A design at the least width, others about expected optima, then where the regret is largest."""
    tune = {"rate": octaves(-10, -4), "decay": octaves(-6, 0)}
    study = Study(tmp_path / "s", scale=WIDTHS, tune=tune)
    first = study.ask(100, until_settled=True, patience=1e-9)
    counts = ask_and_tell(study, lambda trial: bowl(trial, slope), 0.002)
    assert counts[0] == len(first) == 9 and {trial.width for trial in first} == {64}
    verdict = study.verdict()
    assert verdict.results[0].verdict.decision == ("DRIFTS" if slope else "TRANSFERS")
    assert 30 <= sum(counts) <= 80, "the whole grid has 147"
    main(["watch", str(tmp_path / "s"), "--once"])
    assert f"s: {sum(counts)} trials stored" in capsys.readouterr().out, "no grid of which they are a part"


def test_a_design_of_several_hyperparameters_has_the_studys_seeds(tmp_path):
    tune = {"rate": octaves(-10, -4), "decay": octaves(-6, -2)}
    study, noise = Study(tmp_path, scale=WIDTHS, tune=tune, seeds=2), 0.004
    assert ask_and_tell(study, bowl, noise, rounds=2)[0] == 18
    assert set(study.to_frame().groupby(["width", "rate", "decay"]).size()) == {2}
    assert study.verdict().results[0].surface.noise == pytest.approx(noise, rel=0.5), "by seeds"


@pytest.mark.nightly
def test_a_flat_hyperparameter_is_not_sought_and_may_be_left_alone(tmp_path):
    """A decay that costs 0.002 nat an octave, downwards without end."""
    tune = {"rate": octaves(-10, -4), "decay": octaves(-6, -2)}
    study = Study(tmp_path / "s", scale=WIDTHS, tune=tune)

    def loss(trial):
        return (
            3 - trial.width / 1e3 + 0.03 * (math.log2(trial.rate) + 7) ** 2 + 0.002 * math.log2(trial.decay)
        )

    ask_and_tell(study, loss, 0.002, seed=1)
    assert study.to_frame().groupby("width").size().max() <= 50, "81 and 87 before"
    verdict = study.verdict()
    assert {o.status for o in verdict.parts[1].results[0].optima} == {"flat", "bracketed"}
    assert verdict.results[0].verdict.decision == "MOVES AT NO COST" and "may be left alone" in str(verdict)


def test_a_design_without_a_minimum_is_moved_towards_its_lowest_run(tmp_path):
    tune = {"rate": octaves(-14, -10), "decay": octaves(-6, -2)}
    study = Study(tmp_path / "s", scale=WIDTHS, tune=tune)
    for trial in study.ask(100, until_settled=True):
        study.tell(trial, 3 - 0.1 * math.log2(trial.rate) - 0.01 * abs(math.log2(trial.decay) + 4))
    moved = study.ask(100, until_settled=True)
    rates = sorted({math.log2(trial.rate) for trial in moved})
    assert rates[-1] == -7 and {trial.width for trial in moved} == {64}, "an octave beyond the edge, ± 2"


def test_the_target_of_a_study_is_trained_with_its_predicted_value_and_scored(tmp_path, capsys):
    study = Study(tmp_path / "s", scale=WIDTHS, tune={"rate": octaves(-10, -4)})
    for trial in study.ask(99):
        study.tell(trial, 3 - 0.1 * math.log2(trial.width) + 0.05 * (math.log2(trial.rate) + 7.3) ** 2)
    main(["transfer", study.folder, "--at", "width=1024"])
    out = " ".join(capsys.readouterr().out.split())
    assert "rate 2^-7.30" in out and f"mup-tpu ask {study.folder}_transfer" in out
    target = Study.load(f"{study.folder}_transfer")
    (trial,) = target.ask(9)
    assert trial.width == 1024 and math.log2(trial.rate) == pytest.approx(-7.3, abs=0.05)
    target.tell(trial, 2.01)
    main(["analyze", target.folder])
    out = " ".join(capsys.readouterr().out.split())
    assert "at width 1024, predicted on" in out and "measured 2.010, inside the interval" in out
    main(["predict", study.folder, "--at", "width=1024", "--format", "torchtitan"])
    assert "--optimizer.param-groups.0.optimizer-kwargs.lr 0.00" not in (out := capsys.readouterr().out)
    assert "rate" in out


def test_what_cannot_be_told_is_refused_and_what_is_stored_stays(tmp_path):
    study = study_in(tmp_path)
    one, two = study.ask(2)
    study.tell(one, 2.5)
    for call, error, sentence in (
        (lambda: study.tell(one, 2.6), StoreError, f"trial {one.id} has a loss already, 2.5: a loss is told"),
        (lambda: study.tell("nobody", 2.6), StoreError, f"'nobody' was not given by .* waits for {two.id}"),
        (lambda: study.tell(two, "2.31"), ConfigError, "loss '2.31' is str, not a number"),
        (lambda: study.tell(two), ConfigError, "loss and failed: give one of them"),
        (lambda: study.ask(0), ConfigError, "count 0 is not allowed"),
        (lambda: study.ask(patience=-1), ConfigError, "patience -1 is not allowed"),
    ):
        with pytest.raises(error, match=sentence):
            call()
    assert load_runs(tmp_path)["loss"].tolist() == [2.5]


def test_a_lease_of_a_clock_that_is_wrong_is_given_again(tmp_path):
    study = Study(tmp_path, scale={"width": [1]}, tune={"lr": [0.1]})
    (trial,) = study.ask(1)
    file = tmp_path / "asked" / f"{trial.id}.json"
    for ahead, given in ((3600, []), (10**9, [trial])):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"at": time.time() + ahead}))
        assert Study.load(tmp_path).ask(1) == given
    file.write_bytes(b"")  # a power cut after its name was written
    assert Study.load(tmp_path).ask(1) == [trial]


@pytest.mark.parametrize(
    "change",
    [
        "[" * 100_000, "3", '"text"', "{}", {"at": "1"}, {"at": 10**400}, {"patience": math.inf},
        {"values": [1]}, {"values": {"width": 64}}, {"purchase": 2**70}, {"purchase": math.nan},
        {"purchase": -1}, "a pipe",
    ],
)  # fmt: skip
def test_a_lease_that_somebody_changed_is_one_sentence(change, tmp_path):
    study = study_in(tmp_path)
    (trial,) = study.ask(1)
    file = tmp_path / "asked" / f"{trial.id}.json"
    lease = json.loads(file.read_text())
    if change == "a pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        file.write_text(change if isinstance(change, str) else json.dumps(lease | change))
    for call in (lambda: study_in(tmp_path).ask(1), lambda: study_in(tmp_path).tell(trial, 2.5)):
        with pytest.raises(StoreError, match=f"{trial.id}.json cannot be read: ") as caught:
            call()
        assert len(str(caught.value)) < 500
    assert not (tmp_path / "runs").exists()


TOML = """
experiment = "cli"
trainer = "{python} program.py {{lr}} {{width}}"
scale = {{width = [256, 512]}}
tune = {{lr = ["2^-7", "2^-6", "2^-5"]}}
[settings]
steps = 3
"""
PROGRAM = """
import math, sys
lr, width = float(sys.argv[1]), int(sys.argv[2])
print("step 1 of 3")
if width == 256 and lr == 2**-5:
    sys.exit(3)
print("no number" if width == 256 and lr == 2**-7 else 3 + (math.log2(lr) + 6) ** 2)
"""


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "cli.toml").write_text(TOML.format(python=sys.executable))
    return "cli.toml"


def test_a_program_is_swept(toml, tmp_path, outcome):
    code, _, err = outcome("sweep", toml, "--workers", 2)
    assert code == 1 and "2 of 6 trials failed" in err
    runs = load_runs("results/cli").set_index(["width", "lr"])
    assert runs.loc[(512, 2**-5), "loss"] == runs.loc[(512, 2**-7), "loss"] == 4
    assert runs.loc[(256, 2**-6), "loss"] == 3
    exited, printed = runs.loc[(256, 2**-5)], runs.loc[(256, 2**-7)]
    output = f"output: step 1 of 3 (output/{exited['trial_id']}.txt)"
    assert exited["reason"].endswith(f"ended with exit code 3; {output}")
    assert "no line of the output has a loss that is recognised" in printed["reason"]
    text = (tmp_path / "results/cli/output" / f"{printed['trial_id']}.txt").read_text()
    assert text.startswith("$ ") and text.endswith(" 0.0078125 256\nstep 1 of 3\nno number\n")


def test_values_stay_in_their_words_and_no_shell_reads_them(tmp_path):
    settings = {"text": f"a b; touch {tmp_path}/made"}
    study = Study(tmp_path, scale={"width": [1]}, tune={"optim.lr": [0.5]}, settings=settings)
    program = "import sys; assert sys.argv[1] == sys.argv[2] + ' b; touch ' + sys.argv[3]; "
    program += "print(float(sys.argv[4]) + sum({{1.0}}))"
    study.run(f'{sys.executable} -c "{program}" {{text}} a {tmp_path}/made {{optim.lr}}', workers=1)
    assert load_runs(tmp_path)["loss"].tolist() == [1.5] and not (tmp_path / "made").exists()


def test_ask_and_tell_on_the_command_line(toml, outcome):
    code, out, err = outcome("ask", toml, 2, "--json")
    trials = [json.loads(line) for line in out.splitlines()]
    assert [trial["lr"] for trial in trials] == [2**-7, 2**-6] and (code, err) == (0, "")
    assert outcome("ask", "results/cli", 1)[1].startswith("id=")
    assert outcome("tell", "results/cli", trials[0]["id"], 2.31)[0] == 0
    assert load_runs("results/cli")["loss"].tolist() == [2.31]
    assert outcome("ask", "results/cli", 1000)[0] == 0
    code, _, err = outcome("ask", "results/cli")
    assert code == 0 and err.startswith("no trial: all missing trials are leased")
    for words, sentence in (
        ((trials[0]["id"], "2.31"), "has a loss already"),
        ((trials[1]["id"], "good"), "loss 'good' is not a number"),
        (("0", "1"), "was not given by"),
    ):
        code, _, err = outcome("tell", "results/cli", *words)
        assert code == 2 and sentence in err and err.count("error:") == 1


def test_escapes_in_a_setting_do_not_reach_the_terminal(tmp_path, outcome):
    settings = {"text": "\x1b[31mred\x1b]0;title\x07", "lines": "a\nid=0123456789abcdef"}
    study_in(tmp_path / "one", settings=settings)._open()
    code, out, _ = outcome("ask", tmp_path / "one", 6)
    assert code == 0 and out.replace("\n", "").isprintable() and len(out.splitlines()) == 6


def test_a_study_file_that_cannot_be_is_refused(tmp_path, outcome):
    file = tmp_path / "bad.toml"
    for text, sentence in (
        ("[settings]\na = 1", "scale is missing"),
        ("tune = {lr = [1]}\n[settings]", "scale is missing"),
        ("scale = {w = [1]}\n[settings]", "tune is missing"),
        ("base.model = {}\n[settings]", "base is not for the file of a study"),
        ("lerning_rate = 1\n[settings]\na = 1", "unknown key 'lerning_rate'"),
        ("trainer = 3", "trainer 3 is not text"),
        ("scale = {w = [1]}\ntune = {lr = [1]}\n[settings]", "trainer is missing"),
    ):
        file.write_text(text)
        code, _, err = outcome("sweep", file)
        assert code == 2 and sentence in err
    code, _, err = outcome("ask", tmp_path / "nothing", 3)
    assert code == 2 and "holds no study" in err


def test_the_template_is_a_study(tmp_path, monkeypatch, outcome):
    monkeypatch.chdir(tmp_path)
    assert outcome("init", "study")[0] == 0
    trials = [json.loads(line) for line in outcome("ask", "study.toml", 100, "--json")[1].splitlines()]
    assert len({trial["id"] for trial in trials}) == 48 and {trial["steps"] for trial in trials} == {100}


def test_resources_of_a_trial_are_names_with_numbers():
    assert StudyOptions().amounts() is None
    assert StudyOptions(resources=("GPU=1", "CPU=0.5")).amounts() == {"GPU": 1, "CPU": 0.5}
    with pytest.raises(ConfigError, match="resources 'GPU=one' is not NAME=NUMBER; write for example GPU=1"):
        StudyOptions(resources=("GPU=one",)).amounts()
