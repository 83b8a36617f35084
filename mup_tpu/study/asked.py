"""Asked trials, not told yet: a file each in the folder of the study."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_tpu.errors import StoreError, raised_as, reason
from mup_tpu.files import Folder, lock
from mup_tpu.study.space import Trial

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

    @property
    def is_awaited(self) -> bool:
        """Whether its patience has not run out."""
        return time.time() < self.at + self.patience


class AskedTrials:
    """Asked trials of one study.

    Args:
        folder: results folder.
        study: name of the study.
    """

    def __init__(self, folder: Folder, study: str) -> None:
        self._root, self._folder, self._study = folder, folder / "asked", study

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock against other processes that ask or tell; a bucket has none."""
        if not self._root.is_local:
            yield
            return
        path = Path(self._root.path, "asked.lock")
        with raised_as(StoreError, f"{path} cannot be opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = lock(path, wait=True)
        with file:
            yield

    def all(self) -> dict[str, Asked]:
        """Asked trials by id, the longest asked first.

        Raises:
            StoreError: a file cannot be read.
        """
        found = [self._read(name) for name in self._folder.names() if name.endswith(".json")]
        return {a.trial.id: a for a in sorted(found, key=lambda a: a.at)}

    def awaited(self) -> set[str]:
        """Ids of trials within their patience."""
        return {name for name, asked in self.all().items() if asked.is_awaited}

    def add(self, trials: Iterable[tuple[Trial, int | None]], patience: float) -> None:
        """Remember trials, each with its purchase."""
        for trial, purchase in trials:
            held = {"values": trial.values, "at": time.time(), "patience": patience, "purchase": purchase}
            self._folder.write(f"{trial.id}.json", json.dumps(held).encode())

    def forget(self, name: str) -> None:
        """Forget a told trial."""
        self._folder.remove(f"{name}.json")

    def _read(self, file: str) -> Asked:
        try:
            held: dict[str, Any] = json.loads(self._folder.read(file))
            trial = Trial(self._study, held["values"])
            return Asked(trial, float(held["at"]), float(held["patience"]), held["purchase"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._folder}/{file} cannot be read: {reason(error)}") from None
