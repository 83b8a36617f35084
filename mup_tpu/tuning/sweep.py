"""A sweep: run what is missing of a known grid, store each pack as it ends.

The store is the only state. Running a sweep again runs what is missing and nothing else: that is resume,
caching, and "three more learning rates" in one rule.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mup_tpu import data
from mup_tpu.config import DataConfig, RunOptions, Sweep, SweepOptions, Trial, field_column
from mup_tpu.config.columns import CONFIGURED, configured, label, write
from mup_tpu.errors import ConfigError, Preempted, StoreError
from mup_tpu.jobs import local_packs, this_machine
from mup_tpu.jobs.plan import describe, make_packs, missing_trials
from mup_tpu.models import declare, training_flops
from mup_tpu.store import Store, StoredAxes, results_folder
from mup_tpu.training.continuation import begin, longer
from mup_tpu.training.report import (
    PackEvent,
    PackFailure,
    PackPreparing,
    PackResult,
    PackSplit,
    PackStarted,
    Report,
)
from mup_tpu.training.rows import failed_row
from mup_tpu.tuning.checkpoint_folders import CheckpointFolders
from mup_tpu.tuning.progress import SweepProgress, count_statuses
from mup_tpu.tuning.tracking import Tracking, require_packages

if TYPE_CHECKING:
    from mup_tpu.jobs.ray_packs import KeptWorkers


def run_sweep(
    sweep: Sweep,
    results: str,
    options: SweepOptions,
    run: RunOptions,
    console: Console,
    continue_to: int | None = None,
) -> Counter[str]:
    """Run what is missing of a sweep and store it.

    Args:
        sweep: the grid.
        results: results folder or fsspec URL; rows already there are not run again.
        options: where it runs.
        run: how each pack is run.
        console: for progress.
        continue_to: steps of the trials in place of the sweep's, gone on to from checkpoints of those.

    Returns:
        How many trials ended how in this call; empty where nothing was missing.

    Raises:
        ConfigError: a trial of the grid is not allowed, or cannot be gone on with, two points of its scale
            measure the same, or the device or cluster is not there.
        StoreError: the results folder cannot be written, or holds another experiment, other axes, or runs of
            another kind.
        DataError: the corpus cannot be used.
    """
    trials = sweep.trials()
    if continue_to is not None:
        _check_goes_on(sweep, run)
        trials = [longer(trial, continue_to) for trial in trials]
    corpora = Corpora(trials)
    measured(sweep, corpora)
    store = Store(results, sweep.experiment, StoredAxes.of(sweep))
    check_alike(sweep, store, but=() if continue_to is None else ("steps",))
    run = replace(run, tuned=sweep.tune_axis.fields)
    purchase = store.next_purchase()
    before = None if continue_to is None else sweep.base.train.steps
    return run_missing(
        store, corpora, trials, sweep.scale_axis.fields, options, run, console,
        lambda trial: purchase, steps_before=before,
    )  # fmt: skip


def _check_goes_on(sweep: Sweep, run: RunOptions) -> None:
    """Check what trials need to go on to more steps, beside what `longer` does.

    Raises:
        ConfigError: an axis sets the steps, or packs are not checkpointed, or halved at shares of the steps.
    """
    if any("steps" in axis.fields for axis in sweep.axes):
        raise ConfigError("continue_to sets the steps of all trials, and an axis of the sweep does so too")
    if not run.checkpoint_every:
        raise ConfigError("continue_to needs checkpoint_every: packs go on from checkpoints")
    if run.halving:
        raise ConfigError("continue_to needs halving false: it stops trials at shares of the steps")


def what_is_missing(sweep: Sweep, results: str) -> tuple[list[Trial], Corpora]:
    """What `run_sweep` would train now, and the data; nothing is written.

    Raises:
        ConfigError, StoreError, DataError: as `run_sweep`.
    """
    trials = sweep.trials()
    corpora, done = Corpora(trials), set[str]()
    measured(sweep, corpora)
    if "store.json" in results_folder(results).names():
        store = Store(results, sweep.experiment, StoredAxes.of(sweep))
        check_alike(sweep, store)
        done = store.done()
    return missing_trials(trials, done, corpora.trial_id), corpora


def run_trials(
    experiment: str,
    trials: list[Trial],
    scale: Sequence[str],
    results: str,
    options: SweepOptions,
    run: RunOptions,
    console: Console,
) -> Counter[str]:
    """Run what is missing of any trials, as `run_sweep` does; fields of `scale` tell their sizes."""
    store = Store(results, experiment)
    return run_missing(store, Corpora(trials), trials, scale, options, run, console)


def measured(sweep: Sweep, corpora: Corpora) -> dict[float, dict[str, Any]]:
    """Points of the scale by what measures them, which must tell them apart, or an analysis would take two
    for one.

    Raises:
        ConfigError: two of them measure the same.
        DataError: the corpus cannot be used.
    """
    axis, found = sweep.scale_axis, dict[float, dict[str, Any]]()
    for point in axis.points:
        trial = sweep.base.replace(**point)
        vocab_size = corpora.of(trial).vocab_size  # of the data, as in rows: bytes have 256 whatever is asked
        declaration = declare(trial.model, vocab_size, trial.data.sequence_length)
        values = {
            **configured(trial),
            "params_non_embedding": declaration.non_embedding,
            "flops": training_flops(trial, vocab_size),
        }
        at = describe(trial, axis.fields)
        size = float(values[axis.column])
        if size in found:
            before = describe(sweep.base.replace(**found[size]), axis.fields)
            raise ConfigError(
                f"scale: {before} and {at} have the same {label(axis.column)} "
                f"({write(axis.column, values[axis.column])}), by which the sweep is measured; "
                "give a measured_by that tells them apart"
            )
        found[size] = point
    return found


def check_alike(sweep: Sweep, store: Store, but: Sequence[str] = ()) -> None:
    """What is stored must be of the sweep's kind, or every analysis of both would be refused afterwards;
    fields of `but` may differ.

    Raises:
        StoreError: a field that the sweep does not change along an axis has another value there.
    """
    runs = store.results()
    fields = [*but, *(field for axis in sweep.axes for field in axis.fields)]
    changing = {field_column(field) for field in fields} | {"seed", "corpus"}
    own = configured(sweep.base)
    for column, value in own.items():
        if column not in CONFIGURED or column in changing or not len(runs):
            continue
        others = [v for v in runs[column].dropna().unique().tolist() if v != value]
        if others:
            raise StoreError(
                f"results folder {store.folder} holds runs with {label(column)} {write(column, others[0])}, "
                f"and this sweep has {write(column, value)}; an analysis compares runs of one kind: give "
                f"another --results, or look at what is there with --where {column}={others[0]}"
            )


def run_missing(
    store: Store,
    corpora: Corpora,
    trials: list[Trial],
    scale: Sequence[str],
    options: SweepOptions,
    run: RunOptions,
    console: Console,
    purchase: Callable[[Trial], int | None] = lambda trial: None,
    deadline: float = math.inf,
    steps_before: int | None = None,
    workers: KeptWorkers | None = None,
) -> Counter[str]:
    """Run what a store misses of some trials.

    Args:
        store: where rows go.
        corpora: of the trials.
        trials: in any order.
        scale: fields that tell their sizes.
        options: where they run.
        run: how each pack is run.
        console: for progress.
        purchase: of a sequence that a trial comes with; None where it is of none.
        deadline: by `time.monotonic`, when packs that have not ended are given up.
        steps_before: steps of the same trials whose checkpoints are gone on from; None goes on from none.
        workers: on Ray, what stays from one call to the next; None keeps nothing.

    Returns:
        How many trials ended how in this call; empty where nothing was missing.
    """
    require_packages(options.track)
    tracking = Tracking(options.track, store)
    missing = missing_trials(trials, store.done(stopped=run.halving), corpora.trial_id)
    console.print(
        f"{store.experiment}: {len(trials)} trials, {len(trials) - len(missing)} stored, "
        f"{len(missing)} to run",
        highlight=False,
    )
    if not missing:
        return Counter()
    if run.placement != "host" and not options.on_ray:
        raise ConfigError(f"placement {run.placement!r} needs Ray: add --ray or --address")
    for batch_size in {trial.data.batch_size for trial in missing}:
        run.require_parts(batch_size)
    folders = CheckpointFolders(store.folder, corpora.trial_id, run)
    runner = functools.partial(_with_ray, workers) if options.on_ray else _on_this_machine
    with (
        runner(missing, options, run, folders, str(store.folder), console) as (packs, events),
        SweepProgress(missing, scale, console) as progress,
    ):
        if steps_before is not None:
            _begin_packs(packs, steps_before, corpora, folders, console)
        keeper = _Keeper(store, corpora, folders, packs, scale, run, progress, console, purchase, tracking)
        for index, event in events:
            keeper.take(index, event)
            if time.monotonic() >= deadline:
                break
    console.print(progress.summary(), highlight=False, soft_wrap=True)
    if not keeper.outcome["failed"] and time.monotonic() < deadline:
        folders.remove_done(trials, store.done)
    return keeper.outcome


def _begin_packs(
    packs: list[list[Trial]],
    steps_before: int,
    corpora: Corpora,
    folders: CheckpointFolders,
    console: Console,
) -> None:
    """Have packs go on from checkpoints of their trials with fewer steps, and say which cannot."""
    at_start = 0
    for pack in packs:
        shorter = [trial.replace(steps=steps_before) for trial in pack]
        folder = folders.of(pack)
        assert folder is not None
        at_start += not begin(folders.root, pack, shorter, corpora.trial_id, folder)
    if at_start:
        console.print(
            f"{at_start} of {len(packs)} packs have no checkpoint of {steps_before} steps or before to go on "
            "from, and train from the start",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


class Corpora:
    """The data of trials, which may differ in batches or in text, each loaded once."""

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        """Load those of some trials now, so that what is wrong with them is said first."""
        self._datasets: dict[DataConfig, data.TokenDataset] = {}
        for trial in trials:
            self.of(trial)

    def of(self, trial: Trial) -> data.TokenDataset:
        """What a trial trains on."""
        if trial.data not in self._datasets:
            self._datasets[trial.data] = data.load(trial.data)
        return self._datasets[trial.data]

    def trial_id(self, trial: Trial) -> str:
        """Name of a trial's row."""
        return trial.trial_id(self.of(trial).fingerprint)


