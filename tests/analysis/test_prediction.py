"""Predicted optima against kriging and rejection sampling, targets by other columns, and what is said."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from mup_tpu import predict
from mup_tpu.analysis import Columns, analyze, check_table, load_table
from mup_tpu.analysis.curvature import valley_at
from mup_tpu.analysis.line import expected_variance, fit_line
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.priors import Priors, kind_of, priors_of
from mup_tpu.errors import TableError

SCALES, X, ERRORS = (64, 128, 256, 512), (-5.6, -5.3, -5.5, -5.1), (0.05, 0.1, 0.07, 0.2)


def optimum(scale, x, error, status="bracketed", low=None, high=None):
    low, high = (x - 2 * error if low is None else low), (x + 2 * error if high is None else high)
    return Optimum(scale, status, x, low, high, 2.0, x, x, x, error)


KNOWN = [optimum(*point) for point in zip(SCALES, X, ERRORS, strict=True)]


def wandered(a, b):
    """Covariance of a twice integrated white noise at two distances from 0."""
    if a * b <= 0:
        return 0.0
    a, b = abs(a), abs(b)
    return quad(lambda u: (a - u) * (b - u), 0, min(a, b))[0]


def kriging(octaves, tau):
    """Density of the optima, and mean and covariance at targets, for one τ: universal kriging."""
    priors, octaves = Priors(), np.atleast_1d(octaves)
    at = np.log2(np.array(SCALES) / SCALES[-1])
    x, ones = np.array(X), np.ones(len(X))

    def covariance(a, b):
        return priors.slope**2 * np.outer(a, b) + priors.bend**2 * np.vectorize(wandered)(a[:, None], b)

    K = covariance(at, at) + np.diag(np.square(ERRORS) + tau**2)
    inverse = np.linalg.inv(K)
    beta = ones @ inverse @ x / (ones @ inverse @ ones)
    left = x - beta
    log_density = -0.5 * (left @ inverse @ left + np.linalg.slogdet(K)[1] + math.log(ones @ inverse @ ones))
    k = covariance(at, octaves)
    mean = beta + k.T @ inverse @ left
    prior = covariance(octaves, octaves) + tau**2 * np.eye(len(octaves))
    lacking = 1 - ones @ inverse @ k
    spread = prior - k.T @ inverse @ k + np.outer(lacking, lacking) / (ones @ inverse @ ones)
    return math.exp(log_density), np.squeeze(mean), np.squeeze(spread)


@pytest.mark.parametrize("octaves", [1.0, 3.0])
def test_prediction_is_that_of_kriging_with_the_scatter_integrated(octaves):
    def over_tau(of):
        prior = norm(0, Priors().scatter)
        return quad(lambda tau: prior.pdf(tau) * of(*kriging(octaves, tau)), 0, 1.0, limit=200)[0]

    weight = over_tau(lambda density, mean, variance: density)
    mean = over_tau(lambda density, mean, variance: density * mean) / weight
    second = over_tau(lambda density, mean, variance: density * (variance + mean**2)) / weight

    def below(x):
        return over_tau(lambda density, m, v: density * norm(m, math.sqrt(v)).cdf(x)) / weight

    line = fit_line(KNOWN, np.random.default_rng(0), draws=200_000)
    draws_R = line.optima_R(512 * 2**octaves, np.random.default_rng(1))
    sd = math.sqrt(second - mean**2)
    assert draws_R.mean() == pytest.approx(mean, abs=0.02 * sd)
    assert draws_R.std() == pytest.approx(sd, rel=0.02)
    assert math.sqrt(line.variance(octaves)) == pytest.approx(sd, rel=0.02)
    low, high = np.quantile(draws_R, [0.025, 0.975])
    assert below(low) == pytest.approx(0.025, abs=0.004)
    assert below(high) == pytest.approx(0.975, abs=0.004)


def test_the_variance_to_expect_is_that_of_kriging_over_the_scatters_prior():
    def variance(tau):
        return kriging(2.0, tau)[2]

    prior = norm(0, Priors().scatter)
    expected = 2 * quad(lambda tau: prior.pdf(tau) * variance(tau), 0, 1.0, limit=200)[0]
    at_S = np.log2(np.array(SCALES) / SCALES[-1])
    assert expected_variance(at_S, np.square(ERRORS), 2.0, Priors()) == pytest.approx(expected, rel=1e-3)


def test_a_steady_line_is_believed_as_far_as_the_optima_say_so():
    may_be, is_not = Priors(steady=0.5), Priors()
    flat = [optimum(scale, -6.0, 0.03) for scale in SCALES]
    steep = [optimum(scale, -0.5 * math.log2(scale), 0.03) for scale in SCALES]

    def spread(optima, priors):
        return (
            fit_line(optima, np.random.default_rng(0), priors).trend_R(4096, np.random.default_rng(1)).std()
        )

    assert spread(flat, may_be) < 0.6 * spread(flat, is_not)
    assert spread(steep, may_be) == pytest.approx(spread(steep, is_not), rel=0.1)
    steady = (fit_line(flat, np.random.default_rng(0), may_be).factor_R < 1).mean()
    # Bayes' rule with each prior alone: the densities of the optima by their normal's contrasts.
    contrast = np.linalg.svd(np.ones((1, 4)))[2][1:]
    at = np.log2(np.array(SCALES) / SCALES[-1])

    def density(factor):
        def of(tau):
            prior = 0.25 * np.outer(at, at) + 0.09 * np.vectorize(wandered)(at[:, None], at)
            K = factor**2 * prior + np.eye(4) * (0.03**2 + tau**2)
            return norm(0, 0.15).pdf(tau) / math.sqrt(np.linalg.det(contrast @ K @ contrast.T))

        return quad(of, 0, 1.0, limit=200)[0]

    assert steady == pytest.approx(density(0.15) / (density(0.15) + density(1.0)), abs=0.02)


def test_scales_far_behind_do_not_pin_the_slope_ahead():
    far = [optimum(2.0**k, -6.0, 0.02) for k in range(12)]
    sd = fit_line(far, np.random.default_rng(0)).trend_R(2.0**13, np.random.default_rng(1)).std()
    near = fit_line(far[-4:], np.random.default_rng(0)).trend_R(2.0**13, np.random.default_rng(1)).std()
    assert sd == pytest.approx(near, rel=0.2) and sd > Priors().bend


def test_priors_come_by_the_kind_of_scale_and_by_what_the_rule_promises():
    assert [kind_of(c) for c in ("d_model", "n_layer", "bs", "steps_planned", "flops", "dropout")] == [
        "width", "depth", "batch size", "tokens", "size", "",
    ]  # fmt: skip
    assert priors_of("width", "mup").bend < priors_of("width", "sp").bend
    assert priors_of("dropout", "mup") == Priors()


def test_an_optimum_below_its_grid_bounds_the_line_as_rejection_of_draws_does():
    bound = -5.5
    beyond = [optimum(1024, -5.6, math.nan, "at lower edge", -math.inf, bound)]
    generator, taus = np.random.default_rng(1), np.arange(0.005, 0.75, 0.01)
    drawn = [kriging([1.0, 2.0], tau) for tau in taus]
    weight = np.array([density for density, _, _ in drawn]) * norm(0, Priors().scatter).pdf(taus)
    counts = generator.multinomial(400_000, weight / weight.sum())
    pairs = np.concatenate(
        [generator.multivariate_normal(m, v, n) for (_, m, v), n in zip(drawn, counts, strict=True)]
    )
    kept = pairs[:, 0] <= bound
    expected_R = pairs[kept, 1]
    assert kept.mean() < 0.5, "the bound says something"
    line = fit_line([*KNOWN, *beyond], np.random.default_rng(2), draws=100_000)
    found_R = line.trend_R(2048, np.random.default_rng(3))
    assert found_R.mean() == pytest.approx(expected_R.mean(), abs=0.02)
    assert found_R.std() == pytest.approx(expected_R.std(), rel=0.03)


def test_a_bound_that_the_known_optima_did_not_expect_still_moves_the_line():
    known = [optimum(scale, -7.0, 0.04) for scale in (64, 128, 256)]
    beyond = [optimum(s, -9.0, math.nan, "at lower edge", -math.inf, -9.0) for s in (512, 1024)]
    line = fit_line([*known, *beyond], np.random.default_rng(0))
    assert np.median(line.trend_R(2048, np.random.default_rng(1))) < -9.5
    above = [optimum(s, -5.0, math.nan, "at upper edge", -5.0, math.inf) for s in (512, 1024)]
    line = fit_line([*known, *above], np.random.default_rng(0))
    assert np.median(line.trend_R(2048, np.random.default_rng(1))) > -4.5


def test_where_an_optimum_was_measured_the_measurement_counts():
    line = fit_line(KNOWN, np.random.default_rng(0))
    draws_R = line.optima_R(64, np.random.default_rng(1))
    assert abs(draws_R.mean() - X[0]) < ERRORS[0] and draws_R.std() < ERRORS[0]


def valley_runs(alpha=-0.5, widths=(64, 128, 256, 512), curvature=0.08, seeds=2, **more):
    """Runs whose optimum lies at 2^-6 at width 64, with loss 2 + 8·width^-0.5 there."""
    generator = np.random.default_rng(0)
    rows = []
    for width in widths:
        best = -6 + alpha * math.log2(width / 64)
        for x in np.arange(-12.0, -2.0):
            for seed in range(seeds):
                loss = 2 + 8 * width**-0.5 + curvature / 2 * (x - best) ** 2 + generator.normal(0, 0.002)
                sizes = {"params_non_embedding": 12 * width**2, "tokens": 2.0e6} | more
                rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": loss} | sizes)
    return pd.DataFrame(rows)


def test_a_power_goes_on_to_the_target_with_its_cost_and_loss():
    found = predict(valley_runs(), "width=1024").of("all")
    truth = -6 - 0.5 * 4
    assert found.reach == 1 and found.bears
    assert found.interval[0] < truth < found.interval[1] and found.x == pytest.approx(truth, abs=0.15)
    assert found.half[0] < found.x < found.half[1]
    assert found.staying.expected == pytest.approx(0.04 * 4.0, rel=0.25)
    sd = (found.interval[1] - found.interval[0]) / 3.92
    assert found.following.expected == pytest.approx(0.04 * (0.25 + sd**2), rel=0.25)
    assert found.taking.expected < found.following.expected
    assert found.loss.holds(2 + 8 * 1024**-0.5)


def test_curvature_is_the_second_derivative_at_the_optimum():
    result = analyze(valley_runs(curvature=0.08)).results[0]
    valley = valley_at(result.curves, result.noise, result.optima[-1])
    assert valley.curvature == pytest.approx(0.08, rel=0.1)


def test_a_table_says_how_far_it_bears():
    near, far = predict(valley_runs(), ["width=1024", "width=65536"]).predictions
    assert near.bears and not far.bears
    assert near.furthest == far.furthest and 1 < near.furthest < 7
    found = predict(valley_runs(), f"width={512 * 2 ** (near.furthest - 0.1)}").predictions[0]
    assert found.bears
    assert not predict(valley_runs(), f"width={512 * 2 ** (near.furthest + 0.2)}").predictions[0].bears


def test_targets_by_other_columns_are_found_by_what_the_rows_say():
    width, params = predict(valley_runs(), ["width=4096", f"params={12 * 4096**2}"]).predictions
    assert params.scale == pytest.approx(width.scale, rel=1e-6)
    (flops,) = predict(valley_runs(), f"flops={6 * 12 * 1024**2 * 2e6}").predictions
    assert flops.scale == pytest.approx(1024, rel=1e-6)
    (alias,) = predict(valley_runs(), "d_model=1024").predictions
    assert alias.scale == 1024
    both = predict(valley_runs(), "width=1024, width=32")
    assert [p.scale for p in both.predictions] == [1024, 32]
    (field,) = predict("results/horizon_transfer", "steps=8000").predictions[:1]
    assert field.scale == 8000, "a field's name, where its column has another"


def test_flops_that_rows_lack_are_those_of_the_parameters_that_a_token_uses():
    table = load_table("results/moe_transfer")
    rows = table.stored.assign(flops=math.nan)
    (known,) = rows.loc[rows["width"] == 128, ["params_active", "tokens"]].drop_duplicates().to_numpy()
    found = predict(replace(table, stored=rows), f"flops={6 * known.prod()}")
    assert found.predictions[0].scale == pytest.approx(128, rel=1e-3)


@pytest.mark.parametrize(
    ("at", "sentence"),
    [
        ([], "a prediction needs a target: give --at width=VALUE"),
        ("4096", "at 4096 is not NAME=VALUE; write for example width=4096"),
        ("=3", "at =3 is not NAME=VALUE; write for example width=4096"),
        ("width=", "at width= is not allowed: its value must be a finite number above 0"),
        ("width=-2", "must be a finite number above 0"),
        ("width=nan", "must be a finite number above 0"),
        ("width=1e300", "octaves from the largest width, 512; at most 40 are predicted"),
        ("tokens=5e9", "all runs have tokens 2e+06, so the table says nothing of another; give width=VALUE"),
        ("depth=8", "the table does not say how depth follows width; give width=VALUE, params=VALUE"),
        ("width=1024,depth=8", "at 'depth': the table does not say how depth follows width"),
    ],
)
def test_targets_that_cannot_be_are_one_sentence(at, sentence):
    with pytest.raises(TableError) as error:
        predict(valley_runs(), at)
    assert sentence in str(error.value)


def test_a_table_whose_parameters_have_another_name_says_which_flag_names_them():
    runs = valley_runs().rename(columns={"params_non_embedding": "weights"})
    with pytest.raises(TableError, match=r"how params follows width \(--columns params=COLUMN names a table"):
        predict(runs, "params=1.3e9")
    named = check_table(runs, Columns(params="weights"))
    assert predict(named, f"params={12 * 4096**2}").predictions[0].scale == pytest.approx(4096)


def test_a_rule_with_one_known_optimum_is_not_predicted():
    runs = valley_runs(widths=(64,))
    with pytest.raises(
        TableError, match="2 widths with an optimum inside the grid are needed, and the best rule has 1"
    ):
        predict(runs, "width=128")
    both = pd.concat([runs.assign(parametrization="sp"), valley_runs().assign(parametrization="mup")])
    found = predict(both, "width=1024")
    assert [p.compared for p in found.predictions] == ["mup"]
    assert (found.notes[0].code, found.notes[0]["compared"]) == ("no prediction", "sp")


def test_a_loss_that_cannot_be_told_has_its_reason():
    found = predict(valley_runs(widths=(64, 128)), "width=512").predictions[0]
    assert found.loss is None
    assert found.why_no_loss.code == "few optima"


def test_any_scale_of_a_table_may_be_predicted():
    runs = valley_runs().rename(columns={"width": "tokens_seen"}).drop(columns="tokens")
    table = check_table(runs, Columns(scale="tokens_seen"))
    assert predict(table, "tokens_seen=1024").predictions[0].reach == 1


def test_the_figure_has_a_panel_a_rule_and_marks_every_target():
    from mup_tpu import plots

    both = pd.concat(
        [valley_runs(0).assign(parametrization="mup"), valley_runs().assign(parametrization="sp")]
    )
    figure = plots.prediction_figure(predict(both, ["width=1024", "width=65536"]))
    assert [ax.get_title() for ax in figure.axes] == ["μP", "SP"]
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "extrapolated too far" in key


def test_a_column_of_parameters_is_told_by_its_name_and_a_target_with_a_separator_is_named_whole():
    runs = valley_runs().drop(columns="params_non_embedding", errors="ignore")
    runs = runs.assign(n_params=12 * runs["width"] ** 2 + 256 * runs["width"])
    found = predict(runs, f"params={12 * 2048**2 + 256 * 2048}").predictions[0]
    assert found.scale == pytest.approx(2048)
    with pytest.raises(TableError, match="at width=4,096 is not NAME=VALUE; write for example width=4096"):
        predict(runs, "width=4,096")
