"""The regression of optima over scales, against kriging with covariances by quadrature."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import prediction as benchmark
import pytest
from scipy import stats
from scipy.integrate import dblquad

from mup_tpu.analysis.drift import fit_drift
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.trend import (
    BY_KIND,
    KEPT,
    Pace,
    Priors,
    Trend,
    claims,
    fit_trend,
    kind_of,
    priors_of,
    rule_named,
)  # fmt: skip

SCALES = (64.0, 128.0, 256.0, 512.0)
X, ERRORS = np.array([-5.6, -5.3, -5.5, -5.1]), np.array([0.05, 0.1, 0.07, 0.2])
ONE = Priors(steady=0.0, scatter=0.1, mean=0.2, moving=Pace(0.4, 0.3, 1.5), breaks=0.0)
"""A single set: its posterior has a reference."""


def optimum(scale, x, error, status="bracketed"):
    return Optimum(scale, status, x, x - 2 * error, x + 2 * error, 2.5, round(x), x - 1, x + 1, error)


def optima_of(xs, error, scales=SCALES):
    return [optimum(s, x, error) for s, x in zip(scales, xs, strict=False)]


@cache
def wandered(r, t, pace):
    """Covariance of a slope's integral from 0, by quadrature of its own covariance."""
    if r == 0 or t == 0:
        return 0.0
    value, _ = dblquad(lambda a, b: math.exp(-abs(a - b) / pace.memory), 0, t, 0, r, epsabs=1e-7)
    return pace.wander**2 * value


def kriging(octaves, tau, priors=ONE):
    """Density of the optima, mean and variance at a distance, and those of the slope, for one τ."""
    pace, at = priors.moving, np.append(np.log2(np.array(SCALES) / SCALES[-1]), octaves)
    whole = np.array([[wandered(r, t, pace) + pace.slope**2 * r * t for t in at] for r in at])
    y, own = X - priors.mean * at[:-1], np.diag(ERRORS**2 + tau**2)
    K, k = whole[:-1, :-1] + own, whole[:-1, -1]
    ones, inverse = np.ones(len(X)), np.linalg.inv(K)
    precision = ones @ inverse @ ones
    beta = ones @ inverse @ y / precision
    left, lacking = y - beta, 1 - ones @ inverse @ k
    density = math.exp(-0.5 * (left @ inverse @ left + np.linalg.slogdet(K)[1] + math.log(precision)))
    mean = beta + priors.mean * octaves + k @ inverse @ left
    return density, mean, whole[-1, -1] + tau**2 - k @ inverse @ k + lacking**2 / precision


@pytest.mark.parametrize("octaves", [3.0])
def test_a_prediction_is_that_of_kriging_with_the_scatter_integrated(octaves):
    taus = 0.1 * stats.t.isf(0.5 * (1 - (np.arange(60) + 0.5) / 60), 3)
    density, mean, variance = np.array([kriging(octaves, tau) for tau in taus]).T
    weight = density / density.sum()
    expected = weight @ mean
    sd = math.sqrt(weight @ (variance + mean**2) - expected**2)
    predicted = Trend(SCALES, X, ERRORS, (ONE,)).optimum(SCALES[-1] * 2**octaves)
    assert predicted.mean == pytest.approx(expected, abs=0.03 * sd)
    assert math.sqrt(predicted.variance) == pytest.approx(sd, rel=0.03)
    for q in (0.025, 0.25, 0.975):
        below = weight @ stats.norm.cdf((predicted.quantile(q) - mean) / np.sqrt(variance))
        assert below == pytest.approx(q, abs=0.006)
    draws_R = predicted.draws_R(np.random.default_rng(0), 100_000)
    assert draws_R.std() == pytest.approx(sd, rel=0.03)


def test_a_slope_is_that_of_least_squares_through_exact_optima():
    xs = [-6.0, -6.5, -7.2, -7.3]
    trend = fit_trend(optima_of(xs, 0.001), Priors(0.0, 1e-3))
    assert trend.slope().mean == pytest.approx(np.polyfit(range(4), xs, 1)[0], abs=0.005)


