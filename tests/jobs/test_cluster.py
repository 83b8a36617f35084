"""TPU hosts and lost nodes, on a fake Ray cluster: several nodes on this machine."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import ray
from light_jobs import Count
from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.cluster import RayActors, ray_cluster, slots
from mup_tpu.jobs.driver import Finished, Started, run_jobs
from mup_tpu.jobs.pools import Pools

ALONE = """
import atexit, os
import ray
from mup_tpu.cli.console import guard
from mup_tpu.jobs.cluster import ray_cluster

atexit.register(lambda: print([name for name in os.environ if name.startswith("RAY_AUTH")]))

def look():
    with ray_cluster("local"):
        assert ray.get(ray.remote(lambda: 1).remote()) == 1
        print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
        input()

guard(look)
"""


@pytest.mark.slow
def test_a_local_ray_is_this_user_s_and_ends_at_sigterm_with_a_sentence(tmp_path):
    """Other users cannot enter the folder of its logs and sockets.

    It writes nothing into the home, whose token is of another cluster, and leaves none of its own behind.
    """
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("b" * 40)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    environment["HOME"] = str(tmp_path)
    alone = subprocess.Popen(
        [sys.executable, "-c", ALONE], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    session = Path(alone.stdout.readline().strip())
    closed = [folder for folder in session.parents if not stat.S_IMODE(folder.stat().st_mode) & 0o077]
    alone.send_signal(signal.SIGTERM)
    said, errors = alone.communicate()
    assert alone.returncode == 143, errors
    assert errors.startswith("error: ended by SIGTERM; checkpoints") and len(errors.splitlines()) <= 2
    assert closed and closed[0].name.startswith("mup_tpu_") and not closed[0].exists()
    assert said == "[]\n", "words about tokens"
    assert [path.name for path in tmp_path.rglob("*")] == [".ray", "auth_token"]
    assert (tmp_path / ".ray" / "auth_token").read_text() == "b" * 40


@pytest.mark.slow
def test_xla_without_tpus_names_the_missing_chips_and_the_way_to_run_on_a_cpu(local_ray, monkeypatch):
    with ray_cluster("local"):
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        room = slots(RunOptions(device="xla"))
        assert (room.execution, room.environment["PJRT_DEVICE"]) == ("vmap", "CPU")
        assert "resources" not in room.needs
        monkeypatch.delenv("PJRT_DEVICE")
        with pytest.raises(ConfigError, match="has CPU .*TPU 0; PJRT_DEVICE=CPU runs XLA without TPUs"):
            slots(RunOptions(device="xla"))


@pytest.fixture(scope="module")
def hosts(fake_cluster):
    """Cluster of a head without chips and two hosts of four chips."""
    cluster = fake_cluster.cluster
    for _ in range(2):
        cluster.add_node(num_cpus=4, resources={"TPU": 4})
    cluster.wait_for_nodes()
    yield cluster
    fake_cluster.remove(cluster.worker_nodes)


@pytest.mark.slow
def test_a_pack_asks_for_a_host_or_a_chip(hosts, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    by_host = slots(RunOptions(device="xla"))
    assert (by_host.count, by_host.needs["resources"], by_host.execution) == (2, {"TPU": 4}, "vmap")
    assert by_host.environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    by_chip = slots(RunOptions(device="xla", placement="chip"))
    assert (by_chip.count, by_chip.needs["resources"]) == (8, {"TPU": 1})


@pytest.mark.slow
def test_needs_beyond_the_cluster_are_refused_before_an_actor_is_asked_for(hosts, monkeypatch):
    monkeypatch.setattr(ray, "remote", None)  # an actor would wait for room for ever
    with pytest.raises(ConfigError, match="asks for .*'num_cpus': 64.* has CPU 8, GPU 0, TPU 8"):
        slots(RunOptions(threads=64))
    with pytest.raises(ConfigError, match="asks for .*'num_gpus': 1.* has CPU 8, GPU 0, TPU 8"):
        slots(RunOptions(device="cuda"))


@pytest.mark.slow
def test_where_ray_has_no_gpu_packs_leave_alone_a_gpu_that_torch_sees(hosts):
    """Workers of device "auto" would otherwise take the first GPU, all at the same time."""
    with contextlib.closing(Pools(SweepOptions(address="local"), None, Console(quiet=True))) as pools:
        place = pools.place(2, RunOptions())
    assert (place.run.device, place.execution) == ("cpu", "loop")


@pytest.mark.nightly
def test_a_job_of_a_lost_node_goes_on_elsewhere_and_nodes_added_in_mid_run_are_used(hosts, tmp_path, caplog):
    """Two jobs on two nodes, one of which is lost; the third job waits for a node that comes later."""
    options = RunOptions(threads=4)
    lost = hosts.worker_nodes.copy().pop()
    jobs = [Count(tmp_path, str(i), then="wait") for i in range(3)]
    states = [tmp_path / job.name for job in jobs]
    room, added, last, starts = slots(options), False, {}, Counter()
    assert room.count == 2
    with RayActors(lambda: slots(options)) as pool:
        for job, event in run_jobs(jobs, pool, heartbeat=600):
            last[job.name] = event
            starts[job.name] += isinstance(event, Started)
            if not added and len([path for path in states if path.exists() and path.read_text() == "4"]) == 2:
                hosts.remove_node(lost)
                for _ in range(2):
                    hosts.add_node(num_cpus=4)
                added = True
            if all(job.pids() for job in jobs) and max(starts.values()) == 2:
                (tmp_path / "go").touch()
    expected = [Finished(f"{name} from {4 * (count - 1)}") for name, count in sorted(starts.items())]
    assert [last[str(i)] for i in range(3)] == expected and sorted(starts.values()) == [1, 1, 2]
    assert "is tried again (its" in caplog.text
