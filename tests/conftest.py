"""Shared by all tests: few threads, a small real corpus, and a trial small enough to train in a second."""

import importlib.util
import os
import pydoc_data.topics
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mup_tpu.tuning  # noqa: F401 (before ray: it tells Ray how to authenticate)
from mup_tpu.config import Trial

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where tests ask for more threads: those that wait must not spin on cores that others also use.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A shell has its background jobs ignore Ctrl-C, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens are cached in a folder of this test run, not in the user's."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["MUP_TPU_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's own manual pages (about 0.7 MB of English and code), a document a topic."""
    folder = tmp_path_factory.mktemp("topics")
    for name, text in pydoc_data.topics.topics.items():
        (folder / f"{name.replace('/', '_')}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> Trial:
    """A trial that trains in about a second."""
    return Trial().replace(
        corpus=str(corpus), width=32, base_width=32, head_size=16, sequence_length=32, batch_size=4, steps=30,
        warmup=0.2, init_std=0.08, learning_rate=0.01, eval_batches=2,
    )  # fmt: skip


@pytest.fixture(scope="session")
def dataset(tiny: Trial) -> Any:
    """The tokens of `tiny`."""
    from mup_tpu import data

    return data.load(tiny.data)


NO_NETWORK = re.compile(
    r"dns error|name resolution|failed to fetch|connection (?:refused|reset|error)|timed out|\bnetwork\b",
    re.I,
)


@pytest.fixture(scope="session")
def replay_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds `pip install .` and what executes notebooks: no torch."""
    root = Path(__file__).parents[1]
    # Built from a copy: setuptools builds in the source folder, and would take stale files from there.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    shutil.copytree(root / "mup_tpu", source / "mup_tpu", ignore=shutil.ignore_patterns("__pycache__"))
    environment = tmp_path_factory.mktemp("replay")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    if importlib.util.find_spec("uv"):
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    else:
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    wanted = [source, "nbclient", "ipykernel"]
    result = subprocess.run([*install, *wanted], cwd=source, capture_output=True, text=True)
    if result.returncode and NO_NETWORK.search(result.stderr):
        pytest.skip("the package registry cannot be reached")
    assert result.returncode == 0, result.stderr
    return python
