"""List of steps for a GPU: an ended step is not run again, a killed one is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import on_gpu
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
def test_a_step_that_has_ended_is_not_run_again_and_one_out_of_time_is(tmp_path, capsys):
    rehearsal = {"rehearse": True, "out": tmp_path, "steps": ("tests",)}
    with pytest.raises(SystemExit) as ended:
        on_gpu.main(minutes=0.01, **rehearsal)
    assert ended.value.code == 0
    assert "tests: not done in" in capsys.readouterr().out
    for said in ("tests: ended (", "tests: ended before"):
        with pytest.raises(SystemExit) as ended:
            on_gpu.main(**rehearsal)
        assert ended.value.code == 0
        assert said in capsys.readouterr().out
    assert "1 passed" in (tmp_path / "on_gpu_logs" / "tests.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="a process ends with its parent as Linux has it")
def test_a_list_that_is_killed_takes_its_step_with_it(tmp_path):
    command = [sys.executable, "benchmarks/on_gpu.py", "--rehearse", "--out", str(tmp_path)]
    running = subprocess.Popen([*command, "--steps", "tests"], cwd=ROOT, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    while not (step := children.read_text().split()):
        assert running.poll() is None
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{step[0]}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{step[0]}/stat").exists()
    assert not (tmp_path / "on_gpu.json").exists()


def test_every_script_of_the_list_is_there():
    for step in on_gpu.STEPS:
        for words in (step.words, step.rehearsal):
            files = [
                word.partition("::")[0] for word in words if word.startswith(("benchmarks/", "tests/", "exp"))
            ]
            assert (files or "mup_tpu" in words) and all((ROOT / file).exists() for file in files), step.name
    assert len({step.name for step in on_gpu.STEPS}) == len(on_gpu.STEPS)
