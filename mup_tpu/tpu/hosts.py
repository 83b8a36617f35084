"""TPU hosts and slices of a Ray cluster: room for packs, libtpu's environment, and the actor of a slice.

A host has one resource TPU for each chip. A worker may ask for 1, 2, 4 or 8 chips, and Ray names them in
TPU_VISIBLE_CHIPS. A host's labels name the slice, its type and topology, and the host's number in the slice.
A host outside a larger slice is a slice by itself.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.cluster import HostActor, Slots, nodes_with, reservation
from mup_tpu.jobs.driver import Ended, Finished, Job

SLICE_NAME, WORKER_ID = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
TOPOLOGY, POD_TYPE = "ray.io/tpu-topology", "ray.io/tpu-pod-type"

# Shape of the chips of one process (TPU_CHIPS_PER_PROCESS_BOUNDS), by number of chips
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}

_RESERVE_S = 5.0


@dataclass(frozen=True)
class SliceKind:
    """Kind of slices of several hosts."""

    generation: str  # Ray's name: "v4", "v5litepod"
    topology: str  # Chips along each axis, such as "2x2x2"
    chips_per_host: int

    @property
    def hosts(self) -> int:
        return _chips_of(self.topology) // self.chips_per_host


def slots(options: RunOptions, environment: dict[str, str]) -> Slots:
    """Return the room for packs on TPUs of the connected cluster."""
    by_chip = options.placement == "chip" or options.device == "tpu"  # TorchTPU has a process for each chip
    if options.placement == "slice" and options.device == "tpu":
        raise ConfigError(
            "placement 'slice' needs device 'xla': with 'tpu' each chip trains packs of its own"
        )
    if options.placement == "slice":
        kind, count = kind_of_most_chips()
        # The slice's actor does little. It runs beside the driver, to survive the loss of a slice.
        driver = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        needs: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": driver}
        return Slots(count, needs, "vmap", environment, actor=SliceActor, arguments=(kind,))
    hosts = tpu_hosts(any_generation=options.device == "tpu")
    chips = 1 if by_chip else chips_of_a_pack(hosts)
    # Otherwise libtpu would wait for other processes of the host.
    bounds = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[chips]}
    count = int(sum(host["Resources"]["TPU"] // chips for host in hosts))
    needs = {"num_cpus": 1, "resources": {"TPU": chips}}
    return Slots(count, needs, "vmap", environment | bounds, prepare=take_chips)


def tpu_hosts(any_generation: bool = False) -> list[dict[str, Any]]:
    """Return the nodes of the connected cluster with TPU chips."""
    hosts = nodes_with("TPU")
    for host in hosts:
        # Bounds of v7x have four numbers: torch_xla 2.9 writes four and reads three.
        kind = host["Labels"].get(POD_TYPE, "")
        is_v7 = re.match("(v|tpu)7", kind) or "accelerator_type:TPU-V7X" in host["Resources"]
        if is_v7 and not any_generation:
            raise ConfigError(
                f"TPU host {_address(host)} is a {kind or 'v7x'}: TPU v7x (Ironwood) is not supported by "
                "torch_xla; take --device tpu"
            )
    return hosts


def chips_of_a_pack(hosts: list[dict[str, Any]]) -> int:
    """Return the chips of a pack on one host: the smallest host's."""
    if not hosts:
        return 1
    smallest = min(hosts, key=lambda host: host["Resources"]["TPU"])
    chips = smallest["Resources"]["TPU"]
    if chips not in _BOUNDS:
        raise ConfigError(
            f"TPU host {_address(smallest)} has {chips:g} chips, but Ray gives one pack 1, 2, 4 or 8; "
            "--placement chip gives each chip a pack"
        )
    return int(chips)


def take_chips() -> None:
    """Set the environment for the chips of one host that Ray gave this worker, before torch_xla is imported.

    On one host of a slice, libtpu would ask the metadata for other hosts and wait for them (pytorch/xla issue
    7714): the environment is GKE's for a single host.
    """
    here = take_chips_of_slice()
    if here is not None and _has_neighbours(here):
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


def take_chips_of_slice() -> dict[str, Any] | None:
    """Name the device and type of TPU before torch_xla is imported; return this node, None without chips.

    PJRT_DEVICE is TPU unless the driver or the host sets it.
    """
    context = ray.get_runtime_context()
    if not context.get_accelerator_ids().get("TPU"):
        return None
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    here = next(node for node in nodes_with("TPU") if node["NodeID"] == context.get_node_id())
    if POD_TYPE in here["Labels"]:  # torch_xla needs it at import without metadata
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", here["Labels"][POD_TYPE])
    return here


def _has_neighbours(host: dict[str, Any]) -> bool:
    labels = host["Labels"]
    if labels.get(WORKER_ID, "0") != "0":
        return True
    if _chips_of(labels.get(TOPOLOGY, "")) > host["Resources"]["TPU"]:
        return True
    name = labels.get(SLICE_NAME)
    return name is not None and sum(node["Labels"].get(SLICE_NAME) == name for node in nodes_with("TPU")) > 1


def kind_of_most_chips() -> tuple[SliceKind, int]:
    """Return the kind of slice with the most chips on the connected cluster, and the number of its slices."""
    hosts = tpu_hosts()
    whole, problems = slices()
    if not whole:
        why = f" ({'; '.join(problems)})" if problems else ""
        raise ConfigError(
            "one pack asks for a TPU slice of several hosts (--placement slice), but the Ray cluster has "
            f"{len(hosts)} TPU hosts and no slice with all of its hosts{why}; "
            "--placement host takes single hosts"
        )
    counts = {kind: len(names) for kind, names in whole.items()}
    return max(counts.items(), key=lambda item: item[0].hosts * item[0].chips_per_host * item[1])


