"""Runner of missing trials, of our networks or of anyone's function; it stores each job's rows as it ends."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from rich.console import Console

from mup_tpu.config.options import TrackerName
from mup_tpu.errors import Preempted
from mup_tpu.jobs.driver import run_jobs
from mup_tpu.jobs.job import Failed, Finished, Job, Pool, Preparing, Split, Started
from mup_tpu.jobs.pack_job import missing_trials
from mup_tpu.store import Store
from mup_tpu.training.report import count_statuses
from mup_tpu.tuning.progress import TrialProgress
from mup_tpu.tuning.tracking import Tracking, require_packages

T = TypeVar("T", bound=Hashable)
# Rows of trials, and points of their curves, as the store takes them
Rows = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


class TrialKind(ABC, Generic[T]):
    """Trials of one kind: how they become jobs, and results of jobs become rows.

    Jobs have `trials`, and reports of one kind have a static method `note`. The kind opens a pool with the
    first jobs, and the end of the `with` block closes it.
    """

    kept = "its checkpoints are kept"
    """State of a preempted job, in words."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def trial_id(self, trial: T) -> str:
        """Return the trial_id in the store."""

    @abstractmethod
    def size(self, trial: T) -> str:
        """Return a trial's point of the scale, in words."""

    @abstractmethod
    def work(self, trial: T) -> float:
        """Return the expected time of a trial in any unit."""

    @abstractmethod
    def jobs(self, missing: list[T]) -> tuple[Sequence[Job], Pool[Any]]:
        """Return jobs of missing trials in the order of their start, and the open pool that runs them.

        Raises:
            ConfigError: an option does not fit the trials, or the device or cluster is not there.
        """

    @abstractmethod
    def rows(self, job: Any, ended: Finished | Failed) -> Rows:
        """Return rows and curves of a job that has ended, with a result or without."""

    @abstractmethod
    def stored(self, job: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remove checkpoints of a job after its rows are stored."""

    @abstractmethod
    def tidy(self, trials: Sequence[T], stored: Callable[[], Collection[str]]) -> None:
        """Remove checkpoints that a killed call left; `stored` gives the trial_ids with a row."""

    def summary(self) -> str:
        """Return a line about all jobs of a run; "" for none."""
        return ""


class TrialRunner(Generic[T]):
    """Runner of one results folder's trials; workers stay from one `run` to the next.

    Args:
        store: place of the rows; trackers of `track` get a copy of each.
        kind: kind of the trials.
        heartbeat: seconds without a report after which a worker counts as hung.
        halving: whether stopped trials count as run.

    Raises:
        ConfigError: a tracker's package is not installed.
    """

    def __init__(
        self,
        store: Store,
        kind: TrialKind[T],
        heartbeat: float,
        halving: bool,
        track: Sequence[TrackerName],
        console: Console,
    ) -> None:
        require_packages(track)
        self._store, self._kind, self._console = store, kind, console
        self._heartbeat, self._halving = heartbeat, halving
        self._tracking = Tracking(track, store)

    def __enter__(self) -> Self:
        self._kind.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._kind.__exit__(*error)

    def run(
        self,
        trials: Sequence[T],
        purchase: Callable[[T], int | None] = lambda trial: None,
        deadline: float = math.inf,
        elsewhere: Collection[str] = (),
    ) -> Counter[str]:
        """Run trials without a row; return the number of this call's trials by status.

        Args:
            trials: trials in any order.
            purchase: function from a trial to the number of its purchase in a sequence, or None.
            deadline: time by `time.monotonic` at which unfinished jobs are given up.
            elsewhere: ids of trials that somebody else runs.

        Raises:
            Preempted: SIGTERM ended the run.
        """
        store, kind, console = self._store, self._kind, self._console
        lacking = missing_trials(trials, store.done(stopped=self._halving), kind.trial_id)
        missing = [trial for trial in lacking if kind.trial_id(trial) not in elsewhere]
        awaited = len(lacking) - len(missing)
        console.print(
            f"{store.experiment}: {len(trials)} trials, {len(trials) - len(lacking)} stored, "
            f"{len(missing)} to run" + (f", {awaited} asked for elsewhere" if awaited else "")
        )
        outcome: Counter[str] = Counter()
        if missing:
            purchases = {kind.trial_id(trial): purchase(trial) for trial in missing}
            jobs, pool = kind.jobs(missing)
            with (
                contextlib.closing(run_jobs(jobs, pool, self._heartbeat)) as events,
                TrialProgress(missing, kind.size, kind.work, console) as progress,
            ):
                for job, event in events:
                    match event:
                        case Started():
                            progress.started(job)
                        case Preparing(doing):
                            progress.preparing(job, doing)
                        case Split(parts, reason):
                            progress.split(job)
                            console.print(f"{reason}: split into {len(parts)} packs")
                        case Finished() | Failed():
                            rows, curves = kind.rows(job, event)
                            rows = [{**row, "purchase": purchases[row["trial_id"]]} for row in rows]
                            store.append(rows, curves)  # before trackers, which may fail
                            self._tracking.add(rows, curves)
                            progress.ended(job, rows)
                            outcome += (statuses := count_statuses(rows))
                            if statuses["preempted"]:
                                raise Preempted(
                                    f"preempted in {job}, {kind.kept}; the rest is stored in "
                                    f"{store.folder}, and the same command goes on"
                                )
                            for reason in dict.fromkeys(r["reason"] for r in rows if r["status"] == "failed"):
                                console.print(f"{job} failed: {reason}", style="red")
                            kind.stored(job, rows)
                        case report:
                            progress.reported(job, report)
                    if time.monotonic() >= deadline:
                        break
            if summary := kind.summary():
                console.print(summary)
        # The same command goes on from checkpoints of failed and unfinished trials.
        if not outcome["failed"] and time.monotonic() < deadline:
            kind.tidy(trials, store.done)
        return outcome
