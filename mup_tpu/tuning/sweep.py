"""Sweeps: run the missing trials of a known grid, and store each pack as it ends.

The store is the only state. The same sweep again runs the missing trials and nothing else: one rule for
resuming, caching, and "three more learning rates".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial, field_column
from mup_tpu.config.columns import CONFIGURED, configured, label, write
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.jobs.pack_job import describe, missing_trials
from mup_tpu.models import sizes
from mup_tpu.store import Store, StoredAxes, results_folder
from mup_tpu.training.trials import longer
from mup_tpu.tuning.packs import Packs
from mup_tpu.tuning.trials import Corpora, sweep_with_precision


def run_sweep(
    sweep: Sweep,
    results: str,
    options: SweepOptions,
    run: RunOptions,
    console: Console,
    continue_to: int | None = None,
) -> Counter[str]:
    """Run the missing trials of a sweep and store their rows.

    With `continue_to`, trials have that number of steps, and go on from checkpoints of the shorter ones.

    Returns:
        Number of this call's trials by status; empty if none was missing.

    Raises:
        ConfigError: a trial of the grid is not allowed or cannot go on, two points of the scale measure the
            same, or the device or cluster is not there.
        StoreError: the results folder cannot be written, or holds another experiment, other axes, or runs of
            another kind.
        DataError: the corpus cannot be used.
    """
    sweep = sweep_with_precision(sweep, results, run, console)
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
    fields = sweep.scale_axis.fields
    packs = Packs(store, corpora, fields, options, run, console, before)
    with packs.runner() as runner:
        return runner.run(trials, lambda trial: purchase)


def _check_goes_on(sweep: Sweep, run: RunOptions) -> None:
    if any("steps" in axis.fields for axis in sweep.axes):
        raise ConfigError("continue_to sets the steps of all trials, and an axis of the sweep does so too")
    if not run.checkpoint_every:
        raise ConfigError("continue_to needs checkpoint_every: packs go on from checkpoints")
    if run.halving:
        raise ConfigError("continue_to needs halving false: it stops trials at shares of the steps")


def what_is_missing(sweep: Sweep, results: str) -> tuple[list[Trial], Corpora]:
    """Return missing trials of a sweep, and their data; write nothing. Raises the errors of `run_sweep`."""
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
    """Run missing trials, as `run_sweep` does; fields of `scale` tell sizes apart."""
    store = Store(results, experiment)
    with Packs(store, Corpora(trials), scale, options, run, console).runner() as runner:
        return runner.run(trials)


def measured(sweep: Sweep, corpora: Corpora) -> dict[float, dict[str, Any]]:
    """Return the points of the scale by their measure; refuse two of the same: an analysis joins them."""
    axis, by_size = sweep.scale_axis, dict[float, dict[str, Any]]()
    for point in axis.points:
        trial = sweep.base.replace(**point)
        # The vocabulary as in rows: bytes have 256, and the trial's vocab_size is not read.
        values = configured(trial) | sizes(trial, corpora.of(trial).vocab_size)
        at = describe(trial, axis.fields)
        size = float(values[axis.column])
        if size in by_size:
            before = describe(sweep.base.replace(**by_size[size]), axis.fields)
            raise ConfigError(
                f"scale: {before} and {at} have the same {label(axis.column)} "
                f"({write(axis.column, values[axis.column])}), by which the sweep is measured; "
                "give a measured_by that tells them apart"
            )
        by_size[size] = point
    return by_size


def check_alike(sweep: Sweep, store: Store, but: Sequence[str] = ()) -> None:
    """Refuse a sweep of another kind than stored runs, as an analysis would; fields of `but` may differ."""
    fields = [*but, *(field for axis in sweep.axes for field in axis.fields)]
    changing = {field_column(field) for field in fields} | {"seed", "corpus"}
    settings = {
        c: value for c, value in configured(sweep.base).items() if c in CONFIGURED and c not in changing
    }
    for column, other in store.others(settings):
        raise StoreError(
            f"results folder {store.folder} holds runs with {label(column)} {write(column, other)}, and this "
            f"sweep has {write(column, settings[column])}; an analysis compares runs of one kind: give "
            f"another --results, or analyse the stored runs with --where {column}={other}"
        )
