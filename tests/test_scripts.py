"""The cluster files: valid by Ray's own schema, closed to the internet, and up only after a question."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

TPU = Path(__file__).parents[1] / "scripts" / "tpu"


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


def cluster(*arguments, **environment):
    return subprocess.run(
        [str(TPU / "cluster"), *arguments],
        capture_output=True,
        text=True,
        input="no\n",
        env=os.environ | environment,
    )


def test_nothing_is_created_without_a_project_and_a_yes(tmp_path):
    refused = cluster("up")
    assert refused.returncode == 2
    assert "still says your-project" in refused.stderr
    edited = tmp_path / "cluster.yaml"
    edited.write_text((TPU / "cluster.yaml").read_text().replace("your-project", "mine"))
    asked = cluster("up", CLUSTER_YAML=str(edited))
    assert asked.returncode == 1
    assert "cost money" in asked.stdout
    assert "nothing was created" in asked.stdout


def test_the_wrapper_explains_itself():
    for arguments in ((), ("upp",)):
        explained = cluster(*arguments)
        assert explained.returncode == 2
        assert "fetch-results" in explained.stdout
    assert "needs the name of an experiment" in cluster("submit").stderr
