"""Leases of a study's trials that run elsewhere, a file each in the folder until their losses come."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mup_tpu.config import shown
from mup_tpu.errors import StoreError, reason
from mup_tpu.store import FINAL, Store
from mup_tpu.store.runs import Result
from mup_tpu.study.space import Space, Trial

PATIENCE_S = 24 * 3600.0
"""Lease of a trial, in seconds."""

_FOLDER, _MOST_BYTES = "asked", 2**20


@dataclass(frozen=True)
class Lease:
    """A trial that runs elsewhere."""

    trial: Trial
    at: float  # begin, in seconds since 1970
    patience: float  # seconds after the begin from which the trial may be leased again
    purchase: int | None  # purchase of a sequence that the trial belongs to

    @property
    def end(self) -> float:
        return self.at + self.patience


class Leases:
    """Leased trials of one study."""

    def __init__(self, store: Store, space: Space) -> None:
        self._store, self._space = store, space
        self._folder = store.folder / _FOLDER
        self._known: Mapping[str, Result] = {}
        self._first = 0  # trials of the grid before this one have results in `_known`
        # Leases by file name. A running one is not read again: only after its end may another replace it.
        self._read: dict[str, Lease] = {}

    def alone(self) -> AbstractContextManager[None]:
        return self._store.folder.locked(f"{_FOLDER}/asked.lock")

    def running(self) -> Iterator[Lease]:
        """Yield the leases that have not ended."""
        now = time.time()
        known, self._read = self._read, {}
        for file in filter(lambda name: name.endswith(".json"), self._folder.names()):
            lease = known.get(file)
            if lease is None or lease.end <= now:
                lease = self._parse(file)
            if lease is not None:
                self._read[file] = lease
                if now < lease.end:
                    yield lease

    def missing(self) -> Iterator[Trial]:
        """Yield trials of the grid without a result."""
        known, trials = self._store.known(), self._space.trials
        if known is not self._known:
            self._known, self._first = known, 0
        while self._first < len(trials) and _is_final(known.get(trials[self._first].id)):
            self._first += 1
        rest = itertools.islice(trials, self._first, None)
        return (trial for trial in rest if not _is_final(known.get(trial.id)))

    def give(self, planned: Iterable[tuple[Trial, int | None]], count: int, patience: float) -> list[Trial]:
        """Give a lease to the first planned trials without one; each keeps its purchase."""
        leased = {lease.trial.id for lease in self.running()}
        free = (plan for plan in planned if plan[0].id not in leased)
        given = list(itertools.islice(free, count))
        for trial, purchase in given:
            lease = {"values": trial.values, "at": time.time(), "patience": patience, "purchase": purchase}
            # Losing a lease in a power cut loses no result: nothing waits for the disk.
            self._folder.write(f"{trial.id}.json", json.dumps(lease).encode(), flushed=False)
        return [trial for trial, _ in given]

    def find(self, name: str) -> Lease:
        """Return the lease of a trial that was given, or is in the grid and has no result."""
        result = self._store.known().get(name)
        if result is not None and _is_final(result):
            raise StoreError(f"trial {name} has a loss already, {result.loss:.6g}: a loss is told once")
        if name.isalnum() and (lease := self._parse(f"{name}.json")) is not None:
            return lease
        if (trial := self._space.trial_of.get(name)) is not None:
            return Lease(trial, 0.0, 0.0, self._store.next_purchase())
        waiting = [lease.trial.id for lease in sorted(self.running(), key=lambda lease: lease.at)]
        shown_ids = ", ".join(waiting[:4]) + (" ..." if len(waiting) > 4 else "")
        raise StoreError(
            f"trial {shown(name)} was not given by {self._store.folder}; it waits for {shown_ids or 'none'}"
        )

    def forget(self, name: str) -> None:
        self._folder.remove(f"{name}.json")

    def _parse(self, file: str) -> Lease | None:
        """Read a lease; None if the file is missing."""
        try:
            match json.loads(self._folder.read(file, _MOST_BYTES)):
                case {"values": dict(values), "at": at, "patience": patience, "purchase": purchase}:
                    trial = Trial(self._space.name, values)
                    are_times = all(type(t) in (int, float) and math.isfinite(t) for t in (at, patience))
                    is_purchase = purchase is None or (type(purchase) is int and 0 <= purchase < 2**63)
                    if are_times and is_purchase and f"{trial.id}.json" == file:
                        return Lease(trial, float(at), float(patience), purchase)
            raise ValueError("it is no lease of a trial of this study")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreError(f"{self._folder}/{file} cannot be read: {reason(error)}") from None


def _is_final(result: Result | None) -> bool:
    return result is not None and result.status in FINAL