def sampled(trend, chosen, draws=400_000):
    """Optima from the prior, scatter included, and their density beside the chosen scales' measured ones."""
    generator, r_S = np.random.default_rng(0), np.log2(np.array(SCALES) / SCALES[-1])
    pace, tau_R = ONE.moving, 0.1 * np.abs(generator.standard_t(3, draws))
    moved_RS = generator.multivariate_normal(ONE.mean * r_S, pace.covariance(r_S, r_S), draws)
    truth_RS = moved_RS + tau_R[:, None] * generator.standard_normal(moved_RS.shape)
    # The level is flat: it follows from the chosen scales' optima, each by its error.
    weight_S = np.where(chosen, ERRORS**-2.0, 0.0)
    level_R = (X - truth_RS) @ weight_S / weight_S.sum()
    truth_RS += level_R[:, None] + generator.standard_normal(draws)[:, None] / math.sqrt(weight_S.sum())
    left_RS = X - truth_RS
    around_RS = left_RS - (left_RS @ weight_S / weight_S.sum())[:, None]
    return truth_RS, np.exp(-0.5 * (around_RS**2) @ weight_S)


def test_a_movement_is_the_slope_of_the_optima_and_an_exponent_has_their_scatter_as_error():
    truth_RS, density_R = sampled(ONE, np.ones(4, bool))
    slopes_R = truth_RS @ np.array([-1.5, -0.5, 0.5, 1.5]) / 5
    mean = np.average(slopes_R, weights=density_R)
    trend = Trend(SCALES, X, ERRORS, (ONE,))
    slope = trend.movement()
    assert slope.mean == pytest.approx(mean, abs=0.005)
    deviation = math.sqrt(np.average((slopes_R - mean) ** 2, weights=density_R))
    assert math.sqrt(slope.variance) == pytest.approx(deviation, rel=0.05)
    assert trend.slope().variance > 1.3 * slope.variance


WIDTHS = [64.0 * 2**k for k in range(7)]


def test_the_exponent_of_pure_scatter_is_seldom_told_from_0():
    """Optima that scatter by half an octave have moved; a law through them has that scatter as its error."""
    drifts = [
        fit_drift(optima_of(-8 + 0.5 * np.random.default_rng(s).standard_normal(7), 0.05, WIDTHS), "width")
        for s in range(40)
    ]
    assert np.mean([d.low < 0 < d.high for d in drifts]) > 0.9
    assert np.mean([d.has_moved for d in drifts]) > 0.7


def test_an_optimum_left_out_is_predicted_as_by_a_trend_without_it():
    priors = replace(ONE, shared=(0.0, 0.3))
    sizes = 2.0 ** np.array([(n, d) for n in range(4) for d in range(4)])
    generator = np.random.default_rng(2)
    x, errors = generator.normal(0, 1, 16), generator.uniform(0.05, 0.2, 16)
    left = Trend(sizes, x, errors, (priors, priors)).left_out()[5]
    others = np.arange(16) != 5
    expected = Trend(sizes[others], x[others], errors[others], (priors, priors)).optimum(sizes[5])
    assert left.mean == pytest.approx(expected.mean, abs=1e-3)
    assert left.variance == pytest.approx(expected.variance + errors[5] ** 2, rel=1e-3)


def test_two_optima_are_drawn_together_with_what_the_other_scales_say():
    truth_RS, density_R = sampled(ONE, np.array([False, True, True, False]))
    draws_2R = X[[0, 3], None] + 0.4 * np.random.default_rng(1).standard_normal((2, 4000))
    number_R = Trend(SCALES, X, ERRORS, (ONE,)).together(64.0, 512.0, draws_2R)
    both_RS = truth_RS[:, [0, 3]]
    weight_R = density_R * np.exp(-0.5 * ((both_RS - X[[0, 3]]) ** 2).sum(axis=1) / 0.4**2)
    apart_R = both_RS[:, 1] - both_RS[:, 0]
    mean = np.average(apart_R, weights=weight_R)
    drawn_R = np.diff(draws_2R[:, number_R], axis=0)[0]
    assert drawn_R.mean() == pytest.approx(mean, abs=0.03)
    deviation = math.sqrt(np.average((apart_R - mean) ** 2, weights=weight_R))
    assert drawn_R.std() == pytest.approx(deviation, rel=0.08)
    assert drawn_R.std() < 0.8 * np.diff(draws_2R, axis=0).std()


def test_what_far_ahead_costs_grows_as_the_distance_and_not_as_its_cube():
    trend = fit_trend(optima_of([-6, -6, -6, -6], 0.03), replace(ONE, moving=Pace(0.0, 0.3, 1.0)))
    near, far = (trend.optimum(512 * 2.0**r).variance for r in (4, 8))
    assert 1.7 < far / near < 2.4


