"""Chooser of a search's trials: Ray Tune's algorithms propose points, its scheduler stops trials early.

The driver runs the trials (`search.py`). Tune's own loop (`Tuner.fit`) would bring a second set of attempts,
heartbeats and checkpoints, and it keeps its state in pickles. Its API does without the loop, but for two
things, both here:

- a scheduler takes the controller, which ASHA does not read, and a Tune trial, of which it reads `trial_id`;
- an algorithm is restored from a pickle only, so that a resumed search replays its log of proposals and ends
  into a new one with the same seed.

In a local folder the log is search.jsonl, a line for each event. In a bucket, where nothing can be appended,
it is search/00000000.json and so on, an object for each event.
"""

from __future__ import annotations

import json
import logging
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher

from mup_tpu.config.options import SearchOptions
from mup_tpu.config.sweep import Search
from mup_tpu.config.toml import from_dict
from mup_tpu.config.trial import Trial
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError, StoreError, raised_as
from mup_tpu.files import Folder, patiently
from mup_tpu.store import LOG_FILE, LOG_OBJECTS

LOSS, _SHARE = "loss", "share"
_ALL = 100  # share of a trial's steps at its end, per cent


def _trial(key: int) -> Any:
    return SimpleNamespace(trial_id=str(key))


class Chooser:
    """Algorithm and scheduler of a search, with the proposals of its log."""

    def __init__(self, search: Search, options: SearchOptions, log: SearchLog) -> None:
        self._algorithm, self.log = algorithm(search, options), log
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
            point = self._algorithm.suggest(str(len(self.log.proposals)))
            if point is None or point == Searcher.FINISHED:
                return None
            key = self.log.propose({name: float(value) for name, value in point.items()})
        if self._asha is not None:
            self._asha.on_trial_add(None, _trial(key))
        return key

    def stops(self, key: int, share: float, loss: float) -> bool:
        """Report the loss of a proposal after a share of its steps; return whether it is hopeless."""
        if self._asha is None:
            return False
        result = {_SHARE: max(1, int(_ALL * share)), LOSS: loss}
        return bool(self._asha.on_trial_result(None, _trial(key), result) == TrialScheduler.STOP)

    def end(self, key: int, loss: float, is_whole: bool) -> None:
        """Log the last loss of a proposal, and report it to Tune; `is_whole` unless it was stopped early."""
        self.log.end(key, loss)
        self._algorithm.on_trial_complete(str(key), {LOSS: loss})
        if self._asha is not None:
            # Without a share, ASHA only forgets the trial: it has compared the last evaluation already.
            result = {_SHARE: _ALL, LOSS: loss} if is_whole else {}
            self._asha.on_trial_complete(None, _trial(key), result)


def algorithm(search: Search, options: SearchOptions) -> Searcher:
    """Make a new search algorithm for a space."""
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it warns that it converts the space by itself
    draws = {"loguniform": tune.loguniform, "uniform": tune.uniform}
    space = {
        name: tune.choice([*d.values]) if d.kind == "choice" else draws[d.kind](d.low, d.high)
        for name, d in search.space.items()
    }
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


