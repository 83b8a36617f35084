"""Runner of a study's trials: calls of its function or program, and the rows of their outcomes."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import math
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from mup_tpu.analysis.ingest.table_values import is_cross_entropy
from mup_tpu.config import require_above_zero
from mup_tpu.config.grid import ORDERS
from mup_tpu.config.values import require_count
from mup_tpu.errors import ConfigError
from mup_tpu.files import Folder
from mup_tpu.internals.processes import cores
from mup_tpu.jobs.driver import Failed, Finished, Pool
from mup_tpu.jobs.pools import Forked
from mup_tpu.jobs.this_machine import visible_gpus, workers_that_fit
from mup_tpu.logs.lines import name_of
from mup_tpu.store import Result
from mup_tpu.study.attempt import Outcome
from mup_tpu.study.grid import Leases, StudyGrid
from mup_tpu.study.report import StudyTrial, damaged
from mup_tpu.study.trainer import FunctionJob
from mup_tpu.tuning.runner import Purchases, Rows, Runner

_log = logging.getLogger(__name__)

# Measured, without what the function itself imports and needs, which nobody knows before it runs.
_SERVER_MB, _WORKER_MB = 80, 60

OpensPool = Callable[[], contextlib.AbstractContextManager[Pool[Any]]]


@dataclass(eq=False)
class Calls(Runner[StudyTrial]):
    """Runner of a study's trials: calls of its function."""

    grid: StudyGrid
    leases: Leases
    code: str | None  # fingerprint of the trainer
    job: Callable[[StudyTrial, Collection[str], Sequence[str]], FunctionJob]  # trial, shown, shorter
    open_pool: Callable[[], Pool[Any]]  # once

    def trial_id(self, trial: StudyTrial) -> str:
        return trial.id

    def size(self, trial: StudyTrial) -> str:
        return " ".join(f"{name} {trial.values[name]:g}" for name in self.shown_sizes)

    @property
    def shown_sizes(self) -> list[str]:
        # Not the work by which a plan orders its sizes
        point = self.grid.points[0]
        return [name for name in point if name not in ORDERS or len(point) == 1]

    def work(self, trial: StudyTrial) -> float:
        return float(trial.values[self.grid.measure])

    def elsewhere(self) -> Collection[str]:
        return {lease.trial.id for lease in self.leases.running()}

    def loss_name(self) -> str:
        return next(iter(self.losses), "loss")

    def parts(self, trials: Purchases[StudyTrial]) -> Sequence[Purchases[StudyTrial]]:
        if (name := self.grid.continued) is None:
            return [trials]
        lengths = sorted({trial.values[name] for trial in trials})
        return [{t: n for t, n in trials.items() if t.values[name] == length} for length in lengths]

    def place(self, trials: int, at_most: int = 0) -> None:
        self.pool = self.open_pool()

    def jobs(self, trials: list[StudyTrial]) -> Sequence[FunctionJob]:
        missing = sorted(trials, key=self.work, reverse=True)
        # Not what all trials share
        shown = [*self.shown_sizes, *self.grid.compared[0], *self.grid.tuned, "seed"]
        known = self.store.known() if self.grid.continued else {}
        # Many longer runs may go on from one shorter.
        holds_whole = functools.cache(functools.partial(is_whole, self.store.folder / "work"))
        jobs = []
        for trial in missing:
            begun = [t.id for t in self.grid.shorter(trial) if finished(t, known) and holds_whole(t)]
            jobs.append(self.job(trial, shown, begun))
        return jobs

    @functools.cached_property
    def losses(self) -> dict[str, None]:
        stored = self.store.results()["versions"].str.extract(_LOSS_NAME)[0].dropna()
        return {json.loads(name): None for name in stored}

    def rows(self, job: FunctionJob, ended: Finished | Failed) -> Rows:
        outcome = ended.result if isinstance(ended, Finished) else Outcome("failed", math.nan, ended.reason)
        if outcome.lacks_loss and not self.losses:  # no other trial will tell one
            raise ConfigError(f"{job.trial}: {outcome.reason}")
        if (logged := outcome.logged) is not None:
            if not self.losses:
                self.console.print(f"loss: `{logged.name}` of lines like `{logged.line}`: {logged.loss:g}")
                if logged.loss > _SUM and is_cross_entropy(logged.name):
                    what = f"{logged.name} {logged.loss:g} is a sum over tokens, and not their mean"
                    self.console.print(f"note: {what}: ε of 0.01 nat means little, print the mean")
                self.losses[logged.name] = None
                rates = [name for name in self.grid.tuned if name_of(name).kind == "rate"]
                given = float(job.trial.values[rates[0]]) if len(rates) == 1 else math.nan
                shown = outcome.learning_rate
                if shown is not None and abs(shown - given) > 0.05 * max(shown, given):
                    self.console.print(
                        f"note: the output shows a learning rate of at most {shown:g}, and the trial has "
                        f"{rates[0]} {given:g}: does the program take it?"
                    )
            elif _without_numbers(logged.name) not in map(_without_numbers, self.losses):
                expected = next(iter(self.losses))
                why = f"its output tells `{logged.name}` and no `{expected}`, the loss of the other trials"
                outcome = replace(outcome, status="failed", loss=math.nan, reason=why)
        return rows_of(job.trial, outcome, code=self.code)

    def stored(self, job: FunctionJob, rows: Sequence[Mapping[str, Any]]) -> None:
        if not self._is_needed(job.trial, rows[0]["status"]):
            (self.store.folder / "work").remove(job.trial.id)

    def tidy(self, trials: Collection[StudyTrial], stored: Callable[[], Collection[str]]) -> None:
        # A driver that is killed after it has stored a row leaves checkpoints.
        work = self.store.folder / "work"
        if names := work.names():
            ended = {*names} & {*stored()}
            if self.grid.continued:
                known = self.store.known()
                of = {trial.id: trial for trial in trials}
                ended = {n for n in ended if n in of and not self._is_needed(of[n], known[n].status)}
            work.remove(*ended)

    def _is_needed(self, trial: StudyTrial, status: str) -> bool:
        name = self.grid.continued
        goes_on = name and trial.values[name] < max(p[name] for p in self.grid.points)
        return status == "failed" or (status == "finished" and bool(goes_on))


