"""Choice of the packs' pool: this process, forked processes, or Ray actors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs import this_machine
from mup_tpu.jobs.job import Pool
from mup_tpu.jobs.processes import Forked, InProcess


@dataclass(frozen=True)
class Place:
    """Pool of packs, and how they run there."""

    pool: Pool[Any]
    workers: int
    """Packs at once, to begin with."""
    execution: str
    """Execution of a pack's members: "loop" or "vmap"."""
    run: RunOptions
    """Options of each pack, with its number of threads."""
    gpu: str = ""
    """Name of the GPU that each pack trains on; "" on other devices and on a Ray cluster."""


class Pools:
    """The open pool of a run, replaced if another is needed.

    `results` is the folder or fsspec URL of the workers' logs; None keeps none.
    """

    def __init__(self, options: SweepOptions, results: str | None, console: Console) -> None:
        self._options, self._results, self._console = options, results, console
        self._asked: tuple[Any, ...] = ()
        self._pool, self._cluster = contextlib.ExitStack(), contextlib.ExitStack()
        self._open: Pool[Any] | None = None

    def close(self) -> None:
        with self._cluster, self._pool:
            self._open = None

    def place(self, trials: int, run: RunOptions, at_most: int = sys.maxsize) -> Place:
        """Return the place for this number of trials; `at_most` limits packs at once.

        Raises:
            ConfigError: the device or cluster is not there, or too small.
        """
        if self._options.on_ray:
            return self._on_ray(min(trials, at_most), run, at_most)
        if run.placement != "host":
            raise ConfigError(f"placement {run.placement!r} needs Ray: add --ray or --address")
        return self._on_this_machine(min(trials, at_most), run, at_most)

    def _on_ray(self, trials: int, run: RunOptions, at_most: int) -> Place:
        with self._console.status("importing ray"):
            from mup_tpu.jobs import cluster
            from mup_tpu.jobs.ray_actors import RayActors

        if self._open is None:
            self._cluster.enter_context(cluster.ray_cluster(self._options.address, self._console))
        run = replace(run, threads=run.threads or cluster.threads(trials))

        def look() -> cluster.Slots:
            room = cluster.slots(run)
            return replace(room, count=min(room.count, at_most))

        room = look()
        pool = self._kept(room.key, lambda: RayActors(room, look, self._results))
        if room.execution == "loop" and run.device == "auto":
            # Its workers would take a GPU that Ray does not know of, all of them the same one.
            run = replace(run, device="cpu")
        execution = room.execution if run.execution == "auto" else run.execution
        return Place(pool, room.count, execution, run)

    def _on_this_machine(self, trials: int, run: RunOptions, at_most: int) -> Place:
        with self._console.status("looking for the device"):  # torch is imported to find an accelerator
            workers, threads = this_machine.room(trials, run)
            workers = min(workers, at_most)
            execution, gpu = this_machine.execution(run), this_machine.gpu(run)
        # A GPU that fails is lost to its process, so that even a single pack has one of its own.
        forks = this_machine.CAN_FORK and (workers > 1 or gpu != "")

        def make() -> Pool[Any]:
            if note := this_machine.unused_gpus(run):
                self._console.print(note, style="yellow")
            parts = this_machine.gpus(run)[:workers]
            return Forked(workers, self._results, parts=parts) if forks else InProcess(self._results)

        pool = self._kept((workers,), make)
        return Place(pool, workers, execution, replace(run, threads=threads), gpu)

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Pool[Any]]) -> Pool[Any]:
        """Return the open pool if its key is the same, else a new one in its place."""
        if self._open is None or key != self._asked:
            self._pool.close()
            self._open, self._asked = self._pool.enter_context(make()), key
        return self._open
