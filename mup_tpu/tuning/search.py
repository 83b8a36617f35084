"""Searches: Ray Tune proposes and stops trials; the training loop, the store and resuming are ours.

What a search knows is in its log (`search_log`), the trials themselves are in `trainable`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from rich.console import Console

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.config.search import Domain, Search, SearchOptions
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.files import Folder
from mup_tpu.files.leftovers import scratch_folder
from mup_tpu.jobs.cluster import ray_cluster, slots
from mup_tpu.store import FINAL, Store
from mup_tpu.training.rows import failed_row
from mup_tpu.training.signals import handling
from mup_tpu.tuning.search_log import ReplayedSearcher, SearchLog
from mup_tpu.tuning.search_progress import KEY, SearchProgress, point_of
from mup_tpu.tuning.tracking import Tracking, require_packages
from mup_tpu.tuning.trainable import RESULT, TrialTrainable, checkpoints_of


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended."""

    counts: Counter[str]
    """Trials of this call by status."""
    unfinished: int
    """Trials that a resumed search goes on with."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""


def run_search(
    search: Search, results: str, options: SearchOptions, run: RunOptions, resume: bool, console: Console
) -> SearchOutcome:
    """Run a search, or what is left of it, and store its trials.

    Args:
        search: base trial and space.
        results: results folder or fsspec URL.
        options: algorithm, scheduler, limits, and where it runs.
        run: how each trial is run.
        resume: go on with the search that the folder holds.
        console: for progress.

    Raises:
        ConfigError: a search is there already and resume is not asked for, or the reverse; no cluster; a
            tracker's package is not installed.
        StoreError: the folder cannot be written, or another search is writing it.
        DataError: the corpus cannot be used.
    """
    if run.placement == "slice":
        raise ConfigError("placement 'slice' is for sweeps; a search takes 'host' or 'chip'")
    require_packages(options.track)
    store = Store(results, search.experiment)
    folder = store.folder
    data.load(search.base.data)
    with _only_one(folder):
        log = _open_log(folder, search, options, resume)
        tracking = Tracking(options.track, store)
        left = options.num_samples - len(log.ended)
        if left <= 0:
            return SearchOutcome(Counter(), 0)
        keeper = _Keeper(search, store, log, folder, _scheduler(options), run.device, tracking)
        progress = SearchProgress(console, options.num_samples, len(log.ended))
        with (
            ray_cluster(options.address, console),
            scratch_folder() as scratch,
            progress,
            _stop_on_interrupt(console) as interrupted,
        ):
            try:
                _tuner(search, options, run, keeper, progress, left, str(scratch)).fit()
            except tune.TuneError as error:
                raise keeper.error or log.error or error from None
        for key in log.ended:  # a worker's last breath may have checkpointed what had ended
            _remove_checkpoints(folder, key)
    return SearchOutcome(keeper.counts, options.num_samples - len(log.ended), bool(interrupted))


def _remove_checkpoints(folder: Folder, key: int) -> None:
    """Drop the checkpoints of a proposal; those that cannot be reached stay."""
    with contextlib.suppress(OSError):
        Folder(checkpoints_of(str(folder), key)).remove_all()


def _open_log(folder: Folder, search: Search, options: SearchOptions, resume: bool) -> SearchLog:
    """The log of a new search, or of the one to go on with.

    Raises:
        ConfigError: a search is there already and resume is not asked for, or the reverse.
    """
    log = SearchLog(folder)
    if log.events and not resume:
        raise ConfigError(
            f"results folder {folder} holds a search of {len(log.proposals)} trials; "
            "go on with --resume, or give this one a folder of its own"
        )
    if resume and not log.events:
        raise ConfigError(f"results folder {folder} holds no search to resume")
    log.begin(search, options)
    return log


def _tuner(
    search: Search,
    options: SearchOptions,
    run: RunOptions,
    keeper: _Keeper,
    progress: SearchProgress,
    count: int,
    scratch: str,
) -> tune.Tuner:
    """Ray Tune, set up to run `count` trials; its own files go to `scratch`."""
    # Our progress is what is shown; Tune's loggers would write every row again.
    os.environ |= {
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
    }
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    room = slots(replace(run, threads=run.threads or 1))
    trainable = tune.with_parameters(
        TrialTrainable,
        search=search,
        options=options,
        run=run,
        folder=str(keeper.folder),
        environment=room.environment,
    )
    return tune.Tuner(
        tune.with_resources(trainable, room.for_tune()),
        tune_config=tune.TuneConfig(
            metric=RESULT,
            mode="min",
            search_alg=ReplayedSearcher(_algorithm(search, options), keeper.log, RESULT),
            scheduler=keeper.scheduler,
            num_samples=count,
            max_concurrent_trials=min(options.max_concurrent or room.count, room.count),
            time_budget_s=options.seconds,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=scratch,
            failure_config=tune.FailureConfig(max_failures=options.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[keeper, progress],
            verbose=0,
        ),
    )


class _Keeper(tune.Callback):
    """Stores every trial that ends, and notes it in the log."""

    def __init__(
        self,
        search: Search,
        store: Store,
        log: SearchLog,
        folder: Folder,
        scheduler: TrialScheduler,
        device: str,
        tracking: Tracking,
    ) -> None:
        self.log, self.folder, self.scheduler = log, folder, scheduler
        self.counts: Counter[str] = Counter()
        """Trials by how they ended."""
        self._search, self._store, self._device, self._tracking = search, store, device, tracking
        self.error: StoreError | None = None
        """Why nothing can be stored any more."""

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles its callbacks for a restore that we never do."""
        return {}

    def on_trial_complete(self, iteration: int, trials: list, trial: TuneTrial, **info: Any) -> None:
        """Store what finished, diverged, or was stopped by the scheduler (not by Ctrl-C or the budget)."""
        result = trial.last_result or {}
        if "row" not in result:
            return
        row = json.loads(result["row"])
        if row["status"] not in FINAL or (row["status"] == "stopped" and not self._was_halted(trial)):
            return
        self._keep(trial, row, json.loads(result["curves"]), result[RESULT])

    def on_trial_error(self, iteration: int, trials: list, trial: TuneTrial, **info: Any) -> None:
        """Store a failure with its reason."""
        trained = self._search.trial(point_of(trial.config))
        dataset = data.load(trained.data, progress=False)
        steps_done = int((trial.last_result or {}).get("train_step", 0))
        row = failed_row(trained, dataset, _reason(trial), self._device, steps_done=steps_done)
        self._keep(trial, row, [], 2 * math.log(dataset.vocab_size))

    def _was_halted(self, trial: TuneTrial) -> bool:
        return trial.trial_id in getattr(self.scheduler, "halted", ())

    def _keep(self, trial: TuneTrial, row: dict[str, Any], curves: list, loss: float) -> None:
        try:
            self._store.append([row], curves)
            self.log.end(trial.config[KEY], loss)
        except StoreError as error:
            self.error = error  # Tune wraps what its callbacks raise in a stack of its own
            raise
        self._tracking.add([row], curves)
        self.counts[row["status"]] += 1
        _remove_checkpoints(self.folder, trial.config[KEY])


