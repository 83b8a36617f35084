"""Experiments: every trial of every sweep is allowed and has a pack, and scripts run a part of their grid."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from mup_tpu.config import Sweep
from mup_tpu.training import pack_key

ROOT = Path(__file__).parents[1]
SCRIPTS = {path.stem: runpy.run_path(str(path)) for path in sorted((ROOT / "experiments").glob("*.py"))}
SWEEPS = {
    f"{script}.{name}.{sweep.experiment}": sweep
    for script, names in SCRIPTS.items()
    for name, value in names.items()
    for sweep in [value]
    if isinstance(value, Sweep)
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
