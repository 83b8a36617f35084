"""Experiments: every trial of every sweep is allowed and has a pack, and no two are one."""

import runpy
from pathlib import Path

import pytest

from mup_tpu.config import Sweep
from mup_tpu.training.pack_key import pack_key

FILES = sorted((Path(__file__).parents[1] / "experiments").glob("*.py"))
SWEEPS = {
    f"{path.stem}.{name}": value
    for path in FILES
    for name, value in runpy.run_path(str(path)).items()
    if isinstance(value, Sweep)
}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_trial_of_a_sweep_can_be_planned(name):
    trials = SWEEPS[name].trials()
    assert all(pack_key(trial) for trial in trials)
    assert len({trial.trial_id("data") for trial in trials}) == len(trials)


@pytest.mark.parametrize("scale", ["depth", "batch", "horizon", "decay"])
def test_what_rules_are_compared_on_grows_and_they_answer(scale):
    """Growth of the compared scale is not 1 everywhere, and at the base all of its rules are one."""
    sweep = SWEEPS[f"{scale}_transfer.SWEEP"]
    field = {"depth": "depth", "batch": "batch_size", "horizon": "tokens", "decay": "width"}[scale]
    grown = {getattr(trial.growth, field) for trial in sweep.trials()}
    assert 1 in grown and len(grown) >= 3  # fewer have no verdict
