"""Actors that run jobs on Ray: one on a host, or one for a TPU slice of several hosts.

Both answer `ready` once they have a place on the cluster, and stream a job's events from `run`. A slice that
loses a host ends as a whole, and its job is tried again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mup_tpu.internals.ray import actor_id
from mup_tpu.jobs.job import Ended, Finished, Job, Surroundings, perform
from mup_tpu.jobs.tpu_hosts import SliceKind, slices, take_chips
from mup_tpu.training.host_log import host_log

_RESERVE_S = 5.0


class HostActor:
    """Actor that runs jobs one after another in its process.

    Args:
        placement: TPU resources of a job, as in `RunOptions`.
        results: folder or fsspec URL of its log; None keeps none.
    """

    def __init__(self, placement: str, results: str | None) -> None:
        self._results = results
        self._leads, self._follows = Surroundings(), Surroundings(writes=False)
        take_chips(placement)

    def ready(self) -> str:
        """Host that the actor runs on."""
        return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def run(self, job: Job) -> Iterator[Any]:
        """Run a job, yielding its events."""
        with host_log(self._results, capture_warnings=True):
            yield from perform(job, self._leads)

    def follow(self, job: Job) -> Any:
        """Take part in a job that another host of the slice reports; return how it failed here, or None."""
        with host_log(self._results, capture_warnings=True):
            *_, ended = perform(job, self._follows)
        return ended if not isinstance(ended, Finished) else None


class SliceActor:
    """Actor that runs jobs one after another on a whole TPU slice of a kind, which it reserves.

    Each host runs the same program, and host 0 reports. The hosts' actors end with this one. The reservation
    outlives a killed actor; `end_actor` frees it.
    """

    def __init__(self, placement: str, results: str | None, kind: SliceKind) -> None:
        self._placement, self._results, self._kind = placement, results, kind
        self._hosts: list[Any] = []

    def ready(self) -> str:
        """Hosts of the slice, once it is reserved and an actor runs on each of them."""
        self._addresses, self._group = self._reserve()
        self._start_hosts()
        return ", ".join(self._addresses)

    def _reserve(self) -> tuple[list[str], Any]:
        """Hosts of a whole, free slice, and the placement group that reserves all of them or none."""
        from ray.util.tpu import slice_placement_group

        while True:
            for name, addresses in slices()[0].get(self._kind, {}).items():
                reserved = slice_placement_group(
                    name=_reservation(str(ray.get_runtime_context().get_actor_id())),
                    topology=self._kind.topology,
                    accelerator_version=self._kind.generation,
                    chips_per_vm=self._kind.chips_per_host,
                    bundle_label_selector=self._kind.host_labels(name),
                )
                group = reserved.slice_placement_group
                if group is not None and group.wait(_RESERVE_S):
                    return addresses, group
                reserved.shutdown()
            time.sleep(1.0)

    def _start_hosts(self) -> None:
        """Start a new actor on each host, with libtpu's environment for a slice."""
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
            .remote(self._placement, self._results)
            for i in range(self._kind.hosts)
        ]
        ray.get([host.ready.remote() for host in self._hosts])

    def run(self, job: Job) -> Iterator[Any]:
        """Run a job on all hosts, yielding the events of host 0, or how another host failed."""
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


def end_actor(actor: Any) -> None:
    """End an actor of either class at once, and free its reserved slice."""
    ray.kill(actor)
    with contextlib.suppress(ValueError):  # it has none
        remove_placement_group(get_placement_group(_reservation(actor_id(actor))))


def _reservation(name: str) -> str:
    return f"mup-tpu-{name}"
