"""Packs on Ray: one actor a slot, kept for the whole sweep so that torch is imported and warmed up once.

An actor streams a pack's reports and then its rows. If its process dies, the pack is tried again on a new
one; if a pack raises, its trials are stored as failed with the reason, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import ray

from mup_tpu.config import RunOptions, Trial
from mup_tpu.errors import ConfigError, PackTooLarge, first_line
from mup_tpu.training.report import PackEvent, PackFailure, PackSplit, Report
from mup_tpu.tuning.cluster import Slots, slots
from mup_tpu.tuning.plan import MAX_ATTEMPTS, split_pack
from mup_tpu.tuning.workers import PackWorker, SliceWorker, end_worker

_LOOK_EVERY_S = 5.0


class _Workers:
    """The actors of a run: kept for all of it, replaced where lost, more of them where nodes join.

    They are given packs once they have a place on the cluster, since what replaces a lost node's worker may
    wait for one for long.
    """

    def __init__(self, options: RunOptions, room: Slots, results: str | None) -> None:
        self._options, self._room, self._looked_at = options, room, time.monotonic()
        self._results = results
        environment = {"env_vars": room.environment}
        worker = ray.remote(PackWorker if room.slice is None else SliceWorker)
        self._remote = worker.options(runtime_env=environment, **room.needs)
        self._failed_starts = 0
        self.starting: dict[Any, Any] = {}
        """Answer to come -> worker."""
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[int, Any]] = {}
        """Stream of events -> pack index, worker."""

    def fill(self, wanted: int) -> None:
        """Start as many as the cluster has room for now, up to one a pack that is left."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._room, self._looked_at = _room_now(self._options, self._room), time.monotonic()
        have = len(self.starting) + len(self.idle) + len(self.busy)
        for _ in range(min(self._room.count, wanted) - have):
            reserves = [] if self._room.slice is None else [self._room.slice]
            worker: Any = self._remote.remote(self._options, self._results, *reserves)
            self.starting[worker.ready.remote()] = worker

    def wait(self) -> list[Any]:
        """Streams with something to read; settles workers that have found their place on the way.

        Raises:
            ConfigError: workers cannot be started.
        """
        references = [*self.busy, *self.starting]
        if not references:  # no node is left for now
            time.sleep(1.0)
            return []
        ready: list[Any] = ray.wait(references, num_returns=1, timeout=1.0)[0]
        for reference in [reference for reference in ready if reference in self.starting]:
            worker = self.starting.pop(reference)
            try:
                ray.get(reference)
                self.idle.append(worker)
                self._failed_starts = 0
            except ray.exceptions.RayError as error:
                end_worker(worker)
                self._failed_starts += 1
                if self._failed_starts >= MAX_ATTEMPTS:
                    raise ConfigError(f"workers do not start: {first_line(error)}") from None
        return [reference for reference in ready if reference in self.busy]

    def free(self, stream: Any) -> None:
        """A worker is done with its pack."""
        self.idle.append(self.busy.pop(stream)[1])

    def lost(self, stream: Any) -> None:
        """A worker has died, its node and its place on the cluster maybe with it."""
        end_worker(self.busy.pop(stream)[1])
        self._looked_at = -math.inf

    def kill(self) -> None:
        """End all of them."""
        for worker in [*self.idle, *self.starting.values(), *(worker for _, worker in self.busy.values())]:
            end_worker(worker)


def run_packs(
    packs: list[list[Trial]],
    options: RunOptions,
    room: Slots,
    checkpoints: Callable[[list[Trial]], str | None] = lambda pack: None,
    results: str | None = None,
) -> Generator[tuple[int, PackEvent | None]]:
    """Run packs on the cluster, yielding (pack index, event) as events come; None says that it has started.

    Args:
        packs: in the order to start them; the parts of those that do not fit in memory are added.
        options: how each is run.
        room: how many at once to begin with, and what an actor asks Ray for; looked at again as they run.
        checkpoints: the folder or fsspec URL of a pack's checkpoints, or None.
        results: the folder or fsspec URL whose logs the workers keep theirs in; None keeps none.
    """
    waiting = list(range(len(packs)))
    attempts: Counter[int] = Counter()
    workers = _Workers(options, room, results)
    try:
        while waiting or workers.busy:
            workers.fill(len(waiting) + len(workers.busy))
            while waiting and workers.idle:
                index, worker = waiting.pop(0), workers.idle.pop()
                attempts[index] += 1
                stream = worker.run.options(num_returns="streaming").remote(
                    packs[index], checkpoints(packs[index])
                )
                workers.busy[stream] = (index, worker)
                yield index, None
            for stream in workers.wait():
                index, _ = workers.busy[stream]
                try:
                    event: PackEvent = ray.get(next(stream))
                except ray.exceptions.RayActorError as error:
                    workers.lost(stream)
                    if attempts[index] < MAX_ATTEMPTS:
                        waiting.insert(0, index)
                    else:
                        reason = f"its process died {MAX_ATTEMPTS} times: {first_line(error)}"
                        yield index, PackFailure(reason)
                    continue
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, PackTooLarge):
                        parts = split_pack(packs, index, error.cause)
                        waiting[:0] = parts
                        event = PackSplit(parts, str(error.cause))
                    else:
                        event = PackFailure(first_line(error.cause or error))
                yield index, event
                if not isinstance(event, Report):
                    workers.free(stream)
    finally:
        workers.kill()


def _room_now(options: RunOptions, before: Slots) -> Slots:
    """Nodes come and go; with none left for now, the packs wait for one."""
    try:
        return slots(options)
    except ConfigError:
        return dataclasses.replace(before, count=0)