def test_a_rule_is_as_steady_as_its_optima_and_its_claim_say():
    flat, steep = (
        fit_trend(optima_of([-6 + s * k for k in range(4)], 0.03), priors_of("width")) for s in (0, -0.5)
    )
    assert steep.steady < 1e-3 < BY_KIND["width"].steady < flat.steady
    claimed = fit_trend(optima_of([-6] * 4, 0.03), priors_of("width", claimed=True))
    assert claimed.steady > flat.steady
    odds = flat.steady / (1 - flat.steady) / (BY_KIND["width"].steady / (1 - BY_KIND["width"].steady))
    assert claimed.steady / (1 - claimed.steady) == pytest.approx(odds * KEPT / (1 - KEPT), rel=1e-6)


def test_a_break_beyond_the_scales_widens_what_lies_there_alone():
    calm = fit_trend(optima_of([-6] * 4, 0.03), replace(ONE, breaks=0.0))
    wary = fit_trend(optima_of([-6] * 4, 0.03), replace(ONE, breaks=0.2, broken=0.5))
    assert wary.optimum(256).variance == pytest.approx(calm.optimum(256).variance)
    chance, more = 1 - math.exp(-0.2 * 3), (0.5 * 3) ** 2 / 3
    assert wary.optimum(4096).variance - calm.optimum(4096).variance == pytest.approx(chance * more)


def test_where_an_optimum_was_measured_the_measurement_counts():
    trend = Trend(SCALES, X, ERRORS, (ONE,))
    at = trend.optimum(64)
    assert abs(at.mean - X[0]) < ERRORS[0] and math.sqrt(at.variance) < ERRORS[0]
    assert trend.optimum(64, measured=False).variance > at.variance


def test_an_optimum_at_an_edge_moves_a_prediction_and_no_exponent():
    known = optima_of([-7, -7, -7], 0.05)
    edge = replace(optimum(512.0, -9.0, 0.4, "at lower edge"), mean=-9.7)
    with_edge, without = (fit_trend(o, priors_of("width")) for o in ([*known, edge], known))
    assert with_edge.optimum(1024).mean < without.optimum(1024).mean - 0.5
    assert with_edge.steady < without.steady
    assert fit_drift([*known, edge]).alpha == pytest.approx(fit_drift(known).alpha)


def test_scatter_beyond_the_errors_is_seen():
    calm, wild = (
        fit_drift(optima_of(xs, 0.05), "width") for xs in ([-8, -8.01, -8.02, -8.03], [-8, -7, -8, -7])
    )
    assert wild.tau > 0.3 > calm.tau
    assert not fit_drift(optima_of([-8, -8], 0.1)).is_known


def test_an_interval_says_whether_it_rests_on_the_prior():
    plain = fit_drift(optima_of([-6, -6.5, -7, -7.5], 0.02), "width")
    assert plain.has_moved and not plain.rests_on_prior
    unsure = [
        fit_drift(optima_of([-6, -6 - s, -6 - 2 * s], 0.1), "width").rests_on_prior
        for s in np.arange(0.02, 0.5, 0.02)
    ]
    assert any(unsure) and not all(unsure)


@pytest.mark.parametrize(("count", "scatter", "error"), [(4, 0.15, 0.05), (3, 0.1, 0.05), (4, 0.0, 0.1)])
def test_drift_interval_holds_the_truth_as_often_as_it_says(count, scatter, error):
    generator, inside = np.random.default_rng(0), []
    for _ in range(300):
        truth = -8 + scatter * generator.standard_normal(count)
        drift = fit_drift(optima_of(truth + error * generator.standard_normal(count), error))
        inside.append(drift.low <= np.polyfit(range(count), truth, 1)[0] <= drift.high)
    assert np.mean(inside) >= 0.92


@pytest.mark.parametrize("name", ["mup", "muP", "μP", "µP", "mu-P", "MUP", "mu_p"])
def test_a_claim_has_many_spellings(name):
    assert rule_named(name) == "mup" and claims(name, "width")


def test_priors_come_by_the_kind_of_scale_and_by_the_claim():
    assert [kind_of(c) for c in ("d_model", "n_layer", "bs", "steps_planned", "flops", "dropout")] == [
        "width", "depth", "batch size", "tokens", "size", "",
    ]  # fmt: skip
    assert not claims("sp", "width") and not claims("mup", "batch size") and not claims("all", "width")
    tuned = ("lr", "init_std", "alpha_out", "weight_decay", "optimizer.wd", "dropout", "batch_size", "bs")
    assert [name for name in tuned if claims("mup", "width", name)] == ["lr", "init_std", "alpha_out"]
    assert priors_of("d_model") == BY_KIND["width"] and priors_of("dropout") == BY_KIND[""]


