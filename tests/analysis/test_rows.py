"""The ranking of a search's trials."""

import math

import pandas as pd

from mup_tpu.analysis.run_table import ranked, varied
from mup_tpu.config.columns import CONFIGURED


def trials() -> pd.DataFrame:
    """Five trials that vary learning rate and init alone."""
    same = dict.fromkeys(CONFIGURED, 1.0)
    rows = [
        ("stopped", 100, 2.4, 0.001, 0.1),
        ("finished", 500, 1.7, 0.004, 0.2),
        ("stopped", 200, 2.1, 0.002, 0.1),
        ("diverged", 40, math.inf, 0.5, 0.1),
        ("finished", 500, 1.6, 0.008, 0.1),
    ]
    names = ("status", "steps_done", "loss", "lr", "init_std")
    return pd.DataFrame([same | dict(zip(names, row, strict=True)) for row in rows])


def test_finished_trials_come_first_by_loss_then_stopped_ones_by_how_far_they_came():
    assert ranked(trials())["lr"].tolist() == [0.008, 0.004, 0.002, 0.001, 0.5]


def test_only_what_was_varied_is_shown():
    assert varied(trials()) == ["lr", "init_std"]