def slices() -> tuple[dict[SliceKind, dict[str, list[str]]], list[str]]:
    """Find the slices of several hosts on the connected cluster.

    Returns:
        Addresses of hosts, in order, by kind and name of each whole slice; and a sentence for each slice that
        cannot be used.
    """
    named: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in nodes_with("TPU"):
        if SLICE_NAME in node["Labels"]:
            named[node["Labels"][SLICE_NAME]].append(node)
    whole: dict[SliceKind, dict[str, list[str]]] = {}
    problems = []
    for name, hosts in sorted(named.items()):
        described = {
            (host["Labels"].get(POD_TYPE, ""), host["Labels"].get(TOPOLOGY, ""), host["Resources"]["TPU"])
            for host in hosts
        }
        (pod_type, topology, chips), *others = described
        numbers = {host["Labels"].get(WORKER_ID, ""): _address(host) for host in hosts}
        count, rest = divmod(_chips_of(topology), chips)
        if others or chips not in _BOUNDS or rest or "-" not in pod_type:
            kinds = [
                f"{kind or 'no type'} {shape or 'no topology'} with {n:g}" for kind, shape, n in described
            ]
            problems.append(f"slice {name!r} has hosts of {', '.join(kinds)} chips")
        elif count == 1:
            problems.append(f"slice {name!r} is a single host")
        elif sorted(numbers) != sorted(str(i) for i in range(int(count))):
            present = ", ".join(sorted(numbers))
            problems.append(f"slice {name!r} has hosts number {present}, and {topology} needs {count:g}")
        else:
            kind = SliceKind(pod_type.rpartition("-")[0], topology, int(chips))
            addresses = [numbers[str(i)] for i in range(kind.hosts)]
            whole.setdefault(kind, {})[name] = addresses
    return whole, problems


def _chips_of(topology: str) -> int:
    # A topology is written as "2x2x2"; any other text has 0 chips.
    return math.prod(map(int, topology.split("x"))) if re.fullmatch(r"\d+(x\d+)+", topology) else 0


def _address(node: dict[str, Any]) -> str:
    return node["NodeManagerAddress"]


class SliceActor:
    """Actor that runs jobs one after another on a whole TPU slice of a kind, which it reserves.

    Each host runs the same program, and host 0 reports. The hosts' actors end with this one. A slice that
    loses a host ends as a whole, and its job is tried again. The reservation outlives a killed actor;
    `cluster.end_actor` frees it.
    """

    def __init__(self, results: str | None, kind: SliceKind) -> None:
        self._results, self._kind = results, kind
        self._hosts: list[Any] = []

    def ready(self) -> str:
        self._addresses, self._group = self._reserve()
        self._start_hosts()
        return ", ".join(self._addresses)

    def _reserve(self) -> tuple[list[str], Any]:
        """Return the hosts of a whole, free slice, and the placement group that reserves them."""
        from ray.util.tpu import slice_placement_group

        while True:
            for name, addresses in slices()[0].get(self._kind, {}).items():
                reserved = slice_placement_group(
                    name=reservation(str(ray.get_runtime_context().get_actor_id())),
                    topology=self._kind.topology,
                    accelerator_version=self._kind.generation,
                    chips_per_vm=self._kind.chips_per_host,
                    bundle_label_selector=[
                        {SLICE_NAME: name, WORKER_ID: str(i)} for i in range(self._kind.hosts)
                    ],
                )
                group = reserved.slice_placement_group
                if group is not None and group.wait(_RESERVE_S):
                    return addresses, group
                reserved.shutdown()
            time.sleep(1.0)

    def _start_hosts(self) -> None:
        for host in self._hosts:
            ray.kill(host)
        hostnames = ",".join(self._addresses)
        self._hosts = [
            ray.remote(HostActor)
            .options(
                num_cpus=1,
                resources={"TPU": self._kind.chips_per_host},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i),
                runtime_env={"env_vars": {"TPU_WORKER_ID": str(i), "TPU_WORKER_HOSTNAMES": hostnames}},
            )
            .remote(self._results, take_chips_of_slice)
            for i in range(self._kind.hosts)
        ]
        ray.get([host.ready.remote() for host in self._hosts])

    def run(self, job: Job) -> Iterator[Any]:
        """Run a job on all hosts; yield the events of host 0, or how another host failed."""
        first, *others = self._hosts
        events: Any = first.run.options(num_returns="streaming").remote(job)
        running: list[Any] = [events, *(host.follow.remote(job) for host in others)]
        ended: Ended | None = None
        try:
            while running:
                ready: list[Any]
                ready, running = ray.wait(running, num_returns=1)
                event = ray.get(next(events)) if ready[0] is events else ray.get(ready[0])
                if isinstance(event, Ended):
                    ended = event
                    if not isinstance(event, Finished):  # other hosts would wait for this one without end
                        self._start_hosts()
                        break
                elif ready[0] is events:
                    yield event
                    running.append(events)
        except ray.exceptions.RayActorError:
            os._exit(1)  # other hosts would wait without end: this worker is lost as a whole
        except ray.exceptions.RayTaskError:
            self._start_hosts()
            raise
        yield ended
