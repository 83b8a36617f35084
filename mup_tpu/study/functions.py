"""Calls of a training function, for the runner of trials: pools, jobs and rows of a study."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

from rich.console import Console

from mup_tpu.config.fields import require_above_zero, require_count
from mup_tpu.files import Folder
from mup_tpu.internals.control_groups import cores
from mup_tpu.jobs.job import Failed, Finished, Pool
from mup_tpu.jobs.pools import Forked
from mup_tpu.jobs.this_machine import visible_gpus, workers_that_fit
from mup_tpu.study.attempt import Outcome
from mup_tpu.study.function_job import FunctionJob, How
from mup_tpu.study.report import forget_rungs
from mup_tpu.study.space import Space, Trial
from mup_tpu.tuning.runner import Rows

# Measured, without what the function itself imports and needs, which nobody knows before it runs.
_SERVER_MB, _WORKER_MB = 80, 60

OpensPool = Callable[[], contextlib.AbstractContextManager[Pool[Any]]]


class Functions:
    """Trials of a study: calls of its function. `payload` is the pickled function."""

    def __init__(self, space: Space, payload: bytes, how: How, pool: OpensPool) -> None:
        self._space, self._payload, self._how, self._open_pool = space, payload, how, pool
        self._at_end = contextlib.ExitStack()
        self._pool: Pool[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._at_end:
            self._pool = None

    def trial_id(self, trial: Trial) -> str:
        """Name of a trial in the store."""
        return trial.id

    def size(self, trial: Trial) -> str:
        """Point of the scale of a trial: "width 256"."""
        return self._space.size(trial)

    def work(self, trial: Trial) -> float:
        """Measure of a trial's scale."""
        return float(trial.values[self._space.measured_by])

    def jobs(self, missing: list[Trial]) -> tuple[Sequence[FunctionJob], Pool[Any]]:
        """Jobs of missing trials, the largest first."""
        self._pool = self._pool or self._at_end.enter_context(self._open_pool())
        missing = sorted(missing, key=self.work, reverse=True)
        return [FunctionJob(self._payload, t, self._how, self._group(t)) for t in missing], self._pool

    def _group(self, trial: Trial) -> str:
        """Name shared by trials that differ in the hyperparameter alone."""
        values = {name: value for name, value in trial.values.items() if name != self._space.tuned}
        return Trial(self._space.name, values).id

    def rows(self, job: FunctionJob, ended: Finished | Failed) -> Rows:
        """Row and curve of a trial."""
        outcome = ended.result if isinstance(ended, Finished) else Outcome("failed", math.nan, ended.reason)
        return as_rows(job.trial, outcome)

    def stored(self, job: FunctionJob, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remove checkpoints of a trial; of a failed one, its losses at rungs instead."""
        if rows[0]["status"] != "failed":
            (Folder(self._how.folder) / "work").remove(job.trial.id)
        elif (rungs := self._how.rungs(job.group)) is not None:
            forget_rungs(Folder(rungs), lambda name: name != job.trial.id)

    def tidy(self, trials: Sequence[Trial], stored: Callable[[], Collection[str]]) -> None:
        """Remove checkpoints of stored trials: a driver killed after it stored a row leaves them."""
        work = Folder(self._how.folder) / "work"
        if names := work.names():
            work.remove(*{*names} & {*stored()})

    def summary(self) -> str:
        return ""


def as_rows(trial: Trial, ended: Outcome, purchase: int | None = None) -> Rows:
    """Row and curve of a trial for the store."""
    own = {name: value for name, value in trial.values.items() if name != "seed"}
    row = {
        **trial.values,
        "trial_id": trial.id,
        "loss": ended.loss,
        "status": ended.status,
        "reason": ended.reason,
        "wall_time_s": ended.seconds,
        "steps_done": ended.step,
        "purchase": purchase,
        "versions": _versions(),
        "config": json.dumps(own, sort_keys=True),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    curve = [
        {"trial_id": trial.id, "step": step, "tokens": None, "split": "train", "loss": loss}
        for step, loss in ended.points
    ]
    return [row], curve


@functools.cache
def _versions() -> str:
    version = importlib.metadata.version("mup_tpu")
    return json.dumps({"python": platform.python_version(), "mup_tpu": version})


def place_here(folder: str, workers: int | None) -> tuple[int, OpensPool]:
    """CPU threads of a trial on this machine, and the opener of its workers' pool.

    By default one worker a GPU, which sees no other GPU; without GPUs one a core.

    Raises:
        ConfigError: the number of workers is not allowed.
    """
    if workers is not None:
        require_count("workers", workers)
    gpus = visible_gpus()
    count = workers_that_fit(workers or len(gpus) or cores(), _SERVER_MB, _WORKER_MB, "a study")
    parts = [gpus[i % len(gpus)] for i in range(count) if gpus]
    threads = max(1, cores() // count)
    return threads, lambda: Forked(count, folder, preload=("mup_tpu.study.function_job",), parts=parts)


def place_on_ray(
    folder: str, address: str | None, resources: Mapping[str, float], console: Console
) -> tuple[int, OpensPool]:
    """CPU threads of a trial on Ray, and the opener of a pool of actors, each with a trial's resources.

    Without an address the pool starts a cluster. The opener raises ConfigError if no cluster or node fits.

    Raises:
        ConfigError: an amount is not above 0.
    """
    for name, amount in resources.items():
        require_above_zero(f"resources {name}", amount)

    @contextlib.contextmanager
    def opened() -> Iterator[Pool[Any]]:
        from mup_tpu.jobs.cluster import RayActors, ray_cluster, slots_with

        look = functools.partial(slots_with, resources)
        with ray_cluster(address, console), RayActors(look(), look, folder) as pool:
            yield pool

    return max(1, int(resources.get("CPU", 1))), opened
