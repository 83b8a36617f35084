"""Small tables whose answer is known: verdicts where grids end, runs diverge, or nothing moves."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, load_table
from mup_tpu.analysis.looks import Question, weigh
from mup_tpu.analysis.regret import regret

DATA = Path(__file__).parent / "data"


def result_of(name):
    """The analysis of a table with one parametrization."""
    (result,) = analyze(DATA / f"{name}.csv").results
    return result


@pytest.mark.parametrize("name", ["identical_optima", "identical_curves"])
def test_identical_optima_lose_nothing(name):
    """The regret is that of any x nearby, on either side of the target's best grid point."""
    table = load_table(DATA / f"{name}.csv")
    evidence = weigh(table.runs, Question.of(table))
    first, last = evidence.estimates[0], evidence.estimates[-1]
    for off in (-1e-6, 0.0, 1e-6):
        moved = replace(first, optimum=replace(first.optimum, x=round(last.optimum.x) + off))
        assert regret(moved, last).value == pytest.approx(0.0, abs=6e-4)
    assert result_of(name).headline_regret.value == pytest.approx(0.0, abs=5e-4)


def test_no_transfer_while_the_largest_scales_have_left_the_grid():
    """Widths 64 to 256 agree; at 512 and 1024 the optimum lies below the lowest learning rate."""
    result = result_of("unbracketed_largest")
    assert result.verdict.decision != "TRANSFERS"
    assert result.headline_regret.target == 1024, "the largest width that was run"
    headline = result.headline_regret
    assert headline.target == 1024 and headline.low > 0.01 and headline.high == math.inf
    for optimum in result.optima[-2:]:
        assert optimum.status in ("at lower edge", "no finite run")


def test_equal_optima_beside_divergence_do_not_drift():
    """Somewhere between 2^-7 and 2^-6 runs of width 512 begin to diverge: a run there tells."""
    result = result_of("equal_optima_beside_divergence")
    assert result.verdict.decision != "DRIFTS"
    cells = {(cell.scale, cell.x) for cell in result.next_batch.cells}
    assert any(scale == 512 and -7 < x < -6 for scale, x in cells)


def test_single_runs_of_a_public_table_are_no_noisier_than_they_are():
    """Six widths × 20 rates, a seed each: points within 0.15 nat of the best scatter by 0.0023."""
    mup, sp = analyze(DATA / "mup_mlp.csv").results
    assert mup.noise.sigma == pytest.approx(0.0023, rel=0.5)
    assert mup.verdict.decision == "TRANSFERS" and sp.verdict.decision == "DRIFTS"
    headline = mup.headline_regret
    assert (headline.source, headline.target) == (256, 8192) and 0.001 < headline.value < 0.006
    optima = {o.scale: o.x for o in mup.optima}
    assert optima[8192] - optima[256] == pytest.approx(-0.25, abs=0.12)


def test_no_optimum_lies_beside_a_run_that_is_plainly_worse():
    """Four shapes × 6 rates, losses up to 59: at width 3072 the next run above the best loses 0.9 nat."""
    result = analyze(pd.read_csv(DATA / "gemstone.csv").drop(columns="depth")).results[0]
    for curve, optimum in zip(result.curves, result.optima, strict=True):
        nearest = int(np.argmin(np.abs(curve.x_G - optimum.x)))
        assert curve.mean_G[nearest] - curve.mean_G.min() < 0.1
    assert result.optima[-1].best_x == pytest.approx(np.log2(0.0005))
    assert result.noise.sigma < 0.1
    assert result.optima[-1].below > 0
