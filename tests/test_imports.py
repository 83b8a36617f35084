"""Arrows between rooms: nothing imports upward, and replay imports no training library."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mup_tpu.cli import COMMANDS

PACKAGE = Path(__file__).parents[1] / "mup_tpu"
HEAVY = ("torch", "torch_xla", "torchvision", "ray", "transformers", "datasets", "mup", "hyperopt", "optuna")
LIGHT_ROOMS = (
    "errors", "files", "rules", "config", "logs", "optimizers", "store", "analysis", "words", "plots",
    "report",
)  # fmt: skip

# Rooms that each room may import besides itself, from left to right. The command line and experiments may
# import all.
CONFIGURATION = {"errors", "rules", "config"}
MODEL = CONFIGURATION | {"optimizers", "models", "internals"}
TRAINING = MODEL | {"files", "data", "devices", "training"}
MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "rules": {"errors"},
    "config": {"errors", "files", "rules"},
    "optimizers": CONFIGURATION,
    "models": CONFIGURATION | {"optimizers", "internals"},
    "data": CONFIGURATION | {"files", "internals"},
    "internals": set(),
    "logs": {"errors", "config"},
    "devices": {"errors", "config", "files", "internals"},
    "training": TRAINING,
    "parametrize": TRAINING | {"analysis"},
    "jobs": TRAINING,
    "tpu": TRAINING | {"jobs"},
    "tuning": TRAINING | {"jobs", "store", "analysis", "words"},
    "study": CONFIGURATION
    | {"files", "internals", "training", "jobs", "tuning", "store", "analysis", "words", "plots", "logs"},
    "store": CONFIGURATION | {"files"},
    "analysis": CONFIGURATION | {"files", "internals", "store", "logs"},
    "words": CONFIGURATION | {"store", "analysis"},
    "plots": CONFIGURATION | {"store", "analysis", "words"},
    "report": CONFIGURATION | {"store", "analysis", "words", "plots"},
}


LIGHT = (
    "fsspec", "matplotlib.figure", "numpy", "pandas", "pyarrow.parquet", "rich.console", "scipy.stats", "tyro"
)  # fmt: skip
"""Packages of the replay that take longest to import."""

FORKS = """
import importlib, json, os, sys
light, heavy = json.loads(sys.argv[1])
for name in light:
    importlib.import_module(name)
for line in sys.stdin:
    code = json.loads(line)
    child = os.fork()
    if not child:
        answer = os.dup(1)
        os.dup2(2, 1)
        exec(code, {"__name__": "__main__", "sys": sys})
        os.write(answer, json.dumps([name for name in heavy if name in sys.modules]).encode())
        os._exit(0)
    print("", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def heavy_modules_after() -> Iterator[Callable[[str], list[str]]]:
    """Training libraries that a code leaves imported, run in a fork of an interpreter that has imported light
    packages.
    """
    start = [sys.executable, "-c", FORKS, json.dumps([LIGHT, HEAVY])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(start, cwd=PACKAGE.parent, text=True, **pipes) as server:  # type: ignore[call-overload]

        def heavy_modules_after(code: str) -> list[str]:
            print(json.dumps(code), file=server.stdin, flush=True)
            found, _, exit_code = server.stdout.readline().rpartition(" ")
            assert exit_code == "0\n", "the code failed: see stderr"
            return json.loads(found)

        yield heavy_modules_after


def test_each_trial_of_a_study_forks_a_process_with_few_modules() -> None:
    """With pandas, a fork took three times as long."""
    imports = "import sys, mup_tpu.jobs.pools, mup_tpu.study.trainer"
    code = f"{imports}; print(*{{'numpy', 'pandas', 'rich', 'fsspec'}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=PACKAGE.parent, text=True) == "\n"


def room_sources(room: str) -> list[Path]:
    """Files of a room: one module or one package."""
    module = PACKAGE / f"{room}.py"
    return [module] if module.exists() else sorted((PACKAGE / room).rglob("*.py"))


def dotted_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, in functions and type-checking blocks too."""
    package = dotted_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*origin, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        modules |= {name for name in names if name.startswith("mup_tpu.")}
    return modules


def imported_rooms(path: Path) -> set[str]:
    """Rooms of the package that a file imports, in functions and type-checking blocks too."""
    return {room for room in (name.split(".")[1] for name in imported_modules(path)) if room_sources(room)}


def test_the_detector_sees_a_heavy_import(heavy_modules_after):
    assert heavy_modules_after("sys.modules['optuna'] = sys") == ["optuna"]  # importing it takes seconds
    assert heavy_modules_after("import numpy") == []


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_replay_rooms_import_no_training_library(room, heavy_modules_after):
    modules = [dotted_name(path) for path in room_sources(room)]
    assert modules and heavy_modules_after("\n".join(f"import {name}" for name in modules)) == []


@pytest.mark.parametrize("module", ["tuning.sweep", "tuning.search", "study"])
def test_a_driver_leaves_torch_to_its_workers(module, heavy_modules_after):
    assert set(heavy_modules_after(f"import mup_tpu.{module}")) <= {"ray"}


def test_training_starts_without_transformers_and_torchs_compiler(heavy_modules_after):
    """Each takes longer to import than torch. Torch's optimizers and layers import its compiler."""
    code = (
        "import torch\nfrom mup_tpu.config import Trial\nfrom mup_tpu.devices import get_device\nfrom "
        "mup_tpu.training.pack import Pack\nimport mup_tpu.training.loop\ntrials = "
        "[Trial().replace(width=32, tied=tied, optimizer=optimizer)\n          for tied in (True, False) for "
        "optimizer in ('adamw', 'sgd', 'muon')]\nfor trial in trials:\n    Pack([trial], 16, "
        "get_device('cpu')).step(torch.zeros(2, 9, dtype=torch.int64))\nassert 'torch._dynamo' not in "
        "sys.modules"
    )
    assert heavy_modules_after(code) == ["torch", "mup"]


@pytest.mark.parametrize("command", [[], ["analyze"], ["predict"]], ids=str)
def test_command_line_help_imports_no_training_library(command, heavy_modules_after):
    code = (
        f"from mup_tpu.cli import main\nsys.argv = ['mup-tpu', *{command!r}, '--help']\ntry:\n    "
        "main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert heavy_modules_after(code) == []


def test_package_runs_as_a_module_and_its_help_needs_no_scipy():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mup_tpu", "--help"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "mup_tpu.cli" in result.stderr and not re.search(r"scipy|pandas|tyro|rich", result.stderr)
    for command in COMMANDS:
        assert command in result.stdout


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_nothing_imports_upward(room):
    for path in room_sources(room):
        upward = imported_rooms(path) - MAY_IMPORT[room] - {room}
        assert not upward, f"{path.relative_to(PACKAGE.parent)} imports {', '.join(sorted(upward))}"


def test_no_module_imports_itself_by_way_of_others():
    modules = {dotted_name(path): path for path in PACKAGE.rglob("*.py")}
    arrows = {
        name: {
            m for m in imported_modules(path) if m in modules and m != name and not name.startswith(f"{m}.")
        }
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError with the modules of a circle


def test_only_errors_lie_at_the_root():
    names = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert names == {"errors"}


def test_every_room_has_its_arrows():
    rooms = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__", "__main__", "cli"} <= MAY_IMPORT.keys()
