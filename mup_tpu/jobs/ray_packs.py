"""Packs on Ray: one actor a slot, kept for the whole sweep or sequence so that torch is imported and warmed
up once.

An actor streams a pack's reports and then its rows. If its process dies or hangs, the pack is tried again on
a new one; if a pack raises, its trials are stored as failed with the reason, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.errors import ConfigError, PackTooLarge, first_line
from mup_tpu.jobs.cluster import Slots, slots
from mup_tpu.jobs.heartbeat import MAX_ATTEMPTS, Heartbeats, Lost
from mup_tpu.jobs.plan import split_pack
from mup_tpu.jobs.workers import PackWorker, SliceWorker, end_worker
from mup_tpu.training.report import PackEvent, PackFailure, PackPreparing, PackSplit, PackStarted, Report

_LOOK_EVERY_S = 5.0


@dataclass(frozen=True)
class _Worker:
    """An actor that has its place on the cluster."""

    actor: Any
    host: str


class _Workers:
    """The actors of a run: kept for all of it, replaced where lost, more of them where nodes join.

    They are given packs once they have a place on the cluster, since what replaces a lost node's worker may
    wait for one for long.
    """

    def __init__(self, options: RunOptions, room: Slots, results: str | None, heartbeat: float) -> None:
        self._options, self._room, self._looked_at = options, room, time.monotonic()
        self._results, self._heartbeats = results, Heartbeats(heartbeat)
        environment = {"env_vars": room.environment}
        worker = ray.remote(PackWorker if room.slice is None else SliceWorker)
        self._remote = worker.options(runtime_env=environment, **room.needs)
        self._failed_starts = 0
        self.starting: dict[Any, Any] = {}
        """Answer to come, which is its host -> actor."""
        self.idle: list[_Worker] = []
        self.busy: dict[Any, tuple[int, _Worker]] = {}
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

    def start(self, index: int, pack: list[Trial], checkpoints: str | None) -> None:
        """Hand a pack to a worker that waits."""
        worker = self.idle.pop()
        stream = worker.actor.run.options(num_returns="streaming").remote(pack, checkpoints)
        self.busy[stream] = (index, worker)
        self._heartbeats.heard(stream)

    def events(self) -> Iterator[tuple[int, PackEvent | PackTooLarge | Lost]]:
        """What workers have to say, waiting up to a second for it, and which of them are lost.

        Raises:
            ConfigError: workers cannot be started.
        """
        for stream in self._wait():
            index, worker = self.busy[stream]
            event: PackEvent | PackTooLarge | Lost
            try:
                event = ray.get(next(stream))
            except ray.exceptions.RayActorError as error:
                event = Lost(f"its process on {worker.host} died: {first_line(error)}")
            except ray.exceptions.RayTaskError as error:
                too_large = isinstance(error.cause, PackTooLarge)
                event = error.cause if too_large else PackFailure(first_line(error.cause or error))
            if isinstance(event, PackPreparing | Report):
                self._heartbeats.heard(stream)
            elif isinstance(event, Lost):
                self._lost(stream)
            else:
                self._forget(stream)
                self.idle.append(worker)
            yield index, event
        for stream in self._heartbeats.hung():
            index, worker = self.busy[stream]
            self._lost(stream)
            yield index, self._heartbeats.lost(f" on {worker.host}")

    def _wait(self) -> list[Any]:
        """Streams with something to read; settles workers that have found their place on the way."""
        references = [*self.busy, *self.starting]
        if not references:  # no node is left for now
            time.sleep(1.0)
            return []
        ray.wait(references, num_returns=1, timeout=1.0)
        # All that are ready, not the first alone: who is not read would seem to be silent.
        ready: list[Any] = ray.wait(references, num_returns=len(references), timeout=0)[0]
        for reference in [reference for reference in ready if reference in self.starting]:
            actor = self.starting.pop(reference)
            try:
                self.idle.append(_Worker(actor, ray.get(reference)))
                self._failed_starts = 0
            except ray.exceptions.RayError as error:
                end_worker(actor)
                self._failed_starts += 1
                if self._failed_starts >= MAX_ATTEMPTS:
                    raise ConfigError(f"workers do not start: {first_line(error)}") from None
        return [reference for reference in ready if reference in self.busy]

    def _lost(self, stream: Any) -> None:
        """A worker has died or hangs, its node and its place on the cluster maybe gone with it."""
        end_worker(self._forget(stream).actor)
        self._looked_at = -math.inf

    def _forget(self, stream: Any) -> _Worker:
        """The worker of a stream that has ended."""
        self._heartbeats.forget(stream)
        return self.busy.pop(stream)[1]

    def give_up(self) -> None:
        """End those that have a pack, and keep the others."""
        for stream in list(self.busy):
            self._lost(stream)

    def kill(self) -> None:
        """End all of them."""
        self.give_up()
        for actor in [*self.starting.values(), *(worker.actor for worker in self.idle)]:
            end_worker(actor)


class KeptWorkers:
    """Actors that stay from one run of packs to the next, if that asks for the same; ended with the block."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] = ()
        self._workers: _Workers | None = None

    def __enter__(self) -> KeptWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._workers is not None:
            self._workers.kill()
            self._workers = None

    def of(self, options: RunOptions, room: Slots, results: str | None, heartbeat: float) -> _Workers:
        """Those that are there, or, where they were started for something else, new ones in their place."""
        # The strategy follows from the rest, and Ray's two of the same node are not equal.
        needs = {name: need for name, need in room.needs.items() if name != "scheduling_strategy"}
        asked = (options, needs, room.environment, room.slice, results, heartbeat)
        if self._workers is None or asked != self._asked:
            self.__exit__()
            self._workers, self._asked = _Workers(options, room, results, heartbeat), asked
        return self._workers


