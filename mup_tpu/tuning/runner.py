"""Runner of missing trials, of our networks or of anyone's function; it stores each job's rows as it ends.

Checkpoints of packs lie beside the rows until each trial of the pack has its row; those for longer runs
(`--continue-to`) for good.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, Generic, Self, TypeVar

from rich.console import Console

from mup_tpu import data
from mup_tpu.config import DEVICES, Grid, RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.config.grid import Point
from mup_tpu.config.options import TrackerName
from mup_tpu.config.values import counted, parse_price, write_time
from mup_tpu.devices.peak import bfloat16_units
from mup_tpu.errors import ConfigError, Preempted, TrialsFailed
from mup_tpu.files import Folder, near, short_hash
from mup_tpu.jobs.driver import Failed, Finished, Pool, Preparing, Request, Split, Started, run_jobs
from mup_tpu.jobs.pack_job import PackJob, describe, make_packs, missing_trials, work
from mup_tpu.jobs.pools import Pools
from mup_tpu.jobs.this_machine import device_kind
from mup_tpu.store import Store, load_runs, load_values
from mup_tpu.training.record import PackResult, Rates, count_statuses, failed_row
from mup_tpu.tuning.progress import TrialProgress, cost, starting
from mup_tpu.tuning.tracking import Tracking

T = TypeVar("T", bound=Hashable)
_LONG_S = 10  # seconds from which the time of trials is printed
_SAME_FAILURES = 5  # trials that fail for one reason before any ends otherwise, after which no more begin
# Trials with the numbers of their purchases in a sequence; None without one
Purchases = Mapping[T, int | None]
# Rows of trials, and points of their curves, as the store takes them
Rows = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


@dataclass(eq=False)
class Runner(ABC, Generic[T]):
    """Runs missing trials of one kind, and stores the rows of each job as it ends.

    Subclasses make jobs of trials, and rows of their results. Jobs have `trials`, and their reports a static
    method `note`.
    """

    pool: Pool[Any] = field(init=False, repr=False)  # as `place` opens it; it stays for the next call

    store: Store
    console: Console
    heartbeat: float  # seconds without a report after which a worker counts as hung
    track: Sequence[TrackerName]
    deadline: float  # time, by `time.monotonic`, at which unfinished jobs are given up
    price: float = field(default=math.nan, kw_only=True)  # of an hour of a worker

    def __post_init__(self) -> None:
        self._tracking = Tracking(self.track, self.store)
        self._training_s = 0.0  # time of all trials of this call
        self._is_expected = False  # whether the time of the trials that run has been printed
        self._began = time.monotonic()
        self._reasons = Counter[str]()  # failed trials by their reason, which is printed for the first

    @abstractmethod
    def trial_id(self, trial: T) -> str: ...

    @abstractmethod
    def size(self, trial: T) -> str: ...

    @abstractmethod
    def work(self, trial: T) -> float: ...

    @abstractmethod
    def place(self, trials: int, at_most: int = 0) -> None:
        """Open the pool for a number of trials, `at_most` of whose jobs run at once; 0 is no limit."""

    @abstractmethod
    def jobs(self, trials: list[T]) -> Sequence[Any]: ...

    @abstractmethod
    def rows(self, job: Any, ended: Finished | Failed) -> Rows: ...

    @abstractmethod
    def stored(self, job: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remove checkpoints of a job whose rows are stored."""

    @abstractmethod
    def tidy(self, trials: Collection[T], stored: Callable[[], Collection[str]]) -> None:
        """Remove checkpoints that a killed call left."""

    def loss_name(self) -> str:
        return "loss"

    def parts(self, trials: Purchases[T]) -> Sequence[Purchases[T]]:
        return [trials]

    def elsewhere(self) -> Collection[str]:
        return ()

    def summary(self) -> str:
        return ""

    def run_grid(self, grid: Grid[T], points: Mapping[float, Point] | None = None) -> Counter[str]:
        """Run the missing trials of a grid, and return the number of this call's trials by status.

        With its points by size, runs are bought batch after batch, until each verdict is settled or not worth
        its cost.
        """
        if points is None:
            outcome = self.run(dict.fromkeys(grid.trials(), self.store.next_purchase()))
        else:
            from mup_tpu.tuning.sequence import Buyer, buy  # with the analysis

            buyer = Buyer(grid, points, self.trial_id, self.store, self.deadline)
            outcome = buy(buyer, self.run, self.deadline, self.console)
        self.say_cost(outcome)
        return outcome

    def say_cost(self, outcome: Counter[str]) -> None:
        """Print how this call's trials ended, what they cost, and where they are stored."""
        if outcome:
            took = write_time(time.monotonic() - self._began)
            self.console.print(
                f"ran {outcome.total()} trials in {took} ({cost(self._training_s, self.price)} of training): "
                f"{counted(sorted(outcome.items()))}; stored in {near(str(self.store.folder))}"
            )
        if time.monotonic() >= self.deadline:
            self.console.print("the budget is used up; the same command goes on")

    def run(self, trials: Purchases[T]) -> Counter[str]:
        elsewhere = self.elsewhere()
        return sum((self._run(part, elsewhere) for part in self.parts(trials)), Counter[str]())

    def _run(self, trials: Purchases[T], elsewhere: Collection[str]) -> Counter[str]:
        store, console = self.store, self.console
        lacking = missing_trials([*trials], store.done(stopped=False), self.trial_id)
        missing = missing_trials(lacking, elsewhere, self.trial_id)
        awaited = len(lacking) - len(missing)
        what = f"{store.experiment}: {len(trials)} trials, {len(trials) - len(lacking)} stored"
        what += f", {awaited} asked for elsewhere" * (awaited > 0) + f", {len(missing)} to run"
        seconds = self._expected(trials, lacking, missing)
        self._is_expected = not math.isnan(seconds)
        console.print(starting(what, seconds, self.price) if missing else what)
        outcome: Counter[str] = Counter()
        if missing:
            purchases = {self.trial_id(trial): trials[trial] for trial in missing}
            self.place(len(missing))
            progress = TrialProgress(missing, self.size, self.work, console, self.loss_name)
            outcome = self.drive(self.jobs(missing), progress, purchases)
            if summary := self.summary():
                console.print(summary)
        # The same command goes on from checkpoints of failed and unfinished trials.
        if not outcome["failed"] and time.monotonic() < self.deadline:
            self.tidy(trials, store.done)
        return outcome

    def drive(
        self,
        jobs: Any,
        progress: Any,
        purchases: Mapping[str, int | None],
        decide: Callable[[Any, Request], Collection[str]] = lambda job, request: (),
    ) -> Counter[str]:
        """Run jobs, and store the rows of each as it ends; return the number of their trials by status.

        `progress` follows the jobs as `TrialProgress` does. The first trials that end give the time of all,
        where no stored ones did. `decide` names trials that a job's request stops.
        """
        store, outcome, running = self.store, Counter[str](), set[Any]()
        began, trained_s = time.monotonic(), self._training_s
        with contextlib.closing(run_jobs(jobs, self.pool, self.heartbeat, decide)) as events, progress:
            for job, event in events:
                match event:
                    case Started():
                        running.add(job)
                        progress.update(job, "starting")
                    case Preparing(doing):
                        progress.update(job, doing)
                    case Split(parts, reason):
                        running.discard(job)
                        progress.update(job, "split")
                        self.console.print(f"{reason}: split into {len(parts)} packs")
                    case Finished() | Failed():
                        rows, curves = self.rows(job, event)
                        rows = [{**row, "purchase": purchases.get(row["trial_id"])} for row in rows]
                        store.append(rows, curves)  # before trackers, which may fail
                        self._tracking.add(rows, curves)
                        progress.ended(job, rows, curves)
                        outcome += (statuses := count_statuses(rows))
                        if statuses["preempted"]:
                            raise Preempted(
                                f"preempted in {job}, {job.kept}; the rest is stored in {store.folder}, and "
                                "the same command goes on"
                            )
                        times = [row.get("wall_time_s") for row in rows]  # a failed trial may have none
                        self._training_s += sum(s for s in times if s is not None and s > 0)
                        if outcome["finished"] and not self._is_expected:
                            self._is_expected = True
                            whole_s = (self._training_s - trained_s) / progress.ended_share
                            left_s = whole_s / len(running) - (time.monotonic() - began)
                            if left_s > _LONG_S:
                                self.console.print(
                                    f"all trials take about {cost(whole_s, self.price)} of training, "
                                    f"{write_time(left_s)} from now; Ctrl-C stops"
                                )
                        running.discard(job)
                        self.stored(job, rows)
                        for reason in {r["reason"]: None for r in rows if r["status"] == "failed"}:
                            self._say_failed(job, reason)
                        if {*outcome} == {"failed"} and max(self._reasons.values()) >= _SAME_FAILURES:
                            raise TrialsFailed(
                                f"the first {outcome.total()} trials failed, and the others would too: mend "
                                "this, and run the same command again"
                            )
                    case report:
                        progress.update(job, report=report)
                if time.monotonic() >= self.deadline:
                    break
        return outcome

    def _say_failed(self, job: Any, reason: str) -> None:
        """Print why a job failed; a reason that others had too is that of the first, whose output is kept."""
        # Without what is the trial's own: the file of its output, and its id in paths
        self._reasons[kind := re.sub(r" \(\S+\.txt\)$|[0-9a-f]{16}", "", str(reason))] += 1
        if self._reasons[kind] == 1:
            self.console.print(f"{job} failed: {reason}", style="red", markup=False)

    def _expected(self, trials: Collection[T], lacking: Collection[T], missing: Collection[T]) -> float:
        """Estimate how many seconds missing trials train, from stored trials; nan if none is stored."""
        awaited = {*lacking}
        ids = {self.trial_id(trial): trial for trial in trials if trial not in awaited}
        if not ids or not missing:
            return math.nan
        runs = load_runs(self.store.folder.path, ("trial_id", "wall_time_s"))
        known = runs[runs["trial_id"].isin(ids) & (runs["wall_time_s"] > 0)]
        work = sum(self.work(ids[name]) for name in known["trial_id"])
        return known["wall_time_s"].sum() / work * sum(map(self.work, missing)) if work > 0 else math.nan


