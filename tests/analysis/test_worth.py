"""Worth of a transfer as a scale grows without end, against closed forms."""

import math

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.analysis.worth import Interval, Worth, approach, loss_errors, with_penalties

WIDTHS = np.array([64.0, 128.0, 256.0, 512.0, 1024.0])


def runs(optimum, loss, curvature, rule="mup", sigma=1e-4):
    """Three seeds of parabolas over log2 of the learning rate: half-octave grids around each optimum."""
    generator = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "parametrization": rule,
            "width": width,
            "lr": 2.0**x,
            "seed": seed,
            "loss": loss(width) + curvature(width) / 2 * (x - optimum(width)) ** 2 + sigma * noise,
        }
        for width in WIDTHS
        for x in np.round(2 * optimum(width)) / 2 + np.arange(-2.0, 2.1, 0.5)
        for seed, noise in enumerate(generator.standard_normal(3))
    )


def test_losses_are_as_uncertain_as_what_runs_of_a_seed_share():
    frame = runs(lambda w: -7.0, lambda w: 2 + 8 / w**0.5, lambda w: 0.1)
    shared = 0.02 * np.random.default_rng(0).standard_normal((len(WIDTHS), 3))
    at = np.searchsorted(WIDTHS, frame["width"])
    frame["loss"] += shared[at, frame["seed"]]
    evidence = weigh(check_table(frame).runs, Question())
    errors = loss_errors(evidence.estimates)
    assert errors == pytest.approx(math.sqrt(shared.var(axis=1, ddof=1).mean() / 3), rel=0.1)


@pytest.mark.parametrize(
    ("limit", "factor", "exponent"), [(1.5, 8.0, 0.5), (2.0, 3.0, 1.0), (-6.0, -9.0, 0.3)]
)
def test_limit_and_exponent_of_a_power_are_found(limit, factor, exponent):
    values = limit + factor * WIDTHS**-exponent
    found_limit, found = approach(WIDTHS, values, np.full(5, 1e-4))
    assert found_limit.value == pytest.approx(limit, abs=0.02)
    assert found.value == pytest.approx(exponent, rel=0.02)
    assert found_limit.low <= limit <= found_limit.high and found.low <= exponent <= found.high
    assert found.high - found.low < 0.05


def test_intervals_hold_a_power_in_19_of_20_tables():
    generator, held = np.random.default_rng(7), []
    for _ in range(300):
        values = 1.5 + 2.4 * WIDTHS[:4] ** -0.5 + 0.003 * generator.standard_normal(4)
        limit, exponent = approach(WIDTHS[:4], values, np.full(4, 0.003), floor=0.0)
        held.append((limit.low <= 1.5 <= limit.high, exponent.low <= 0.5 <= exponent.high))
    assert (np.mean(held, axis=0) > 0.92).all()


def test_an_optimum_that_follows_a_power_of_the_scale_has_no_limit():
    _, exponent = approach(WIDTHS, -6 - 0.5 * np.log2(WIDTHS), np.full(5, 0.05))
    assert exponent.low == 0 and exponent.high < 0.3


def test_an_optimum_that_stays_tells_no_exponent():
    _, exponent = approach(WIDTHS, np.full(5, -6.0), np.full(5, 0.1))
    assert exponent.low == 0 and exponent.high == math.inf


@pytest.mark.parametrize(
    ("loss_gap", "optimum_gap", "said"),
    [
        (1.0, 1.0, "useful"),  # random-feature ridge regression: theorem 3 of Ghosh et al.
        (1.0, 0.5, "not told"),  # the boundary, which strong convexity alone gives
        (1.5, 0.1, "not useful"),
    ],
)
def test_transfer_is_useful_if_its_cost_vanishes_faster_than_the_loss_gap(loss_gap, optimum_gap, said):
    _, a = approach(WIDTHS, 1.5 + 64**loss_gap * WIDTHS**-loss_gap, np.full(5, 1e-3))
    _, b = approach(WIDTHS, -6 + 3 * 64**optimum_gap * WIDTHS**-optimum_gap, np.full(5, 0.01))
    assert Worth(loss_exponent=a, optimum_exponent=b).useful == said


def test_kappa_is_that_of_the_curvature_over_the_hyperparameter_itself():
    """α − 2β + γ, for a loss gap n^-α, a best learning rate n^-β and a second derivative n^γ."""
    alpha, beta, gamma = 0.6, 0.3, 0.8

    def best(width):
        return -5 - beta * np.log2(width / 64)

    def curvature(width):  # over log2: the second derivative times (η ln 2)²
        return 0.2 * (width / 64) ** gamma * (2 ** (best(width) - best(64))) ** 2

    table = runs(best, lambda n: 1.5 + (n / 64) ** -alpha, curvature)
    found = analyze(table).results[0].worth
    assert found.kappa.value == pytest.approx(alpha - 2 * beta + gamma, abs=0.1)
    assert found.kappa.low < alpha - 2 * beta + gamma < found.kappa.high
    assert found.irreducible.value == pytest.approx(1.5, abs=0.02)


def test_the_penalty_is_against_the_best_of_the_other_rules():
    def rule(name, limit):
        return runs(lambda n: -6.0, lambda n: limit + (n / 64) ** -1.0, lambda n: 0.2, name)

    better, worse = analyze(pd.concat([rule("mup", 1.5), rule("sp", 1.7)])).results
    assert worse.worth.penalty.value == pytest.approx(0.2, abs=0.02)
    assert better.worth.penalty.value == pytest.approx(-0.2, abs=0.02)
    assert worse.worth.penalty.low > 0 > better.worth.penalty.high
    assert not with_penalties([better.worth])[0].penalty.is_known


def test_what_is_not_known_says_why():
    rising = runs(lambda n: -6.0, lambda n: 2 + n / 1024, lambda n: 0.2)
    assert analyze(rising).results[0].worth.why_not.code == "loss does not fall"
    three = rising[rising["width"] < 512]
    found = analyze(three).results[0].worth
    assert (
        found.why_not == Reason.of("few optima", known=3, needed=4)
        and found.useful == "not told"
        and not found.kappa.is_known
    )


def test_a_sum_of_intervals_is_that_of_independent_numbers():
    total = Interval(1.0, 0.7, 1.4).plus(Interval(2.0, 1.6, 2.3).times(-1.0))
    assert (total.value, total.low, total.high) == pytest.approx(
        (-1, -1 - math.hypot(0.3, 0.3), -1 + math.hypot(0.4, 0.4))
    )
