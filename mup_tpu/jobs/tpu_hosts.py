"""TPU hosts and slices of a Ray cluster, and libtpu's environment on them.

A host has one resource TPU for each chip. A worker may ask for 1, 2, 4 or 8 chips, and Ray names them in
TPU_VISIBLE_CHIPS. A host's labels hold its slice's name, type and topology, and its number in the slice. A
host outside a larger slice is a slice by itself.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray

from mup_tpu.errors import ConfigError

SLICE_NAME, WORKER_ID = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
TOPOLOGY, POD_TYPE = "ray.io/tpu-topology", "ray.io/tpu-pod-type"

_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Shape of the chips of one process (TPU_CHIPS_PER_PROCESS_BOUNDS), by number of chips."""


@dataclass(frozen=True)
class SliceKind:
    """Kind of slices of several hosts."""

    generation: str
    """Ray's name: "v4", "v5litepod"."""
    topology: str
    """Chips along each axis, such as "2x2x2"."""
    chips_per_host: int

    @property
    def hosts(self) -> int:
        """Hosts of one slice."""
        return (_chips_of(self.topology) or 0) // self.chips_per_host

    def host_labels(self, name: str) -> list[dict[str, str]]:
        """Labels of each host of a slice, in order."""
        return [{SLICE_NAME: name, WORKER_ID: str(i)} for i in range(self.hosts)]


def nodes_with(resource: str) -> list[dict[str, Any]]:
    """Live nodes of the connected cluster that have a resource."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]


def tpu_hosts() -> list[dict[str, Any]]:
    """Nodes of the connected cluster with TPU chips.

    Raises:
        ConfigError: a host is of a generation that is not supported.
    """
    hosts = nodes_with("TPU")
    for host in hosts:
        # Bounds of v7x have four numbers: torch_xla 2.9 writes four and reads three.
        kind = host["Labels"].get(POD_TYPE, "")
        if re.match("(v|tpu)7", kind) or "accelerator_type:TPU-V7X" in host["Resources"]:
            raise ConfigError(
                f"TPU host {_name(host)} is a {kind or 'v7x'}: TPU v7x (Ironwood) is not supported; "
                "v2, v3, v4, v5e, v5p and v6e are"
            )
    return hosts


def chips_of_a_pack(hosts: list[dict[str, Any]]) -> int:
    """Chips of a pack on one host: the smallest host's.

    Raises:
        ConfigError: Ray gives no worker this number of chips.
    """
    if not hosts:
        return 1
    smallest = min(hosts, key=lambda host: host["Resources"]["TPU"])
    chips = smallest["Resources"]["TPU"]
    if chips not in _BOUNDS:
        raise ConfigError(
            f"TPU host {_name(smallest)} has {chips:g} chips, but Ray gives one pack 1, 2, 4 or 8; "
            "--placement chip gives each chip a pack"
        )
    return int(chips)


def bounds(chips: int) -> dict[str, str]:
    """Environment of a process with its own chips: libtpu would wait for other processes of the host."""
    return {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[chips]}


def take_chips(placement: str) -> None:
    """Set the environment for the chips that Ray gave this worker, before torch_xla is imported.

    PJRT_DEVICE is TPU unless the driver or the host sets it. On one host of a slice, libtpu would ask the
    metadata for other hosts and wait for them (pytorch/xla issue 7714): the environment is GKE's for a single
    host. `placement` is as in `RunOptions`.
    """
    context = ray.get_runtime_context()
    if not context.get_accelerator_ids().get("TPU"):
        return
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    here = next(node for node in nodes_with("TPU") if node["NodeID"] == context.get_node_id())
    if POD_TYPE in here["Labels"]:  # torch_xla needs it at import without metadata
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", here["Labels"][POD_TYPE])
    if placement != "slice" and _has_neighbours(here):
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


def _has_neighbours(host: dict[str, Any]) -> bool:
    """Whether a host belongs to a slice of several hosts."""
    labels = host["Labels"]
    if labels.get(WORKER_ID, "0") != "0":
        return True
    if (_chips_of(labels.get(TOPOLOGY, "")) or 0) > host["Resources"]["TPU"]:
        return True
    name = labels.get(SLICE_NAME)
    return name is not None and sum(node["Labels"].get(SLICE_NAME) == name for node in nodes_with("TPU")) > 1


def slices() -> tuple[dict[SliceKind, dict[str, list[str]]], list[str]]:
    """Slices of several hosts on the connected cluster.

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
        try:
            kind, addresses = _slice_of(hosts)
        except ValueError as error:
            problems.append(f"slice {name!r} {error}")
        else:
            whole.setdefault(kind, {})[name] = addresses
    return whole, problems


def _slice_of(hosts: list[dict[str, Any]]) -> tuple[SliceKind, list[str]]:
    """Kind of the slice of these hosts, and their addresses in order; ValueError says why they are none."""
    for host in hosts:
        _check_labels(host)
    described = {
        (host["Labels"][POD_TYPE], host["Labels"][TOPOLOGY], host["Resources"]["TPU"]) for host in hosts
    }
    if len(described) > 1:
        raise ValueError("has hosts that differ in type, topology or number of chips")
    pod_type, topology, chips = described.pop()
    total = _chips_of(topology) or 0
    if chips not in _BOUNDS or total % chips:
        raise ValueError(f"has hosts of {chips:g} chips, which do not make up its topology {topology}")
    kind = SliceKind(pod_type.rpartition("-")[0], topology, int(chips))
    if kind.hosts == 1:
        raise ValueError("is a single host")
    numbers = sorted(int(host["Labels"][WORKER_ID]) for host in hosts)
    if numbers != list(range(kind.hosts)):
        raise ValueError(f"has hosts number {', '.join(map(str, numbers))}, not all of {kind.hosts}")
    hosts = sorted(hosts, key=lambda host: int(host["Labels"][WORKER_ID]))
    return kind, [host["NodeManagerAddress"] for host in hosts]


def _check_labels(host: dict[str, Any]) -> None:
    """Check that a slice's host has all labels, each in its form."""
    for label, pattern in ((POD_TYPE, r".+-\d+"), (TOPOLOGY, r"\d+(x\d+)+"), (WORKER_ID, r"\d+")):
        value = host["Labels"].get(label)
        if value is None:
            raise ValueError(f"has a host, {_name(host)}, without the label {label}")
        if not re.fullmatch(pattern, value):
            raise ValueError(f"has a host, {_name(host)}, whose label {label} is {value!r}")


def kind_of_most_chips() -> tuple[SliceKind, int]:
    """Kind of slice with the most chips on the connected cluster, and its number of slices.

    Raises:
        ConfigError: no slice has all of its hosts.
    """
    hosts = tpu_hosts()
    whole, problems = slices()
    if not whole:
        why = f" ({'; '.join(problems)})" if problems else ""
        raise ConfigError(
            "one pack asks for a TPU slice of several hosts (--placement slice), but the Ray cluster has "
            f"{len(hosts)} TPU hosts and no slice with all of its hosts{why}; "
            "--placement host takes single hosts"
        )
    return max(
        ((kind, len(names)) for kind, names in whole.items()),
        key=lambda found: found[0].hosts * found[0].chips_per_host * found[1],
    )


def _chips_of(topology: str) -> int | None:
    """Chips of a topology such as "2x2x2"."""
    return math.prod(map(int, topology.split("x"))) if re.fullmatch(r"\d+(x\d+)+", topology) else None


def _name(node: dict[str, Any]) -> str:
    return node["NodeManagerAddress"]