class SearchLog:
    """Proposals and their ends; each event is written to the disk or bucket at once."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._writer = folder, uuid.uuid4().hex
        self.events: list[dict[str, Any]] = []
        self._in_line = False  # whether a local log ends within a line, as after a kill
        self.path = f"{folder}/{LOG_FILE if folder.is_local else LOG_OBJECTS}"
        misfits = (OSError, ValueError, RecursionError)
        with raised_as(StoreError, f"search log {self.path} cannot be read", misfits):
            if folder.is_local:
                path = Path(self.path)
                text = path.read_bytes() if path.exists() else b""
                self._in_line = not text.endswith(b"\n") if text else False
                for number, line in enumerate(text.splitlines(), 1):
                    try:
                        event = json.loads(line)
                    except ValueError:
                        warnings.warn(
                            f"line {number} of {path} is torn, as by a kill: left out", stacklevel=2
                        )
                    else:
                        self._take(event, f"line {number}")
            else:
                with ThreadPoolExecutor(16) as pool:
                    names = (folder / LOG_OBJECTS).names()
                    contents = pool.map((folder / LOG_OBJECTS).read, names)
                    for name, content in zip(names, contents, strict=True):
                        self._take(json.loads(content), name)
        self.proposals: dict[int, dict[str, float]] = {
            e["key"]: e["point"] for e in self.events if e["event"] == "proposed"
        }
        # An end whose proposal's line is torn tells nothing.
        self.events = [e for e in self.events if e["event"] != "ended" or e["key"] in self.proposals]
        self.ended: set[int] = {e["key"] for e in self.events if e["event"] == "ended"}

    def _take(self, event: Any, where: str) -> None:
        numbers: list[Any] = []
        match event:
            case {"event": "begun", "space": dict(), "algorithm": str(), "seed": int(), "base": dict()}:
                pass
            case {"event": "proposed", "key": int(), "point": dict(point)}:
                numbers = [*point.values()]
            case {"event": "ended", "key": int(), "loss": loss}:
                numbers = [loss]
            case _:
                numbers = [None]
        if any(type(number) not in (int, float) for number in numbers):
            raise ValueError(f"{where} is no event of a search: {shown(event)}")
        self.events.append(event)

    def begin(self, search: Search, options: SearchOptions) -> None:
        """Log the space and the algorithm of a search, or compare them with the log."""
        for key, point in self.proposals.items():
            if set(point) != set(search.space):
                raise StoreError(
                    f"search log {self.path} cannot be read: proposal {key} does not give "
                    f"{', '.join(search.space)}"
                )
        space = {name: asdict(domain) for name, domain in search.space.items()}
        identity: dict[str, Any] = {"space": space, "algorithm": options.algorithm, "seed": options.seed}
        identity["base"] = search.base.to_dict()
        begun = next((e for e in self.events if e["event"] == "begun"), None)
        if begun is None:
            self._add({"event": "begun", **identity})
            return
        misfits = (ConfigError, TypeError, ValueError, AttributeError, KeyError)
        with raised_as(StoreError, f"search log {self.path} cannot be read: its base", misfits):
            base = from_dict(Trial, begun["base"]).to_dict()  # new fields have their defaults
        begun = begun | {"base": base}
        for name, value in identity.items():
            if begun[name] != json.loads(json.dumps(value)):
                raise ConfigError(
                    f"{name} of the search differs from {self.path}; a search is resumed as it was begun"
                )

    def propose(self, point: dict[str, float]) -> int:
        """Log a new proposal; return its number."""
        key = len(self.proposals)
        self.proposals[key] = point
        self._add({"event": "proposed", "key": key, "point": point})
        return key

    def end(self, key: int, loss: float) -> None:
        self.ended.add(key)
        self._add({"event": "ended", "key": key, "loss": loss})

    def _add(self, event: dict[str, Any]) -> None:
        with raised_as(StoreError, f"search log {self.path} cannot be written"):
            if self._folder.is_local:
                with self._folder.append_to(LOG_FILE) as file:
                    file.write(("\n" if self._in_line else "") + json.dumps(event) + "\n")
                self._in_line = False
            else:
                self._create(f"{LOG_OBJECTS}/{len(self.events):08}.json", {**event, "writer": self._writer})
        self.events.append(event)

    def _create(self, name: str, event: dict[str, Any]) -> None:
        """Write the next object; refuse if another search has written it."""
        try:
            patiently(lambda: self._folder.create(name, json.dumps(event).encode()))
        except OSError as error:
            try:
                written = json.loads(self._folder.read(name))
            except FileNotFoundError:
                raise error from None
            if written["writer"] != self._writer:  # else the answer to an earlier try was lost
                busy = f"results folder {self._folder} is being written by another search"
                raise StoreError(f"{busy}; wait for it, or stop it") from None
