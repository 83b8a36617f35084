"""A short walk of processes that are killed; benchmarks/walk.py has long ones."""

import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[2] / "benchmarks" / "walk.py"


@pytest.mark.slow
def test_processes_that_are_killed_lose_and_double_nothing():
    done = subprocess.run(
        [sys.executable, WALK, "--walks", "1", "--seconds", "5"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "| faults | 0 |" in done.stdout, done.stderr