def run_packs(
    packs: list[list[Trial]],
    options: RunOptions,
    room: Slots,
    checkpoints: Callable[[list[Trial]], str | None] = lambda pack: None,
    results: str | None = None,
    heartbeat: float = SweepOptions.heartbeat,
    kept: KeptWorkers | None = None,
) -> Generator[tuple[int, PackEvent]]:
    """Run packs on the cluster, yielding (pack index, event) as events come.

    Args:
        packs: in the order to start them; the parts of those that do not fit in memory are added.
        options: how each is run.
        room: how many at once to begin with, and what an actor asks Ray for; looked at again as they run.
        checkpoints: the folder or fsspec URL of a pack's checkpoints, or None.
        results: the folder or fsspec URL whose logs the workers keep theirs in; None keeps none.
        heartbeat: seconds without a report after which a worker counts as hung.
        kept: where workers are taken from and stay; without, they end with the packs.

    Raises:
        ConfigError: workers cannot be started.
    """
    waiting = list(range(len(packs)))
    attempts: Counter[int] = Counter()
    with contextlib.ExitStack() as at_end:
        workers = (kept or at_end.enter_context(KeptWorkers())).of(options, room, results, heartbeat)
        at_end.callback(workers.give_up)  # where the caller ends first
        while waiting or workers.busy:
            workers.fill(len(waiting) + len(workers.busy))
            while waiting and workers.idle:
                index = waiting.pop(0)
                attempts[index] += 1
                workers.start(index, packs[index], checkpoints(packs[index]))
                yield index, PackStarted()
            for index, event in workers.events():
                if isinstance(event, Lost):
                    failure = event.outcome(packs[index], attempts[index])
                    if failure:
                        yield index, failure
                    else:
                        waiting.insert(0, index)
                elif isinstance(event, PackTooLarge):
                    parts = split_pack(packs, index, event)
                    waiting[:0] = parts
                    yield index, PackSplit(parts, str(event))
                else:
                    yield index, event


def _room_now(options: RunOptions, before: Slots) -> Slots:
    """Nodes come and go; with none left for now, the packs wait for one."""
    try:
        return slots(options)
    except ConfigError:
        return dataclasses.replace(before, count=0)
