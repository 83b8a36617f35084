"""Searches: Ray Tune proposes and stops trials; the training loop, the store and resuming are ours.

A search's memory is a log of what was proposed and what came of it (search.jsonl), beside the store. Resuming
replays it into a fresh algorithm with the same seed, which then knows what it knew, and first goes on with
the trials that had not ended, from their checkpoints. Tune's own state on disk is pickled, and never read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.logger import TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from rich.console import Console

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.config_search import Domain, Search, SearchOptions
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import FINAL, Store
from mup_tpu.training.loop import PackResult, PackRun
from mup_tpu.training.rows import run_row
from mup_tpu.tuning.ray_packs import ray_cluster, slots
from mup_tpu.tuning.search_progress import SearchProgress

KEY = "_key"
"""Where a proposal carries its number in the search's log."""


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended."""

    counts: Counter[str]
    """Trials of this call by status."""
    unfinished: int
    """Trials that a resumed search goes on with."""


def run_search(
    search: Search, results: str, options: SearchOptions, run: RunOptions, resume: bool, console: Console
) -> SearchOutcome:
    """Run a search, or what is left of it, and store its trials.

    Args:
        search: base trial and space.
        results: local results folder.
        options: algorithm, scheduler, limits, and where it runs.
        run: how each trial is run.
        resume: go on with the search that the folder holds.
        console: for progress.

    Raises:
        ConfigError: a search is there already and resume is not asked for, or the reverse; no cluster.
        StoreError: the folder cannot be written, or another search is writing it.
        DataError: the corpus cannot be used.
    """
    # Our progress is what is shown; Tune's loggers would write every row again.
    os.environ |= {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    folder = Path(results).absolute()
    store = Store(str(folder), search.experiment)
    data.load(search.base.data)
    with _only_one(folder):
        log = SearchLog(folder / "search.jsonl")
        if log.events and not resume:
            raise ConfigError(
                f"results folder {results} holds a search of {len(log.proposals)} trials; "
                "go on with --resume, or give this one a folder of its own"
            )
        if resume and not log.events:
            raise ConfigError(f"results folder {results} holds no search to resume")
        log.begin(search, options)
        left = options.num_samples - len(log.ended)
        counts: Counter[str] = Counter()
        if left <= 0:
            return SearchOutcome(counts, 0)
        with ray_cluster(options.address), tempfile.TemporaryDirectory() as scratch:
            concurrent, needs = slots(replace(run, threads=run.threads or 1))
            searcher = ReplayedSearcher(_algorithm(search, options), log, _RESULT)
            scheduler = _scheduler(options)
            keeper = _Keeper(search, store, log, folder, scheduler, counts)
            progress = SearchProgress(console, options.num_samples, len(log.ended))
            tuner = tune.Tuner(
                tune.with_resources(
                    tune.with_parameters(
                        TrialTrainable, search=search, options=options, run=run, folder=str(folder)
                    ),
                    {name.removeprefix("num_").removesuffix("s"): amount for name, amount in needs.items()},
                ),
                tune_config=tune.TuneConfig(
                    metric=_RESULT,
                    mode="min",
                    search_alg=searcher,
                    scheduler=scheduler,
                    num_samples=left,
                    max_concurrent_trials=min(options.max_concurrent or concurrent, concurrent),
                    time_budget_s=options.seconds,
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=scratch,
                    failure_config=tune.FailureConfig(max_failures=options.max_failures),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    callbacks=[keeper, progress, TBXLoggerCallback()],
                    verbose=0,
                ),
            )
            with progress:
                tuner.fit()
            _keep_tensorboard(Path(scratch) / "tune", folder / "tensorboard")
    return SearchOutcome(counts, options.num_samples - len(log.ended))


class SearchLog:
    """What was proposed and how it ended, a JSON line an event, written through to the disk.

    Args:
        path: the log; made at the first event.

    Raises:
        StoreError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    continue  # the torn last line of a killed search
        self.proposals: dict[int, dict[str, float]] = {
            e["key"]: e["point"] for e in self.events if e["event"] == "proposed"
        }
        self.ended: set[int] = {e["key"] for e in self.events if e["event"] == "ended"}

    def begin(self, search: Search, options: SearchOptions) -> None:
        """Note what is searched; a log of another space or algorithm is not gone on with.

        Raises:
            ConfigError: the log was begun differently.
        """
        space = {name: asdict(domain) for name, domain in search.space.items()}
        what = {"space": space, "algorithm": options.algorithm, "seed": options.seed}
        what |= {"base": search.base.to_dict()}
        begun = next((e for e in self.events if e["event"] == "begun"), None)
        if begun is None:
            self._add({"event": "begun", **what})
            return
        for name, value in what.items():
            if begun[name] != json.loads(json.dumps(value)):
                raise ConfigError(
                    f"{name} of the search is not that of {self.path}; a search is resumed as it was begun"
                )

    def propose(self, point: dict[str, float]) -> int:
        """Note a new proposal; its number."""
        key = len(self.proposals)
        self.proposals[key] = point
        self._add({"event": "proposed", "key": key, "point": point})
        return key

    def end(self, key: int, loss: float) -> None:
        """Note how a proposal ended."""
        self.ended.add(key)
        self._add({"event": "ended", "key": key, "loss": loss})

    def _add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise StoreError(f"search log {self.path} cannot be written: {error.strerror}") from None