class _Keeper:
    """Shows what packs say of themselves, and stores what they leave."""

    def __init__(
        self,
        store: Store,
        corpora: Corpora,
        folders: CheckpointFolders,
        packs: list[list[Trial]],
        scale: Sequence[str],
        run: RunOptions,
        progress: SweepProgress,
        console: Console,
        purchase: Callable[[Trial], int | None],
        tracking: Tracking,
    ) -> None:
        self._tracking = tracking
        self._purchase = {corpora.trial_id(t): purchase(t) for pack in packs for t in pack}
        self._store, self._corpora, self._folders, self._packs = store, corpora, folders, packs
        self._scale, self._run, self._progress, self._console = scale, run, progress, console
        self.outcome: Counter[str] = Counter()
        """Trials by how they ended."""

    def take(self, index: int, event: PackEvent) -> None:
        """Take an event of a pack.

        Raises:
            Preempted: the pack was; what ended before is stored.
        """
        match event:
            case PackStarted():
                self._progress.started(index, self._packs[index])
            case PackPreparing():
                self._progress.preparing(index, event.doing)
            case Report():
                self._progress.reported(index, event)
            case PackSplit():
                self._progress.split(index)
                self._console.print(f"{event.reason}: split into {len(event.packs)} packs", highlight=False)
            case PackFailure():
                size = describe(self._packs[index][0], self._scale)
                self._console.print(f"a pack of {size} failed: {event.reason}", style="red", soft_wrap=True)
                self._store_result(index, self._failed(index, event.reason))
            case PackResult():
                self._store_result(index, event)

    def _failed(self, index: int, reason: str) -> PackResult:
        pack, device = self._packs[index], self._run.device
        rows = [failed_row(t, self._corpora.of(t), reason, device, len(pack)) for t in pack]
        return PackResult(rows, [], None, None)

    def _store_result(self, index: int, result: PackResult) -> None:
        pack = self._packs[index]
        rows = [{**row, "purchase": self._purchase[row["trial_id"]]} for row in result.rows]
        self._store.append(rows, result.curves)
        self._tracking.add(rows, result.curves)
        self._progress.finished(index, result)
        statuses = count_statuses(result)
        self.outcome += statuses
        if statuses["preempted"]:
            kept = "its checkpoint is kept" if self._run.checkpoint_every else "without --checkpoint-every"
            raise Preempted(
                f"preempted in a pack of {describe(pack[0], self._scale)}, {kept}; "
                f"the rest is stored in {self._store.folder}, and the same command goes on"
            )
        self._folders.remove(pack)


