"""Shared by all tests: few threads, a small real corpus, and a trial small enough to train in a second."""

import importlib.util
import os
import pydoc_data.topics
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

import mup_tpu.tuning  # noqa: F401 (before ray: it tells Ray how to authenticate)
from mup_tpu.config import Trial

# Without a package that triples the time that each process of Ray takes to start.
QUICK_START = str(Path(__file__).with_name("quick_start"))
sys.path.insert(0, QUICK_START)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (QUICK_START, os.environ.get("PYTHONPATH"))))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where tests ask for more threads: those that wait must not spin on cores that others also use.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray need not start workers before it is asked for some: packs' have an environment of their own, and would
# not be these.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# What tests start would compile our modules, and those of fresh environments, anew in each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell has its background jobs ignore Ctrl-C, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where packs train that train anywhere; tests that leave it to "auto" take a GPU by themselves."""
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where packs of tests train")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MUP_TPU_TEST_DEVICE"] = config.getoption("--device")


RAYS = ("local_ray", "fake_cluster")
IN_ONE_PROCESS = (*RAYS, "replay_python")
"""Fixtures that cost so much that all tests that share one run in one process of pytest-xdist."""


@pytest.hookimpl(wrapper=True)  # before pytest-xdist's, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """What shares an expensive fixture stands together, and what takes longest begins first: what shares one,
    then what is slow, then what is many.

    Under pytest-xdist tests of a file run in one process, but for slow ones without a fixture of their file.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    slow = {name: any(item.get_closest_marker("slow") for item in group) for name, group in groups.items()}
    items.clear()
    order = {n: (n not in IN_ONE_PROCESS, not slow[n], -len(group)) for n, group in groups.items()}
    for name in sorted(groups, key=order.__getitem__):
        for item in groups[name]:
            item.add_marker(pytest.mark.xdist_group(name))
        items += groups[name]
    yield


def group_of(item: pytest.Item) -> str:
    """Name of the group of tests that run one after another in one process."""
    if "replay_python" in item.fixturenames:
        return "replay_python"
    if ray := ray_of(item):
        return ray
    file = item.nodeid.partition("::")[0]
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    of_file = any(f.scope == "module" for found in fixtures for f in found)
    return item.nodeid if item.get_closest_marker("slow") and not of_file else file


def ray_of(item: pytest.Item) -> str | None:
    """The fixture of the Ray that a test asks for; one with a parameter `ray` asks where that is true."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    asked = parameters.get("ray", True)
    return next((name for name in RAYS if asked and name in item.fixturenames), None)


class SharedRay:
    """The Ray that tests in this process share: none, one of this machine, or a fake cluster."""

    kind: str | None = None
    cluster: Any = None

    def be(self, kind: str | None) -> None:
        """Have this one up and no other."""
        if kind == self.kind:
            return
        import ray

        if self.kind:
            ray.shutdown()
        if self.cluster:
            self.cluster.shutdown()
            self.cluster = None
        self.kind = kind
        # A node that is not up in half a minute is given up by Ray: processes of tests start theirs in turn.
        lock = filelock.FileLock(Path(tempfile.gettempdir(), f"mup_tpu-tests-ray-{os.getuid()}.lock"))
        with lock, pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_MODE", "offline")  # for its processes
            self._start(kind)

    def _start(self, kind: str | None) -> None:
        import ray
        from ray.cluster_utils import Cluster

        from mup_tpu.jobs.cluster import start_here, start_patiently

        quiet = {"log_to_driver": False, "logging_level": "ERROR"}

        def start_fake() -> None:
            lean = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False}
            self.cluster = Cluster(initialize_head=True, head_node_args=lean)
            ray.init(address=self.cluster.address, **quiet)

        if kind == "local_ray":
            start_here(num_cpus=2, **quiet)
        elif kind == "fake_cluster":
            start_patiently(start_fake)

    def remove(self, nodes: Iterable[Any]) -> None:
        """Take nodes of the fake cluster away, and wait until it knows; with the cluster they are gone."""
        import ray

        if self.cluster is None:
            return
        for node in list(nodes):
            self.cluster.remove_node(node)
        deadline = time.monotonic() + 60
        while sum(node["Alive"] for node in ray.nodes()) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)


_SHARED_RAY = SharedRay()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The Ray that a test asks for is up before its fixtures are; a test that asks for none finds none."""
    _SHARED_RAY.be(ray_of(item))


def pytest_sessionfinish() -> None:
    _SHARED_RAY.be(None)


@pytest.fixture(scope="session")
def local_ray() -> None:
    """Ray on two cores of this machine, for tests that need one but no fresh one: what would start a Ray
    joins it.
    """


@pytest.fixture(scope="session")
def fake_cluster() -> Any:
    """A Ray cluster of a head that has no cores; whoever adds nodes to `.cluster` removes them."""
    return _SHARED_RAY


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


@pytest.fixture
def patience() -> int:
    """How many times as long things may take as where no other process is busy: load over cores."""
    return max(1, int(os.getloadavg()[0] / (os.cpu_count() or 1)))


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