class ReplayedSearcher(Searcher):
    """An algorithm that remembers through a `SearchLog`.

    Args:
        algorithm: a fresh one, with its space, metric and seed.
        log: what happened before, replayed into the algorithm in its order.
        metric: what is minimised.
    """

    def __init__(self, algorithm: Searcher, log: SearchLog, metric: str) -> None:
        super().__init__(metric=metric, mode="min")
        self._algorithm, self._log = algorithm, log
        self._keys: dict[str, int] = {}
        for event in log.events:
            if event["event"] == "proposed":
                algorithm.suggest(str(event["key"]))
            elif event["event"] == "ended":
                algorithm.on_trial_complete(str(event["key"]), {metric: event["loss"]})
        self._waiting = [key for key in log.proposals if key not in log.ended]

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """First what had not ended, then what the algorithm proposes."""
        if self._waiting:
            key = self._waiting.pop(0)
        else:
            point = self._algorithm.suggest(str(len(self._log.proposals)))
            if point is None or point == Searcher.FINISHED:
                return point
            key = self._log.propose({name: float(value) for name, value in point.items()})
        self._keys[trial_id] = key
        return {**self._log.proposals[key], KEY: key}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the algorithm."""
        key = str(self._keys[trial_id])
        self._algorithm.on_trial_complete(key, result, error=error)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the log is the memory."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the log is the memory."""


class TrialTrainable(tune.Trainable):
    """A trial as Tune sees it: each step trains to the next evaluation, checkpointed by our own loop."""

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], search: Search, options: SearchOptions, run: RunOptions, folder: str
    ) -> None:
        """Begin, or go on from the trial's checkpoint."""
        self._search, self._options, self._run_options, self._folder = search, options, run, Path(folder)
        self._thread = ThreadPoolExecutor(1)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial in the same process, where everything is imported already."""
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        trial = self._search.trial({name: value for name, value in config.items() if name != KEY})
        every = max(1, trial.train.steps // self._options.evaluations)
        run = replace(self._run_options, eval_every=every, checkpoint_every=every)
        run = replace(run, threads=run.threads or 1)
        folder = _checkpoints(self._folder, config[KEY])
        self._chance = math.log(data.load(trial.data, progress=False).vocab_size)
        self._run = PackRun([trial], data.load(trial.data, progress=False), run, folder, None)
        self._events = self._run.steps()

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation or to the end."""
        return self._thread.submit(self._advance).result(timeout=self._options.heartbeat)

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Nothing: the training loop writes checkpoints, which `setup` goes on from."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing, likewise."""

    def _advance(self) -> dict[str, Any]:
        for event in self._events:
            if isinstance(event, PackResult):
                return self._report(event, done=True)
            if event.validation_losses is not None and event.statuses[0] == "running":
                return self._report(self._run.so_far(), done=False)
        raise AssertionError("a pack always ends with its result")

    def _report(self, result: PackResult, done: bool) -> dict[str, Any]:
        row = result.rows[0]
        share = 100 * row["steps_done"] // row["steps_planned"] if not done else 100
        worst = 2 * self._chance  # searchers and schedulers need a number where a trial diverged
        loss = min(row["loss"], worst) if math.isfinite(row["loss"]) else worst
        return {
            _RESULT: loss,
            "share": max(1, share),
            "train_step": row["steps_done"],
            "done": done,
            "row": json.dumps(row),
            "curves": json.dumps(result.curves),
        }


