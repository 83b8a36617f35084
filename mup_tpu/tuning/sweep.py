"""A sweep: run what is missing of a known grid, store each pack as it ends.

The store is the only state. Running a sweep again runs what is missing and nothing else: that is resume,
caching, and "three more learning rates" in one rule.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace

from rich.console import Console

from mup_tpu import data
from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.errors import ConfigError, Preempted
from mup_tpu.files import Folder
from mup_tpu.store import Store
from mup_tpu.training.report import PackResult, PackSplit, Report
from mup_tpu.training.rows import failed_row
from mup_tpu.tuning import local_packs, this_machine
from mup_tpu.tuning.plan import make_packs, missing_trials
from mup_tpu.tuning.progress import SweepProgress, count_statuses


def run_sweep(
    sweep: Sweep, results: str, options: SweepOptions, run: RunOptions, console: Console
) -> Counter[str]:
    """Run what is missing of a sweep and store it.

    Args:
        sweep: the grid.
        results: results folder or fsspec URL; rows already there are not run again.
        options: where it runs.
        run: how each pack is run.
        console: for progress.

    Returns:
        How many trials ended how in this call; empty where nothing was missing.

    Raises:
        ConfigError: a trial of the grid is not allowed, or the device or cluster is not there.
        StoreError: the results folder cannot be written or holds another experiment.
        DataError: the corpus cannot be used.
    """
    return run_trials(sweep.experiment, sweep.trials(), results, options, run, console)


def run_trials(
    experiment: str,
    trials: list[Trial],
    results: str,
    options: SweepOptions,
    run: RunOptions,
    console: Console,
) -> Counter[str]:
    """Run what is missing of any trials that share their data, as `run_sweep` does.

    Raises:
        ConfigError: the trials do not share one DataConfig; else as `run_sweep`.
    """
    if len({trial.data for trial in trials}) != 1:
        raise ConfigError("the trials of one sweep must share one DataConfig")
    store = Store(results, experiment)
    dataset = data.load(trials[0].data)
    missing = missing_trials(trials, store.done(stopped=run.halving), dataset.fingerprint)
    console.print(
        f"{experiment}: {len(trials)} trials, {len(trials) - len(missing)} stored, {len(missing)} to run",
        highlight=False,
    )
    outcome: Counter[str] = Counter()
    if not missing:
        return outcome
    folders = _CheckpointFolders(store.folder, dataset.fingerprint, run)
    if run.tpu_trial != "host" and not options.on_ray:
        raise ConfigError(f"tpu_trial {run.tpu_trial!r} needs Ray: add --ray or --address")
    runner = _with_ray if options.on_ray else _on_this_machine
    with (
        runner(missing, options, run, folders, str(store.folder)) as (packs, events),
        SweepProgress(missing, console) as progress,
    ):
        for index, event in events:
            if event is None:
                progress.started(index, packs[index])
            elif isinstance(event, Report):
                progress.reported(index, event)
            elif isinstance(event, PackSplit):
                progress.split(index)
                console.print(f"{event.reason}: split into {len(event.packs)} packs", highlight=False)
            else:
                if isinstance(event, PackResult):
                    result = event
                else:
                    failed = [
                        failed_row(t, dataset, event.reason, run.device, len(packs[index]))
                        for t in packs[index]
                    ]
                    result = PackResult(failed, [], None, None)
                    console.print(
                        f"[red]a pack of width {packs[index][0].model.width} failed:[/] {event.reason}"
                    )
                store.append(result.rows, result.curves)
                statuses = count_statuses(result)
                progress.finished(index, result)
                outcome += statuses
                if statuses["preempted"]:
                    kept = "its checkpoint is kept" if run.checkpoint_every else "without --checkpoint-every"
                    raise Preempted(
                        f"preempted in a pack of width {packs[index][0].model.width}, {kept}; "
                        f"the rest is stored in {results}, and the same command goes on"
                    )
                folders.remove(packs[index])
    console.print(progress.summary(), highlight=False, soft_wrap=True)
    if not outcome["failed"]:
        folders.remove_all(trials)
    return outcome


class _CheckpointFolders:
    """A folder for each pack's checkpoints, named by its first member: same trials, same packs."""

    def __init__(self, results: Folder, fingerprint: str, run: RunOptions) -> None:
        self._root = results / "checkpoints" if run.checkpoint_every else None
        self._fingerprint = fingerprint

    def of(self, pack: list[Trial]) -> str | None:
        return str(self._root / pack[0].trial_id(self._fingerprint)) if self._root else None

    def remove(self, pack: list[Trial]) -> None:
        if self._root is not None:
            with contextlib.suppress(OSError):
                self._root.remove(pack[0].trial_id(self._fingerprint))

    def remove_all(self, trials: list[Trial]) -> None:
        """Drop what is left of these trials: packs of an earlier, killed call may have been others.

        Folders of other trials stay: a driver elsewhere may be training them.
        """
        if self._root is None:
            return
        own = {trial.trial_id(self._fingerprint) for trial in trials}
        with contextlib.suppress(OSError):
            self._root.remove(*own.intersection(self._root.names()))
            if self._root.is_local:
                os.rmdir(self._root.path)  # only if it is empty; a bucket has no empty folders


@contextlib.contextmanager
def _with_ray(
    trials: list[Trial], options: SweepOptions, run: RunOptions, folders: _CheckpointFolders, results: str
) -> Iterator[tuple[list[list[Trial]], Generator]]:
    from mup_tpu.tuning import cluster, ray_packs

    with cluster.ray_cluster(options.address):
        run = replace(run, threads=run.threads or cluster.threads(len(trials)))
        slots = cluster.slots(run)
        way = slots.way if run.way == "auto" else run.way
        packs = make_packs(trials, slots.count, way, options.pack_size)
        with contextlib.closing(
            ray_packs.run_packs(packs, run, slots, folders.of, results, options.heartbeat)
        ) as events:
            yield packs, events


@contextlib.contextmanager
def _on_this_machine(
    trials: list[Trial], options: SweepOptions, run: RunOptions, folders: _CheckpointFolders, results: str
) -> Iterator[tuple[list[list[Trial]], Generator]]:
    workers, threads = this_machine.room(len(trials), run)
    packs = make_packs(trials, workers, local_packs.way(run), options.pack_size)
    run = replace(run, threads=threads)
    with contextlib.closing(
        local_packs.run_packs(packs, run, workers, folders.of, results, options.heartbeat)
    ) as events:
        yield packs, events
