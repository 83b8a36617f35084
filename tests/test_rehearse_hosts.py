"""Rehearsal of several hosts in network namespaces: its checks hold, and it leaves no process."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).parents[1] / "scripts" / "hosts" / "rehearse.py"
NO_NAMESPACES = 3


def left(logs: Path) -> list[list[str]]:
    """Command lines of a rehearsal's processes: they name the folder of its logs."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(logs) in " ".join(line)]


def test_a_host_that_is_killed_costs_no_trial_and_a_token_is_asked_for(tmp_path):
    """Losses equal those of the sweep that looks at ports."""
    words = ["token", "ports", "killed", "--steps", "600", "--logs", tmp_path / "logs"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=840)
    if done.returncode == NO_NAMESPACES:
        pytest.skip(done.stderr.strip().removeprefix("error: "))
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert said == ["cluster", "token", "ports", "killed"]
    assert not left(tmp_path / "logs")
