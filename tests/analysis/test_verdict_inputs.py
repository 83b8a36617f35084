"""Small tables whose answer is known: what the verdict says where grids end, runs diverge, or nothing moves."""

from dataclasses import replace
from pathlib import Path

import pytest

from mup_tpu.analysis import analyze
from mup_tpu.analysis.looks import Question, weigh
from mup_tpu.analysis.regret import regret
from mup_tpu.analysis.run_table import load_table

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
        assert regret(moved, last).value == pytest.approx(0.0, abs=5e-4)
    assert result_of(name).headline_regret.value == pytest.approx(0.0, abs=5e-4)
