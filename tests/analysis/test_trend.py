"""Trends of optima against an integration of the same posterior in closed form."""

import numpy as np
import pytest

from mup_tpu.analysis.trend import fit_trend
from mup_tpu.analysis.valleys import Particles

SCALES = np.array([64.0, 128.0, 256.0, 512.0])


def particles(middle, sd, generator, count=800):
    """Draws of a curve whose optimum is known to a standard error."""
    vertex = middle + sd * np.sort(generator.standard_normal(count))
    one, inf = np.ones(count), np.full(count, np.inf)
    return Particles(one / count, vertex, one.astype(int), 0.08 * one, 2.5 * one, -inf, inf)


def integrated(x, sd):
    """Mean and standard deviation of α over a half-normal scatter and a log-uniform one, by quadrature."""
    octaves, found = np.log2(SCALES), []
    for tau in np.geomspace(0.015, 2.2, 400):
        weight = 1 / (sd**2 + tau**2)
        design = np.column_stack([np.ones(4), octaves])
        precision = design.T @ (weight[:, None] * design)
        beta = np.linalg.solve(precision, design.T @ (weight * x))
        left = (weight * (x - design @ beta) ** 2).sum()
        usual = np.exp(-0.5 * (tau / 0.15) ** 2) * 2 / (0.15 * np.sqrt(2 * np.pi))
        prior = 0.9 * usual + 0.1 / (tau * np.log(110))
        log = 0.5 * np.log(weight).sum() - 0.5 * np.linalg.slogdet(precision)[1] - left / 2
        found.append((beta[1], np.linalg.inv(precision)[1, 1], np.exp(log) * prior * tau))
    mean, variance, density = np.array(found).T
    middle = np.average(mean, weights=density)
    return middle, np.sqrt(np.average(variance + (mean - middle) ** 2, weights=density))


@pytest.mark.parametrize(
    ("x", "sd"),
    [
        ([-8.0, -8.3, -8.7, -8.9], [0.2, 0.1, 0.3, 0.2]),
        ([-8.0, -8.02, -7.97, -8.01], [0.05, 0.05, 0.05, 0.05]),
        ([-8.0, -7.0, -8.2, -7.4], [0.05, 0.1, 0.05, 0.1]),
    ],
)
def test_the_exponent_is_that_of_the_integrated_posterior(x, sd):
    generator = np.random.default_rng(0)
    trend = fit_trend(SCALES, [particles(m, s, generator) for m, s in zip(x, sd, strict=True)], generator)
    middle, spread = integrated(np.array(x), np.array(sd))
    assert trend.alpha_R.mean() == pytest.approx(middle, abs=0.15 * spread)
    assert trend.alpha_R.std() == pytest.approx(spread, rel=0.15)


def test_scatter_that_no_error_explains_widens_the_exponent():
    generator = np.random.default_rng(0)
    calm, wild = (
        fit_trend(SCALES, [particles(m, 0.05, generator) for m in x], generator)
        for x in ([-8.0, -8.01, -8.02, -8.03], [-8.0, -7.0, -8.0, -7.0])
    )
    assert np.median(wild.tau_R) > 5 * np.median(calm.tau_R)
    assert wild.alpha_R.std() > 3 * calm.alpha_R.std()


def test_draws_of_all_scales_go_together():
    """With little scatter, optima lie about their own draw's trend; a curve that tells little follows."""
    generator = np.random.default_rng(0)
    curves = [particles(-8.0, sd, generator) for sd in (0.05, 0.05, 0.05, 1.0)]
    trend = fit_trend(SCALES, curves, generator)
    expected = trend.intercept_R + trend.alpha_R * np.log2(SCALES[-1])
    left = trend.valleys[-1].optimum_P - expected
    assert np.std(left) < 0.35 < 1.0
    assert np.std(left / trend.tau_R) == pytest.approx(1.0, abs=0.25)
