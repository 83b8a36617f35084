"""Optima of curves whose optimum is known in closed form, and intervals against simulation."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Reading, analyze, check_table, load_table
from mup_tpu.analysis.optimum import Noise, _ridge_effects, estimates, loss_curve, pooled_noise
from mup_tpu.store import Condition

ROOT = Path(__file__).parents[2]


def curve_of(loss, grid, seeds=2, sigma=0.0, generator=None):
    """The curve of `loss(x)` on a grid of x = log2 lr, with seeds that scatter by sigma."""
    generator = generator or np.random.default_rng(0)
    rows = [
        {"width": 64, "lr": 2.0**x, "seed": s, "loss": loss(x) + sigma * generator.standard_normal()}
        for x in grid
        for s in range(seeds)
    ]
    return loss_curve(check_table(pd.DataFrame(rows)).runs)


def optimum_of(curve, seed=0):
    noise = pooled_noise([curve])
    return estimates([curve], noise, np.random.default_rng(seed))[0].optimum


def test_a_single_seed_is_weak_evidence_and_not_none():
    """Three values bracket an optimum, a run each: its interval was 0 to ∞."""
    generator = np.random.default_rng(1)
    curves = [
        curve_of(lambda x, at=at: 2.5 + 0.05 * (x - at) ** 2, range(-9, -6), 1, 0.003, generator)
        for at in (-8.1, -8.0, -7.9)
    ]
    noise = pooled_noise(curves)
    assert 0.001 < noise.sigma < 0.02
    for one, truth in zip(estimates(curves, noise, generator), (-8.1, -8.0, -7.9), strict=True):
        assert -9 < one.optimum.low < truth < one.optimum.high < -7


def test_optimum_of_a_parabola_is_its_vertex():
    curve = curve_of(lambda x: 2.5 + 0.03 * (x + 8.3) ** 2, range(-12, -4))
    optimum = optimum_of(curve)
    assert optimum.status == "bracketed"
    assert optimum.x == pytest.approx(-8.3, abs=0.006)
    assert optimum.loss == pytest.approx(2.5, abs=1e-4)
    assert optimum.low <= -8.3 <= optimum.high


def test_optimum_of_a_cubic_is_its_local_minimum():
    # d/dx of 0.05 u² + 0.008 u³ vanishes at u = 0, whatever the cubic term.
    curve = curve_of(lambda x: 2.5 + 0.05 * (x + 7.6) ** 2 + 0.008 * (x + 7.6) ** 3, range(-11, -4))
    optimum = optimum_of(curve)
    # No shape of the family is a cubic: its error of form is 0.12 octave here, and the interval owns it.
    assert optimum.x == pytest.approx(-7.6, abs=0.13) and optimum.low < -7.6 < optimum.high


@pytest.mark.parametrize(("vertex", "status"), [(-14, "at lower edge"), (-2, "at upper edge")])
def test_optimum_at_an_edge_is_a_bound(vertex, status):
    optimum = optimum_of(curve_of(lambda x: 2.5 + 0.03 * (x - vertex) ** 2, range(-11, -4)))
    assert optimum.status == status
    assert not optimum.is_bracketed
    assert (optimum.low == -np.inf) == (status == "at lower edge")
    assert (optimum.high == np.inf) == (status == "at upper edge")


def test_divergence_beside_the_best_point_bounds_the_optimum():
    curve = curve_of(lambda x: np.inf if x > -8 else 2.5 + 0.02 * (x + 6) ** 2, range(-12, -4))
    optimum = optimum_of(curve)
    assert optimum.status == "bracketed by divergence"
    assert -9 <= optimum.low < -7.5 < optimum.high <= -7
    assert curve.diverged_G.tolist() == [0, 0, 0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "only", "status"),
    [
        ({"status": "stopped"}, (), "bracketed by stopped runs"),
        ({"grad_norm": 9.0}, ("grad_norm < 5",), "bracketed by refused runs"),
        ({"grad_norm": 9.0, "status": "diverged"}, ("grad_norm < 5",), "bracketed by divergence"),
    ],
)
def test_lost_runs_beside_the_best_point_bound_the_optimum_too(change, only, status):
    rows = [
        {"width": 64, "lr": 2.0**x, "loss": 2.5 + 0.02 * (x + 6) ** 2, "status": "finished", "grad_norm": 1.0}
        | (change if x > -8 else {})
        for x in range(-12, -4)
    ]
    table = check_table(pd.DataFrame(rows), Reading(only=[*map(Condition.parse, only)]))
    curve = loss_curve(table.runs)
    optimum = optimum_of(curve)
    assert optimum.status == status and optimum.is_bracketed
    assert -9 <= optimum.low < -7.5 < optimum.high <= -7
    lost = {"bracketed by stopped runs": curve.stopped_G - curve.refused_G,
            "bracketed by refused runs": curve.refused_G}.get(status, curve.diverged_G)  # fmt: skip
    assert lost.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_cell_is_diverged_if_half_its_seeds_are():
    rows = pd.DataFrame(
        [{"width": 64, "lr": 2.0**x, "seed": s, "loss": 2.5} for x in (-9, -8, -7) for s in range(4)]
    )
    rows.loc[(rows["lr"] == 2.0**-8) & (rows["seed"] < 2), "loss"] = np.nan
    rows.loc[(rows["lr"] == 2.0**-7) & (rows["seed"] < 1), "loss"] = np.nan
    curve = loss_curve(check_table(rows).runs)
    assert curve.mean_G == pytest.approx([2.5, np.inf, 2.5])
    assert curve.diverged_G.tolist() == [0, 2, 1]


def test_a_cell_is_not_better_for_the_seeds_it_has():
    """Seed 2 is worse by 0.05 everywhere; the cell that lacks it must not become the optimum for that."""
    generator = np.random.default_rng(2)
    rows = [
        {"width": 64, "lr": 2.0**x, "seed": s, "loss": 2.5 + 0.01 * (x + 8) ** 2 + 0.05 * (s == 2)}
        for x in range(-11, -4)
        for s in range(3)
        if (x, s) != (-7, 2)
    ]
    frame = pd.DataFrame(rows)
    frame["loss"] += 0.001 * generator.standard_normal(len(frame))
    plain = frame.groupby("lr")["loss"].mean()
    curve = loss_curve(check_table(frame).runs)
    assert plain.idxmin() == 2.0**-7, "by plain means it would"
    assert curve.x_G[np.argmin(curve.mean_G)] == -8
    assert curve.mean_G[4] - curve.mean_G[3] == pytest.approx(0.01, abs=0.004)


def test_equal_seeds_keep_their_plain_means():
    frame = pd.DataFrame(
        [{"width": 64, "lr": 2.0**x, "seed": s, "loss": 2.5 + 0.1 * s} for x in (-9, -8) for s in range(3)]
    )
    assert loss_curve(check_table(frame).runs).mean_G == pytest.approx([2.6, 2.6])


@pytest.mark.parametrize("height", [3.6, 4.5, 6.0])
@pytest.mark.parametrize("first", [-6, -5, -7])
def test_runs_that_blow_up_beyond_the_optimum_do_not_bend_it(height, first):
    def loss(x):
        return height if x >= first else 2.5 + 0.03 * (x + 8) ** 2

    for seed in range(4):
        generator = np.random.default_rng(seed)
        curve = curve_of(loss, range(-12, -3), seeds=3, sigma=0.004, generator=generator)
        optimum = optimum_of(curve)
        if first > -7:
            assert optimum.x == pytest.approx(-8, abs=0.2)
            assert not math.isfinite(optimum.missed_by)
        assert optimum.low <= -8 <= optimum.high
        assert optimum.loss == pytest.approx(curve.mean_G.min(), abs=0.01)


def test_an_optimum_may_lie_anywhere_before_a_wall():
    wall = curve_of(lambda x: 2.5 + 0.03 * (x + 7.3) ** 2 + (x > -7.5), range(-12, -3), seeds=3, sigma=0.004)
    optimum = optimum_of(wall)
    assert optimum.best_x == -8 and optimum.status == "bracketed"
    assert optimum.low < -7.8 and -7.4 < optimum.high <= -7


def test_optima_lie_within_noise_of_the_runs_beside_them_in_a_sweep_with_valleys_of_its_own():
    """Of widths 64 and 128 the stars once floated 0.07 and 0.04 nat off: seven standard errors."""
    table = load_table(ROOT / "results" / "nanogpt_mup")
    runs = table.runs[table.runs["compared"] == "sp"]
    curves = [loss_curve(group) for _, group in runs.groupby("scale")]
    noise = pooled_noise(curves)
    for curve in curves:
        found = estimates([curve], noise, np.random.default_rng(0))[0].optimum
        best = int(np.argmin(curve.mean_G))
        assert found.loss == pytest.approx(curve.mean_G[best], abs=3 * noise.errors_G(curve)[best])
        assert not np.isfinite(found.missed_by)


def test_the_optimum_of_noisy_points_close_together_need_not_lie_beside_the_lowest_one():
    errors = []
    for seed in range(40):
        generator = np.random.default_rng(seed)
        curve = curve_of(
            lambda x: 2.5 + 0.02 * (x + 8) ** 2, np.arange(-11, -4.9, 0.25), sigma=0.03, generator=generator
        )
        errors.append((optimum_of(curve).x + 8, curve.x_G[np.argmin(curve.mean_G)] + 8))
    fitted, lowest = np.sqrt(np.mean(np.square(errors), axis=0))
    assert fitted < 0.7 * lowest


def test_a_flat_curve_says_so_with_its_band():
    optimum = optimum_of(curve_of(lambda x: 2.5 + 1e-5 * (x + 8) ** 2, range(-12, -3), sigma=0.01))
    assert optimum.status in ("flat", "at lower edge", "at upper edge")
    curve = curve_of(lambda x: 2.5 + 2e-4 * (x + 8) ** 2, range(-12, -3), seeds=4, sigma=0.004)
    flat = optimum_of(curve)
    assert flat.status == "flat"


def test_what_is_near_optimal_is_read_from_the_valley_with_the_epsilon_that_was_asked():
    """0.04·u² stays below ε up to √(ε/0.04) octaves, however far apart the grid's points are."""
    frame = pd.DataFrame(
        [
            {"width": width, "lr": 2.0**x, "seed": 0, "loss": 2.5 + 0.04 * (x + 7.8) ** 2}
            for width in (64, 128, 256)
            for x in range(-12, -3)
        ]
    )
    for epsilon in (0.01, 0.0025):
        for optimum in analyze(check_table(frame), epsilon=epsilon).results[0].optima:
            reach = np.sqrt(epsilon / 0.04)
            assert (optimum.band_low, optimum.band_high) == pytest.approx(
                (-7.8 - reach, -7.8 + reach), abs=0.06
            )


