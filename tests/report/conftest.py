"""Reports that several of these files look at."""

from pathlib import Path

import pytest

from mup_tpu import report
from mup_tpu.analysis import analyze, load_table

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="package")
def quickstart():
    """A stored sweep: its analysis and its table."""
    table = load_table(RESULTS / "quickstart")
    return analyze(table), table


@pytest.fixture(scope="package")
def sweep_html(quickstart):
    return report.render(report.sweep_page(quickstart[0]))
