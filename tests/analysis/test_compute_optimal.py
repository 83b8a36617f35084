"""Compute-optimal sizes against the closed form and a search along the isoFLOP curve."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize_scalar

from mup_tpu.analysis.scaling_law import compute_optimal
from mup_tpu.errors import TableError

E, A, ALPHA, B, BETA = 1.8172, 482.01, 0.3478, 2085.43, 0.3658  # Besiroglu et al. 2024, table 1


def loss(params, tokens):
    return E + A * params**-ALPHA + B * tokens**-BETA


def isoflops(centre=0.0, scatter=0.0):
    """Seven runs of equal compute at each of five budgets, around the optimum or beside it (octaves)."""
    generator, rows = np.random.default_rng(0), []
    for flops in 10.0 ** np.arange(18, 22.1):
        best = 2.0 ** minimize_scalar(lambda n: loss(2.0**n, flops / 6 / 2.0**n), bounds=(20, 50)).x  # noqa: B023
        for octave in np.arange(-3, 4):
            params = best * 2.0 ** (octave + centre)
            noisy = loss(params, flops / 6 / params) * np.exp(scatter * generator.standard_normal())
            rows.append({"params": params, "tokens": flops / 6 / params, "loss": noisy})
    return pd.DataFrame(rows)


def test_sizes_are_those_of_least_loss_along_the_curve_of_equal_compute():
    found = compute_optimal(isoflops())
    assert found.exponent[0] == pytest.approx(BETA / (ALPHA + BETA), abs=0.005)
    best = minimize_scalar(lambda n: loss(2.0**n, 1e24 / 6 / 2.0**n), bounds=(20, 50))
    optimal = found.at(1e24)
    assert np.log2(optimal.params[0]) == pytest.approx(best.x, abs=0.1)
    assert optimal.params[0] * optimal.tokens[0] * 6 == pytest.approx(1e24)
    assert optimal.loss[0] == pytest.approx(best.fun, abs=0.01)
    assert found.slices == 5 and found.parabolas == pytest.approx(found.exponent[0], abs=0.02)


def test_intervals_hold_the_truth_where_parabolas_beside_the_optimum_do_not_say_it():
    found = compute_optimal(isoflops(centre=1.5, scatter=0.002))
    value, low, high = found.exponent
    assert low < BETA / (ALPHA + BETA) < high
    best = minimize_scalar(lambda n: loss(2.0**n, 1e21 / 6 / 2.0**n), bounds=(20, 50)).x
    _, low, high = np.log2(found.at(1e21).params)
    assert low < best < high


def test_what_cannot_be_told_is_one_sentence():
    runs = isoflops()
    with pytest.raises(TableError, match="tokens is not a column of numbers above 0; there are params, loss"):
        compute_optimal(runs.drop(columns="tokens"))
    with pytest.raises(TableError):
        compute_optimal(runs.head(5))
    with pytest.raises(TableError, match="FLOP above 0"):
        compute_optimal(runs).at(-1.0)
