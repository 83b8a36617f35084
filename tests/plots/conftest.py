"""What several of these files draw."""

from pathlib import Path

import pytest

from mup_tpu.analysis import Columns, analyze, load_table
from mup_tpu.analysis.referee import Ruling
from mup_tpu.analysis.verdict import Regret

RESULTS = Path(__file__).parents[2] / "results"
REFERENCE = Path(__file__).parents[1] / "reference_runs" / "nanogpt_mup_shakespeare_digitised.csv"


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
        values = {"sweep": "a", "columns": Columns(), "smallest": 64, "largest": 256, "alone": True}
        values |= {"best_loss": 2.0, "architecture": "gpt2", "update_rule": "adamw", **changes}
        regret = cost and Regret(64, 256, *cost, cost[0], "estimated", 0.1)
        alpha, low, high = drift
        values = {"has_moved": low > 0 or high < 0, **values}
        return Ruling(rule=rule, alpha=alpha, low=low, high=high, regret=regret, decision=decision, **values)

    return make
