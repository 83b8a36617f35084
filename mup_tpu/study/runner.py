"""Runner of missing trials of a study; it stores each as it ends."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from mup_tpu.errors import Preempted, StoreError, raised_as
from mup_tpu.files import lock
from mup_tpu.jobs.driver import run_jobs
from mup_tpu.jobs.forked import Forked
from mup_tpu.jobs.job import Failed, Finished, Started
from mup_tpu.jobs.plan import missing_trials
from mup_tpu.jobs.pool import Pool
from mup_tpu.jobs.this_machine import cores, visible_gpus
from mup_tpu.store import Store
from mup_tpu.study.attempt import Outcome
from mup_tpu.study.function_job import FunctionJob, How
from mup_tpu.study.progress import StudyProgress
from mup_tpu.study.report import Reported
from mup_tpu.study.space import Space, Trial

OpensPool = Callable[[], contextlib.AbstractContextManager[Pool[Any]]]


class StudyRunner:
    """Runs trials of one study; workers stay from one `run` to the next.

    Args:
        store: where rows go.
        space: the study.
        payload: pickled training function.
        how: how each trial is run.
        pool: opens the pool that trials run on.
        heartbeat: seconds without a report after which a trial that has reported counts as hung.
        console: for progress.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        payload: bytes,
        how: How,
        pool: OpensPool,
        heartbeat: float,
        console: Console,
    ) -> None:
        self._store, self._space, self._payload, self._how = store, space, payload, how
        self._make_pool, self._heartbeat, self._console = pool, heartbeat, console
        self._at_end = contextlib.ExitStack()
        self._pool: Pool[Any] | None = None

    def __enter__(self) -> Self:
        self._at_end.enter_context(only_driver(self._how.folder))
        return self

    def __exit__(self, *error: object) -> None:
        with self._at_end:
            self._pool = None

    def run(
        self,
        trials: Sequence[Trial],
        purchase: Callable[[Trial], int | None] = lambda trial: None,
        deadline: float = math.inf,
        elsewhere: Collection[str] = (),
    ) -> Counter[str]:
        """Run the trials that have no row yet, the largest first.

        Args:
            trials: in any order.
            purchase: number of the purchase of a sequence that a trial belongs to; None without one.
            deadline: time by `time.monotonic` at which trials that have not ended are given up.
            elsewhere: ids of trials that somebody else runs.

        Returns:
            Number of this call's trials by status; empty if none was missing.

        Raises:
            Preempted: SIGTERM ended the run.
        """
        done = self._store.done(stopped=self._how.halving)
        missing = missing_trials(trials, {*done, *elsewhere}, lambda trial: trial.id)
        self._remove_work(done)
        console, space = self._console, self._space
        stored = sum(trial.id in done for trial in trials)
        asked = len(trials) - stored - len(missing)
        console.print(
            f"{space.name}: {len(trials)} trials, {stored} stored, {len(missing)} to run"
            + (f", {asked} asked for elsewhere" if asked else ""),
            highlight=False,
        )
        if not missing:
            return Counter()
        self._pool = self._pool or self._at_end.enter_context(self._make_pool())
        missing.sort(key=self._measure, reverse=True)
        jobs = [FunctionJob(self._payload, trial, self._how, self._group(trial)) for trial in missing]
        outcome: Counter[str] = Counter()
        with (
            contextlib.closing(run_jobs(jobs, self._pool, self._heartbeat)) as events,
            StudyProgress(missing, space.size, self._measure, console) as progress,
        ):
            for job, event in events:
                assert isinstance(job, FunctionJob)
                match event:
                    case Started():
                        progress.started(job.trial)
                    case Reported():
                        progress.reported(job.trial, event)
                    case Failed() | Finished():
                        ended = event.result if isinstance(event, Finished) else _failed(event)
                        self._keep(job.trial, ended, purchase(job.trial))
                        outcome[ended.status] += 1
                        progress.ended(job.trial, ended.status, ended.loss)
                if time.monotonic() >= deadline:
                    break
        return outcome

    def _remove_work(self, done: Collection[str]) -> None:
        """Remove checkpoints of stored trials: a driver killed after it stored a row leaves them."""
        work = self._store.folder / "work"
        work.remove(*{*work.names()} & {*done})

    def _measure(self, trial: Trial) -> float:
        return float(trial.values[self._space.measured_by])

    def _group(self, trial: Trial) -> str:
        """Name of the trials that this one differs from in the hyperparameter alone."""
        values = {name: value for name, value in trial.values.items() if name != self._space.tuned}
        return Trial(self._space.name, values).id

    def _keep(self, trial: Trial, ended: Outcome, purchase: int | None) -> None:
        """Store a trial's row, and drop its checkpoints where that is a result.

        Raises:
            Preempted: the trial was; rows of those that ended before are stored.
        """
        self._store.append(*as_rows(trial, ended, purchase))
        if ended.status == "preempted":
            raise Preempted(
                f"preempted in {trial}; its checkpoints are kept, the rest is stored in "
                f"{self._store.folder}, and the same command goes on"
            )
        if ended.status == "failed":
            self._console.print(
                f"{trial} failed: {ended.reason}", style="red", soft_wrap=True, highlight=False
            )
        else:
            (self._store.folder / "work").remove(trial.id)


def as_rows(
    trial: Trial, ended: Outcome, purchase: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Row and curve of a trial, as the store takes them."""
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
        "versions": json.dumps(
            {"python": platform.python_version(), "mup_tpu": importlib.metadata.version("mup_tpu")}
        ),
        "config": json.dumps(own, sort_keys=True),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    curve = [
        {"trial_id": trial.id, "step": step, "tokens": None, "split": "train", "loss": loss}
        for step, loss in ended.points
    ]
    return [row], curve


def _failed(event: Failed) -> Outcome:
    return Outcome("failed", math.nan, event.reason)


@contextlib.contextmanager
def only_driver(folder: str) -> Iterator[None]:
    """Lock of a local study's folder, which one driver holds at a time; the system frees it after a kill.

    Raises:
        StoreError: another process runs the study.
    """
    if "://" in folder:
        yield
        return
    path = Path(folder, "driver.lock")
    with raised_as(StoreError, f"{path} cannot be opened"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = lock(path)
        except BlockingIOError:
            who = path.read_text().strip() or "another process"
            raise StoreError(
                f"results folder {folder} is being run by {who}: wait for it, or let both ask and tell"
            ) from None
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} of {platform.node()}")
        file.flush()
        yield


def pool_here(folder: str, workers: int | None) -> tuple[int, OpensPool]:
    """Number of workers on this machine, and the opener of their pool.

    By default one worker a GPU, which sees no other, or one a core on a machine without.
    """
    gpus = visible_gpus()
    count = workers or len(gpus) or cores()
    parts = [gpus[i % len(gpus)] for i in range(count) if gpus]
    return count, lambda: Forked(count, folder, preload=("mup_tpu.study.function_job",), parts=parts)


@contextlib.contextmanager
def pool_on_ray(
    folder: str, address: str | None, resources: dict[str, float], console: Console
) -> Iterator[Pool[Any]]:
    """Pool of Ray actors with the resources of one trial each; without an address it starts a cluster.

    Raises:
        ConfigError: there is no such cluster, or no node has the resources.
    """
    from mup_tpu.jobs.cluster import ray_cluster, slots_with
    from mup_tpu.jobs.ray_actors import RayActors

    look = functools.partial(slots_with, resources)
    with ray_cluster(address, console), RayActors(look(), look, folder) as pool:
        yield pool