class Corpora:
    """Datasets of trials, which may differ in batches or in text; each is loaded once.

    Data of the given trials is loaded at once, so that errors come first.
    """

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self._load = functools.cache(data.load)
        for trial in trials:
            self.of(trial)

    def of(self, trial: Trial) -> data.TokenDataset:
        return self._load(trial.data)

    def trial_id(self, trial: Trial) -> str:
        return trial.trial_id(self.of(trial).fingerprint)


def refuse_another_device(results: str | None, run: RunOptions) -> None:
    """Refuse runs of another kind of device than all those of a results folder, unless `run.mix` allows them.

    Rounding alone takes a CPU and XLA up to 0.035 nat apart in 400 steps at a high rate, which is chaotic.
    """
    if results is None or run.mix:
        return
    kinds = {name.partition(":")[0] for name in load_values(results, "device")}
    kinds = {kind if kind in DEVICES else "cuda" for kind in kinds}  # GPUs have names such as NVIDIA H100
    kind = device_kind(run)
    if kinds and kind not in kinds:
        raise ConfigError(
            f"device {kind!r} is not allowed: {results} holds runs of {', '.join(sorted(kinds))}, and losses "
            "of devices drift apart; give --mix to store both, or another results folder"
        )


def with_precision(trial: Trial, results: str | None, run: RunOptions, console: Console) -> Trial:
    """Return the trial with a precision in place of "auto", and print the precision and the reason."""
    if trial.train.precision != "auto":
        return trial
    stored = load_values(results, "precision") if results is not None else ()
    if len(stored) == 1:
        precision, why = stored[0], f"as the runs in {results}"
    else:
        precision, why = precision_of(run)
    console.print(f"precision {precision}: {why}")
    return trial.replace(precision=precision)


