"""Packs on Ray: one actor a slot, kept for the whole sweep so that torch is imported and warmed up once.

An actor streams a pack's reports and then its rows. If its process dies, the pack is tried again on a new
one; if a pack raises, its trials are stored as failed with the reason, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from mup_tpu.config import RunOptions, Trial
from mup_tpu.training.report import PackResult, Report
from mup_tpu.tuning.cluster import Slots, first_line

MAX_ATTEMPTS = 3
"""Times a pack is started before its trials count as failed."""


@dataclasses.dataclass(frozen=True)
class PackFailure:
    """A pack that could not be run, and why."""

    reason: str


PackEvent = Report | PackResult | PackFailure


class _PackWorker:
    """Runs packs one after another; lives in its own Ray process."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options

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
    slots: Slots,
    checkpoints: Sequence[Path | None],
) -> Generator[tuple[int, PackEvent | None]]:
    """Run packs on the cluster, yielding (pack index, event) as events come; None says that it has started.

    Args:
        packs: in the order to start them.
        options: how each is run.
        slots: how many at once, and what an actor asks Ray for.
        checkpoints: a folder for each pack, or None.
    """
    environment = {"env_vars": slots.environment}
    remote = ray.remote(_PackWorker).options(runtime_env=environment, **slots.needs)
    idle = [remote.remote(options) for _ in range(min(slots.count, len(packs)))]
    waiting = list(range(len(packs)))
    attempts = [0] * len(packs)
    streams: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or streams:
            while waiting and idle:
                index, worker = waiting.pop(0), idle.pop()
                attempts[index] += 1
                folder = checkpoints[index]
                stream = worker.run.options(  # type: ignore[attr-defined]
                    num_returns="streaming"
                ).remote(list(packs[index]), str(folder) if folder else None)
                streams[stream] = (index, worker)
                yield index, None
            ready: list[Any] = ray.wait(list(streams), num_returns=1, timeout=1.0)[0]
            for stream in ready:
                index, worker = streams[stream]
                try:
                    event: PackEvent = ray.get(next(stream))  # type: ignore[assignment]
                except ray.exceptions.RayActorError as error:
                    del streams[stream]
                    idle.append(remote.remote(options))
                    if attempts[index] < MAX_ATTEMPTS:
                        waiting.insert(0, index)
                    else:
                        yield (
                            index,
                            PackFailure(f"its process died {MAX_ATTEMPTS} times: {first_line(error)}"),
                        )
                    continue
                except ray.exceptions.RayTaskError as error:
                    del streams[stream]
                    idle.append(worker)
                    yield index, PackFailure(first_line(error.cause or error))
                    continue
                yield index, event
                if isinstance(event, PackResult):
                    del streams[stream]
                    idle.append(worker)
    finally:
        for worker in [*idle, *(worker for _, worker in streams.values())]:
            ray.kill(worker)
