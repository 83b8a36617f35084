"""Scripts: cluster files by Ray's own schema, closed to the internet, up only after a question; test-all."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TPU = ROOT / "scripts" / "tpu"


def test_the_cluster_file_is_valid_by_ray_s_schema():
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load((TPU / "cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))
    with pytest.raises(Exception, match="Additional properties"):
        util.validate_config(util.prepare_config(config) | {"machines": 4})


def test_workers_are_tpu_vms_and_the_head_is_not():
    config = yaml.safe_load((TPU / "cluster.yaml").read_text())
    nodes = dict(config["available_node_types"])
    head = nodes.pop(config["head_node_type"])
    assert "acceleratorType" not in head["node_config"]
    assert {node["node_config"]["acceleratorType"] for node in nodes.values()} == {
        "v2-8",
        "v3-8",
        "v4-8",
        "v5litepod-8",
        "v6e-8",
    }
    for node in nodes.values():
        assert node["node_config"]["schedulingConfig"] == {"preemptible": True}
        assert "machineType" not in node["node_config"]
        assert node["resources"]["TPU"] in (4, 8)


def test_dashboards_stay_inside_and_tokens_are_asked_for():
    config = yaml.safe_load((TPU / "cluster.yaml").read_text())
    (start,) = [line for line in config["head_start_ray_commands"] if "--head" in line]
    assert "--dashboard-host=127.0.0.1" in start
    for line in [start, config["worker_start_ray_commands"][-1]]:
        assert "RAY_AUTH_MODE=token" in line
    pods = yaml.safe_load((TPU / "kuberay.yaml").read_text())["spec"]
    assert pods["headGroupSpec"]["serviceType"] == "ClusterIP"
    for group in (pods["headGroupSpec"], *pods["workerGroupSpecs"]):
        names = {entry["name"] for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names


def cluster(*arguments, answer="no", **environment):
    return subprocess.run(
        [str(TPU / "cluster"), *arguments],
        capture_output=True,
        text=True,
        input=f"{answer}\n",
        env=os.environ | environment,
    )


def test_nothing_is_created_without_a_project_and_a_yes(edited):
    refused = cluster("up")
    assert refused.returncode == 2
    assert "still says your-project" in refused.stderr
    asked = cluster("up", CLUSTER_YAML=edited)
    assert asked.returncode == 1
    assert "cost money" in asked.stdout
    assert "nothing was created" in asked.stdout


@pytest.fixture
def edited(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text((TPU / "cluster.yaml").read_text().replace("your-project", "mine"))
    return str(file)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [["up"], ["down"], ["status"], ["logs"], ["submit", "sweep", "a.toml"], ["fetch-results"]],
    ids=str,
)
def test_a_cluster_that_cannot_be_reached_is_a_sentence(words, edited, tmp_path):
    """Google's client prints a traceback of 87 lines, without a network or without credentials."""
    pytest.importorskip("googleapiclient")
    there = {"CLUSTER_YAML": edited, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    asked = cluster(*words, answer="yes", **there)
    assert asked.returncode == 2, asked.stderr
    assert asked.stderr.startswith(f"error: Ray cannot reach the cluster of {edited}: ")
    assert len(asked.stderr.splitlines()) == 1
    assert asked.stderr.endswith("machines that run go on, and cost money\n") == (words[0] in ("up", "down"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lr_transfer", "--scale", "64"], "sweep experiments/lr_transfer.py --address auto --device xla "
         "--checkpoint-every 100 --results ~/results/lr_transfer --scale 64 2>&1"),
        (["sweep", "a.toml", "--results", "gs://b/a"], "sweep --address auto --device xla "
         "--checkpoint-every 100 a.toml --results gs://b/a 2>&1"),
        (["search", "a.toml"], "search --address auto --device xla --results ~/results/search a.toml 2>&1"),
        (["train"], "train --device xla --results ~/results/train "),
        (["sweep", "mup_tpu/templates/study.toml"], "sweep --address auto --results ~/results/sweep "
         "mup_tpu/templates/study.toml 2>&1"),
    ],
)  # fmt: skip
def test_what_is_submitted_gets_the_options_that_it_has(words, line, edited):
    pytest.importorskip("googleapiclient")
    command = ["bash", "-x", TPU / "cluster", "submit", *words]
    environment = os.environ | {"CLUSTER_YAML": edited, "PYTHONPATH": str(ROOT)}
    traced = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert f"python -m mup_tpu {line}" in traced.stderr


def test_every_node_runs_the_ray_that_setup_installed():
    config = yaml.safe_load((TPU / "cluster.yaml").read_text())
    # With the dashboard, which `scripts/tpu/cluster dashboard` tunnels.
    assert config["setup_commands"] == ["VENV=.venv EXTRAS=xla,gcp,dashboard ~/mup_tpu/scripts/tpu/setup"]
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert len(starts) == 4
    assert all(re.search(r"(^|=token )~/mup_tpu/\.venv/bin/ray (stop|start )", line) for line in starts)
    assert "~/mup_tpu" in config["file_mounts"]


