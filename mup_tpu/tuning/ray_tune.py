"""Ray Tune as the chooser of a search: its algorithms propose points, its scheduler stops trials early.

The driver runs the trials (`search.py`). Tune's own loop (`Tuner.fit`) would bring a second set of attempts,
heartbeats and checkpoints, and it keeps its state in pickles. Its API does without the loop, but for two
things, both here:

- a scheduler takes the controller, which ASHA does not read, and a Tune trial, of which it reads `trial_id`;
- an algorithm is restored from a pickle only, so that a resumed search replays its log into a new one.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher

from mup_tpu.config.options import SearchOptions
from mup_tpu.config.sweep import Domain, Search
from mup_tpu.tuning.search_log import SearchLog

LOSS, _SHARE = "loss", "share"
_ALL = 100  # share of a trial's steps at its end, per cent


class Chooser:
    """Algorithm and scheduler of a search, with the proposals of its log."""

    def __init__(self, search: Search, options: SearchOptions, log: SearchLog) -> None:
        self._algorithm, self._log = algorithm(search, options), log
        self._asha: Any = None
        if options.scheduler == "asha":
            self._asha = ASHAScheduler(
                time_attr=_SHARE,
                metric=LOSS,
                mode="min",
                max_t=_ALL,
                grace_period=max(1, int(_ALL * options.grace)),
                reduction_factor=options.reduction_factor,
            )
        # The same seed and the same ends give the same proposals. ASHA's rungs begin anew: the log has no
        # losses from within a trial.
        for event in log.events:
            if event["event"] == "proposed":
                self._algorithm.suggest(str(event["key"]))
            elif event["event"] == "ended":
                self._algorithm.on_trial_complete(str(event["key"]), {LOSS: event["loss"]})
        self._unfinished = [key for key in log.proposals if key not in log.ended]

    def propose(self) -> int | None:
        """Return the number of an unfinished proposal of the log, or of a new one; None if none is left."""
        if self._unfinished:
            key = self._unfinished.pop(0)
        else:
            point = self._algorithm.suggest(str(len(self._log.proposals)))
            if point is None or point == Searcher.FINISHED:
                return None
            key = self._log.propose({name: float(value) for name, value in point.items()})
        if self._asha is not None:
            self._asha.on_trial_add(None, _tune_trial(key))
        return key

    def stops(self, key: int, share: float, loss: float) -> bool:
        """Report the loss of a proposal after a share of its steps; return whether it is hopeless."""
        if self._asha is None:
            return False
        result = {_SHARE: max(1, int(_ALL * share)), LOSS: loss}
        return bool(self._asha.on_trial_result(None, _tune_trial(key), result) == TrialScheduler.STOP)

    def end(self, key: int, loss: float, is_whole: bool) -> None:
        """Log the last loss of a proposal, and report it to Tune; `is_whole` unless it was stopped early."""
        self._log.end(key, loss)
        self._algorithm.on_trial_complete(str(key), {LOSS: loss})
        if self._asha is not None:
            # Without a share, ASHA only forgets the trial: it has compared the last evaluation already.
            result = {_SHARE: _ALL, LOSS: loss} if is_whole else {}
            self._asha.on_trial_complete(None, _tune_trial(key), result)


def _tune_trial(key: int) -> Any:
    return SimpleNamespace(trial_id=str(key))


def algorithm(search: Search, options: SearchOptions) -> Searcher:
    """Make a new search algorithm for a space."""
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it warns that it converts the space by itself
    space = {name: _tune_domain(domain) for name, domain in search.space.items()}
    if options.algorithm == "hyperopt":
        from ray.tune.search.hyperopt import HyperOptSearch

        # HyperOpt draws its first points at random, 20 by default: more than half of a small search.
        return HyperOptSearch(
            space=space, metric=LOSS, mode="min", random_state_seed=options.seed, n_initial_points=8
        )
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"optuna": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    sampler = samplers[options.algorithm](seed=options.seed)
    return OptunaSearch(space=space, metric=LOSS, mode="min", sampler=sampler)


def _tune_domain(domain: Domain) -> Any:
    if domain.kind == "choice":
        return tune.choice(list(domain.values))
    draw = tune.loguniform if domain.kind == "loguniform" else tune.uniform
    return draw(domain.low, domain.high)
