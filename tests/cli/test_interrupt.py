"""Ctrl-C while a command imports what it needs: exit code 130 and one word, whenever it comes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def interrupted(command: list[str], moment: str) -> tuple[int, list[str]]:
    """Exit code and stderr of a command that is interrupted, with all that it started, once it has imported a
    module.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("import time:") and line.rpartition("|")[2].strip() == moment:
            break
    else:
        raise AssertionError(f"it never imported {moment}")
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, rest = process.communicate(timeout=240)  # until all that it started has ended too
    finally:
        process.kill()
    lines = [*said, *rest.splitlines(keepends=True)]
    return process.returncode, [line for line in lines if not line.startswith("import time:")]


@pytest.mark.slow
@pytest.mark.parametrize("moment", [pytest.param("pandas", marks=pytest.mark.nightly), "torch._C"])
def test_ctrl_c_in_the_middle_of_imports_ends_a_command(moment, corpus):
    code, lines = interrupted(["-m", "mup_tpu", "train", "--corpus", str(corpus)], moment)
    assert code == 130 and [line for line in lines if "Ctrl-C stops" not in line] == ["stopped\n"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["tyro", pytest.param("mup_tpu.training.pack", marks=pytest.mark.nightly)])
def test_ctrl_c_in_the_middle_of_imports_ends_an_experiment_and_its_server(moment, tmp_path):
    """It is the server of its processes that imports torch; meanwhile the experiment learns its folder."""
    command = ["-m", "mup_tpu", "sweep", "experiments/quickstart.py", "--results", str(tmp_path)]
    command += ["--threads", "1"]
    code, lines = interrupted(command, moment)
    known = f"stopped; finished trials are stored in {tmp_path}"
    said = "stopped\n" if moment == "tyro" else ("stopped\n", known)
    assert code == 130 and len(lines) == 1 and lines[0].startswith(said)
