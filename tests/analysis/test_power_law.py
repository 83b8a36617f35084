"""Power laws in several scales against least squares, and on tables that no single scale explains."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table, predict
from mup_tpu.analysis.optimum import Estimate, Optimum
from mup_tpu.analysis.result import PowerLaw
from mup_tpu.errors import TableError
from mup_tpu.plots import law_figure
from mup_tpu.words import summary

EXPONENTS = {"N": -0.6, "D": 0.2, "bs": 0.4}


def cells_of_runs(scatter=0.05, seed=0, seeds=1):
    """Runs of 3 × 3 × 3 cells whose optimum follows the exponents, with loss 2 + 0.04·(distance)²."""
    generator, rows, optima = np.random.default_rng(seed), [], []
    for sizes in itertools.product((1e8, 3e8, 1e9), (1e9, 4e9, 2e10), (32, 128, 512)):
        best = np.log2(sizes) @ [*EXPONENTS.values()] + generator.normal(0, scatter)
        optima.append([1.0, *np.log2(sizes), best])
        for x, own in itertools.product(np.arange(best - 4.5, best + 4.5), range(seeds)):
            loss = 2 + 0.04 * (x - best) ** 2 + generator.normal(0, 1e-3)
            rows.append({**dict(zip(EXPONENTS, sizes, strict=True)), "lr": 2.0**x, "loss": loss, "seed": own})
    return pd.DataFrame(rows), np.array(optima)


def table_of(runs, first, *beside):
    return check_table(runs, Reading(Columns(first, scales_beside=beside)))


def test_exponents_are_those_of_least_squares_on_the_true_optima():
    runs, optima = cells_of_runs(seeds=2)  # single runs would be taken to have the usual, larger noise
    analysis = analyze(table_of(runs, "N", "D", "bs"))
    law = analysis.results[0].power_law
    expected = np.linalg.lstsq(optima[:, :4], optima[:, 4], rcond=None)[0]
    assert [e.value for e in law.exponents] == pytest.approx(expected[1:], abs=0.05)
    for e in law.exponents:
        assert e.low < EXPONENTS[e.scale] < e.high
    residual = optima[:, 4] - optima[:, :4] @ expected
    assert law.tau == pytest.approx(residual.std() * math.sqrt(27 / 23), rel=0.4)
    at = {"N": 3e9, "D": 5e10, "bs": 256}
    made = predict(analysis.table, ",".join(f"{name}={size}" for name, size in at.items()))
    x, (low, high) = made.of("all").x, made.of("all").interval
    truth = sum(a * math.log2(at[name]) for name, a in EXPONENTS.items())
    assert low < truth < high and x == pytest.approx(truth, abs=0.2)
    assert law.held_out.cells == 27 and law.held_out.inside >= 0.85 and law.held_out.regret < 0.002
    places = law_figure(analysis).axes[0].collections[-1]  # the measured optima, at the mean batch size
    assert np.log2(np.asarray(places.get_offsets())) == pytest.approx(
        np.unique(np.log2(runs[["N", "D"]]), axis=0)
    )
    away = optima[:, 4] - EXPONENTS["bs"] * (optima[:, 3] - 7)
    assert np.asarray(places.get_array()) == pytest.approx(away.reshape(9, 3).mean(axis=1), abs=0.1)
    assert summary(analysis).startswith("all runs: best learning rate ∝ N^-0.6")


def test_cells_of_one_size_that_miss_the_law_together_widen_its_exponent():
    generator = np.random.default_rng(1)
    sizes = np.array([(n, d) for n in range(26, 32) for d in range(30, 36)], float)
    x = -0.5 * (sizes[:, 0] - 29) + np.repeat(generator.normal(0, 0.4, 6), 6) + generator.normal(0, 0.2, 36)
    optima = [
        Estimate(None, None, None, Optimum(2**n, "bracketed", at, se=0.05, beside=(2**d,)), None)
        for (n, d), at in zip(sizes, x, strict=True)
    ]
    law = PowerLaw(("N", "D"), tuple(optima))
    assert law.tau == pytest.approx(0.2, abs=0.04)
    first, second = law.exponents
    # Least squares on the six means, each as sure as its shared effect lets it be.
    assert first.value == pytest.approx(np.polyfit(range(6), x.reshape(6, 6).mean(axis=1), 1)[0], abs=0.03)
    assert first.high - first.low == pytest.approx(2 * 1.96 * 0.4 / math.sqrt(17.5), rel=0.4)
    assert second.high - second.low < 0.4 * (first.high - first.low)


def test_the_best_of_a_second_tuned_column_is_taken_in_each_cell():
    runs, _ = cells_of_runs()
    # The best batch size follows D alone: a penalty beside it.
    away = np.log2(runs["bs"]) - 0.5 * np.log2(runs["D"])
    runs["loss"] += 0.05 * (away - np.log2(128) + 0.5 * np.log2(4e9)) ** 2
    reading = Reading(Columns("N", "bs", scales_beside=("D",)), best_over=("lr",))
    analysis = analyze(check_table(runs, reading))
    law = analysis.results[0].power_law
    by_scale = {e.scale: e for e in law.exponents}
    assert by_scale["D"].low < 0.5 < by_scale["D"].high or by_scale["D"].value == pytest.approx(0.5, abs=0.15)
    assert analysis.hyperparameter == "bs"


def test_scales_that_cannot_be_are_one_sentence():
    runs, _ = cells_of_runs()
    with pytest.raises(TableError, match="must be different columns, not N, N, lr, loss"):
        table_of(runs, "N", "N")
    with pytest.raises(TableError, match="table has no column 'depth'"):
        table_of(runs, "N", "depth")
    few = runs[(runs["N"] == 1e8) & (runs["D"] == 1e9)]
    with pytest.raises(TableError, match="needs 5 cells with an optimum inside their grid, and 3 of 3"):
        analyze(table_of(few, "N", "D", "bs"))
    with pytest.raises(TableError, match=r"at N=1e9: give a number above 0 for each of N, D, bs"):
        predict(table_of(runs, "N", "D", "bs"), "N=1e9")