def bare_path(folder: Path) -> Path:
    """Folder for PATH with the commands of any Linux, without Python."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "env", "flock", "grep", "head", "mkdir", "rm", "sed", "sh", "tr"):
        (tools / name).symlink_to(shutil.which(name))
    return tools


def test_setup_shows_why_uv_cannot_fetch_a_python(tmp_path):
    """With --quiet uv prints no reason."""
    uv = bare_path(tmp_path) / "uv"
    uv.write_text('#!/bin/sh\ncase "$*" in *quiet*) ;; *) echo "no route ($*)" >&2 ;; esac\nexit 1\n')
    uv.chmod(0o755)
    setup = [str(TPU / "setup")]
    there = {"PATH": str(uv.parent), "HOME": str(tmp_path)}
    refused = subprocess.run(setup, env=there, capture_output=True, text=True)
    *_, reason, sentence = refused.stderr.splitlines()
    assert refused.returncode == 2 and reason == "no route (python install 3.12)"
    assert sentence.startswith("error: uv cannot fetch Python 3.12 (above)")


def docker_steps() -> list[tuple[str, str]]:
    """Instruction and argument of each step of the Dockerfile."""
    lines = (TPU / "Dockerfile").read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]


def test_pods_run_the_image_of_the_dockerfile():
    pods = yaml.safe_load((TPU / "kuberay.yaml").read_text())["spec"]
    images = {
        group["template"]["spec"]["containers"][0]["image"]
        for group in (pods["headGroupSpec"], *pods["workerGroupSpecs"])
    }
    (image,) = images
    assert f"docker build -f scripts/tpu/Dockerfile -t {image} ." in (TPU / "Dockerfile").read_text()
    imported = next(a for i, a in docker_steps() if i == "RUN" and "import" in a)
    assert {"ray", "torch_xla", "libtpu", "mup_tpu"} <= set(re.findall(r"\w+", imported))


def checkout_without_packages(folder: Path) -> Path:
    """Copy of the scripts with a Python that runs no check and writes down pytest's arguments."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        '  "-m pytest") shift 2; printf "%s\\n" "$MUP_TPU_EXAMPLES" "$@" >pytest.txt; exit 3;;\n'
        '  "-m uv") for last; do :; done; case $last in .*) echo "$last" >>installed.txt;; esac; exit 0;;\n'
        "  -m*) exit 0;;\n"
        "esac\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize("script", ["test", "test-all"])
def test_arguments_reach_pytest_and_its_exit_code_comes_back(script, tmp_path):
    checkout = checkout_without_packages(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MUP_TPU_EXAMPLES")}
    command = [str(checkout / "scripts" / script), "tests/store", "-k", "atomic or whole"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 3, done.stderr
    examples, *words = (checkout / "pytest.txt").read_text().splitlines()
    chosen = ["-m", "nightly or not nightly"] if script == "test-all" else []
    assert words[-3 - len(chosen) :] == [*chosen, "tests/store", "-k", "atomic or whole"]
    assert ("-m" in words, examples) == ((True, "20000") if chosen else (False, ""))
    assert re.search(r"^\[test\] wall time \S+; CPU time \S+ \(user\) and \S+ \(system\)$", done.stderr, re.M)


@pytest.mark.nightly
def test_a_second_script_adds_packages_and_takes_none_away(tmp_path):
    checkout = checkout_without_packages(tmp_path)
    quickstart = checkout / "scripts" / "quickstart"
    quickstart.write_text(quickstart.read_text().partition("\nsay ")[0])  # the environment alone
    installed = checkout / "installed.txt"

    def prepare(script, **environment):
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "EXTRAS", "VENV")}
        command = ["bash", "-c", f"source {shlex.quote(str(checkout / 'scripts' / script))}"]
        subprocess.run(command, env=kept | environment, check=True, capture_output=True, cwd="/")
        return installed.read_text().split()

    assert prepare("quickstart") == [".[pinned]"]
    assert prepare("quickstart") == [".[pinned]"]  # nothing to do
    assert prepare("_environment")[1:] == [".[pinned,all]"]
    assert prepare("quickstart", EXTRAS="train,docs")[2:] == []  # `all` has them
    assert prepare("_environment", EXTRAS="all,dashboard")[2:] == [".[pinned,all,dashboard]"]
    (checkout / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text() + "\n")
    assert prepare("quickstart")[3:] == [".[pinned,all,dashboard]"]  # all of it anew


@pytest.mark.nightly
def test_what_a_gpu_is_asked_is_rehearsed_on_the_cpu(tmp_path):
    command = [sys.executable, "benchmarks/on_gpu.py", "--rehearse", "--out", tmp_path, "--seconds", "0.1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "at width 128, predicted on" in ran.stdout
    assert len((tmp_path / "rates.csv").read_text().splitlines()) == 3