def test_everything_diverged():
    optimum = optimum_of(curve_of(lambda x: np.nan, range(-8, -4)))
    assert optimum.status == "no finite run"


def test_same_seed_same_interval():
    curve = curve_of(lambda x: 2.5 + 0.03 * (x + 8) ** 2, range(-12, -4), sigma=0.01)
    assert optimum_of(curve) == optimum_of(curve)
    assert optimum_of(curve) != optimum_of(curve, seed=1)


def test_noise_is_that_of_the_seeds():
    curve = curve_of(lambda x: 2.5 + 0.03 * (x + 8) ** 2, np.arange(-12, -4, 0.125), seeds=6, sigma=0.02)
    noise = pooled_noise([curve])
    assert noise.source == "seeds"
    assert noise.sigma == pytest.approx(0.02, rel=0.15)


def test_one_unstable_point_does_not_widen_the_others():
    rows = [
        {"width": 64, "lr": 2.0**x, "seed": s, "loss": 2.5 + 0.03 * (x + 8) ** 2 + 0.002 * (-1) ** s}
        for x in np.arange(-12, -4, 0.5)
        for s in (0, 1)
    ]
    for row in rows:
        if row["lr"] == 2.0**-7:
            row["loss"] += 0.2 * (-1) ** row["seed"]
    curve = loss_curve(check_table(pd.DataFrame(rows)).runs)
    error_G = pooled_noise([curve]).errors_G(curve)
    assert error_G[10] > 10 * error_G[9]
    assert error_G[9] < 0.006


