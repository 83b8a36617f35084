"""Grids of studies, under the user's own names, and leases of trials that run elsewhere.

A lease is a file in the folder until the trial's loss comes.
"""

from __future__ import annotations

import itertools
import json
import keyword
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from mup_tpu.config import Axes, Domain, Grid, on_one_line, parse_number, shown
from mup_tpu.config.grid import DESIGNS, ORDERS, Point, Value
from mup_tpu.config.toml import from_dict
from mup_tpu.errors import ConfigError, StoreError, reason
from mup_tpu.store import FINAL, STUDY_COLUMNS, Result, Store
from mup_tpu.study.report import StudyTrial

_RESERVED = {*STUDY_COLUMNS, "step", "loss_err", "id", "values"}
"""Names of columns of every study or attributes of every trial."""


@dataclass(frozen=True)
class StudyGrid(Grid[StudyTrial]):
    """A grid of trials of a study: names are the user's own."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # values that all trials share
    continued: str | None = None  # name of the scale whose longer runs go on from shorter ones
    space: Mapping[str, Any] | None = None  # domains of a search, in place of `tune`

    def __post_init__(self) -> None:
        if self.space is not None:
            self._check_space(self.space)
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"settings {shown(self.settings)} is not names with their values")
        plain = {name: self._check("", name, value) for name, value in self.settings.items()}
        object.__setattr__(self, "settings", plain)
        super().__post_init__()
        if self.continued is not None and self.continued not in self.points[0]:
            raise ConfigError(
                f"continued={shown(self.continued)} must be a name in scale: {', '.join(self.points[0])}"
            )

    def _check_space(self, space: Any) -> None:
        for name in ("tune", "compare", "design", "continued"):
            if getattr(self, name):
                raise ConfigError(f"{name} is for a sweep, and space for a search: give one of them")
        if len(self.points) > 1 or self.num_seeds > 1:
            what = f"scale with {len(self.points)} points" if len(self.points) > 1 else "several num_seeds"
            raise ConfigError(f"{what}: a search has one size and one seed; its best values go to others")
        if not isinstance(space, Mapping) or not space:
            raise ConfigError(
                f"space {shown(space)} is not names with domains, as {{'learning_rate': {{'low': 1e-4, "
                "'high': 1e-1}}"
            )
        domains = {n: d for n, d in space.items() if isinstance(d, Domain)}
        domains = {n: domains.get(n) or from_dict(Domain, d, f"space of {n}") for n, d in space.items()}
        for name, domain in domains.items():
            for value in domain.ends:
                self._check("space", name, value)
        object.__setattr__(self, "space", domains)

    @cached_property
    def tuned(self) -> dict[str, tuple[Any, ...]]:
        return super().tuned if self.space is None else {name: d.ends for name, d in self.space.items()}

    @cached_property
    def tuned_points(self) -> tuple[Point, ...]:
        return super().tuned_points if self.space is None else ()  # an algorithm chooses them

    def _check(self, where: str, name: Any, value: Any) -> Value:
        words = name.split(".") if isinstance(name, str) else [""]
        is_name = words[0].isidentifier() and not keyword.iskeyword(words[0])
        # Each name becomes an attribute of a trial and a column of the run table.
        if not is_name or name[0] == "_" or not re.fullmatch(r"[\w.]*\w", name) or ".." in name:
            raise ConfigError(
                f"name {shown(name)} is not allowed: it must be a word of letters, digits and underscores "
                "that begins with a letter, as learning_rate, or such words with dots, as optim.lr"
            )
        if name in _RESERVED:
            taken = ", ".join(sorted(_RESERVED))
            raise ConfigError(f"name {name!r} is not allowed: every run has its own; so have {taken}")
        what = f"{where} {name}".strip()
        if hasattr(value, "item") and callable(value.item):
            value = value.item()
        if isinstance(value, str) and (
            where == "tune" or (where == "scale" and isinstance(self.scale, Mapping))
        ):
            value = parse_number(value, what)
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"{what} {shown(value)} is not text, a number, True or False")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{what} {value} is not allowed: it must be a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{what} {shown(value)} is not allowed: it must fit 64 bits")
        return value

    def _shared(self) -> Sequence[str]:
        return [*self.settings]

    @cached_property
    def axes(self) -> Axes:
        # If nothing is compared, the compared axis is the experiment.
        compared = tuple(self.compared[0]) or ("experiment",)
        return Axes(tuple(self.points[0]), self.measure, tuple(self.tuned), compared, is_study=True)

    @cached_property
    def by_size(self) -> dict[float, Point]:
        return {float(point[self.measure]): point for point in self.points}

    @cached_property
    def columns(self) -> dict[str, type]:
        tuned = {name: values[0] for name, values in self.tuned.items()}
        values = {**self.points[0], **self.compared[0], **tuned, **self.settings}
        return {name: type(value) for name, value in values.items()}

    def trial(self, values: Mapping[str, Value], seed: int) -> StudyTrial:
        return StudyTrial(self.experiment, {**values, **self.settings, "seed": seed})

    @cached_property
    def trial_of(self) -> Mapping[str, StudyTrial]:
        return {trial.id: trial for trial in self._trials}

    def shorter(self, trial: StudyTrial) -> list[StudyTrial]:
        """Return the runs from whose checkpoints a trial may go on, the longest first."""
        if (name := self.continued) is None:
            return []
        length, free = trial.values[name], {name, *ORDERS}

        def is_shorter(p: Point) -> bool:
            return p[name] < length and all(n in free or v == trial.values[n] for n, v in p.items())

        points = sorted(filter(is_shorter, self.points), key=lambda p: p[name], reverse=True)
        return [StudyTrial(self.experiment, {**trial.values, **point}) for point in points]

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `Study` for this grid, as plain values."""
        return {
            "name": self.experiment,
            "scale": list(self.points),
            "measured_by": self.measure,
            **(
                {"tune": {key: list(values) for key, values in self.tuned.items()}}
                if self.space is None
                else {"space": {key: asdict(domain) for key, domain in self.space.items()}}
            ),
            "compare": {key: [p[key] for p in self.compared] for key in self.compared[0]},
            "seeds": self.num_seeds,
            "settings": dict(self.settings),
            **({"design": self.design or DESIGNS[0]} if len(self.tuned) > 1 and not self.space else {}),
            **({"continued": self.continued} if self.continued else {}),
        }


