"""Installing: set-up scripts, pins that must fit each other, and the environment of `pip install .`."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
def test_script_is_valid_bash(script):
    result = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable(script):
    assert os.access(ROOT / script, os.X_OK)


def test_environment_refuses_a_python_it_cannot_use(tmp_path):
    """In a copy of the scripts: the environment of this checkout stays as it is."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = subprocess.run(
        [tmp_path / "scripts" / "test"],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
    )
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


def test_every_file_of_the_package_is_in_the_wheel(monkeypatch):
    """By setuptools' own list of modules and data files."""
    from setuptools import Distribution, find_packages

    monkeypatch.chdir(ROOT)
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = find_packages(**asked["packages"]["find"])
    given = {"packages": packages, "package_data": asked["package-data"], "script_name": "setup.py"}
    build = Distribution(given).get_command_obj("build_py")
    build.ensure_finalized()
    packed = {Path(file) for _, _, file in build.find_all_modules()}
    packed |= {Path(folder, name) for _, folder, _, names in build.data_files for name in names}
    wanted = {path.relative_to(ROOT) for path in (ROOT / "mup_tpu").rglob("*") if path.is_file()}
    assert sorted(map(str, {path for path in wanted if "__pycache__" not in path.parts} - packed)) == []


@pytest.mark.nightly
def test_plain_install_is_a_working_replay_without_training_libraries(replay_python, tmp_path):
    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = run(
        replay_python,
        "-c",
        "import importlib.util as u, mup_tpu.analysis, mup_tpu.report, mup_tpu.store\n"
        "print(mup_tpu.__path__[0], *[n for n in ('torch', 'ray', 'transformers', 'mup') if u.find_spec(n)])",
    ).split()
    installed = Path(found[0])
    assert found[1:] == []
    assert replay_python.parents[1].resolve() in installed.resolve().parents
    assert "analyze" in run(replay_python.parent / "mup-tpu", "--help")
    assert "DRIFTS" in run(replay_python.parent / "mup-tpu", "analyze", ROOT / "results" / "nanogpt_mup")
    command = [replay_python.parent / "mup-tpu", "analyze", ROOT / "results" / "muon_transfer"]
    assert "spent so far" in run(*command, "--next", "--report", "--out", "x.html")
    assert (tmp_path / "x.html").stat().st_size > 100_000
    names = {path.relative_to(ROOT) for path in (ROOT / "mup_tpu").rglob("*") if path.is_file()}
    wanted = {name for name in names if "__pycache__" not in name.parts}
    missing = sorted(str(name) for name in wanted if not (installed.parent / name).exists())
    assert not missing, f"not in the wheel: {missing}"


EACH_IN_A_FORK = """
import json, os, sys, tempfile
import matplotlib.figure, pandas, pyarrow.parquet, scipy.stats  # once for all
from mup_tpu.cli import main
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
answers = []
for command in sys.argv[2:]:
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                main(command.split())
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
"""Runs each command in a fork, without the modules that come first; prints exit codes and outputs."""


def require_what_to_install(python: Path, hidden: tuple[str, ...], tmp_path: Path) -> None:
    """Each command that trains says what to install, where these modules are hidden."""
    (tmp_path / "sweep.toml").write_text('experiment = "x"\nwidths = [64]\nlearning_rates = [0.01]\n')
    (tmp_path / "search.toml").write_text(
        'experiment = "x"\n[space.learning_rate]\nkind = "loguniform"\nlow = 0.001\nhigh = 0.1\n'
    )
    commands = (
        "train", "train --checkpoints kept --export out", "sweep sweep.toml", "sweep sweep.toml --dry-run",
        "sweep sweep.toml --until-settled", "sweep sweep.toml --ray", "search search.toml", "check",
        "data inspect --corpus sotu", "data prepare --corpus sotu --out shards",
        f"transfer {ROOT / 'results' / 'tune_small'} --at width=512",
    )  # fmt: skip
    asked = [python, "-c", EACH_IN_A_FORK, json.dumps(hidden), *commands]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = {command: (code, said) for command, code, said in json.loads(done.stdout)}
    assert tuple(answers) == commands
    sentence = r"error: this command needs \w+, which is not installed: pip install '\.\[train\]'\n"
    for command, (code, said) in answers.items():
        assert code == 2, (command, said)
        assert re.fullmatch(sentence, said), (command, said)


def test_commands_that_train_say_what_to_install_where_it_is_not(tmp_path):
    hidden = ("torch", "ray", "transformers", "tokenizers", "datasets", "mup", "sotu", "hyperopt", "optuna")
    require_what_to_install(Path(sys.executable), hidden, tmp_path)


@pytest.mark.nightly
def test_plain_install_answers_each_command_that_trains_with_what_to_install(replay_python, tmp_path):
    require_what_to_install(replay_python, (), tmp_path)
    python = [replay_python, "-c", "import mup_tpu.parametrize"]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    sentence = "mup_tpu.parametrize needs torch, which is not installed: pip install '.[train]'"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"
    # An address is asked without ray.
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:6379"}
    doctor = [replay_python.parent / "mup-tpu", "doctor"]
    found = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 1, found.stderr
    assert "no Ray cluster answers at address '127.0.0.1:6379'" in found.stdout
    assert "- torch is not installed: training needs it, pip install '.[train]'" in found.stdout


def installed_for(extra: str) -> set[str]:
    """Names of installed packages that an extra brings, with all that these require."""
    names, waiting = set(), requirements_of(extra) + [Requirement(r) for r in METADATA["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)
        ):
            continue
        asked = {name, *(f"{name}[{e}]" for e in requirement.extras)}
        if asked <= names:
            continue
        names |= asked
        for line in importlib.metadata.requires(name) or []:
            inner = Requirement(line)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)
            ):
                inner.marker = None
                waiting.append(inner)
    return {name for name in names if "[" not in name}


@pytest.mark.nightly
def test_the_extra_train_is_enough_to_train_on_a_cpu(tmp_path):
    """In an environment of links to the installed files of the extra's packages, and nothing else."""
    names = installed_for("train")
    assert "torch" in names and "pytest" not in names and "torch-xla" not in names
    for name in names:
        for file in importlib.metadata.files(name) or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                installed, link = Path(str(file.locate())), tmp_path / "site" / file
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(installed)
                # Bytecode is linked too, or all of torch would be compiled again.
                compiled = link.with_name("__pycache__")
                if not compiled.exists() and installed.with_name("__pycache__").is_dir():
                    compiled.symlink_to(installed.with_name("__pycache__"))
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path / 'site')!r}]\nfrom mup_tpu.cli import "
        "main\nmain(['train', '--width', '32', '--base-width', '32', '--depth', '1', '--steps', '4',\n      "
        "'--device', 'cpu', '--results', 'out'])"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
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