def test_without_replicates_the_lack_of_fit_stands_in_and_rounding_is_a_floor():
    curve = curve_of(lambda x: 2.5 + 0.03 * (x + 8) ** 2, range(-12, -4), seeds=1)
    noise = pooled_noise([curve], rounding=0.01)
    assert noise.source == "lack of fit"
    # The prior of the noise adds to the floor.
    assert 0.01 / 12**0.5 <= noise.sigma < 1.1 * 0.01 / 12**0.5


def test_given_errors_are_used():
    rows = pd.DataFrame([{"width": 64, "lr": 2.0**x, "loss": 2.5, "loss_err": 0.004} for x in range(-9, -4)])
    curve = loss_curve(check_table(rows).runs)
    noise = pooled_noise([curve])
    assert noise.source == "given errors"
    assert noise.errors_G(curve) == pytest.approx(np.full(5, 0.004))


@pytest.mark.nightly
def test_noise_known_from_few_runs_still_covers():
    """Noise is told by four degrees of freedom, and is often twice what they say."""
    inside = []
    for trial in range(150):
        generator = np.random.default_rng(trial)
        curve = curve_of(lambda x: 2.5 + 0.04 * (x + 8.2) ** 2, range(-12, -4), 1, 0.02, generator)
        sigma = 0.02 * math.sqrt(generator.chisquare(4) / 4)
        optimum = estimates([curve], Noise(sigma, 4, "seeds"), generator)[0].optimum
        inside.append(optimum.low <= -8.2 <= optimum.high)
    assert np.mean(inside) > 0.92