def sweep_with_precision(sweep: Sweep, results: str, run: RunOptions, console: Console) -> Sweep:
    if "precision" in sweep.fields:  # it compares precisions
        return sweep
    return replace(sweep, base=with_precision(sweep.base, results, run, console))


def precision_of(run: RunOptions) -> tuple[str, str]:
    has, why = bfloat16_units(device_kind(run))
    return ("bf16" if has else "float32"), why


class Packs(Runner[Trial]):
    """Trials of our networks, several of one shape a job.

    Checkpoints and logs lie beside the store; fields of `scale` tell sizes apart. Packs go on from
    checkpoints of the same trials with `steps_before` steps; 0 is none. At `evaluations` of a search a trial
    is checkpointed, and may be stopped.
    """

    def __init__(
        self,
        store: Store,
        corpora: Corpora,
        scale: Sequence[str],
        options: SweepOptions,
        run: RunOptions,
        console: Console,
        steps_before: int = 0,
        deadline: float = math.inf,
        evaluations: int = 0,
    ) -> None:
        price = parse_price(run.price) * run.split_over
        super().__init__(store, console, options.heartbeat, options.track, deadline, price=price)
        if evaluations:
            run = replace(run, checkpoint_every=1)
        self._evaluations = evaluations
        self._scale, self._steps_before, self._corpora = scale, steps_before, corpora
        self._options, self._pack_size = run, options.pack_size
        self._folders = CheckpointFolders(store.folder, corpora.trial_id, run)
        self._pools = Pools(options, str(store.folder), console)
        self._placed, self._rates = 0.0, list[Rates]()  # rates of each ended pack, over all of its training

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pools.close()

    def trial_id(self, trial: Trial) -> str:
        return self._corpora.trial_id(trial)

    def work(self, trial: Trial) -> float:
        return work(trial)

    def size(self, trial: Trial) -> str:
        return describe(trial, self._scale)

    def place(self, trials: int, at_most: int = 0) -> None:
        self._place = self._pools.place(trials, self._options, at_most or trials)
        self.pool = self._place.pool
        refuse_another_device(str(self.store.folder), self._place.run)
        self._placed, self._rates = time.monotonic(), []

    def jobs(self, trials: list[Trial]) -> Sequence[PackJob]:
        for batch_size in {trial.data.batch_size for trial in trials}:
            self._options.require_parts(batch_size)
        place, size = self._place, 1 if self._options.split_over > 1 else self._pack_size
        packs = make_packs(trials, place.workers, place.execution, size, place.gpu)
        at_start, before = 0, self._steps_before
        for pack in packs if before else ():
            from mup_tpu.training.checkpoint import begin

            shorter = [trial.replace(steps=before) for trial in pack]
            source, folder = self._folders.of(shorter), self._folders.of(pack)
            assert source is not None and folder is not None
            at_start += not begin(source, shorter, folder, pack, self.trial_id)
        if at_start:
            lacking = f"{at_start} of {len(packs)} packs have no checkpoint of {before} steps or before"
            self.console.print(f"{lacking} to go on from, and train from the start")

        def options(pack: list[Trial]) -> RunOptions:
            if not (count := self._evaluations):
                return place.run
            every = max(1, pack[0].train.steps // count)
            return replace(place.run, eval_every=every, checkpoint_every=every)

        asks = self._evaluations > 0
        return [PackJob(pack, options(pack), self._folders.of, asks, self._scale) for pack in packs]

    def rows(self, job: PackJob, ended: Finished | Failed) -> Rows:
        if isinstance(ended, Finished) and ended.result.rates:
            self._rates.append(ended.result.rates)
        if isinstance(ended, Failed):
            outcome = {"device": device_kind(job.options), "pack_size": len(job.trials)}
            of = self._corpora.of
            return [failed_row(t, of(t), ended.reason, **outcome) for t in job.trials], []
        result: PackResult = ended.result
        return result.rows, result.curves

    def stored(self, job: PackJob, rows: Sequence[Mapping[str, Any]]) -> None:
        self._folders.remove(job.trials)

    def tidy(self, trials: Collection[Trial], stored: Callable[[], Collection[str]]) -> None:
        self._folders.remove_done(list(trials), stored)

    def summary(self) -> str:
        tokens = sum(r.tokens for r in self._rates)
        rate = tokens / max(time.monotonic() - self._placed, 1e-9)
        parts = [f"{tokens:,} tokens in this call, {rate:,.0f} tokens/s in all"]
        if self._rates:
            per_device = mean(r.overall_tokens_per_second / r.devices for r in self._rates)
            parts.append(f"{per_device:,.0f} a device while it trained")
            known = [r.mfu for r in self._rates if not math.isnan(r.mfu)]
            parts += [f"MFU {mean(known):.1%}"] if known else []
            waits = [r.input_wait for r in self._rates]
            parts.append(f"input wait {mean(waits):.1%}, at most {max(waits):.1%}")
        return " · ".join(parts)


class CheckpointFolders:
    """Folders of checkpoints, named by all trials of a pack: drivers may pack the same trials differently."""

    def __init__(self, results: Folder, trial_id: Callable[[Trial], str], run: RunOptions) -> None:
        self.root, self._is_kept, self._trial_id = results / "checkpoints", run.checkpoint_every > 0, trial_id

    def of(self, pack: list[Trial]) -> str | None:
        first, *others = map(self._trial_id, pack)
        name = first if not others else f"{first}-{short_hash(' '.join([first, *others]))[:8]}"
        return str(self.root / name) if self._is_kept else None

    def remove(self, pack: list[Trial]) -> None:
        if folder := self.of(pack):
            with contextlib.suppress(OSError):
                self._remove(folder.rpartition("/")[2])

    def _remove(self, name: str) -> None:
        steps = (self.root / name).names()
        closed = [f"{name}/{step}" for step in steps if not self._meta(name, step).get("is_open")]
        self.root.remove(*(closed if len(closed) < len(steps) else [name]))

    def remove_done(self, trials: list[Trial], stored: Callable[[], Collection[str]]) -> None:
        """Remove checkpoints of an earlier, killed call whose trials all have rows.

        A pack without the row of a trial keeps its checkpoints: another driver may be training it. `stored`
        gives the trial_ids with a row.
        """
        if not self._is_kept:
            return
        done = set(stored())
        ended = {self._trial_id(trial) for trial in trials}.intersection(done)
        with contextlib.suppress(OSError):
            for name in [name for name in self.root.names() if name.partition("-")[0] in ended]:
                ids = [self._meta(name, step).get("trial_ids") for step in (self.root / name).names()]
                if {*next((of_step for of_step in ids if isinstance(of_step, list)), ())} <= done:
                    self._remove(name)
            if self.root.is_local:
                os.rmdir(self.root.path)  # succeeds only on an empty folder; a bucket has none

    def _meta(self, name: str, step: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is damaged
            return dict(json.loads(self.root.read(f"{name}/{step}/meta.json")))
        return {}