def finished(trial: StudyTrial, known: Mapping[str, Result]) -> bool:
    return trial.id in known and known[trial.id].status == "finished"


def is_whole(work: Folder, shorter: StudyTrial) -> bool:
    """Return whether longer runs may go on from a run's checkpoints; a file that was cut short is named."""
    file = damaged(Path(work.path, shorter.id)) if work.is_local else None
    if file is not None:
        _log.warning("%s is damaged: longer runs do not go on from %s", file, shorter)
    return file is None


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)  # w64/val_loss and w128/val_loss are one loss


_SUM = 100.0  # nat above which a cross-entropy is no mean of tokens
_LOSS_NAME = r'"loss": ("(?:[^"\\\\]|\\\\.)*")'


def rows_of(trial: StudyTrial, ended: Outcome, purchase: int | None = None, code: str | None = None) -> Rows:
    values = {name: value for name, value in trial.values.items() if name != "seed"}
    versions = _versions() | ({"trainer": code} if code else {})
    versions |= {"loss": ended.logged.name} if ended.logged else {}
    row = {
        **trial.values,
        "trial_id": trial.id,
        "loss": ended.loss,
        "status": ended.status,
        "reason": ended.reason,
        "wall_time_s": ended.seconds,
        "steps_done": ended.step,
        "purchase": purchase,
        "versions": json.dumps(versions),
        "config": json.dumps(values, sort_keys=True),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    point = {"trial_id": trial.id, "tokens": None, "split": "train"}
    curve = [{**point, "step": step, "loss": loss} for step, loss in ended.points]
    return [row], curve


@functools.cache
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "mup_tpu": importlib.metadata.version("mup_tpu")}


def place_here(folder: str, workers: int | None) -> tuple[int, OpensPool]:
    """Return the CPU threads of a trial on this machine, and the opener of its workers' pool.

    By default one worker per GPU, which sees no other GPU; without GPUs one per core.
    """
    if workers is not None:
        require_count("workers", workers)
    gpus = visible_gpus()
    count = workers_that_fit(workers or len(gpus) or cores(), _SERVER_MB, _WORKER_MB, "a study")
    parts = [gpus[i % len(gpus)] for i in range(count) if gpus]
    threads = max(1, cores() // count)
    return threads, lambda: Forked(
        count, folder, preload=("mup_tpu.jobs.pools", "mup_tpu.study.trainer"), parts=parts
    )


def place_on_ray(
    folder: str, address: str, resources: Mapping[str, float], console: Console, at_most: int = 0
) -> tuple[int, OpensPool]:
    """Return the CPU threads of a trial on Ray, and the opener of a pool with an actor for each trial.

    `at_most` limits the trials at once; 0 is no limit.
    """
    for name, amount in resources.items():
        require_above_zero(f"resources {name}", amount)

    @contextlib.contextmanager
    def opened() -> Iterator[Pool[Any]]:
        from mup_tpu.jobs.cluster import RayActors, ray_cluster, slots_with

        with (
            ray_cluster(address, console),
            RayActors(lambda: slots_with(resources), folder, at_most or sys.maxsize) as pool,
        ):
            yield pool

    return max(1, int(resources.get("CPU", 1))), opened
