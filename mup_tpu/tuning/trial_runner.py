"""Runner of missing trials; it stores each pack as it ends."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.errors import ConfigError, Preempted
from mup_tpu.jobs.driver import run_jobs
from mup_tpu.jobs.job import Failed, Finished, Preparing, Split, Started
from mup_tpu.jobs.pack_job import PackJob
from mup_tpu.jobs.plan import describe, make_packs, missing_trials
from mup_tpu.jobs.pools import Pools
from mup_tpu.store import Store
from mup_tpu.training.continuation import begin
from mup_tpu.training.report import PackResult, Report, count_statuses
from mup_tpu.training.rows import failed_row
from mup_tpu.tuning.checkpoint_folders import CheckpointFolders
from mup_tpu.tuning.corpora import Corpora
from mup_tpu.tuning.progress import SweepProgress
from mup_tpu.tuning.tracking import Tracking, require_packages


class TrialRunner:
    """Runner of one results folder's trials, for sweeps, sequences and transfers.

    Workers stay from one `run` to the next; they end with the `with` block.
    """

    def __init__(
        self,
        store: Store,
        corpora: Corpora,
        scale: Sequence[str],
        options: SweepOptions,
        run: RunOptions,
        console: Console,
    ) -> None:
        require_packages(options.track)
        self.store, self.corpora, self.scale = store, corpora, scale
        self.options, self.run_options, self.console = options, run, console
        self.tracking = Tracking(options.track, store)
        self.folders = CheckpointFolders(store.folder, corpora.trial_id, run)
        self._pools = Pools(options, str(store.folder), console)

    def __enter__(self) -> Self:
        self._pools.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pools.__exit__(*error)

    def run(
        self,
        trials: Sequence[Trial],
        purchase: Callable[[Trial], int | None] = lambda trial: None,
        deadline: float = math.inf,
        steps_before: int | None = None,
    ) -> Counter[str]:
        """Run trials without a row; returns the number of this call's trials by status.

        Args:
            trials: trials in any order.
            purchase: function from a trial to the number of its purchase in a sequence, or None.
            deadline: time by `time.monotonic` at which unfinished packs are given up.
            steps_before: steps of the same trials with checkpoints to go on from; None starts anew.
        """
        store, run, console = self.store, self.run_options, self.console
        missing = missing_trials(trials, store.done(stopped=run.halving), self.corpora.trial_id)
        console.print(
            f"{store.experiment}: {len(trials)} trials, {len(trials) - len(missing)} stored, "
            f"{len(missing)} to run",
            highlight=False,
        )
        if not missing:
            return Counter()
        if run.placement != "host" and not self.options.on_ray:
            raise ConfigError(f"placement {run.placement!r} needs Ray: add --ray or --address")
        for batch_size in {trial.data.batch_size for trial in missing}:
            run.require_parts(batch_size)
        place = self._pools.place(len(missing), run)
        packs = make_packs(missing, place.workers, place.execution, self.options.pack_size)
        jobs = [PackJob(pack, place.run, self.folders.of) for pack in packs]
        with (
            contextlib.closing(run_jobs(jobs, place.pool, self.options.heartbeat)) as events,
            SweepProgress(missing, self.scale, console) as progress,
        ):
            if steps_before is not None:
                self._begin(packs, steps_before)
            keeper = _Keeper(
                self, progress, {self.corpora.trial_id(trial): purchase(trial) for trial in missing}
            )
            for job, event in events:
                keeper.take(job, event)
                if time.monotonic() >= deadline:
                    break
        console.print(progress.summary(), highlight=False, soft_wrap=True)
        if not keeper.outcome["failed"] and time.monotonic() < deadline:
            self.folders.remove_done(list(trials), store.done)
        return keeper.outcome

    def _begin(self, packs: Sequence[list[Trial]], steps_before: int) -> None:
        """Have packs go on from checkpoints of their trials with fewer steps; print how many cannot."""
        at_start = 0
        for pack in packs:
            shorter = [trial.replace(steps=steps_before) for trial in pack]
            folder = self.folders.of(pack)
            assert folder is not None
            at_start += not begin(self.folders.root, pack, shorter, self.corpora.trial_id, folder)
        if at_start:
            self.console.print(
                f"{at_start} of {len(packs)} packs have no checkpoint of {steps_before} steps or before to "
                "go on from, and train from the start",
                highlight=False,
                soft_wrap=True,
            )


class _Keeper:
    """Taker of events: it shows progress, and stores rows."""

    def __init__(self, runner: TrialRunner, progress: SweepProgress, purchase: dict[str, int | None]) -> None:
        self._runner, self._progress, self._purchase = runner, progress, purchase
        self.outcome: Counter[str] = Counter()
        """Trials by how they ended."""

    def take(self, job: Any, event: Any) -> None:
        """Take an event of a pack."""
        console = self._runner.console
        match event:
            case Started():
                self._progress.started(job)
            case Preparing():
                self._progress.preparing(job, event.doing)
            case Report():
                self._progress.reported(job, event)
            case Split():
                self._progress.split(job)
                console.print(f"{event.reason}: split into {len(event.parts)} packs", highlight=False)
            case Failed():
                size = describe(job.trials[0], self._runner.scale)
                console.print(f"a pack of {size} failed: {event.reason}", style="red", soft_wrap=True)
                of, device = self._runner.corpora.of, self._runner.run_options.device
                rows = [failed_row(t, of(t), event.reason, device, len(job.trials)) for t in job.trials]
                self._store(job, PackResult(rows, [], None, None))
            case Finished():
                self._store(job, event.result)

    def _store(self, job: PackJob, result: PackResult) -> None:
        runner = self._runner
        rows = [{**row, "purchase": self._purchase[row["trial_id"]]} for row in result.rows]
        runner.store.append(rows, result.curves)
        runner.tracking.add(rows, result.curves)
        self._progress.finished(job, result)
        self.outcome += count_statuses(result.rows)
        if job.was_preempted(result):
            has_checkpoint = runner.run_options.checkpoint_every
            kept = "its checkpoint is kept" if has_checkpoint else "without --checkpoint-every"
            raise Preempted(
                f"preempted in a pack of {describe(job.trials[0], runner.scale)}, {kept}; "
                f"the rest is stored in {runner.store.folder}, and the same command goes on"
            )
        runner.folders.remove(job.trials)
