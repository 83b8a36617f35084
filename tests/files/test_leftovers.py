"""What a killed process leaves is removed at the next start; what is in use or another's never is."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from mup_tpu.files import Folder
from mup_tpu.store import Store


def wait_for(process, condition, seconds=240):
    """Until the condition holds, while the process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "it ended, or took too long"
        time.sleep(0.02)


def kill(process):
    """As `kill -9`."""
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def writer(tmp_path):
    """A process in the middle of writing two files of a results folder."""
    code = (
        "import sys, time; from mup_tpu.files import Folder\nfolder = Folder(sys.argv[1])\nwith "
        "folder.writing('runs/a') as one, folder.writing('checkpoints/b/step-1/t') as other:\n    "
        "one.write_bytes(b'half'), other.write_bytes(b'half'), print(flush=True), time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    kill(process)


def partials(folder):
    return sorted(folder.rglob(".partial-*"))


def test_half_written_files_of_a_killed_process_are_removed_when_the_folder_is_opened_again(writer, tmp_path):
    assert len(partials(tmp_path)) == 2
    kill(writer)
    assert len(partials(tmp_path)) == 2
    Store(tmp_path, "x")
    assert not partials(tmp_path)


def test_files_that_a_process_is_writing_stay(writer, tmp_path):
    before = partials(tmp_path)
    Store(tmp_path, "x")
    assert partials(tmp_path) == before


def test_what_others_wrote_stays(tmp_path):
    """Another machine's file may be in use there; a name like ours may be the user's."""
    theirs = [tmp_path / ".partial-another.machine-0123", tmp_path / "partial", tmp_path / ".partial-notes"]
    for path in theirs:
        path.write_text("mine")
    Store(tmp_path, "x")
    assert all(path.read_text() == "mine" for path in theirs)


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files, whose path is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def script(tmp_path, base, ray):
    """A driver of a sweep of four trials."""
    path = tmp_path / "sweep.py"
    path.write_text(
        "import json, sys\nfrom rich.console import Console\nfrom mup_tpu.config import *\nfrom "
        "mup_tpu.config.toml import from_dict\nfrom mup_tpu.tuning.sweep import run_sweep\nbase = "
        f"from_dict(Trial, json.loads({json.dumps(base.to_dict())!r}))\nsweep = Sweep('small', base, "
        f"widths=(32,), learning_rates=(0.003, 0.01), num_seeds=1)\noptions = SweepOptions(ray={ray}, "
        "pack_size=4)\nrun_sweep(sweep, sys.argv[1], options, RunOptions(threads=1), Console(quiet=True))\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ray", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_temporary_folders_of_a_killed_sweep_are_removed_by_the_next(ray, temporary, tiny, tmp_path):
    """And those of the standard library that are not ours stay. No process outlives a killed driver."""
    others = temporary / "pymp-other"
    others.mkdir()
    command = [sys.executable, str(script(tmp_path, tiny.replace(steps=2000), ray)), str(tmp_path / "long")]
    driver = subprocess.Popen(command, start_new_session=True)
    wait_for(driver, lambda: list((tmp_path / "long" / "logs").glob("*")))  # a worker trains
    left = {path.name for path in temporary.iterdir()} - {others.name}
    started = psutil.Process(driver.pid).children(recursive=True)
    kill(driver)
    _, alive = psutil.wait_procs(started, timeout=45)
    assert not alive, "two processes of Ray would try for a minute to reach a third"
    ours = {name for name in left if (temporary / name).is_dir()}
    assert {re.match("[a-z]*", name)[0] for name in ours} >= {"mup" if ray else "pymp"}
    command = [sys.executable, str(script(tmp_path, tiny.replace(steps=2), ray)), str(tmp_path / "short")]
    subprocess.run(command, check=True, timeout=300)
    assert not ours & set(os.listdir(temporary)), "left behind"
    assert others.is_dir()


LOOK_ALIKES = {
    "named like ours": lambda folder, _: None,
    "with a mark of earlier versions": lambda folder, _: (folder / "of-mup_tpu").touch(),
    "with a mark of another folder": lambda folder, ours: shutil.copy(ours / "of-mup_tpu", folder),
    "with a link to a mark": lambda folder, ours: (folder / "of-mup_tpu").symlink_to(ours / "of-mup_tpu"),
    "with a mark that is no text": lambda folder, _: (folder / "of-mup_tpu").write_bytes(b"\xff"),
    "with a folder as mark": lambda folder, _: (folder / "of-mup_tpu").mkdir(),
    "with a pipe as mark": lambda folder, _: os.mkfifo(folder / "of-mup_tpu"),
}

LEAVE_ONE = (
    "import os, signal\nfrom mup_tpu.files.local import folder_of_this_process\n"
    "print(folder_of_this_process(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
)


@pytest.mark.parametrize("prefix", ["mup_tpu_", "pymp-"])
def test_folders_that_only_look_like_ours_stay(prefix, temporary):
    """The user's own, copies, links and moved ones, beside one that a killed process left."""

    def left() -> Path:
        return Path(
            subprocess.run([sys.executable, "-c", LEAVE_ONE], capture_output=True, text=True).stdout[:-1]
        )

    ours = left()
    theirs = [temporary / f"{prefix}{number}" for number in range(len(LOOK_ALIKES))]
    for folder, change in zip(theirs, LOOK_ALIKES.values(), strict=True):
        folder.mkdir()
        (folder / "notes").write_text("mine")
        change(folder, ours)
    moved = temporary / f"{prefix}moved"
    shutil.copytree(ours, moved)
    linked = temporary / f"{prefix}linked"
    linked.symlink_to(ours)
    assert left().exists() and not ours.exists(), "what was killed is removed by the next"
    assert all((folder / "notes").read_text() == "mine" for folder in theirs)
    assert moved.is_dir() and linked.is_symlink()


def test_half_written_files_that_only_look_like_ours_stay(tmp_path):
    with Folder(tmp_path).writing("a") as path:
        prefix = re.match(r"\.partial-.*-", path.name)[0]
        path.write_bytes(b"1")
    theirs = tmp_path / f"{prefix}notes"
    theirs.write_text("mine")
    (tmp_path / f"{prefix}{'0' * 32}").symlink_to(theirs)
    os.mkfifo(tmp_path / f"{prefix}{'1' * 32}")
    Store(tmp_path, "x")
    assert theirs.read_text() == "mine"
