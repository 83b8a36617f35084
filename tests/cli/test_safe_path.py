"""Commands in a working folder with modules of any name: none of their code runs, in no process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = """
with open({seen!r}, "a") as file:
    file.write("{name}\\n")
raise ImportError("a module of the working folder")
"""
PACKAGES = ("torch", "numpy", "ray", "psutil", "rich", "pandas", "pyarrow", "safetensors", "filelock", "tqdm")
COMMANDS = {
    "sweep": ("sweep", "small.toml", "--results", "results"),
    "sweep on Ray": ("sweep", "small.toml", "--results", "results", "--ray"),
    "data prepare": (
        *("data", "prepare", "--out", "shards", "--sequence-length", "32", "--shard-samples", "50"),
        "--corpus",
    ),
}


@pytest.fixture
def run(tmp_path, sweep_toml):
    """Runner of a command in a folder with modules of given names; returns those that were executed."""
    seen, folder = tmp_path / "seen", tmp_path / "work"
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])

    def run(command, names):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text(PLANTED.format(seen=str(seen), name=name))
        (folder / "small.toml").write_text(sweep_toml)
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
        )
        executed = sorted(set(seen.read_text().split())) if seen.exists() else []
        assert executed or done.returncode == 0, done.stderr
        return executed

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["sweep", pytest.param("sweep on Ray", marks=pytest.mark.nightly), "data prepare"]
)
def test_no_module_of_the_working_folder_is_executed(run, corpus, what):
    script = shutil.which("mup-tpu", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed")
    arguments = [*COMMANDS[what], *([str(corpus)] if what == "data prepare" else [])]
    assert run([script, *arguments], {*sys.stdlib_module_names, *PACKAGES, "sitecustomize"}) == []


@pytest.mark.nightly
def test_workers_of_python_m_execute_no_module_of_the_working_folder(run):
    """The driver itself does, before our first line: `python -m` looks there first."""
    names = {"multiprocessing", *PACKAGES}
    assert run([sys.executable, "-m", "mup_tpu", *COMMANDS["sweep"]], names) == []
