"""Searches: Ray Tune proposes and stops trials; training, store and resuming are this package's.

The memory of a search is its log (`search_log`). `ray_tune` sets it up for Ray Tune, `trainable` has its
trials.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from rich.console import Console

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.config.search import Search, SearchOptions
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.files import Folder
from mup_tpu.files.leftovers import scratch_folder
from mup_tpu.jobs.cluster import ray_cluster
from mup_tpu.store import FINAL, Store
from mup_tpu.training.process import handling
from mup_tpu.training.record import failed_row
from mup_tpu.tuning.precision import decided
from mup_tpu.tuning.ray_tune import TuneSearch
from mup_tpu.tuning.search_log import SearchLog
from mup_tpu.tuning.search_progress import KEY, LiveCallback, SearchProgress, point_of
from mup_tpu.tuning.tracking import Tracking, require_packages
from mup_tpu.tuning.trainable import RESULT, checkpoints_of


@dataclass(frozen=True)
class SearchOutcome:
    """End of a call of a search."""

    counts: Counter[str]
    """Trials of this call by status."""
    unfinished: int
    """Trials left for a resumed search."""
    interrupted: bool = False
    """Whether Ctrl-C ended the call."""


def run_search(
    search: Search, results: str, options: SearchOptions, run: RunOptions, resume: bool, console: Console
) -> SearchOutcome:
    """Run a search, or the rest of it, and store its trials.

    Raises:
        ConfigError: the folder holds a search and resume is false, or the reverse; there is no cluster; a
            tracker's package is not installed.
        StoreError: the folder cannot be written, or another search is writing it.
        DataError: the corpus cannot be used.
    """
    if run.placement == "slice":
        raise ConfigError("placement 'slice' is for sweeps; a search takes 'host' or 'chip'")
    require_packages(options.track)
    search = replace(search, base=decided(search.base, results, run, console))
    store = Store(results, search.experiment)
    folder = store.folder
    data.load(search.base.data)
    busy = f"results folder {folder} is being written by another search ({{who}}); wait for it, or stop it"
    with folder.locked("search.lock", busy):  # two would propose the same keys; in a bucket the log sees it
        log = _open_log(folder, search, options, resume)
        tracking = Tracking(options.track, store)
        left = options.num_samples - len(log.ended)
        if left <= 0:
            return SearchOutcome(Counter(), 0)
        tuned = TuneSearch(search, options, run, log, str(folder))
        keeper = _Keeper(tuned, store, tracking)
        progress = SearchProgress(console, options.num_samples, len(log.ended))
        with (
            ray_cluster(options.address, console),
            scratch_folder() as scratch,
            progress,
            _stop_on_interrupt(console) as interrupted,
        ):
            try:
                tuned.tuner(left, str(scratch), [keeper, progress]).fit()
            except tune.TuneError as error:
                raise keeper.error or log.error or error from None
        for key in log.ended:  # a worker may have checkpointed a trial after its end
            _remove_checkpoints(folder, key)
    return SearchOutcome(keeper.counts, options.num_samples - len(log.ended), bool(interrupted))


def _remove_checkpoints(folder: Folder, key: int) -> None:
    """Remove the checkpoints of a proposal, unless they cannot be reached."""
    with contextlib.suppress(OSError):
        Folder(checkpoints_of(str(folder), key)).remove_all()


def _open_log(folder: Folder, search: Search, options: SearchOptions, resume: bool) -> SearchLog:
    """Log of a new search, or of the one that is resumed."""
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


class _Keeper(LiveCallback):
    """Stores each trial that ends, and notes its end in the log."""

    def __init__(self, tuned: TuneSearch, store: Store, tracking: Tracking) -> None:
        self.counts: Counter[str] = Counter()
        """Trials by how they ended."""
        self._tuned, self._store, self._tracking = tuned, store, tracking
        self.error: StoreError | None = None
        """Error after which nothing can be stored."""

    def on_trial_complete(self, iteration: int, trials: list, trial: TuneTrial, **info: Any) -> None:
        """Store a trial that finished, diverged or was stopped by the scheduler, not by Ctrl-C or budget."""
        result = trial.last_result or {}
        if "row" not in result:
            return
        row = json.loads(result["row"])
        if row["status"] not in FINAL or (row["status"] == "stopped" and not self._tuned.was_halted(trial)):
            return
        self._keep(trial, row, json.loads(result["curves"]), result[RESULT])

    def on_trial_error(self, iteration: int, trials: list, trial: TuneTrial, **info: Any) -> None:
        """Store a failure with its reason."""
        trained = self._tuned.search.trial(point_of(trial.config))
        dataset = data.load(trained.data, progress=False)
        steps_done = int((trial.last_result or {}).get("train_step", 0))
        row = failed_row(
            trained, dataset, _reason(trial), device=self._tuned.run.device, steps_done=steps_done
        )
        self._keep(trial, row, [], 2 * math.log(dataset.vocab_size))

    def _keep(self, trial: TuneTrial, row: dict[str, Any], curves: list, loss: float) -> None:
        try:
            self._store.append([row], curves)
            self._tuned.log.end(trial.config[KEY], loss)
        except StoreError as error:
            self.error = error  # Tune wraps what its callbacks raise in a stack of its own
            raise
        self._tracking.add([row], curves)
        self.counts[row["status"]] += 1
        _remove_checkpoints(self._store.folder, trial.config[KEY])


@contextlib.contextmanager
def _stop_on_interrupt(console: Console) -> Iterator[list[bool]]:
    """Handle Ctrl-C: the first lets Tune stop, so that running trials checkpoint; the second ends at once.

    Yields a list that is empty until Ctrl-C is pressed. Tune's own handler is not used, as its notice goes to
    a silent log; SIGUSR1 asks Tune for the same stop.
    """
    interrupted: list[bool] = []

    def on_interrupt(number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)
        console.print("stopping: running trials checkpoint at their next evaluation; Ctrl-C again stops now")
        signal.raise_signal(signal.SIGUSR1)

    with handling({signal.SIGINT: on_interrupt, signal.SIGUSR1: signal.SIG_IGN}):
        yield interrupted


def _reason(trial: TuneTrial) -> str:
    """Last error of a trial in one sentence, without its traceback."""
    text = Path(trial.error_file).read_text(encoding="utf-8") if trial.error_file else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)(:|$)", line)]
    reason = (errors or lines or ["its process died"])[-1]
    return "hung: no evaluation within the heartbeat" if reason.startswith("TimeoutError") else reason[:500]
