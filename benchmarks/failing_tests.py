"""Plugin of pytest: a file that has each failing test, by name and traceback, as soon as it has failed.

PYTHONPATH=benchmarks FAILING_TESTS=/tmp/failing.txt python -m pytest -p failing_tests -n 8 tests
"""

import os
from pathlib import Path
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Add a failure to the file; with pytest-xdist the process that distributes tests does it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["FAILING_TESTS"]).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-1500:]}\n\n")
