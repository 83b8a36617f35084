"""Packs on Ray: one actor a slot, kept for the whole sweep so that torch is imported and warmed up once.

An actor streams a pack's reports and then its rows. If its process dies, the pack is tried again on a new
one; if a pack raises, its trials are stored as failed with the reason, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from mup_tpu.config import RunOptions, Trial
from mup_tpu.errors import ConfigError
from mup_tpu.training.report import PackResult, Report
from mup_tpu.tuning.cluster import Slots, first_line, slots

MAX_ATTEMPTS = 3
"""Times a pack is started before its trials count as failed."""

_LOOK_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True)
class PackFailure:
    """A pack that could not be run, and why."""

    reason: str


PackEvent = Report | PackResult | PackFailure


class _PackWorker:
    """Runs packs one after another; lives in its own Ray process."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def ready(self) -> None:
        """Answers once the worker has a place on the cluster."""

    def run(self, trials: list[Trial], checkpoints: str | None) -> Iterator[PackEvent]:
        """Train one pack."""
        from mup_tpu import data
        from mup_tpu.training.loop import train_pack

        dataset = data.load(trials[0].data, progress=False)
        folder = Path(checkpoints) if checkpoints else None
        for event in train_pack(trials, dataset, self._options, folder):
            # The pack's tensors stay here: rows and curves are all that the store needs.
            yield dataclasses.replace(event, pack=None) if isinstance(event, PackResult) else event


def run_packs(
    packs: Sequence[Sequence[Trial]],
    options: RunOptions,
    room: Slots,
    checkpoints: Sequence[Path | None],
) -> Generator[tuple[int, PackEvent | None]]:
    """Run packs on the cluster, yielding (pack index, event) as events come; None says that it has started.

    Args:
        packs: in the order to start them.
        options: how each is run.
        room: how many at once to begin with, and what an actor asks Ray for; looked at again as they run.
        checkpoints: a folder for each pack, or None.
    """
    environment = {"env_vars": room.environment}
    remote = ray.remote(_PackWorker).options(runtime_env=environment, **room.needs)
    waiting = list(range(len(packs)))
    attempts = [0] * len(packs)
    # Workers are given packs once they have a place: what replaces a lost node's may wait for one for long.
    starting: dict[Any, Any] = {}
    idle: list[Any] = []
    streams: dict[Any, tuple[int, Any]] = {}
    failed_starts, last_look = 0, time.monotonic()
    try:
        while waiting or streams:
            if time.monotonic() - last_look > _LOOK_EVERY_S:
                room, last_look = _room_now(options, room), time.monotonic()
            workers = len(starting) + len(idle) + len(streams)
            for _ in range(min(room.count, len(waiting) + len(streams)) - workers):
                worker = remote.remote(options)
                starting[worker.ready.remote()] = worker  # type: ignore[attr-defined]
            while waiting and idle:
                index, worker = waiting.pop(0), idle.pop()
                attempts[index] += 1
                folder = checkpoints[index]
                stream = worker.run.options(num_returns="streaming").remote(
                    list(packs[index]), str(folder) if folder else None
                )
                streams[stream] = (index, worker)
                yield index, None
            ready: list[Any] = ray.wait([*streams, *starting], num_returns=1, timeout=1.0)[0]
            for reference in ready:
                if reference in starting:
                    worker = starting.pop(reference)
                    try:
                        ray.get(reference)
                    except ray.exceptions.RayError as error:
                        failed_starts += 1
                        if failed_starts >= MAX_ATTEMPTS:
                            raise ConfigError(f"workers do not start: {first_line(error)}") from None
                    else:
                        failed_starts = 0
                        idle.append(worker)
                    continue
                index, worker = streams[reference]
                try:
                    event: PackEvent = ray.get(next(reference))
                except ray.exceptions.RayActorError as error:
                    del streams[reference]
                    last_look = -math.inf  # its node may be gone, and its place with it
                    if attempts[index] < MAX_ATTEMPTS:
                        waiting.insert(0, index)
                    else:
                        reason = f"its process died {MAX_ATTEMPTS} times: {first_line(error)}"
                        yield index, PackFailure(reason)
                    continue
                except ray.exceptions.RayTaskError as error:
                    del streams[reference]
                    idle.append(worker)
                    yield index, PackFailure(first_line(error.cause or error))
                    continue
                yield index, event
                if isinstance(event, PackResult):
                    del streams[reference]
                    idle.append(worker)
    finally:
        for worker in [*idle, *starting.values(), *(worker for _, worker in streams.values())]:
            ray.kill(worker)


def _room_now(options: RunOptions, before: Slots) -> Slots:
    """Nodes come and go; with none left for now, the packs wait for one."""
    try:
        return slots(options)
    except ConfigError:
        return dataclasses.replace(before, count=0)