def test_the_benchmark_s_regression_of_all_sweeps_together_is_this_one():
    generator, rows = np.random.default_rng(0), []
    for number, count in enumerate((3, 5)):
        written = (
            f"{64 * 2**k} {-7 - 0.3 * k + 0.1 * generator.standard_normal():.6f} 0.08" for k in range(count)
        )
        labels = {"source": f"source {number}", "sweep": "a", "rule": "r", "kind": "width"}
        rows.append(labels | {"claimed": number == 1, "optima": "; ".join(written)})
    given = benchmark.prefixes(pd.DataFrame(rows))
    low_PT = benchmark.quantile(benchmark.predicted(given, BY_KIND["width"]), 0.025)
    prefix = 0
    for row in rows:
        known = np.array([one.split() for one in row["optima"].split("; ")], float)
        for count in range(2, len(known)):
            trend = Trend(*known[:count].T, (priors_of("width", row["claimed"]),))
            for place, (scale, _, error) in enumerate(known[count:]):
                made = trend.optimum(scale)
                made = replace(made, deviation_K=np.hypot(made.deviation_K, error))
                expected = made.quantile(0.025) - known[count - 1, 1]
                assert low_PT[prefix, place] == pytest.approx(expected, abs=2e-3)
            prefix += 1


def test_priors_count_the_sweeps_of_the_atlas_that_they_rest_on():
    """An atlas that has grown by a sixth asks for priors chosen anew (benchmarks/prediction.md)."""
    file = Path(__file__).parents[2] / "results" / "public" / "sweeps.csv"
    atlas = pd.read_csv(file).fillna({"kind": "", "optima": ""})
    known = atlas[atlas["optima"].str.count(";") >= 2]
    for kind, priors in BY_KIND.items():
        along = known[known["kind"] == kind]
        claiming = int(along["claimed"].astype(bool).sum())
        for rests_on, count in ((priors.sweeps, len(along)), (priors.claiming, claiming)):
            assert abs(rests_on - count) <= max(1, count / 6), kind


def test_intervals_hold_targets_of_sizes_that_change_each_others_exponents():
    """x = a·α + b·β + k·a·b with k of ±0.09, at cells of a plan up to eight octaves from the target."""
    at = np.array([[-8.0, -6], [-8, -3], [-4, -6], [-6, -5], [-4, -4], [-3, -5]])
    plain = (BY_KIND["tokens"], BY_KIND["batch size"])
    inside, generator = {0.0: 0, 0.03: 0}, np.random.default_rng(0)
    for _ in range(60):
        slopes, k = generator.normal(0, 0.2, 2), generator.choice([-0.09, 0.09])
        true = at @ slopes + k * at[:, 0] * at[:, 1]
        x = true + generator.normal(0, 0.1, len(at))
        for mixed in inside:
            priors = tuple(replace(p, mixed=mixed) for p in plain)
            made = Trend(2.0**at, x, np.full(len(at), 0.1), priors).optimum((1, 1))
            inside[mixed] += made.quantile(0.025) < 0 < made.quantile(0.975)
    assert inside[0.03] >= 55 and inside[0.0] < 45
    alone = [Trend(2.0 ** at[:, 0], x, np.full(6, 0.1), (replace(plain[0], mixed=m),)) for m in (0.0, 0.03)]
    assert alone[0].optimum(1.0).quantile(0.9) == alone[1].optimum(1.0).quantile(0.9), "one scale has none"


def test_a_lawful_trend_of_several_sizes_is_a_power_law_and_half_of_it_lies_between():
    priors = (BY_KIND["width"], BY_KIND["tokens"])
    sizes, target = 2.0 ** np.array([(-4, -4), (-4, -2), (-2, -4), (-2, -2), (-1, -1)]), (1.0, 1.0)
    x, errors = np.array([1.0, 1.1, 2.1, 2.0, 2.4]), np.full(5, 0.1)
    straight = tuple(
        replace(p, quiet=p.quiet.straight, moving=p.moving.straight, mixed=0.0, breaks=0.0) for p in priors
    )
    plain, law, half, whole = (
        Trend(sizes, x, errors, of, lawful=chance).optimum(target)
        for of, chance in ((priors, 0.0), (straight, 0.0), (priors, 0.5), (priors, 1 - 1e-9))
    )
    assert (whole.mean, whole.variance) == pytest.approx((law.mean, law.variance), rel=1e-6)
    assert law.variance < half.variance < plain.variance