def test_a_valley_without_a_visible_minimum_has_an_open_interval():
    """The edge of a plateau: the points fall to the second one, within their noise."""
    means = {-8: 2.850, -7: 2.790, -6: 3.016, -5: 3.019, -4: 3.022}
    curve = curve_of(means.__getitem__, means, seeds=1)
    optimum = estimates([curve], Noise(0.04, 367, "seeds"), np.random.default_rng(0))[0].optimum
    assert -8 <= optimum.x <= -6 and optimum.low == -math.inf and optimum.high <= -6
    assert optimum.se > 1, "what nothing bounds has no finite error"


def test_seed_effects_are_those_of_the_ridge_regression_with_its_whole_design():
    """Least squares of all cells and seeds at once, with a row of the penalty for each seed."""
    generator = np.random.default_rng(3)
    cell, seed = generator.integers(0, 7, 400), generator.integers(0, 30, 400)
    y = 2.0 + 0.1 * cell + 0.05 * generator.standard_normal(30)[seed] + 0.02 * generator.standard_normal(400)
    weight = generator.uniform(0.3, 1.0, 400)
    cells, seeds, root = np.eye(7)[cell], np.eye(30)[seed], np.sqrt(weight)[:, None]
    design = np.block([[root * cells, root * seeds], [np.zeros((30, 7)), np.eye(30)]])
    expected = np.linalg.lstsq(design, np.concatenate([root[:, 0] * y, np.zeros(30)]), rcond=None)[0][7:]
    np.testing.assert_allclose(_ridge_effects(y, cell, seed, 30, weight)[0], expected, atol=1e-12)
    _, share_C, left = _ridge_effects(y, cell, seed, 30, np.ones(400))
    variance = np.eye(400) + seeds @ seeds.T
    covariance = np.linalg.inv(cells.T @ np.linalg.solve(variance, cells))
    project = np.linalg.inv(variance) @ (np.eye(400) - cells @ covariance @ cells.T @ np.linalg.inv(variance))
    assert left == pytest.approx(np.trace(project) / (400 - 7))
    apart = np.diag(covariance) - (covariance.sum(axis=1) - np.diag(covariance)) / 6
    np.testing.assert_allclose(share_C, 1 / (apart * np.bincount(cell)))


def of_seeds(shared, seeds, generator, sigma=0.003):
    """Runs of seven rates; those of a seed share an effect."""
    effect_S = shared * generator.standard_normal(seeds)
    return pd.DataFrame(
        [
            {
                "width": 64, "lr": 2.0**x, "seed": s,
                "loss": 2.5 + 0.01 * (x + 8) ** 2 + effect_S[s] + sigma * generator.standard_normal(),
            }
            for x in range(-11, -4)
            for s in range(seeds)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("shared", [0.0, 0.006])
def test_noise_is_what_seeds_do_not_share(shared):
    """An effect on all losses of a seed moves no optimum; it stood in the optimum's error."""
    sigmas = []
    for trial in range(8):
        generator = np.random.default_rng(trial)
        tables = [check_table(of_seeds(shared, 3, generator)) for _ in range(4)]
        sigmas.append(pooled_noise([loss_curve(table.runs) for table in tables]).sigma)
    assert np.exp(np.log(sigmas).mean()) == pytest.approx(0.003, rel=0.2)


def test_noise_is_whole_although_effects_of_seeds_take_their_share_of_it():
    """Of three points, effects of seeds take a third of what differs."""
    generator = np.random.default_rng(0)
    tables = [check_table(of_seeds(0.006, 3, generator)).runs for _ in range(60)]
    curves = [loss_curve(runs[runs["x"].between(-9, -7)]) for runs in tables]
    assert pooled_noise(curves).sigma == pytest.approx(0.003, rel=0.08)


def test_a_run_that_nearly_diverged_is_no_sign_of_a_bad_seed():
    """Of a fresh quickstart, one run of a seed lay 0.2 nat up, and tripled the noise of all others."""
    frame = of_seeds(0.006, 8, np.random.default_rng(0))
    before = pooled_noise([loss_curve(check_table(frame).runs)]).sigma
    frame.loc[(frame["lr"] == 2.0**-6) & (frame["seed"] == 4), "loss"] += 0.2
    assert pooled_noise([loss_curve(check_table(frame).runs)]).sigma < 1.3 * before


def test_a_point_with_seeds_of_its_own_has_the_error_of_both():
    frame = of_seeds(0.006, 3, np.random.default_rng(0))
    assert loss_curve(check_table(frame).runs).weight_G == pytest.approx(3)
    frame.loc[frame["lr"] == 2.0**-8, "seed"] += 10
    weight_G = loss_curve(check_table(frame).runs).weight_G
    assert weight_G[3] == pytest.approx(1.5, rel=0.2)
    assert (np.delete(weight_G, 3) > 1.5 * weight_G[3]).all()
