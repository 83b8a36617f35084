"""Packs on Ray: one actor a slot, kept for the whole sweep so that torch is imported and warmed up once.

An actor streams a pack's reports and then its rows. If its process dies, the pack is tried again on a new
one; if a pack raises, its trials are stored as failed with the reason, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from mup_tpu.config import RunOptions, Trial
from mup_tpu.errors import ConfigError
from mup_tpu.training.report import PackResult, Report

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
        ray.init(address="local", include_dashboard=False, **common)
    else:
        import mup_tpu

        _check_reachable(address)
        try:
            # The cluster's workers run the driver's code, whatever they have installed.
            ray.init(address=address, runtime_env={"py_modules": [mup_tpu]}, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster answers at address {address!r}: {_first_line(error)}"
            ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail in seconds where nobody listens: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ConfigError(f"no Ray cluster answers at address {address!r}: {error}") from None


def slots(options: RunOptions) -> tuple[int, dict[str, Any]]:
    """How many packs run at once on this cluster, and what each asks Ray for.

    Raises:
        ConfigError: the cluster has less than one pack needs.
    """
    have = ray.cluster_resources()
    if options.device == "cuda" or (options.device == "auto" and have.get("GPU", 0) >= 1):
        needs: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1}
        count = int(min(have.get("GPU", 0), have.get("CPU", 0)))
    else:
        needs = {"num_cpus": max(1, options.threads)}
        count = int(have.get("CPU", 0) // needs["num_cpus"])
    if count < 1:
        raise ConfigError(
            f"one pack asks for {needs}, but the Ray cluster has CPU {have.get('CPU', 0):g} "
            f"and GPU {have.get('GPU', 0):g}"
        )
    return count, needs


def run_packs(
    packs: Sequence[Sequence[Trial]],
    options: RunOptions,
    workers: int,
    needs: dict[str, Any],
    checkpoints: Sequence[Path | None],
) -> Generator[tuple[int, PackEvent | None]]:
    """Run packs on the cluster, yielding (pack index, event) as events come; None says that it has started.

    Args:
        packs: in the order to start them.
        options: how each is run.
        workers: actors to keep.
        needs: Ray options of one actor.
        checkpoints: a folder for each pack, or None.
    """
    threads = str(max(1, options.threads))
    environment = {"env_vars": {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}}
    remote = ray.remote(_PackWorker).options(runtime_env=environment, **needs)
    idle = [remote.remote(options) for _ in range(min(workers, len(packs)))]
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
                            PackFailure(f"its process died {MAX_ATTEMPTS} times: {_first_line(error)}"),
                        )
                    continue
                except ray.exceptions.RayTaskError as error:
                    del streams[stream]
                    idle.append(worker)
                    yield index, PackFailure(_first_line(error.cause or error))
                    continue
                yield index, event
                if isinstance(event, PackResult):
                    del streams[stream]
                    idle.append(worker)
    finally:
        for worker in [*idle, *(worker for _, worker in streams.values())]:
            ray.kill(worker)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
