"""TPU slices of several hosts, on a fake Ray cluster: nodes of this machine with the labels of two slices."""

import os
import time

import psutil
import pytest
import ray
from light_jobs import Placed

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.cluster import RayActors, slots
from mup_tpu.jobs.driver import Failed, Finished, run_jobs
from mup_tpu.tpu.hosts import SliceKind

pytestmark = pytest.mark.slow
BY_SLICE = RunOptions(device="xla", placement="slice", checkpoint_every=20)


def add_host(cluster, slice_name, number):
    """Add a host of four chips, as Ray sees a host of a v4-16."""
    environment = {
        "PJRT_DEVICE": "CPU", "TPU_NAME": slice_name, "TPU_WORKER_ID": str(number),
        "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_TOPOLOGY": "2x2x2",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
    }  # fmt: skip
    labels = {
        "ray.io/tpu-slice-name": slice_name, "ray.io/tpu-worker-id": str(number),
        "ray.io/tpu-topology": "2x2x2", "ray.io/tpu-pod-type": "v4-16",
    }  # fmt: skip
    head = {"TPU-v4-16-head": 1} if number == 0 else {}
    resources = {"TPU": 4, slice_name: 1, **head}
    return cluster.add_node(num_cpus=2, resources=resources, labels=labels, env_vars=environment)


@pytest.fixture(scope="module")
def cluster(fake_cluster):
    """Cluster of a head without chips, and one of a slice's two hosts."""
    cluster = fake_cluster.cluster
    add_host(cluster, "one", 1)
    cluster.wait_for_nodes()
    yield cluster
    fake_cluster.remove(cluster.worker_nodes)


@pytest.fixture(scope="module")
def one_slice(cluster):
    """A whole slice, whose second host joined first."""
    add_host(cluster, "one", 0)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture(scope="module")
def two_slices(one_slice):
    for number in (1, 0):
        add_host(one_slice, "two", number)
    one_slice.wait_for_nodes()


@pytest.fixture(autouse=True)
def on_tpus(monkeypatch):
    """Environment of a driver on a TPU cluster."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def test_without_a_whole_slice_one_sentence_says_what_the_cluster_has(cluster):
    with pytest.raises(ConfigError, match="asks for a TPU slice .* has 1 TPU hosts and no slice with all"):
        slots(BY_SLICE)


def check_places(job):
    """A pack has both hosts of one slice, each with its number and all names."""
    hosts = sorted(job.places(), key=lambda place: place[2])
    assert len({node for node, *_ in hosts}) == 2
    assert len({name for _, name, *_ in hosts}) == 1, "a pack straddles two slices"
    assert [number for *_, number, _ in hosts] == ["0", "1"]
    assert {len(names.split(",")) for *_, names in hosts} == {2}


def test_a_pack_has_a_whole_slice(one_slice, tmp_path):
    room = slots(BY_SLICE)
    assert (room.count, room.arguments, room.execution) == (1, (SliceKind("v4", "2x2x2", 4),), "vmap")
    job = Placed(tmp_path, "counts", then="", steps=3)
    with RayActors(lambda: slots(BY_SLICE)) as pool:
        *_, (_, last) = run_jobs([job], pool, heartbeat=60.0)
    assert isinstance(last, Finished)
    check_places(job)


def wait_for_chips():
    """Wait until all chips are free; no placement group holds any."""
    deadline = time.monotonic() + 120
    while ray.available_resources().get("TPU", 0) < 16 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["TPU"] == 16
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}


def stopped_actors():
    """Stopped processes of hosts' actors that were started by this run of tests: others may be beside it."""
    for process in psutil.process_iter(["name", "environ", "status"]):
        seen = process.info
        is_ours = (seen["environ"] or {}).get("MUP_TPU_CACHE") == os.environ["MUP_TPU_CACHE"]
        if "HostActor" in seen["name"] and is_ours and seen["status"] == psutil.STATUS_STOPPED:
            yield process


@pytest.mark.nightly
@pytest.mark.parametrize("falls", ["follower dies", "hang"])
def test_a_slice_with_a_host_that_hangs_or_dies_is_ended_and_one_where_a_job_fails_goes_on(
    falls, two_slices, tmp_path, patience, caplog
):
    """Each pack has a whole slice. Without collectives, as here, a host does not wait for one that hangs."""
    room = slots(BY_SLICE)
    assert (room.count, room.arguments, room.execution) == (2, (SliceKind("v4", "2x2x2", 4),), "vmap")
    jobs = [Placed(tmp_path, how, then=how, steps=40) for how in ("wait", falls, "raise")]
    last = {}
    with RayActors(lambda: slots(BY_SLICE)) as pool:
        for job, event in run_jobs(jobs, pool, heartbeat=6.0 * patience):
            last[job.name] = event
            if {falls, "raise"} <= {name for name, e in last.items() if isinstance(e, Finished | Failed)}:
                (tmp_path / "go").touch()  # until then one job keeps one of the slices
    assert isinstance(last[falls], Finished) and isinstance(last["wait"], Finished)
    assert last["raise"] == Failed("ValueError: no such luck")
    assert len(jobs[1].pids()) == 2 and f"job {falls} is tried again (" in caplog.text
    assert {name for job in jobs for _, name, *_ in job.places()} == {"one", "two"}
    for job in (jobs[0], jobs[2]):
        check_places(job)
    wait_for_chips()
    assert not [*stopped_actors()]