class _Keeper(tune.Callback):
    """Stores every trial that ends, and notes it in the log."""

    def __init__(
        self,
        search: Search,
        store: Store,
        log: SearchLog,
        folder: Path,
        scheduler: TrialScheduler,
        counts: Counter[str],
    ) -> None:
        self._search, self._store, self._log, self._folder = search, store, log, folder
        self._scheduler, self._counts = scheduler, counts

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
        self._keep(trial, row, json.loads(result["curves"]), result[_RESULT])

    def on_trial_error(self, iteration: int, trials: list, trial: TuneTrial, **info: Any) -> None:
        """Store a failure with its reason."""
        trained = self._search.trial({n: v for n, v in trial.config.items() if n != KEY})
        dataset = data.load(trained.data, progress=False)
        row = run_row(
            trained,
            trial_id=trained.trial_id(dataset.fingerprint),
            steps_done=int((trial.last_result or {}).get("train_step", 0)),
            dataset=dataset.name,
            data_fingerprint=dataset.fingerprint,
            loss=math.nan,
            status="failed",
            reason=_reason(trial),
            pack_size=1,
        )
        self._keep(trial, row, [], 2 * math.log(dataset.vocab_size))

    def _was_halted(self, trial: TuneTrial) -> bool:
        return trial.trial_id in getattr(self._scheduler, "halted", ())

    def _keep(self, trial: TuneTrial, row: dict[str, Any], curves: list, loss: float) -> None:
        self._store.append([row], curves)
        self._log.end(trial.config[KEY], loss)
        self._counts[row["status"]] += 1
        shutil.rmtree(_checkpoints(self._folder, trial.config[KEY]), ignore_errors=True)


class _Halving(ASHAScheduler):
    """ASHA that remembers whom it stopped, to tell them from those that the end of the search stops."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.halted: set[str] = set()

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """ASHA's decision."""
        decision = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            self.halted.add(trial.trial_id)
        return decision


_RESULT = "loss"


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
            space=space, metric=_RESULT, mode="min", random_state_seed=options.seed, n_initial_points=8
        )
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"optuna": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    sampler = samplers[options.algorithm](seed=options.seed)
    return OptunaSearch(space=space, metric=_RESULT, mode="min", sampler=sampler)


def _tune_domain(domain: Domain) -> Any:
    if domain.kind == "choice":
        return tune.choice(list(domain.values))
    draw = tune.loguniform if domain.kind == "loguniform" else tune.uniform
    return draw(domain.low, domain.high)


def _checkpoints(folder: Path, key: int) -> Path:
    return folder / "checkpoints" / f"search-{key}"


def _reason(trial: TuneTrial) -> str:
    """The sentence of a trial's last error, without the stack above it."""
    text = Path(trial.error_file).read_text(encoding="utf-8") if trial.error_file else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)(:|$)", line)]
    reason = (errors or lines or ["its process died"])[-1]
    return "hung: no evaluation within the heartbeat" if reason.startswith("TimeoutError") else reason[:500]


def _keep_tensorboard(made: Path, kept: Path) -> None:
    """Move TensorBoard's event files out of Tune's scratch folder."""
    for events in made.glob("*/events.out.tfevents.*"):
        target = kept / events.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.move(str(events), target / events.name)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Refuse a second search in the same folder: two would propose the same keys.

    Raises:
        StoreError: another one is running.
    """
    import fcntl

    with (folder / "search.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"results folder {folder} is being written by another search; wait for it, or stop it"
            ) from None
        yield
