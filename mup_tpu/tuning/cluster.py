"""The Ray cluster a sweep or search runs on: joining or starting it, and how many packs it holds at once.

Ray's view of TPUs: each host has the resource TPU, one a chip; Ray hands a worker its chips through
TPU_VISIBLE_CHIPS, and a worker may ask for 1, 2, 4 or 8 of them. Hosts of one slice carry its name, topology
and their number in it as labels.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.tuning.plan import threads_per_pack

_STARTS = 3
"""Tries to start Ray on this machine."""

SLICE_NAME, WORKER_ID = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"

_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How a process's chips stand, by their number; Ray hands out no others."""


@dataclass(frozen=True)
class SliceKind:
    """What slices of several hosts have in common."""

    generation: str
    """As Ray names it: "v4", "v5litepod"."""
    topology: str
    """Chips along each axis, such as "2x2x2"."""
    chips_per_host: int

    @property
    def hosts(self) -> int:
        """Hosts of one slice."""
        return math.prod(map(int, self.topology.split("x"))) // self.chips_per_host

    def host_labels(self, name: str) -> list[dict[str, str]]:
        """The labels by which Ray finds each host of the slice of that name, in their order."""
        return [{SLICE_NAME: name, WORKER_ID: str(i)} for i in range(self.hosts)]


@dataclass(frozen=True)
class Slots:
    """Room for packs on a cluster."""

    count: int
    """Packs at once."""
    needs: dict[str, Any]
    """Ray options of the actor of one."""
    way: str
    """"vmap" on accelerators, "loop" on CPUs: the workers' device decides, which the driver need not have."""
    environment: dict[str, str]
    """Environment of an actor."""
    slice: SliceKind | None = None
    """What an actor reserves for itself, where a pack has a TPU slice of several hosts."""

    def for_tune(self) -> dict[str, float]:
        """The needs as Ray Tune writes them."""
        plain = {"cpu": self.needs["num_cpus"], "gpu": self.needs.get("num_gpus", 0)}
        return {name: n for name, n in plain.items() if n} | self.needs.get("resources", {})


@contextlib.contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """A connection to a cluster, or a cluster of this machine alone; one that is there already is used.

    Raises:
        ConfigError: no cluster answers at the address.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's coming default; silences its warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        _start_here(common)
    else:
        import mup_tpu

        check_reachable(address)
        try:
            # The cluster's workers run the driver's code, whatever they have installed.
            ray.init(address=address, runtime_env={"py_modules": [mup_tpu]}, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster answers at address {address!r}: {first_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _start_here(common: dict[str, Any]) -> None:
    """A cluster of this machine. Ray gives its node half a minute to start, which a busy machine may exceed.

    Raises:
        ConfigError: it did not start in several tries.
    """
    for _ in range(_STARTS):
        try:
            ray.init(address="local", include_dashboard=False, **common)
            return
        except Exception as error:  # Ray has no class for it
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    raise ConfigError(f"Ray did not start on this machine in {_STARTS} tries: it is too busy")


def check_reachable(address: str) -> None:
    """Fail in seconds where nobody listens: Ray itself tries for minutes.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ConfigError(f"no Ray cluster answers at address {address!r}: {error}") from None


def threads(trials: int) -> int:
    """CPU threads of a pack such that so many trials use every core of the connected cluster's nodes."""
    cores = [node["Resources"]["CPU"] for node in _nodes_with("CPU")]
    return threads_per_pack(trials, int(min(cores)), len(cores)) if cores else 1


def slots(options: RunOptions) -> Slots:
    """How many packs run at once on the connected cluster, and what each asks Ray for.

    Raises:
        ConfigError: the cluster has less than one pack needs.
    """
    threads_each = max(1, options.threads)
    environment = {"OMP_NUM_THREADS": str(threads_each), "TOKENIZERS_PARALLELISM": "false"}
    have = ray.cluster_resources()
    on_tpus = options.device == "xla" and os.environ.get("PJRT_DEVICE") != "CPU"
    kind = None
    if on_tpus and options.tpu_trial == "slice":
        kind, count = _kind_of_most_chips()
        # The actor itself does little and stays beside the driver, safe from what happens to a slice.
        beside = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        needs: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": beside}
    elif on_tpus:
        hosts = [node["Resources"]["TPU"] for node in _nodes_with("TPU")]
        chips = 1 if options.tpu_trial == "chip" else int(min(hosts, default=1))
        needs = {"num_cpus": 1, "resources": {"TPU": chips}}
        count = int(sum(host // chips for host in hosts))
        # Or libtpu would wait for the host's other chips, or for the slice's other hosts.
        environment |= {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[chips]}
    elif options.device == "cuda" or (options.device == "auto" and have.get("GPU", 0) >= 1):
        needs = {"num_cpus": 1, "num_gpus": 1}
        count = int(min(have.get("GPU", 0), have.get("CPU", 0)))
    else:
        needs = {"num_cpus": threads_each}
        count = int(have.get("CPU", 0) // threads_each)
    if count < 1:
        there = ", ".join(f"{name} {have.get(name, 0):g}" for name in ("CPU", "GPU", "TPU"))
        hint = "; PJRT_DEVICE=CPU runs XLA without TPUs" if on_tpus else ""
        raise ConfigError(f"one pack asks for {needs}, but the Ray cluster has {there}{hint}")
    if options.device == "xla":
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
            if name in os.environ:
                environment[name] = os.environ[name]
    way = "vmap" if options.device == "xla" or "num_gpus" in needs else "loop"
    return Slots(count, needs, way, environment, kind)


def intact_slices() -> dict[SliceKind, dict[str, list[str]]]:
    """Slices that have all of their several hosts, by kind and name: the hosts' addresses in their order."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for node in _nodes_with("TPU"):
        if SLICE_NAME in node["Labels"]:
            hosts.setdefault(node["Labels"][SLICE_NAME], []).append(node)
    found: dict[SliceKind, dict[str, list[str]]] = {}
    for name, nodes in hosts.items():
        nodes.sort(key=lambda node: int(node["Labels"][WORKER_ID]))
        labels = nodes[0]["Labels"]
        generation = labels["ray.io/tpu-pod-type"].rpartition("-")[0]
        kind = SliceKind(generation, labels["ray.io/tpu-topology"], int(nodes[0]["Resources"]["TPU"]))
        if len(nodes) == kind.hosts > 1:
            found.setdefault(kind, {})[name] = [node["NodeManagerAddress"] for node in nodes]
    return found


def _nodes_with(resource: str) -> list[dict[str, Any]]:
    """Nodes of the connected cluster that are alive and have some of a resource."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]


def _kind_of_most_chips() -> tuple[SliceKind, int]:
    """The kind of slice that makes up most of the cluster, and how many there are of it.

    Raises:
        ConfigError: no slice is whole.
    """
    slices = intact_slices()
    if not slices:
        raise ConfigError(
            "one pack asks for a TPU slice of several hosts (--tpu-trial slice), but the Ray cluster has "
            f"{len(_nodes_with('TPU'))} TPU hosts and no slice with all of its hosts; "
            "--tpu-trial host takes single hosts"
        )
    return max(
        ((kind, len(names)) for kind, names in slices.items()),
        key=lambda found: found[0].hosts * found[0].chips_per_host * found[1],
    )