PATIENCE_S = 24 * 3600.0  # lease of a trial, in seconds

_FOLDER, _MOST_BYTES = "asked", 2**20


@dataclass(frozen=True)
class Lease:
    """A trial that runs elsewhere."""

    trial: StudyTrial
    at: float  # begin, in seconds since 1970
    patience: float  # seconds after the begin from which the trial may be leased again
    purchase: int | None  # purchase of a sequence that the trial belongs to

    def runs(self, now: float) -> bool:
        """Return whether the trial stays leased; a begin far in the future comes from a wrong clock."""
        return abs(now - self.at) < self.patience


class Leases:
    """Leased trials of one study."""

    def __init__(self, store: Store, grid: StudyGrid) -> None:
        self._store, self._grid = store, grid
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
            if lease is None or not lease.runs(now):
                lease = self._parse(file)
            if lease is not None:
                self._read[file] = lease
                if lease.runs(now):
                    yield lease

    def missing(self) -> Iterator[StudyTrial]:
        """Yield trials of the grid without a result."""
        known, trials = self._store.known(), self._grid.trials()
        if known is not self._known:
            self._known, self._first = known, 0
        while self._first < len(trials) and _is_final(known.get(trials[self._first].id)):
            self._first += 1
        rest = itertools.islice(trials, self._first, None)
        return (trial for trial in rest if not _is_final(known.get(trial.id)))

    def give(
        self, planned: Iterable[tuple[StudyTrial, int | None]], count: int, patience: float
    ) -> list[StudyTrial]:
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
        if (trial := self._grid.trial_of.get(name)) is not None:
            return Lease(trial, 0.0, 0.0, self._store.next_purchase())
        waiting = [lease.trial.id for lease in sorted(self.running(), key=lambda lease: lease.at)]
        shown_ids = ", ".join(waiting[:4]) + (" ..." if len(waiting) > 4 else "")
        raise StoreError(
            f"trial {shown(name)} was not given by {self._store.folder}; it waits for {shown_ids or 'none'}"
        )

    def forget(self, name: str) -> None:
        self._folder.remove(f"{name}.json")

    def _parse(self, file: str) -> Lease | None:
        try:
            content = self._folder.read(file, _MOST_BYTES)
            if not content.strip(b"\0"):  # a power cut left its name alone
                return None
            match json.loads(content):
                case {"values": dict(values), "at": at, "patience": patience, "purchase": purchase}:
                    trial = StudyTrial(self._grid.experiment, values)
                    are_times = all(type(t) in (int, float) and math.isfinite(t) for t in (at, patience))
                    is_purchase = purchase is None or (type(purchase) is int and 0 <= purchase < 2**63)
                    if are_times and is_purchase and f"{trial.id}.json" == file:
                        return Lease(trial, float(at), float(patience), purchase)
            raise ValueError("it is no lease of a trial of this study")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreError(f"{self._folder}/{on_one_line(file)} cannot be read: {reason(error)}") from None


def _is_final(result: Result | None) -> bool:
    return result is not None and result.status in FINAL
