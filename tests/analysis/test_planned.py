"""Numbers that a plan takes from a table of one's own."""

import math

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table
from mup_tpu.analysis.design import REACH
from mup_tpu.analysis.planned import Assumed

CURVATURE = 0.08


def test_as_many_runs_as_a_table_has_give_the_error_that_its_optima_have():
    noise = np.random.default_rng(0).normal
    rows = [
        {"width": w, "lr": 2.0**x, "seed": s, "loss": 2 + CURVATURE / 2 * (x + 7) ** 2 + noise(0, 0.01)}
        for w in (64, 128, 256)
        for x in range(-10, -3)
        for s in range(4)
    ]  # fmt: skip
    analysis = analyze(check_table(pd.DataFrame(rows)))
    assumed = Assumed.measured(analysis, "mup")
    runs = 4 * (2 * int(REACH) + 1)
    errors = [optimum.se for optimum in analysis.results[0].optima]
    assert math.sqrt(assumed.error(runs)) == pytest.approx(np.median(errors), rel=0.2)
    assert assumed.error(runs / 4) == pytest.approx(4 * assumed.error(runs))
    assert assumed.curvature == pytest.approx(CURVATURE, rel=0.3)
    assert assumed.regret(0.5) == pytest.approx(assumed.curvature / 4)
