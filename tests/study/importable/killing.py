"""Drivers of a study that tests kill, and the table that they come to."""

import subprocess
import sys
import time

import psutil

from mup_tpu import Study, octaves
from mup_tpu.store import load_runs

SCRIPT = """
import sys
import trainers
from killing import killed_study
killed_study(sys.argv[1]).run(getattr(trainers, sys.argv[2]), workers=int(sys.argv[3]))
"""


def killed_study(folder):
    """The study of the script: six trials of about a second."""
    return Study(
        folder, scale={"width": [256, 512]}, tune={"lr": octaves(-7, -5)}, compare={"rule": ["stays"]},
        settings={"pause": 0.02}, name="killed",
    )  # fmt: skip


def start(folder, train="resumable", workers=2):
    """A driver of the script's study, and what it prints."""
    folder.parent.mkdir(exist_ok=True)
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, script, folder, train, str(workers)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def starts(folder):
    """Step of each start of a function, its process and the worker."""
    lines = [line for file in folder.glob("starts-*") for line in file.read_text().splitlines()]
    return [tuple(map(int, line.split())) for line in lines]


def alive(folder):
    """Processes of functions that run, each with its worker."""
    return [tuple(of) for _, *of in starts(folder) if psutil.pid_exists(of[0])]


def wait_for_functions(driver, folder, are_there):
    """Wait for a function that runs, and return it and its worker; or wait for the end of all."""
    deadline = time.monotonic() + 240
    while bool(found := alive(folder)) != are_there:
        assert time.monotonic() < deadline and (driver.poll() is None or not are_there)
        time.sleep(0.02)
    return found[-1] if found else None


def table(folder):
    """Rows without what differs from run to run."""
    return load_runs(folder).drop(columns=["wall_time_s", "finished_at"])
