"""A search's memory: a log of what was proposed and what came of it (search.jsonl), beside the store.

Resuming replays it into a fresh algorithm with the same seed, which then knows what it knew, and first goes
on with the trials that had not ended, from their checkpoints. Tune's own state on disk is pickled, and never
read.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from mup_tpu.config import Trial
from mup_tpu.config_io import from_dict
from mup_tpu.config_search import Search, SearchOptions
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.tuning.search_progress import KEY


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
        text = path.read_bytes() if path.exists() else b""
        self._in_line = not text.endswith(b"\n") if text else False
        """Whether the file ends within a line, as after a kill."""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                self.events.append(json.loads(line))
            except ValueError:
                warnings.warn(f"line {number} of {path} is torn, as by a kill: left out", stacklevel=2)
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
        begun = begun | {"base": from_dict(Trial, begun["base"]).to_dict()}  # fields came since
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
                file.write(("\n" if self._in_line else "") + json.dumps(event) + "\n")
            self._in_line = False
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
