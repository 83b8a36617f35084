"""TPU hosts as Ray shows them, and the environment of workers there; hosts are nodes of this machine."""

import contextlib
import os

import pytest
import ray

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.cluster import HostActor, slots
from mup_tpu.tpu.hosts import chips_of_a_pack, kind_of_most_chips, tpu_hosts

pytestmark = pytest.mark.slow
BY_HOST, BY_CHIP, BY_SLICE = (RunOptions(device="xla", placement=by) for by in ("host", "chip", "slice"))
LABELS = {
    "ray.io/tpu-slice-name": "one", "ray.io/tpu-worker-id": "1",
    "ray.io/tpu-topology": "2x2x2", "ray.io/tpu-pod-type": "v4-16",
}  # fmt: skip
TOLD = (
    "PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS",
    "TPU_SKIP_MDS_QUERY", "TPU_VISIBLE_CHIPS", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID",
)  # fmt: skip
ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


@pytest.fixture(scope="module")
def cluster(fake_cluster):
    """Cluster of a head without chips; neither it nor the driver sets a device for XLA."""
    with pytest.MonkeyPatch.context() as patch:
        for name in TOLD:
            patch.delenv(name, raising=False)
        yield fake_cluster


@contextlib.contextmanager
def hosts(fake, *described):
    """Hosts with these numbers of chips, labels and environments, until the block ends."""
    nodes = [
        fake.cluster.add_node(num_cpus=1, resources={"TPU": chips}, labels=labels, env_vars=environment)
        for chips, labels, environment in described
    ]
    fake.cluster.wait_for_nodes()
    try:
        yield
    finally:
        fake.remove(nodes)


@pytest.fixture
def described(monkeypatch):
    """Maker of hosts of so many chips with labels, as Ray describes nodes."""

    def describe(*hosts):
        nodes = [
            {"Alive": True, "NodeManagerAddress": f"10.0.0.{i}"}
            | {"Resources": {"TPU": chips}, "Labels": labels}
            for i, (chips, labels) in enumerate(hosts)
        ]
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "cluster_resources", dict)

    return describe


def environment_of(options):
    """Environment of an actor, read in its own process."""
    room = slots(options)
    worker = ray.remote(HostActor).options(runtime_env={"env_vars": room.environment}, **room.needs)
    worker = worker.remote(None, room.prepare)
    seen = ray.get(worker.__ray_call__.remote(lambda _: dict(os.environ)), timeout=120)
    ray.kill(worker)
    return {name: seen[name] for name in TOLD if name in seen}


@pytest.mark.parametrize("chips", [3, 16])
def test_a_host_with_a_number_of_chips_that_ray_does_not_give_can_be_used_by_chip(described, chips):
    described((chips, {}))
    with pytest.raises(
        ConfigError, match=rf"^TPU host [\d.]+ has {chips} chips, but Ray gives one pack 1, 2"
    ):
        slots(BY_HOST)
    room = slots(BY_CHIP)
    assert (room.count, room.needs["resources"]) == (chips, {"TPU": 1})


def test_where_hosts_differ_a_pack_has_the_chips_of_the_smallest(described):
    described((8, {}), (4, {}))
    room = slots(BY_HOST)
    assert (room.count, room.needs["resources"]) == (3, {"TPU": 4})


def test_torchtpu_has_a_pack_on_each_chip_of_any_generation(described):
    described((4, {"ray.io/tpu-pod-type": "v7x-8"}), (3, {}))
    room = slots(RunOptions(device="tpu"))
    assert (room.count, room.needs["resources"]) == (7, {"TPU": 1})
    assert room.environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    with pytest.raises(ConfigError, match="^placement 'slice' needs device 'xla'"):
        slots(RunOptions(device="tpu", placement="slice"))


def test_unusable_slices_are_named_with_the_reason(described):
    """As Ray describes nodes; tests of slices have real ones."""
    changes = [
        ({"ray.io/tpu-pod-type": ""}, "has hosts of no type 2x2x2 with 4 chips"),
        ({"ray.io/tpu-worker-id": "first"}, "has hosts number first, and 2x2x2 needs 2"),
        ({"ray.io/tpu-topology": "large"}, "has hosts number 1, and large needs 0"),
        ({"ray.io/tpu-topology": "2x3x1"}, "has hosts of v4-16 2x3x1 with 4 chips"),
        ({"ray.io/tpu-topology": "2x2x1"}, "is a single host"),
        ({}, "has hosts number 1, and 2x2x2 needs 2"),
    ]
    labels = [LABELS | {"ray.io/tpu-slice-name": f"{i}"} | new for i, (new, _) in enumerate(changes)]
    labels += [LABELS, LABELS | {"ray.io/tpu-pod-type": "v5p-16"}, {}]
    described(*((4.0, of_host) for of_host in labels))
    with pytest.raises(ConfigError) as error:
        kind_of_most_chips()
    sentence = str(error.value)
    for i, (_, reason) in enumerate(changes):
        assert f"slice '{i}' {reason}" in sentence
    assert "slice 'one' has hosts of " in sentence and "v5p-16 2x2x2 with 4" in sentence
    assert "the Ray cluster has 9 TPU hosts and no slice with all of its hosts (slice '0'" in sentence
    assert sentence.endswith("; --placement host takes single hosts")
    assert chips_of_a_pack(tpu_hosts()) == 4, "their hosts can be used singly"


def test_tpu_v7x_is_refused_for_torch_xla(described):
    described((4, {"ray.io/tpu-pod-type": "v7x-8"}))
    for options in (BY_HOST, BY_CHIP, BY_SLICE):
        with pytest.raises(
            ConfigError, match=r"^TPU host [\d.]+ is a v7x-8: TPU v7x .* is not supported by torch_xla"
        ):
            slots(options)


@pytest.mark.nightly
def test_a_pack_on_one_host_of_a_slice_has_the_environment_of_a_single_host(cluster):
    """The host's own environment says that it is the second of two."""
    of_slice = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}
    expected = ALONE | {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_PROCESS_BOUNDS": "1,1,1"}
    with hosts(cluster, (4, LABELS, of_slice)):
        by_host = environment_of(BY_HOST)
        assert by_host.pop("TPU_VISIBLE_CHIPS") == "0,1,2,3"
        assert by_host == expected | {"TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}
        by_chip = environment_of(BY_CHIP)
        assert by_chip.pop("TPU_VISIBLE_CHIPS") in "0123"
        assert by_chip == expected | {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}
