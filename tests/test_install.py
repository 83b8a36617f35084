"""Installing: the set-up scripts, the pins that must fit each other, and what `pip install .` gives."""

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
SCRIPTS = ("scripts/quickstart", "scripts/test", "scripts/docs", ".ci/run")


def requirements_of(extra: str) -> list[Requirement]:
    """The requirements of an extra, with those of the project's extras that it names."""
    found = []
    for line in METADATA["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == METADATA["name"]:
            found += [inner for name in sorted(requirement.extras) for inner in requirements_of(name)]
        else:
            found.append(requirement)
    return found


def pin_in_all(package: str) -> tuple[str, str]:
    """The exact version that `all` pins a package to, and the platforms that the pin is for."""
    pins = [r for r in requirements_of("all") if r.name == package and str(r.specifier).startswith("==")]
    assert len(pins) == 1, f"`all` pins {package} {len(pins)} times"
    return str(pins[0].specifier).removeprefix("=="), str(pins[0].marker)


@pytest.mark.parametrize("script", [*SCRIPTS, "scripts/_environment"])
def test_script_is_valid_bash(script):
    result = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable(script):
    assert os.access(ROOT / script, os.X_OK)


def test_environment_refuses_a_python_it_cannot_use(tmp_path):
    """A checkout of its own, so that this environment stays as it is."""
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
    assert f"PYTHON={old} is not a Python 3.11, 3.12 or 3.13" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_torch_pins_in_all_are_for_one_release_and_one_platform():
    torch, platforms = pin_in_all("torch")
    torch_xla, xla_platforms = pin_in_all("torch_xla")
    _, vision_platforms = pin_in_all("torchvision")
    assert torch_xla.split(".")[:2] == torch.split(".")[:2]
    assert platforms == xla_platforms == vision_platforms


def test_torchvision_pin_requires_exactly_the_pinned_torch():
    torch, _ = pin_in_all("torch")
    torchvision, _ = pin_in_all("torchvision")
    try:
        installed = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchvision is not installed")
    if installed.split("+")[0] != torchvision:
        pytest.skip(f"torchvision {installed} is installed, not the pinned {torchvision}")
    wanted = [Requirement(line) for line in importlib.metadata.requires("torchvision") or []]
    assert f"torch=={torch}" in [str(requirement) for requirement in wanted]


@pytest.mark.slow
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
    assert "DRIFTS" in run(replay_python.parent / "mup-tpu", "analyze", ROOT / "results" / "quickstart")
    reported = [
        replay_python.parent / "mup-tpu",
        "report",
        ROOT / "results" / "quickstart",
        "--out",
        "x.html",
    ]
    done = subprocess.run(reported, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.endswith("pip install 'mup_tpu[report]'\n"), done.stderr
    assert "were spent" in run(replay_python.parent / "mup-tpu", "next", ROOT / "results" / "muon_transfer")
    names = {path.relative_to(ROOT) for path in (ROOT / "mup_tpu").rglob("*") if path.is_file()}
    wanted = {name for name in names if "__pycache__" not in name.parts}
    missing = sorted(str(name) for name in wanted if not (installed.parent / name).exists())
    assert not missing, f"not in the wheel: {missing}"


EACH_IN_A_FORK = """
import json, os, sys, tempfile
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
"""Commands, each in a process that has imported what is light already; prints its exit code and output."""


@pytest.mark.slow
def test_plain_install_answers_each_command_that_trains_with_what_to_install(replay_python, tmp_path):
    (tmp_path / "sweep.toml").write_text('experiment = "x"\nwidths = [64]\nlearning_rates = [0.01]\n')
    (tmp_path / "search.toml").write_text(
        'experiment = "x"\n[space.learning_rate]\nkind = "loguniform"\nlow = 0.001\nhigh = 0.1\n'
    )
    commands = (
        "train", "train --checkpoints kept --export out", "sweep sweep.toml", "sweep sweep.toml --dry-run",
        "sweep sweep.toml --until-settled", "sweep sweep.toml --ray", "search search.toml", "coord-check",
        "data inspect --corpus sotu", "data prepare --corpus sotu --out shards",
        f"transfer {ROOT / 'results' / 'tune_small'} --width 512",
    )  # fmt: skip
    asked = [replay_python, "-c", EACH_IN_A_FORK, *commands]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = {command: (code, said) for command, code, said in json.loads(done.stdout)}
    assert tuple(answers) == commands
    sentence = r"error: this command needs \w+, which is not installed: pip install 'mup_tpu\[train\]'\n"
    for command, (code, said) in answers.items():
        assert code == 2, (command, said)
        assert re.fullmatch(sentence, said), (command, said)
    python = [replay_python, "-c", "import mup_tpu.parametrize"]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    sentence = "mup_tpu.parametrize needs torch, which is not installed: pip install 'mup_tpu[train]'"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"
    # A cluster's address: ray itself is looked for only where there is one to ask.
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:6379"}
    doctor = [replay_python.parent / "mup-tpu", "doctor"]
    found = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr
    assert "127.0.0.1:6379, not asked, as ray is not installed" in found.stdout
    assert "- torch is not installed: training needs it, pip install 'mup_tpu[train]'" in found.stdout


def installed_for(extra: str) -> set[str]:
    """Names of the installed packages that an extra brings, by their own metadata, with what these need."""
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


@pytest.mark.slow
def test_the_extra_train_is_enough_to_train_on_a_cpu(tmp_path):
    """In an environment of links to the installed files of what the extra asks for, and of nothing else."""
    names = installed_for("train")
    assert "torch" in names and "pytest" not in names and "torch-xla" not in names
    for name in names:
        for file in importlib.metadata.files(name) or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                installed, link = Path(str(file.locate())), tmp_path / "site" / file
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(installed)
                # Or all of torch would be compiled anew; what has no source beside it is never imported.
                compiled = link.with_name("__pycache__")
                if not compiled.exists() and installed.with_name("__pycache__").is_dir():
                    compiled.symlink_to(installed.with_name("__pycache__"))
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path / 'site')!r}]\n"
        "from mup_tpu.cli import main\n"
        "main(['train', '--width', '32', '--base-width', '32', '--depth', '1', '--steps', '4',\n"
        "      '--device', 'cpu', '--results', 'out'])"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "store.json").exists()


def test_groups_of_tests_reach_the_processes_that_run_them(request):
    """Else each test is dealt out alone, and what a file's tests share is made in every process."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests run in one process")
    (group,) = (mark.args[0] for mark in request.node.iter_markers("xdist_group"))
    assert request.node.nodeid.endswith(f"@{group}")
