"""Tables of optima without runs: drift and prediction follow, a regret does not."""

import math

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table, predict
from mup_tpu.errors import TableError
from mup_tpu.words import summary

WIDTHS = np.array([128, 256, 512, 1024])
OPTIMA = pd.DataFrame({"width": WIDTHS, "best_lr": 0.125 / WIDTHS})


def with_interval(factor: float) -> pd.DataFrame:
    return OPTIMA.assign(best_lr_lo=OPTIMA["best_lr"] / factor, best_lr_hi=OPTIMA["best_lr"] * factor)


@pytest.mark.parametrize(
    "table",
    [with_interval(1.1), OPTIMA, OPTIMA.rename(columns={"best_lr": "lr"}), OPTIMA.assign(grid_factor=2)],
    ids=["intervals", "octave grid", "plain name", "grid given"],
)
def test_the_drift_is_that_of_the_optima_and_there_is_no_regret(table):
    analysis = analyze(table)
    (result,) = analysis.results
    assert result.drift.alpha == pytest.approx(-1, abs=0.2) and result.drift.high < -0.3
    assert result.regrets == () and result.verdict.decision == "OPEN"
    said = summary(analysis)
    assert "no verdict, since a regret needs losses" in said
    assert "for a regret, give the losses at width 1024 of 2^-10.0" in said


def test_the_prediction_has_an_interval_and_no_cost():
    predictions = predict(with_interval(1.1), "width=2048")
    prediction = predictions.of("all")
    assert prediction.x == pytest.approx(-14, abs=0.3)
    assert prediction.interval[0] < -14 < prediction.interval[1] and math.isnan(prediction.taking.expected)
    assert "its cost and the loss there are unknown" in summary(predictions)


def test_wider_intervals_are_less_sure():
    narrow, wide = (analyze(with_interval(factor)).results[0].drift for factor in (1.1, 4))
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            OPTIMA.assign(best_lr=[0.1, 0.037, 0.021, 0.003]),
            "neither an interval nor a grid: give best_lr_lo",
        ),
        (with_interval(1.1).assign(best_lr_lo=1.0), "best_lr of row 0 lies outside its interval"),
        (OPTIMA.assign(best_lr=[0, 1, 2, 4]), "best_lr must be above 0, but row 0 has 0"),
    ],
)
def test_what_is_no_optimum_is_one_sentence(table, sentence):
    with pytest.raises(TableError, match=sentence):
        check_table(table)
