"""Searches: Ray Tune chooses trials (`chooser.py`), the driver runs them, and the store keeps their rows.

The memory of a search is its log (`chooser.py`). A resumed search replays the log, then goes on with
unfinished trials from their checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.config.options import SearchOptions
from mup_tpu.config.sweep import Search
from mup_tpu.errors import ConfigError, Preempted
from mup_tpu.jobs.driver import Failed, Finished, Preparing, Split, Started, run_jobs
from mup_tpu.jobs.pack_job import Evaluated, PackJob
from mup_tpu.jobs.pools import Pools
from mup_tpu.store import FINAL, Store
from mup_tpu.training.process import handling
from mup_tpu.training.trials import pack_key
from mup_tpu.tuning.chooser import Chooser, SearchLog
from mup_tpu.tuning.progress import SearchProgress
from mup_tpu.tuning.runner import (
    CheckpointFolders,
    Corpora,
    refuse_another_device,
    rows_of_pack,
    with_precision,
)
from mup_tpu.tuning.tracking import Tracking, require_packages


@dataclass(frozen=True)
class SearchOutcome:
    """End of a call of a search."""

    counts: Counter[str]  # trials of this call by status
    unfinished: int  # trials left for a resumed search
    interrupted: bool = False  # whether Ctrl-C ended the call


def run_search(
    search: Search,
    results: str,
    options: SearchOptions,
    where: SweepOptions,
    run: RunOptions,
    resume: bool,
    console: Console,
) -> SearchOutcome:
    """Run a search, or the rest of it, and store its trials."""
    if run.placement == "slice":  # the driver's answers reach one host alone
        raise ConfigError("placement 'slice' is for sweeps; a search takes 'host' or 'chip'")
    require_packages(where.track)
    deadline = time.monotonic() + (options.seconds or math.inf)
    search = replace(search, base=with_precision(search.base, results, run, console))
    store, corpora = Store(results, search.experiment), Corpora([search.base])
    folder = store.folder
    folders = CheckpointFolders(folder, corpora.trial_id, replace(run, checkpoint_every=1))
    counts: Counter[str] = Counter()
    busy = f"results folder {folder} is being written by another search; wait for it, or stop it"
    with folder.locked("search.lock", busy):  # two would propose the same keys; in a bucket the log sees it
        log = SearchLog(folder)
        if log.events and not resume:
            raise ConfigError(
                f"results folder {folder} holds a search of {len(log.proposals)} trials; "
                "go on with --resume, or give this one a folder of its own"
            )
        if resume and not log.events:
            raise ConfigError(f"results folder {folder} holds no search to resume: leave out --resume")
        log.begin(search, options)
        left = options.num_samples - len(log.ended)
        if left <= 0:
            return SearchOutcome(counts, 0)
        tracking = Tracking(where.track, store)
        with (
            contextlib.closing(Pools(where, str(folder), console)) as pools,
            _pause_on_interrupt(console) as interrupted,
        ):
            place = pools.place(left, run, options.max_concurrent or left)
            refuse_another_device(results, place.run)

            def make_job(pack: list[Trial]) -> PackJob:
                # A checkpoint at each evaluation, since a trial may be paused at any of them.
                every = max(1, pack[0].train.steps // options.evaluations)
                run_and_ask = replace(place.run, eval_every=every, checkpoint_every=every)
                return PackJob(pack, run_and_ask, folders.of, asks=True)

            def is_pausing() -> bool:
                return bool(interrupted) or time.monotonic() >= deadline

            progress = SearchProgress(console, search, store, options.num_samples, log)
            proposals = _Proposals(
                search, Chooser(search, options, log), corpora, progress, make_job, is_pausing, left,
                where.pack_size or 1, {row["trial_id"]: row for row in store.results().to_dict("records")},
            )  # fmt: skip
            events = run_jobs(proposals, place.pool, where.heartbeat, proposals.decide)
            with progress, contextlib.closing(events):
                for job, event in events:
                    match event:
                        case Started():
                            progress.update(proposals.keys(job), "starting")
                        case Preparing(doing):
                            progress.update(proposals.keys(job), doing)
                        case Split(parts, reason):
                            console.print(f"{reason}: split into {len(parts)} packs")
                        case Finished(preempted=True) if is_pausing():
                            progress.update(proposals.keys(job), "paused")
                        case Finished(preempted=True):
                            raise Preempted(f"preempted in {job}; go on with --resume")
                        case Finished() | Failed():
                            rows, curves = rows_of_pack(job, event, corpora)
                            # The row before the log: a kill between them costs no trial, since a resumed
                            # search takes the end of a proposal from its row.
                            store.append(rows, curves)
                            tracking.add(rows, curves)
                            for row in rows:
                                counts[row["status"]] += 1
                                proposals.end(row)
                                if row["status"] == "failed":
                                    console.print(f"{job} failed: {row['reason']}", style="red")
                            folders.remove(job.trials)
                        case report:
                            progress.update(proposals.keys(job), f"at step {report.step}")
        folders.remove_done([*proposals.trials.values()], store.done)
    return SearchOutcome(counts, options.num_samples - len(log.ended), bool(interrupted))


@dataclass
class _Proposals:
    """Jobs of a search, each made when a worker is free, and the answers to their questions."""

    search: Search
    chooser: Chooser
    corpora: Corpora
    progress: SearchProgress
    make_job: Callable[[list[Trial]], PackJob]
    is_pausing: Callable[[], bool]
    left: int
    pack_size: int
    rows: dict[str, Mapping[Any, Any]]  # rows of trials that have ended, by trial_id
    trials: dict[str, Trial] = field(default_factory=dict)  # proposed trials by trial_id
    waiting: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Numbers of proposals without an end, by trial_id: an algorithm may propose a point again."""

    def __len__(self) -> int:
        return self.left

    def __iter__(self) -> Iterator[PackJob]:
        while trials := self._draw():
            packs = defaultdict(list)
            # Points of a space may differ in shape, and only trials of one shape train together.
            for trial in trials:
                packs[pack_key(trial)].append(trial)
            yield from map(self.make_job, packs.values())

    def _draw(self) -> list[Trial]:
        trials = list[Trial]()
        while len(trials) < self.pack_size and self.left and not self.is_pausing():
            if (key := self.chooser.propose()) is None:
                break
            self.left -= 1
            try:
                trial = self.search.trial(self.chooser.log.proposals[key])
            except ConfigError as error:  # the ends of each domain are allowed, not all between them
                self.progress.refused(key, str(error))
                self.chooser.end(key, self._finite(math.inf, self.search.base), is_whole=False)
                continue
            trial_id = self.corpora.trial_id(trial)
            self.trials[trial_id] = trial
            self.waiting[trial_id].append(key)
            if trial_id in self.rows:
                self.end(self.rows[trial_id])
            elif len(self.waiting[trial_id]) == 1:  # else it runs already
                trials.append(trial)
        return trials

    def keys(self, job: PackJob) -> list[int]:
        return [key for trial in job.trials for key in self.waiting[self.corpora.trial_id(trial)]]

    def decide(self, job: PackJob, question: Evaluated) -> set[str] | None:
        """Return the trial_ids that ASHA stops; None pauses the job, for a resumed search to go on with."""
        share, stopped = question.step / job.trials[0].train.steps, set[str]()
        for trial_id, loss in question.losses.items():
            first, *_ = self.waiting[trial_id]
            self.progress.update([first], f"at step {question.step}: loss {loss:.4f}")
            if self.chooser.stops(first, share, self._finite(loss, self.trials[trial_id])):
                stopped.add(trial_id)
        # ASHA hears of the loss even if the trial pauses: its next evaluation has another share.
        return None if self.is_pausing() else stopped

    def end(self, row: Mapping[Any, Any]) -> None:
        """Log the end of a trial whose row is stored."""
        trial_id, status = row["trial_id"], row["status"]
        loss = self._finite(row["loss"], self.trials[trial_id])
        for key in self.waiting.pop(trial_id):
            self.chooser.end(key, loss, is_whole=status in ("finished", "diverged"))
            self.progress.ended(key, row)
        if status in FINAL:
            self.rows[trial_id] = row

    def _finite(self, loss: float, trial: Trial) -> float:
        # Algorithms and schedulers need a number for a divergence: twice the loss of chance.
        worst = 2 * math.log(self.corpora.of(trial).vocab_size)
        return min(loss, worst) if math.isfinite(loss) else worst


@contextlib.contextmanager
def _pause_on_interrupt(console: Console) -> Iterator[list[int]]:
    """Handle Ctrl-C: the first pauses running trials at their next evaluation, the second ends at once.

    Yields a list that is empty until Ctrl-C is pressed.
    """
    interrupted: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(number)
        console.print("stopping: running trials checkpoint at their next evaluation; Ctrl-C again stops now")

    with handling({signal.SIGINT: on_interrupt}):
        yield interrupted
