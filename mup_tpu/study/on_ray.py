"""Pool of Ray actors with the resources that a study's trial asks for."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import ray
from rich.console import Console

from mup_tpu.errors import ConfigError
from mup_tpu.jobs.cluster import Slots, ray_cluster
from mup_tpu.jobs.ray_actors import RayActors


class RayPool(RayActors):
    """Actors on a cluster that is joined or started with the pool, and left with it.

    Args:
        folder: folder or fsspec URL of the study, which keeps the actors' logs.
        address: cluster to join; None starts one on this machine.
        resources: what a trial asks for, as {"CPU": 2, "GPU": 1}.
        console: for what takes long.

    Raises:
        ConfigError: there is no such cluster, or no node has what a trial asks for.
    """

    def __init__(
        self, folder: str, address: str | None, resources: dict[str, float], console: Console
    ) -> None:
        with contextlib.ExitStack() as at_end:
            at_end.enter_context(ray_cluster(address, console))
            super().__init__(slots(resources), lambda: slots(resources), folder)
            self._at_end = at_end.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._at_end:
            super().__exit__(*error)


def slots(resources: dict[str, float]) -> Slots:
    """Room for trials on the connected cluster.

    Raises:
        ConfigError: no node has what a trial asks for.
    """
    asked = {"CPU": 1.0} | resources
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    count = sum(int(min(node.get(name, 0) / amount for name, amount in asked.items())) for node in nodes)
    if count < 1:
        have = ray.cluster_resources()
        there = ", ".join(f"{name} {have.get(name, 0):g}" for name in asked)
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in asked.items())
        raise ConfigError(
            f"one trial asks for {wanted}, but no node of the Ray cluster has that; in all: {there}"
        )
    others = {name: amount for name, amount in asked.items() if name not in ("CPU", "GPU")}
    needs: dict[str, Any] = {"num_cpus": asked["CPU"], "num_gpus": asked.get("GPU", 0), "resources": others}
    threads = str(max(1, int(asked["CPU"])))
    return Slots(count, needs, "loop", {"OMP_NUM_THREADS": threads})