class _Halving(ASHAScheduler):
    """ASHA that records which trials it stopped; the end of a search stops others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.halted: set[str] = set()

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """ASHA's decision."""
        decision = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            self.halted.add(trial.trial_id)
        return decision


def _scheduler(options: SearchOptions) -> TrialScheduler:
    if options.scheduler == "none":
        return FIFOScheduler()
    return _Halving(
        time_attr="share",
        max_t=100,
        grace_period=max(1, int(100 * options.grace)),
        reduction_factor=options.reduction_factor,
    )


def _algorithm(search: Search, options: SearchOptions) -> Searcher:
    space = {name: _tune_domain(domain) for name, domain in search.space.items()}
    if options.algorithm == "hyperopt":
        from ray.tune.search.hyperopt import HyperOptSearch

        return HyperOptSearch(
            space=space, metric=RESULT, mode="min", random_state_seed=options.seed, n_initial_points=8
        )
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"optuna": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    sampler = samplers[options.algorithm](seed=options.seed)
    return OptunaSearch(space=space, metric=RESULT, mode="min", sampler=sampler)


def _tune_domain(domain: Domain) -> Any:
    if domain.kind == "choice":
        return tune.choice(list(domain.values))
    draw = tune.loguniform if domain.kind == "loguniform" else tune.uniform
    return draw(domain.low, domain.high)


@contextlib.contextmanager
def _stop_on_interrupt(console: Console) -> Iterator[list[bool]]:
    """Ctrl-C once: let Tune stop, so that running trials checkpoint. Twice: KeyboardInterrupt, at once.

    Yields a list that is no longer empty once Ctrl-C was pressed. Tune's own handler would do the first, but
    says so in a log that we keep silent; SIGUSR1 asks it for the same.
    """
    interrupted: list[bool] = []

    def on_interrupt(number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)
        console.print(
            "stopping: running trials checkpoint at their next evaluation; Ctrl-C again stops now",
            highlight=False,
        )
        signal.raise_signal(signal.SIGUSR1)

    with handling({signal.SIGINT: on_interrupt, signal.SIGUSR1: signal.SIG_IGN}):
        yield interrupted


def _reason(trial: TuneTrial) -> str:
    """The sentence of a trial's last error, without the stack above it."""
    text = Path(trial.error_file).read_text(encoding="utf-8") if trial.error_file else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)(:|$)", line)]
    reason = (errors or lines or ["its process died"])[-1]
    return "hung: no evaluation within the heartbeat" if reason.startswith("TimeoutError") else reason[:500]


@contextlib.contextmanager
def _only_one(folder: Folder) -> Iterator[None]:
    """Refuse a second search in the same folder: two would propose the same keys.

    A bucket cannot be locked: there the log refuses the one that adds to it last.

    Raises:
        StoreError: another one is running.
    """
    if not folder.is_local:
        yield
        return
    import fcntl

    with Path(folder.path, "search.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"results folder {folder} is being written by another search; wait for it, or stop it"
            ) from None
        yield
