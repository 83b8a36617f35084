"""What several of these files draw."""

from pathlib import Path

import pytest

from mup_tpu.analysis import Columns, analyze, load_table
from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.optimum import Noise, Optimum
from mup_tpu.analysis.referee import Ruling
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.verdict import Regret, Verdict

RESULTS = Path(__file__).parents[2] / "results"
REFERENCE = Path(__file__).parents[1] / "reference_runs" / "nanogpt_mup_shakespeare_digitised.csv"


@pytest.fixture(autouse=True)
def _painted(painted):
    """Tests of figures paint them."""


@pytest.fixture(scope="session")
def analysis():
    """A published sweep in SP and in μP."""
    return analyze(load_table(REFERENCE))


@pytest.fixture(scope="session")
def quickstart():
    """A stored sweep: its table and its analysis."""
    table = load_table(RESULTS / "quickstart")
    return table, analyze(table)


@pytest.fixture(scope="session")
def ruling():
    """Make a verdict of one sweep on one rule."""

    def make(rule="mup", drift=(0.0, -0.1, 0.1), cost=None, decision="TRANSFERS", **changes) -> Ruling:
        ends = changes.pop("ends", (64, 256))
        regret = [Regret(*ends, *cost, cost[0], "estimated", 0.1)] if cost else []
        optima = tuple(Optimum(scale, "bracketed", loss=2.0) for scale in ends)
        result = TransferResult(
            rule, Noise(0.0, 1, "seeds"), optima, (None, None), Drift(*drift, 0.0, 0.0, ends, drift),
            Verdict(decision), tuple(regret),
        )  # fmt: skip
        made = {"architecture": "gpt2", "update_rule": "adamw", "columns": Columns(), "sweep": "a"}
        return Ruling(result=result, **(made | changes))

    return make
