"""Experiments: every trial of every sweep is allowed and has a pack, and scripts run a part of their grid."""

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mup_tpu.cli import experiments
from mup_tpu.config import Sweep
from mup_tpu.store import load_runs
from mup_tpu.training.trials import pack_key

ROOT = Path(__file__).parents[1]
SCRIPTS = {path.stem: runpy.run_path(str(path)) for path in sorted((ROOT / "experiments").glob("*.py"))}
SWEEPS = {
    f"{script}.{name}.{sweep.experiment}": sweep
    for script, names in SCRIPTS.items()
    for name, value in names.items()
    for sweep in ([value] if isinstance(value, Sweep) else value.values() if name == "ABLATIONS" else [])
}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_trial_of_a_sweep_can_be_planned(name):
    trials = SWEEPS[name].trials()
    assert len(trials) >= 5
    some = trials[:: len(trials) // 5]
    assert all(pack_key(trial) for trial in some)
    assert len({trial.trial_id("data") for trial in some}) == len(some)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_names_what_it_runs(script):
    names = SCRIPTS[script]
    assert {"SWEEP", "ABLATIONS", "SEARCH", "TRIALS", "STUDIES"} & set(names)
    assert "H200" not in names or names["H200"].experiment == f"{script}_h200"


@pytest.mark.parametrize("scale", ["depth", "batch", "horizon", "decay"])
def test_what_rules_are_compared_on_grows_and_they_answer(scale):
    """Growth of the compared scale is not 1 everywhere, and at the base all of its rules are one."""
    sweep = SCRIPTS[f"{scale}_transfer"]["SWEEP"]
    field = {"depth": "depth", "batch": "batch_size", "horizon": "tokens", "decay": "width"}[scale]
    grown = {getattr(trial.growth, field) for trial in sweep.trials()}
    assert 1 in grown and len(grown) >= 3  # fewer have no verdict


@pytest.mark.parametrize(("architecture", "optimizer"), [("mlp", "sgd"), ("mlp", "adam"), ("vit", "adam")])
def test_rules_of_images_are_one_at_the_base_and_differ_beyond(architecture, optimizer):
    script = SCRIPTS["images"]
    rules = [
        rule
        for a, o, _, rules in script["STUDIES"].values()
        if (a, o) == (architecture, optimizer)
        for rule in rules
    ]
    settings = script["MODELS"][architecture] | {"steps": 3, "noise": 0.3, "seed": 0, "learning_rate": 0.01}

    def losses(growth):
        width = settings["base"] * growth
        trials = [
            SimpleNamespace(
                architecture=architecture, optimizer=optimizer, parametrization=rule, width=width, **settings
            )
            for rule in rules
        ]
        return [script["train"](trial, lambda **_: None) for trial in trials]

    at_base = losses(1)
    assert at_base == pytest.approx([at_base[0]] * len(rules), rel=1e-5)
    assert len({round(loss, 3) for loss in losses(4)}) == len(rules)


ONE_TRIAL = ["--scale", "64", "--tune", "2^-8", "--num-seeds", "1", "--compare", "mup"]


@pytest.mark.nightly
def test_experiment_script_runs_one_width(tmp_path):
    """The script as a user runs it, on a few trials of its own grid."""
    command = [sys.executable, "experiments/quickstart.py", *ONE_TRIAL, "--results", tmp_path / "results"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    runs = load_runs(tmp_path / "results")
    assert runs[["width", "lr", "experiment"]].values.tolist() == [[64, 2.0**-8, "quickstart"]]
    assert "figure: " in done.stdout


@pytest.mark.slow
def test_experiment_script_of_hours_runs_one_width_of_fewer_steps(tmp_path, capfd, monkeypatch):
    """As it is but for the number of steps, in this process."""
    run_experiment = experiments.run_experiment

    def shortened(sweep, *others):
        run_experiment(dataclasses.replace(sweep, base=sweep.base.replace(steps=20)), *others)

    monkeypatch.setattr(experiments, "run_experiment", shortened)
    script = str(ROOT / "experiments" / "lr_transfer.py")
    monkeypatch.setattr(sys, "argv", [script, *ONE_TRIAL, "--results", str(tmp_path / "results")])
    runpy.run_path(script, run_name="__main__")
    runs = load_runs(tmp_path / "results")
    assert runs[["width", "lr", "experiment"]].values.tolist() == [[64, 2.0**-8, "lr_transfer"]]
    assert "figure: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("script", "option", "value", "sentence"),
    [
        ("quickstart", "--scale", "100", "width 100 is not a multiple"),
        (
            "lr_transfer",
            "--preset",
            "tpu",
            "preset 'tpu' is not allowed: this experiment has 'cpu' or 'h200'",
        ),
        (
            "ablations",
            "--names",
            "warmup",
            "names: unknown key 'warmup'; the nearest known key is 'warmup_0",
        ),
    ],
)
def test_bad_input_is_one_sentence(script, option, value, sentence, capfd, monkeypatch):
    path = str(ROOT / "experiments" / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [path, option, value, "--results", "/dev/null/x"])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(path, run_name="__main__")
    assert sentence in " ".join(capfd.readouterr().err.split())


def test_bad_input_of_a_process_has_no_traceback():
    command = [sys.executable, "experiments/quickstart.py", "--scale", "100", "--results", "/dev/null/x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "width 100 is not a multiple" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
