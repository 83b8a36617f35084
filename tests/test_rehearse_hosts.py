"""Rehearsal of several hosts in network namespaces: its checks hold, and it leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).parents[1] / "scripts" / "hosts" / "rehearse.py"
NO_NAMESPACES = 3


def start(*words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def skip_without_namespaces(code: int, said: str) -> None:
    if code == NO_NAMESPACES:
        pytest.skip(said.strip().removeprefix("error: "))


def left(logs: Path) -> list[str]:
    """Command lines of a rehearsal's processes: they name the folder of its logs."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(logs) in line:
            found.append(line)
    return found


def test_a_host_that_is_killed_costs_no_trial_and_a_token_is_asked_for(tmp_path):
    """Losses equal those of the sweep that looks at ports."""
    rehearsal = start("token", "ports", "killed", "--steps", 600, "--logs", tmp_path / "logs")
    said, _ = rehearsal.communicate(timeout=840)
    skip_without_namespaces(rehearsal.returncode, said)
    assert rehearsal.returncode == 0, said
    assert [line.partition(":")[0] for line in said.splitlines()] == ["cluster", "token", "ports", "killed"]
    assert not left(tmp_path / "logs")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_rehearsal_that_is_ended_leaves_no_process(end, tmp_path):
    """At a moment when a host is up and the bucket's server starts."""
    logs = tmp_path / "logs"
    rehearsal = start("both", "--logs", logs)
    deadline = time.monotonic() + 120
    while not (logs / "moto.log").exists() and rehearsal.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if rehearsal.poll() is not None:
        skip_without_namespaces(rehearsal.returncode, rehearsal.communicate()[0])
    assert (logs / "moto.log").exists() and left(logs)
    os.kill(rehearsal.pid, end)
    rehearsal.communicate(timeout=30)
    assert rehearsal.returncode != 0
    while left(logs) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left(logs)
