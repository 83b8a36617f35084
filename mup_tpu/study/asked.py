"""Asked trials, not told yet: a file each in the folder of the study."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mup_tpu.config import shown
from mup_tpu.errors import StoreError, reason
from mup_tpu.store import Store
from mup_tpu.study.space import Space, Trial

PATIENCE_S = 24 * 3600.0
"""Seconds after which a trial that was not told may be asked for again."""


@dataclass(frozen=True)
class Asked:
    """A trial that somebody runs."""

    trial: Trial
    at: float
    """Time of the asking, in seconds since 1970."""
    patience: float
    """Seconds from then on after which it may be asked for again."""
    purchase: int | None
    """Purchase of a sequence that it belongs to."""


class AskedTrials:
    """Asked trials of one study."""

    def __init__(self, store: Store, space: Space) -> None:
        self._store, self._space, self._folder = store, space, store.folder / "asked"

    def alone(self) -> AbstractContextManager[None]:
        """Lock against other processes that ask or tell; a bucket has none."""
        return self._store.folder.locked("asked/asked.lock")

    def all(self) -> dict[str, Asked]:
        """Asked trials by id, the longest asked first.

        Raises:
            StoreError: a file cannot be read.
        """
        found = [self._read(name) for name in self._folder.names() if name.endswith(".json")]
        return {a.trial.id: a for a in sorted(found, key=lambda a: a.at)}

    def awaited(self) -> set[str]:
        """Ids of trials within their patience."""
        now = time.time()
        return {name for name, asked in self.all().items() if now < asked.at + asked.patience}

    def give(self, planned: Iterable[tuple[Trial, int | None]], count: int, patience: float) -> list[Trial]:
        """First planned trials that were not given before; each is remembered with its purchase."""
        taken = self._store.done() | self.awaited()
        chosen = [(trial, purchase) for trial, purchase in planned if trial.id not in taken][:count]
        for trial, purchase in chosen:
            held = {"values": trial.values, "at": time.time(), "patience": patience, "purchase": purchase}
            self._folder.write(f"{trial.id}.json", json.dumps(held).encode())
        return [trial for trial, _ in chosen]

    def find(self, name: str) -> Asked:
        """Entry of a trial that was asked for, or is in the grid and not told yet.

        Raises:
            StoreError: nobody asked for the trial, or its loss is stored.
        """
        results = self._store.results()
        known = results.loc[results["trial_id"] == name, "loss"]
        if len(known):
            raise StoreError(f"trial {name} has a loss already, {known.iloc[0]:.6g}: a loss is told once")
        there = self.all()
        if name in there:
            return there[name]
        if one := next((t for t in self._space.trials() if t.id == name), None):
            return Asked(one, 0.0, 0.0, self._store.next_purchase())
        waiting = ", ".join(list(there)[:4]) + (" ..." if len(there) > 4 else "")
        raise StoreError(
            f"trial {shown(name)} was not given by {self._store.folder}; it waits for {waiting or 'none'}"
        )

    def forget(self, name: str) -> None:
        """Forget a told trial."""
        self._folder.remove(f"{name}.json")

    def _read(self, file: str) -> Asked:
        try:
            held: dict[str, Any] = json.loads(self._folder.read(file))
            trial = Trial(self._space.name, held["values"])
            return Asked(trial, float(held["at"]), float(held["patience"]), held["purchase"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._folder}/{file} cannot be read: {reason(error)}") from None
