"""What several of these files draw."""

from pathlib import Path

import pytest

from mup_tpu.analysis import analyze, load_table

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
