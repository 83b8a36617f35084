"""What runs packs in Ray processes of their own: one worker a slot, on a host or on a TPU slice of several.

Either kind answers `ready` once it has its place on the cluster, and streams a pack's events from `run`. A
slice that loses a host ends as a whole, so that its pack is tried again as that of any lost worker is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mup_tpu import data
from mup_tpu.config import RunOptions, Trial
from mup_tpu.jobs.pack_events import pack_events
from mup_tpu.jobs.tpu_hosts import SliceKind, slices, take_chips
from mup_tpu.training.report import PackPreparing, PackResult, Report

_RESERVE_S = 5.0


class PackWorker:
    """Runs packs one after another in its process."""

    def __init__(self, options: RunOptions, results: str | None) -> None:
        self._options, self._results = options, results
        take_chips(options)

    def ready(self) -> str:
        """The host that the worker has its place on."""
        return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def run(
        self, trials: list[Trial], checkpoints: str | None
    ) -> Iterator[PackPreparing | Report | PackResult]:
        """Train one pack."""
        yield from self._train(trials, checkpoints, writes=True)

    def follow(self, trials: list[Trial], checkpoints: str | None) -> None:
        """Take part in a pack that another host of the slice reports and checkpoints."""
        for _ in self._train(trials, checkpoints, writes=False):
            pass

    def _train(
        self, trials: list[Trial], checkpoints: str | None, writes: bool
    ) -> Iterator[PackPreparing | Report | PackResult]:
        from mup_tpu.training.host_log import host_log

        load = functools.partial(data.load, progress=False)
        with host_log(self._results, capture_warnings=True):
            yield from pack_events(trials, load, self._options, checkpoints, writes=writes)


class SliceWorker:
    """Runs packs one after another on a whole TPU slice: the same program on each host, host 0 reports.

    Its hosts' workers end with it. The reservation outlives an actor that is killed; `end_worker` frees it.
    """

    def __init__(self, options: RunOptions, results: str | None, kind: SliceKind) -> None:
        self._options, self._results, self._kind = options, results, kind
        self._hosts: list[Any] = []

    def ready(self) -> str:
        """The hosts of the slice, once it is reserved, whole, and a worker stands on each of them."""
        self._addresses, self._group = self._reserve()
        self._start_hosts()
        return ", ".join(self._addresses)

    def _reserve(self) -> tuple[list[str], Any]:
        """The hosts of a slice that is whole and free, and its placement group, which holds all or none."""
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
        """A new worker on each host, told what libtpu asks to know of the slice."""
        for host in self._hosts:
            ray.kill(host)
        hostnames = ",".join(self._addresses)
        self._hosts = [
            ray.remote(PackWorker)
            .options(
                num_cpus=1,
                resources={"TPU": self._kind.chips_per_host},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i),
                runtime_env={"env_vars": {"TPU_WORKER_ID": str(i), "TPU_WORKER_HOSTNAMES": hostnames}},
            )
            .remote(self._options, self._results)
            for i in range(self._kind.hosts)
        ]
        ray.get([host.ready.remote() for host in self._hosts])

    def run(
        self, trials: list[Trial], checkpoints: str | None
    ) -> Iterator[PackPreparing | Report | PackResult]:
        """Train one pack on all hosts."""
        first, *others = self._hosts
        events: Any = first.run.options(num_returns="streaming").remote(trials, checkpoints)
        running: list[Any] = [events, *(host.follow.remote(trials, checkpoints) for host in others)]
        try:
            while running:
                ready: list[Any]
                ready, running = ray.wait(running, num_returns=1)
                if ready[0] is not events:
                    ray.get(ready)
                    continue
                event: PackPreparing | Report | PackResult = ray.get(next(events))
                yield event
                if not isinstance(event, PackResult):
                    running.append(events)
        except ray.exceptions.RayActorError:
            os._exit(1)  # the others wait for the lost host for ever, so that this worker is lost as a whole
        except ray.exceptions.RayTaskError as error:
            self._start_hosts()  # likewise, but the slice itself is whole
            raise error.cause or error from None


def end_worker(worker: Any) -> None:
    """End a worker of either kind, whatever it is doing, and free the slice that it has reserved."""
    ray.kill(worker)
    with contextlib.suppress(ValueError):  # it has none
        remove_placement_group(get_placement_group(_reservation(worker._actor_id.hex())))


def _reservation(actor_id: str | None) -> str:
    return f"mup-tpu-{actor_id}"
