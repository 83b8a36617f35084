"""Fixtures and settings of all tests: one thread, a small real corpus, a trial that trains in a second."""

import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import pydoc_data.topics
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import filelock
import pytest
from packaging.requirements import Requirement

from mup_tpu.config import Trial

# Folders on the path of tests and of the processes that they start: one hides a package which makes each
# process of Ray three times as slow to start, the other has the jobs of tests of pools.
QUICK_START = str(Path(__file__).with_name("quick_start"))
JOBS = str(Path(__file__).parent / "jobs" / "importable")
sys.path[:0] = [QUICK_START, JOBS]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (QUICK_START, JOBS, os.environ.get("PYTHONPATH"))))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Waiting threads sleep: spinning would take a core from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Stock models start in half the time: transformers would import torch_xla and torch's compiler.
os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's workers start when they are asked for: packs need an environment of their own, early ones lack it.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray's workers run at nice 15 by default: a busy machine starves them, and tests wait.
os.environ.setdefault("RAY_worker_niceness", "0")
# Bytecode is written: otherwise each process of a test compiles our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Ctrl-C is heard: a shell has its background jobs ignore it, and processes of tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Device of tests that train on any device; others have no GPU."""
    told = (
        "where packs of tests train; hollow: on a GPU whose values the CPU computes; tpu: by TorchTPU there"
    )
    parser.addoption("--device", choices=("cpu", "cuda", "hollow", "tpu"), default="cpu", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """Nightly tests are left out unless -m names them."""
    device = config.getoption("--device")
    os.environ["MUP_TPU_TEST_DEVICE"] = "cuda" if device == "hollow" else device
    if device in ("cpu", "tpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if device == "tpu":
        import tpu_on_cpu  # noqa: F401
    if device == "hollow":
        import filled_gpu  # noqa: F401
    asked = config.option.markexpr
    if "nightly" not in asked:
        config.option.markexpr = f"({asked}) and not nightly" if asked else "not nightly"


RAYS = ("local_ray", "fake_cluster")
"""Expensive fixtures: all tests that share one run in one process of pytest-xdist."""
MANY_EXAMPLES = bool(int(os.environ.get("MUP_TPU_EXAMPLES", "0")))
"""Whether tests of Hypothesis draw thousands of inputs: each then takes minutes."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage: their objects stay, and the search takes time."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(wrapper=True)  # before pytest-xdist's, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Group tests that share an expensive fixture, and begin with the longest groups: those of an expensive
    fixture, then the others by their seconds. A long group that begins last would leave cores idle.

    Under pytest-xdist a file's tests run in one process, except slow ones without a fixture of their file.
    """
    groups: dict[str, list[pytest.Item]] = {}
    in_turns = pytest.mark.skip(reason="on TPUs members are stacked")
    for item in items:
        spec = getattr(item, "callspec", None)
        if item.config.getoption("--device") == "tpu" and spec and "loop" in spec.params.values():
            item.add_marker(in_turns)
        is_hollow = "on_gpu" in item.fixturenames and item.config.getoption("--device") != "cuda"
        if is_hollow or "hollow_gpu" in item.fixturenames:
            item.add_marker(pytest.mark.nightly)
        if MANY_EXAMPLES and is_drawn(item):
            item.add_marker(pytest.mark.timeout(3 * 3600))
        groups.setdefault(group_of(item), []).append(item)
    items.clear()
    order = {
        n: (n not in RAYS, -max(sum(map(seconds, group)), SECONDS.get(n, 0))) for n, group in groups.items()
    }
    for name in sorted(groups, key=order.__getitem__):
        for item in groups[name]:
            item.add_marker(pytest.mark.xdist_group(name))
        items += groups[name]
    yield


def is_drawn(item: pytest.Item) -> bool:
    """Whether Hypothesis draws the inputs of a test."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test takes more than ten seconds."""
    marked = item.get_closest_marker("slow") or item.get_closest_marker("nightly")
    return bool(marked) or (MANY_EXAMPLES and is_drawn(item))


def measured_seconds() -> dict[str, float]:
    """Seconds of the longest tests, as `scripts/test --durations=200` once printed them, and of files."""
    lines = Path(__file__).with_name("durations.txt").read_text(encoding="utf-8").splitlines()
    parted = (line.partition("s call") for line in lines)
    return {name.partition("@")[0].strip(): float(took) for took, _, name in parted}


SECONDS = measured_seconds()


def seconds(item: pytest.Item) -> float:
    """Seconds that a test took once, or a guess."""
    return SECONDS.get(item.nodeid, 10 if item.get_closest_marker("slow") else 0.2)


def group_of(item: pytest.Item) -> str:
    """Name of the group of tests that run one after another in one process."""
    if ray := ray_of(item):
        return ray
    file = item.nodeid.partition("::")[0]
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    of_file = any(f.scope == "module" for found in fixtures for f in found)
    return item.nodeid if is_slow(item) and not of_file else file


def ray_of(item: pytest.Item) -> str | None:
    """Name of the fixture of Ray that a test uses; a false parameter `ray` means none."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    asked = parameters.get("ray", True)
    return next((name for name in RAYS if asked and name in item.fixturenames), None)


def wait_for_nodes_of_ray() -> None:
    """Have Ray wait four minutes for a node to start; its half minute is too short for a crowded machine."""
    from ray._private import services

    find = services.get_node
    if hasattr(find, "__wrapped__"):
        return

    @functools.wraps(find)
    def find_patiently(*arguments: Any) -> Any:
        deadline = time.monotonic() + 240
        while True:
            try:
                return find(*arguments)
            except RuntimeError:  # it has not registered yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    services.get_node = find_patiently


class SharedRay:
    """Ray of all tests in this process: none, one of this machine, or a fake cluster."""

    kind: str | None = None
    cluster: Any = None
    here = contextlib.ExitStack()

    def be(self, kind: str | None) -> None:
        """Start this kind of Ray and end any other."""
        if kind or "ray" in sys.modules:
            wait_for_nodes_of_ray()
        if kind == self.kind:
            return
        import ray

        if self.kind:
            ray.shutdown()
        self.here.close()
        if self.cluster:
            self.cluster.shutdown()
            self.cluster = None
        self.kind = kind
        # Ray gives up a node that is not up in half a minute, so processes of tests start theirs in turn.
        lock = filelock.FileLock(Path(tempfile.gettempdir(), f"mup_tpu-tests-ray-{os.getuid()}.lock"))
        with lock, pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_MODE", "offline")  # Ray's processes inherit it
            self._start(kind)

    def _start(self, kind: str | None) -> None:
        import ray
        from ray.cluster_utils import Cluster

        from mup_tpu.jobs.cluster import started_here

        if kind == "local_ray":
            self.here.enter_context(started_here(num_cpus=2))
        elif kind == "fake_cluster":
            lean = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False}
            self.cluster = Cluster(initialize_head=True, head_node_args=lean)
            ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def remove(self, nodes: Iterable[Any]) -> None:
        """Remove nodes from the fake cluster and wait until it knows; a cluster that has ended has none."""
        import ray

        if self.cluster is None:
            return
        for node in list(nodes):
            self.cluster.remove_node(node)
        deadline = time.monotonic() + 120
        while sum(node["Alive"] for node in ray.nodes()) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)


_SHARED_RAY = SharedRay()


_last_file: list[Path] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the Ray that a test uses before its fixtures, and end it before a test that uses none.

    A file does not fork from a server without torch that another file has left: each pack would import torch.
    """
    _SHARED_RAY.be(ray_of(item))
    server = forkserver._forkserver
    is_left = server._forkserver_pid and "mup_tpu.jobs.preload" not in server._preload_modules
    if is_left and _last_file and item.path != _last_file[-1]:
        server._stop()
    _last_file[:] = [item.path]
    if plots := sys.modules.get("mup_tpu.plots"):
        plots.save_figure = plots.style.save_figure if "painted" in item.fixturenames else save_unpainted


def save_unpainted(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write the files of a figure that is made and not painted."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        path.write_text(repr(figure))
    return paths


@pytest.fixture
def painted() -> None:
    """Have commands paint their figures: half a second each, most of the time of a sweep's command."""


def pytest_sessionfinish() -> None:
    _SHARED_RAY.be(None)


@pytest.fixture(scope="session")
def local_ray() -> None:
    """Ray on two cores of this machine, shared: code that would start a Ray joins it."""


@pytest.fixture(scope="session")
def fake_cluster() -> Any:
    """Ray cluster of a head without cores; a test removes the nodes that it adds to `.cluster`."""
    return _SHARED_RAY


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of this test run in which tokens are cached, in place of the user's."""
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
def hollow_gpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Output of Python with hollow GPUs (tools/hollow_gpu), by the words after its name."""
    import hollow_gpu

    if importlib.util.find_spec("triton") is None or shutil.which("cc") is None:
        pytest.skip("torch for CUDA, or a C compiler, is not here")
    folder = tmp_path_factory.mktemp("hollow_gpu")
    hollow_gpu.build(folder)

    def run(*words: object, code: int = 0, **settings: Any) -> str:
        environment = hollow_gpu.environment(folder, **settings)
        command = [sys.executable, *map(str, words)]
        ended = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    return run


@pytest.fixture(scope="session")
def with_torch_xla() -> Iterator[None]:
    """Skip tests where torch_xla is not installed.

    This process must not import it: that sets PJRT_DEVICE=CPU, which all later tests would inherit.
    """
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    yield
    assert "torch_xla" not in sys.modules, "a test has imported torch_xla here, not in a process of its own"


@pytest.fixture
def patience() -> int:
    """Factor on time limits: load over cores, at least 1."""
    return max(1, int(os.getloadavg()[0] / (os.cpu_count() or 1)))


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> Trial:
    """Trial that trains in about a second."""
    return Trial().replace(
        corpus=str(corpus), width=32, base_width=32, head_size=16, sequence_length=32, batch_size=4, steps=30,
        warmup=0.2, init_std=0.08, learning_rate=0.01, eval_batches=2,
    )  # fmt: skip


@pytest.fixture(scope="session")
def dataset(tiny: Trial) -> Any:
    """Tokens of `tiny`."""
    from mup_tpu import data

    return data.load(tiny.data)


GOLDEN = Path(__file__).with_name("golden.json")


@pytest.fixture(scope="session")
def golden() -> Iterator[Callable[[str, Any], None]]:
    """Function that compares a value with the frozen one of its name: numbers to 0.5 % and 0.001.

    The tolerance holds what other processors' arithmetic changes. To freeze values that are meant to change:

        MUP_TPU_GOLDEN=write scripts/test -n 0 tests/test_golden.py tests/plots tests/tuning/test_plan.py
    """
    frozen = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    writes = os.environ.get("MUP_TPU_GOLDEN") == "write"

    def check(name: str, value: Any) -> None:
        value = without_sentences(json.loads(json.dumps(value), parse_constant=str))
        if writes:
            frozen[name] = value
        _assert_close(value, frozen[name], name, rel=0.005, abs=1e-3)

    yield check
    if writes:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(frozen[name])}" for name in sorted(frozen))
        GOLDEN.write_text(f"{{\n{lines}\n}}\n")


def without_sentences(value: Any) -> Any:
    """Drop what is said about numbers, so that wording may change."""
    if isinstance(value, dict):
        return {k: without_sentences(v) for k, v in value.items() if not (isinstance(v, str) and " " in v)}
    if isinstance(value, list):
        return [without_sentences(v) for v in value if not (isinstance(v, str) and " " in v)]
    return float(f"{value:.5g}") if isinstance(value, float) else value


_NUMBER = re.compile(r"\d[\d.,]*(e[+-]?\d+)?")


def _assert_close(value: Any, frozen: Any, where: str, rel: float, abs: float) -> None:
    if isinstance(frozen, dict):
        assert value.keys() == frozen.keys(), where
        for key in frozen:
            _assert_close(value[key], frozen[key], f"{where}.{key}", rel, abs)
    elif isinstance(frozen, list):
        assert len(value) == len(frozen), where
        for i, pair in enumerate(zip(value, frozen, strict=True)):
            _assert_close(*pair, f"{where}[{i}]", rel, abs)
    elif isinstance(frozen, float):
        assert value == pytest.approx(frozen, rel=rel, abs=abs), where
    elif where.endswith((".sentence", ".settle")):
        assert value.split()[:2] == frozen.split()[:2], where
    elif where.endswith(".why_not") and isinstance(frozen, str):  # numbers may differ, words not
        assert _NUMBER.sub("#", value) == _NUMBER.sub("#", frozen), where
    else:
        assert value == frozen, where


@pytest.fixture(scope="session")
def stored() -> Callable[[str], Any]:
    """Function that returns the command line's analysis of a results folder, made once."""
    from mup_tpu.cli.table import TableOptions

    options, results = TableOptions(), Path(__file__).parents[1] / "results"
    return functools.cache(lambda folder: options.analyze(options.load(str(results / folder))))


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """Function that compares nested values, numbers within tolerances, and of sentences the first words."""
    return _assert_close


@pytest.fixture(scope="session")
def drawn() -> Callable[[Any], list[Any]]:
    """Function that sums up a figure: the mean point of each line and set of dots, and the limits of axes."""
    import numpy as np

    def drawn(figure: Any) -> list[Any]:
        summaries = []
        for axes in [a for ax in figure.axes for a in (ax, *ax.child_axes)]:  # a second axis is a child
            lines = [np.column_stack([np.asarray(v, float) for v in line.get_data()]) for line in axes.lines]
            dots = [np.asarray(c.get_offsets(), float).reshape(-1, 2) for c in axes.collections]
            marks = []
            for points in (*lines, *dots):
                finite = points[np.isfinite(points).all(axis=1)]
                mean = finite.mean(axis=0) if len(finite) else ()
                marks.append([len(points), *(float(f"{v:.4g}") for v in mean)])
            summaries.append([marks, [float(f"{v:.4g}") for v in (*axes.get_xlim(), *axes.get_ylim())]])
        return summaries

    return drawn


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Maker of environments with some packages and what they require; it returns their interpreter."""
    return lambda *names: environment_of(tmp_path_factory.mktemp("installed"), *names)


ROOT = Path(__file__).parents[1]


def required_by(requirement: Requirement) -> Iterator[Requirement]:
    extras = {"", *requirement.extras}
    lines = importlib.metadata.requires(requirement.name) or []
    if requirement.name == "mup_tpu":  # an editable install may have older metadata
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        of_extras = (line for e in requirement.extras for line in project["optional-dependencies"][e])
        lines = [*project["dependencies"], *of_extras]
    for inner in map(Requirement, lines):
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
            inner.marker = None
            yield inner


def environment_of(folder: Path, *names: str) -> Path:
    """Interpreter of an environment with some packages and what they require.

    This package is installed; the others are links to those here, since an installation would take minutes.
    """
    waiting, seen, links = [*map(Requirement, names)], set[str](), dict[str, Path]()
    while waiting:
        requirement = waiting.pop()
        new = [inner for inner in required_by(requirement) if str(inner) not in seen]
        waiting += new
        seen |= {*map(str, new)}
        is_this = requirement.name == "mup_tpu"
        for file in () if is_this else importlib.metadata.files(requirement.name) or ():
            links[file.parts[0]] = Path(str(file.locate())).parents[len(file.parts) - 1] / file.parts[0]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (site,) = folder.glob("env/lib/*/site-packages")
    for name in links.keys() - {".."}:
        (site / name).symlink_to(links[name])
    # A copy is built: setuptools builds in the source folder and takes stale files from there.
    source = folder / "source"
    shutil.copytree(ROOT / "mup_tpu", source / "mup_tpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as b; b.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    tool = ["uv", "pip", "install", "--python", python]
    if importlib.util.find_spec("uv") is None:
        tool = ["pip", "--python", python, "install"]
    subprocess.run([sys.executable, "-m", *tool, "--no-deps", "--quiet", wheel], check=True)
    return python


@pytest.fixture
def outcome(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `mup-tpu ARGUMENTS`; exit code, standard output and standard error on one line."""

    from mup_tpu.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            main([str(a) for a in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run


@pytest.fixture
def two_rules(tmp_path: Path) -> str:
    """A stored sweep in SP and μP over four widths: SP's best row is the best of all, at width 64.

    μP's optimum lies at 2^-6 at every width, SP's at 2^-5 at width 64 and an octave lower with each octave.
    """
    from mup_tpu.config.columns import configured
    from mup_tpu.store import Store

    rows = []
    for rule, width, x in (
        (r, w, x) for r in ("mup", "sp") for w in (64, 128, 256, 512) for x in range(-11, -2)
    ):
        best = -6.0 if rule == "mup" else -5.0 - math.log2(width / 64)
        floor = 2.0 + 8 * width**-0.5 if rule == "mup" else 1.9 + 0.3 * math.log2(width / 64)
        trial = Trial().replace(width=width, parametrization=rule, learning_rate=2.0**x)
        loss = floor + 0.04 * (x - best) ** 2 + 0.0005 * ((7 * x + width) % 5)
        outcome = {"trial_id": f"{rule}{width}{x}", "status": "finished", "loss": loss}
        rows.append(configured(trial) | outcome)
    Store(tmp_path / "swept", "swept").append(rows)
    return str(tmp_path / "swept")


@pytest.fixture
def limited_group():
    """Maker of real control groups with a limit in MB: a group without one, inside a limited one.

    Skips the test where this user or system can make none.
    """
    made = []

    def make(megabytes):
        lines = Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else []
        own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
        for mount, controllers, limit in (
            ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "", "memory.max"),
        ):
            outer = Path(f"{mount}{own.get(controllers, '/nowhere')}/mup_tpu_test_{os.getpid()}_{len(made)}")
            with contextlib.suppress(OSError):
                for group in (outer, outer / "inner"):
                    group.mkdir()
                    made.append(group)
                (outer / limit).write_text(str(megabytes * 10**6))
                return outer / "inner"
        pytest.skip("no control group with a limit can be made here")

    yield make
    deadline = time.monotonic() + 60
    while made:  # processes of the test are a moment from their end
        with contextlib.suppress(OSError):
            made[-1].rmdir()
            made.pop()
            continue
        assert time.monotonic() < deadline, f"{made[-1]} is still in use"
        time.sleep(0.1)
