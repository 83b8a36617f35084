"""A search for Ray Tune: algorithm, scheduler and resources."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from mup_tpu.config import RunOptions
from mup_tpu.config.search import Domain, Search, SearchOptions
from mup_tpu.jobs.cluster import slots
from mup_tpu.tuning.search_log import ReplayedSearcher, SearchLog
from mup_tpu.tuning.trainable import RESULT, TrialTrainable


class TuneSearch:
    """A search with its log, set up for Ray Tune."""

    def __init__(
        self, search: Search, options: SearchOptions, run: RunOptions, log: SearchLog, folder: str
    ) -> None:
        self.search, self.options, self.run, self.log, self.folder = search, options, run, log, folder
        self._scheduler = _scheduler(options)

    def was_halted(self, trial: TuneTrial) -> bool:
        """Whether the scheduler stopped a trial, not the end of the search."""
        return trial.trial_id in getattr(self._scheduler, "halted", ())

    def tuner(self, count: int, scratch: str, callbacks: Sequence[tune.Callback]) -> tune.Tuner:
        """Ray Tune's tuner of this number of trials."""
        # Progress is shown by this package, and Tune's loggers would write every row again.
        os.environ |= {
            "RAY_AIR_NEW_OUTPUT": "0",
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
            "TUNE_DISABLE_SIGINT_HANDLER": "1",
        }
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        options, room = self.options, slots(replace(self.run, threads=self.run.threads or 1))
        trainable = tune.with_parameters(
            TrialTrainable,
            search=self.search,
            options=options,
            run=self.run,
            folder=self.folder,
            environment=room.environment,
            prepare=room.prepare,
        )
        return tune.Tuner(
            tune.with_resources(trainable, room.for_tune()),
            tune_config=tune.TuneConfig(
                metric=RESULT,
                mode="min",
                search_alg=ReplayedSearcher(algorithm(self.search, options), self.log, RESULT),
                scheduler=self._scheduler,
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
                callbacks=list(callbacks),
                verbose=0,
            ),
        )


class _Halving(ASHAScheduler):
    """ASHA with a record of the trials that it stopped; the end of a search stops others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.halted: set[str] = set()

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
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


def algorithm(search: Search, options: SearchOptions) -> Searcher:
    """A fresh search algorithm for a space."""
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
