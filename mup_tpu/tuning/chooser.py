"""Chooser of a search's trials: Ray Tune's algorithms propose points, its schedulers stop trials early.

The driver runs the trials (`search.py`). Tune's own loop (`Tuner.fit`) would bring a second set of attempts,
heartbeats and checkpoints, and it keeps its state in pickles. Its API does without the loop, but for two
things, both here:

- a scheduler takes the controller, of which only its live trials are read, and a Tune trial, of which only
  `trial_id` is;
- an algorithm is restored from a pickle only, so that a resumed search replays its proposals, and the losses
  that were known before each, into a new one with the same seed.

search.json holds both. It is written whole before a proposed trial runs.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from mup_tpu.config import Domain, SearchOptions
from mup_tpu.config.grid import Point
from mup_tpu.errors import ConfigError, StoreError, not_installed, raised_as
from mup_tpu.files import Folder
from mup_tpu.store import SEARCH_FILE
from mup_tpu.store.header import read_file, write_file

_LOSS, _SHARE = "loss", "share"
_ALL = 100  # share of a trial's steps at its end, per cent
_UNKNOWN = 1e3  # loss of a divergence before any loss is known
_NO_CONTROLLER = SimpleNamespace(get_live_trials=list)

Curve = Sequence[tuple[float, float]]  # losses after shares of a trial's steps, from 0 to 1


class _Trial(NamedTuple):
    trial_id: str


def _per_cent(share: float) -> int:
    return max(1, int(_ALL * share))


class Chooser:
    """Algorithm and scheduler of a search, and its proposals by number, which a folder keeps.

    `base` holds the values that all trials share.
    """

    def __init__(
        self, space: Mapping[str, Domain], options: SearchOptions, base: Mapping[str, Any], folder: Folder
    ) -> None:
        self._options, self._folder, self._file = options, folder, f"{folder}/{SEARCH_FILE}"
        domains = {name: asdict(domain) for name, domain in space.items()}
        identity = {"space": domains, "algorithm": options.algorithm, "seed": options.seed, "base": {**base}}
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._algorithm, self._scheduler = _algorithm(space, options), _scheduler(options)
        self._worst = -math.inf  # highest finite loss that is known
        self.points: list[Point] = []
        # Before each proposal, the ends since the one before: shares of steps with losses, by number
        self._ends: list[dict[str, list[tuple[int, float]]]] = []
        self._ends_since: dict[str, list[tuple[int, float]]] = {}
        self._ended: set[str] = set()
        self._written = read_file(folder, SEARCH_FILE)
        if self._written is not None:
            self._replay(self._written)

    def _replay(self, content: bytes) -> None:
        misfits = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
        with raised_as(StoreError, f"{self._file} cannot be read: it is no search", misfits):
            stored = json.loads(content)
            before = {name: stored[name] for name in self._identity}
            # Later versions may know more settings.
            now = self._identity | {"base": {name: self._identity["base"][name] for name in before["base"]}}
            proposals = [
                (
                    {name: proposal["point"][name] for name in now["space"]},
                    {
                        str(int(number)): [(int(share), float(loss)) for share, loss in losses]
                        for number, losses in proposal["ended"].items()
                    },
                )
                for proposal in stored["proposals"]
            ]
        for name, value in now.items():
            if before[name] != value:
                raise ConfigError(
                    f"{name} of the search differs from that in {self._file}: a search goes on as it was "
                    "begun, so give another folder"
                )
        for point, ends in proposals:
            for number, losses in ends.items():
                self._complete(number, losses)
            if self._suggest() != point and self._options.algorithm != "bohb":
                raise ConfigError(
                    f"algorithm {self._options.algorithm} proposes other points than those in {self._file}, "
                    "as another version of its package does: install that version, or give another folder"
                )
            if self._options.algorithm == "bohb":  # it draws from numpy's own state
                self._algorithm.trial_to_params[str(len(self.points))] = point
            self._note(point, ends)

    def propose(self) -> int | None:
        """Propose a new point; return its number, or None if there is none."""
        if (point := self._suggest()) is None:
            return None
        self._note(point, self._ends_since)
        self._ends_since = {}
        proposals = [{"point": p, "ended": e} for p, e in zip(self.points, self._ends, strict=True)]
        content = json.dumps(self._identity | {"proposals": proposals}).encode()
        if not self._folder.is_local and read_file(self._folder, SEARCH_FILE) != self._written:
            raise StoreError(  # in a bucket there are no locks
                f"results folder {self._folder} is being written by another search; wait for it, or stop it"
            )
        write_file(self._folder, SEARCH_FILE, content)
        self._written = content
        return len(self.points) - 1

    def _suggest(self) -> Point | None:
        point = self._algorithm.suggest(str(len(self.points)))
        if point is None or point == Searcher.FINISHED:
            return None
        values = ((name, point[name]) for name in self._identity["space"])
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in values}

    def _note(self, point: Point, ends: dict[str, list[tuple[int, float]]]) -> None:
        if self._scheduler is not None:
            self._scheduler.on_trial_add(_NO_CONTROLLER, _Trial(str(len(self.points))))
        self.points.append(point)
        self._ends.append(ends)

    def stops(self, number: int, curve: Curve) -> bool:
        """Report losses of a trial; return whether it is hopeless."""
        actions = []
        for share, loss in curve if self._scheduler is not None else ():
            if share < 1:  # at the end there is nothing to stop
                result = {_SHARE: _per_cent(share), _LOSS: self._finite(loss)}
                actions.append(self._scheduler.on_trial_result(_NO_CONTROLLER, _Trial(str(number)), result))
        return any(action != TrialScheduler.CONTINUE for action in actions)

    def end(self, number: int, curve: Curve) -> None:
        """Report the end of a trial whose curve is whole; the last loss is its result."""
        if str(number) in self._ended:
            return
        losses = [(_per_cent(share), self._finite(loss)) for share, loss in curve]
        kept = losses[-1:]
        if self._options.algorithm == "bohb":  # it models each length at which trials are compared
            rungs = [100 * self._options.grace * self._options.reduction_factor**k for k in range(9)]
            firsts = (next((p for p in losses if p[0] >= rung), None) for rung in rungs if rung < _ALL)
            kept = [*dict.fromkeys(point for point in (*firsts, losses[-1]) if point)]
        self._ends_since[str(number)] = kept
        self._complete(str(number), kept)
        share, loss = kept[-1]
        if self._scheduler is not None and share >= _ALL:
            self._scheduler.on_trial_complete(
                _NO_CONTROLLER, _Trial(str(number)), {_SHARE: share, _LOSS: loss}
            )

    def _complete(self, number: str, losses: Sequence[tuple[int, float]]) -> None:
        self._ended.add(number)
        for share, loss in losses if self._options.algorithm == "bohb" else ():
            self._algorithm.on_trial_result(number, {_LOSS: loss, "hyperband_info": {"budget": share}})
        self._algorithm.on_trial_complete(number, {_LOSS: losses[-1][1]})

    def _finite(self, loss: float) -> float:
        # Algorithms and schedulers need a number for a divergence: it is as bad as the worst.
        if math.isfinite(loss):
            self._worst = max(self._worst, loss)
            return loss
        return self._worst if math.isfinite(self._worst) else _UNKNOWN


def _scheduler(options: SearchOptions) -> Any:
    common: dict[str, Any] = {
        "time_attr": _SHARE,
        "metric": _LOSS,
        "mode": "min",
        "grace_period": _per_cent(options.grace),
    }
    if options.scheduler == "asha":
        return ASHAScheduler(max_t=_ALL, reduction_factor=options.reduction_factor, **common)
    # A hard stop would refuse later losses of a stopped trial, which a resumed search reports.
    return MedianStoppingRule(hard_stop=False, **common) if options.scheduler == "median" else None


def _algorithm(space: Mapping[str, Domain], options: SearchOptions) -> Any:
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it warns that it converts the space by itself
    draws = {"loguniform": tune.loguniform, "uniform": tune.uniform}
    domains = {
        name: tune.choice([*d.values]) if d.kind == "choice" else draws[d.kind](d.low, d.high)
        for name, d in space.items()
    }
    common: dict[str, Any] = {"space": domains, "metric": _LOSS, "mode": "min"}
    if options.algorithm == "hyperopt":
        from ray.tune.search.hyperopt import HyperOptSearch

        # HyperOpt draws its first points at random, 20 by default: more than half of a small search.
        return HyperOptSearch(random_state_seed=options.seed, n_initial_points=8, **common)
    if options.algorithm == "bohb":
        try:
            import hpbandster  # noqa: F401
        except ImportError:
            raise ConfigError(f"algorithm 'bohb' {not_installed('hpbandster')}") from None
        from ray.tune.search.bohb import TuneBOHB

        return TuneBOHB(seed=options.seed, **common)
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"optuna": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    return OptunaSearch(sampler=samplers[options.algorithm](seed=options.seed), **common)