@contextlib.contextmanager
def _with_ray(
    workers: KeptWorkers | None,
    trials: list[Trial],
    options: SweepOptions,
    run: RunOptions,
    folders: CheckpointFolders,
    results: str,
    console: Console,
) -> Iterator[tuple[list[list[Trial]], Generator]]:
    with console.status("importing ray"):
        from mup_tpu.jobs import cluster, ray_packs

    with cluster.ray_cluster(options.address, console):
        run = replace(run, threads=run.threads or cluster.threads(len(trials)))
        slots = cluster.slots(run)
        execution = slots.execution if run.execution == "auto" else run.execution
        packs = make_packs(trials, slots.count, execution, options.pack_size)
        with contextlib.closing(
            ray_packs.run_packs(packs, run, slots, folders.of, results, options.heartbeat, workers)
        ) as events:
            yield packs, events


@contextlib.contextmanager
def _on_this_machine(
    trials: list[Trial],
    options: SweepOptions,
    run: RunOptions,
    folders: CheckpointFolders,
    results: str,
    console: Console,
) -> Iterator[tuple[list[list[Trial]], Generator]]:
    workers, threads = this_machine.room(len(trials), run)
    with console.status("looking for the device"):  # torch is imported to find an accelerator
        execution = local_packs.execution(run)
    packs = make_packs(trials, workers, execution, options.pack_size)
    run = replace(run, threads=threads)
    with contextlib.closing(
        local_packs.run_packs(packs, run, workers, folders.of, results, options.heartbeat)
    ) as events:
        yield packs, events
