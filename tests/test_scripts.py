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


CLUSTER = yaml.safe_load((TPU / "cluster.yaml").read_text())
PODS = yaml.safe_load((TPU / "kuberay.yaml").read_text())["spec"]


def test_the_cluster_file_is_valid_by_ray_s_schema():
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(CLUSTER))
    with pytest.raises(Exception, match="Additional properties"):
        util.validate_config(util.prepare_config(CLUSTER) | {"machines": 4})


def test_workers_are_tpu_vms_and_the_head_is_not():
    nodes = dict(CLUSTER["available_node_types"])
    head = nodes.pop(CLUSTER["head_node_type"])
    assert "acceleratorType" not in head["node_config"]
    kinds = {node["node_config"]["acceleratorType"] for node in nodes.values()}
    assert kinds == {"v2-8", "v3-8", "v4-8", "v5litepod-8", "v6e-8"}
    for node in nodes.values():
        assert node["node_config"]["schedulingConfig"] == {"preemptible": True}
        assert "machineType" not in node["node_config"]
        assert node["resources"]["TPU"] in (4, 8)


def test_dashboards_stay_inside_and_tokens_are_asked_for():
    (start,) = [line for line in CLUSTER["head_start_ray_commands"] if "--head" in line]
    assert "--dashboard-host=127.0.0.1" in start
    for line in [start, CLUSTER["worker_start_ray_commands"][-1]]:
        assert "RAY_AUTH_MODE=token" in line
    assert PODS["headGroupSpec"]["serviceType"] == "ClusterIP"
    for group in (PODS["headGroupSpec"], *PODS["workerGroupSpecs"]):
        names = {entry["name"] for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names


def cluster(*arguments, answer="no", **environment):
    command, given = [str(TPU / "cluster"), *arguments], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, input=f"{answer}\n", env=given)


def test_nothing_is_created_without_a_project_and_a_yes(edited):
    refused = cluster("up")
    assert refused.returncode == 2 and "still says your-project" in refused.stderr
    asked = cluster("up", CLUSTER_YAML=edited)
    assert asked.returncode == 1 and re.search("cost money.*nothing was created", asked.stdout, re.S)


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
def test_what_a_gpu_is_asked_is_rehearsed_on_the_cpu(tmp_path):
    command = [sys.executable, "benchmarks/on_gpu.py", "--rehearse", "--out", tmp_path, "--seconds", "0.1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "at width 128, predicted on" in ran.stdout
    assert len((tmp_path / "rates.csv").read_text().splitlines()) == 3
