"""What a drift exponent tells, and when optima leave the straight line of a power law."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from mup_tpu.analysis.drift import bends, fit_drift, is_told
from mup_tpu.analysis.optimum import Optimum


def an_optimum(scale: float, x: float, se: float) -> Optimum:
    return Optimum(scale, "bracketed", x, x - 2 * se, x + 2 * se, 2.5, round(x), x - 1, x + 1, se)


def test_optima_bend_where_a_parabola_s_curvature_is_told_from_0():
    """Against the same regression through numpy's weighted polyfit, and on optima along a line."""
    x, se = np.arange(6.0), np.array([0.1, 0.2, 0.1, 0.3, 0.1, 0.2])
    jitter = 0.05 * np.array([1, -1, 0.5, 1, -1, 0.5])
    for curvature in (0.0, 0.03, 0.05, 0.1, 0.3):
        y = -7 + 0.2 * x - curvature * x**2 + jitter
        fit, covariance = np.polyfit(x, y, 2, w=1 / se, cov="unscaled")
        scatter = max(1.0, float((((np.polyval(fit, x) - y) / se) ** 2).sum()) / 3)
        told = abs(fit[0]) > stats.t.ppf(0.975, 3) * math.sqrt(scatter * covariance[0, 0])
        assert bends([an_optimum(2.0**k, at, s) for k, at, s in zip(x, y, se, strict=True)]) == told
        assert told == (curvature >= 0.1), "the cases lie on both sides"
    assert not bends([an_optimum(2.0**k, -(k**2), 0.1) for k in range(3)]), "three are on any parabola"


def test_the_line_of_a_drift_goes_through_its_optima():
    optima = [replace(an_optimum(2.0**k, 7 - 1.5 * k, 0.02), mean=7 - 1.5 * k) for k in range(5, 10)]
    drift = fit_drift(optima, "width")
    assert drift.alpha == pytest.approx(-1.5, abs=0.02)
    assert [drift.intercept + drift.alpha * k for k in range(5, 10)] == pytest.approx(
        [o.x for o in optima], abs=0.05
    )


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(-15.74, 17.92, False), (-0.9, 0.9, True), (-4, -0.7, True), (math.nan, 1, False)],
)
def test_an_exponent_is_told_where_its_interval_is_narrow_or_excludes_0(low, high, told):
    assert is_told(low, high) == told
