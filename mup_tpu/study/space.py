"""Trials of a study: values under the user's own names, their grid, and leases of trials that run elsewhere.

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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mup_tpu.config import MOST_TRIALS, shown
from mup_tpu.config.sweep import DESIGNS, design_points
from mup_tpu.config.values import require_count, require_name
from mup_tpu.errors import ConfigError, StoreError, reason
from mup_tpu.store import FINAL, STUDY_COLUMNS, Store, StoredAxes, StoredAxis
from mup_tpu.store.runs import Result
from mup_tpu.study.report import StudyTrial, Value

Point = dict[str, Value]
Points = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]

_RESERVED = {*STUDY_COLUMNS, "step", "loss_err", "id", "values"}
"""Names of columns of every study or attributes of every trial."""


def octaves(first: float, last: float, step: float = 1.0) -> list[float]:
    """List powers of 2 from 2^first to 2^last, both included, an octave (or `step` octaves) apart.

    Examples:
        >>> octaves(-3, -1)
        [0.125, 0.25, 0.5]

    Raises:
        ConfigError: step is not above 0, or last is below first.
    """
    if not step > 0 or last < first:
        raise ConfigError(
            f"octaves({first:g}, {last:g}, {step:g}) has no values: last must be first or more, step above 0"
        )
    return [2.0 ** (first + k * step) for k in range(math.floor((last - first) / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Space:
    """Trials of a study: points of a scale × compared values × values of hyperparameters × seeds."""

    name: str  # name of the study
    scale: tuple[Point, ...]  # points of the scale, the smallest first; points of a ladder set several names
    measured_by: str  # name with the measure of the points
    tune: Mapping[str, tuple[float, ...]]  # values of each hyperparameter, ascending
    tuned_points: tuple[Point, ...]  # values of all hyperparameters, as the trials have them
    design: str  # one of `DESIGNS`; of a single hyperparameter all values are run
    compare: tuple[Point, ...]  # compared points; one empty point without any
    seeds: int  # seeds per cell: 0 to seeds - 1
    settings: tuple[tuple[str, Value], ...]  # values that all trials share
    continued: str = ""  # name of the scale whose longer runs go on from shorter ones

    @classmethod
    def of(
        cls,
        name: str,
        scale: Points,
        tune: Mapping[str, Sequence[Any]],
        compare: Mapping[str, Sequence[Any]] | None = None,
        seeds: int = 1,
        settings: Mapping[str, Any] | None = None,
        measured_by: str | None = None,
        design: str | None = None,
        continued: str | None = None,
    ) -> Space:
        """Make a space from arguments of `Study`; ConfigError for a name or value that is not allowed."""
        require_name("name", name)
        require_count("seeds", seeds, most=MOST_TRIALS)
        points = _scale_points(scale, measured_by)
        axes = [_one_axis("tune", {key: values}) for key, values in _table("tune", tune).items()]
        tuned = {key: _numbers(f"tune {key}", values, allow_zero=True) for key, values in axes}
        if len(tuned) > 1:
            tuned_points = design_points(tuned, design or DESIGNS[0])
        elif design is not None or not tuned:
            what = f"design {shown(design)} needs" if tuned else f"tune {shown(tune)} is empty: it needs"
            raise ConfigError(f"{what} {'several names' if tuned else 'a name'} with values in tune")
        else:
            tuned_points = tuple({key: number} for key, numbers in tuned.items() for number in numbers)
        compared: tuple[Point, ...] = ({},)
        if compare:
            axis, choices = _one_axis("compare", compare)
            compared = tuple({axis: choice} for choice in dict.fromkeys(_typed(f"compare {axis}", choices)))
        shared = {key: _plain(key, value) for key, value in _table("settings", settings or {}).items()}
        names = [*points[0], *tuned, *compared[0], *shared]
        for key in names:  # each becomes an attribute of a trial and a column of the run table
            words = key.split(".") if isinstance(key, str) else [""]
            is_name = words[0].isidentifier() and not keyword.iskeyword(words[0])
            if not is_name or key[0] == "_" or not re.fullmatch(r"[\w.]*\w", key) or ".." in key:
                raise ConfigError(
                    f"name {shown(key)} is not allowed: it must be a word of letters, digits and underscores "
                    "that begins with a letter, as learning_rate, or such words with dots, as optim.lr"
                )
            if key in _RESERVED:
                taken = ", ".join(sorted(_RESERVED))
                raise ConfigError(f"name {key!r} is not allowed: every run has its own; so have {taken}")
            if names.count(key) > 1:
                raise ConfigError(f"{key} of the study is given twice: each name may be in one place")
        count = len(points) * len(tuned_points) * len(compared) * seeds
        if count > MOST_TRIALS:
            raise ConfigError(f"the study has {count:,} trials; at most {MOST_TRIALS:,} are planned at once")
        if continued is not None and continued not in points[0]:
            raise ConfigError(
                f"continued {shown(continued)} is not one of {', '.join(points[0])}, which scale sets"
            )
        return cls(
            name, points, measured_by or next(iter(points[0])), tuned, tuned_points, design or DESIGNS[0],
            compared, seeds, tuple(shared.items()), continued or "",
        )  # fmt: skip

    @property
    def tuned(self) -> str:
        return next(iter(self.tune))

    @property
    def values(self) -> tuple[float, ...]:
        return self.tune[self.tuned]

    @property
    def axes(self) -> StoredAxes:
        # If nothing is compared, the compared axis is the experiment.
        compared = next(iter(self.compare[0]), "experiment")
        return StoredAxes(
            StoredAxis(self.measured_by, tuple(self.scale[0]), is_study=True),
            StoredAxis(self.tuned, tuple(self.tune), is_study=True),
            StoredAxis(compared, (compared,), is_study=True),
        )

    @cached_property
    def columns(self) -> dict[str, type]:
        first = self.trial(self.scale[0], self.compare[0], self.tuned_points[0], 0).values
        return {name: type(value) for name, value in first.items() if name != "seed"}

    def trial(self, point: Point, compared: Point, tuned: Point, seed: int) -> StudyTrial:
        values = {**point, **compared, **tuned, **dict(self.settings), "seed": seed}
        return StudyTrial(self.name, values)

    @cached_property
    def trials(self) -> tuple[StudyTrial, ...]:
        # Small scales come first.
        cells = itertools.product(self.scale, self.compare, self.tuned_points, range(self.seeds))
        return tuple(self.trial(*cell) for cell in cells)

    @cached_property
    def trial_of(self) -> Mapping[str, StudyTrial]:
        return {trial.id: trial for trial in self.trials}

    def shorter(self, trial: StudyTrial) -> list[StudyTrial]:
        """Return the runs from whose checkpoints a trial may go on, the longest first."""
        if not self.continued:
            return []
        length, free = trial.values[self.continued], {self.continued, "compute"}
        points = [
            p
            for p in self.scale
            if p[self.continued] < length  # type: ignore[operator]
            and all(name in free or value == trial.values[name] for name, value in p.items())
        ]
        points.sort(key=lambda p: p[self.continued], reverse=True)
        return [StudyTrial(self.name, {**trial.values, **point}) for point in points]

    def by_length(self, trials: Sequence[StudyTrial]) -> list[list[StudyTrial]]:
        """Return trials in parts that run one after the other, as later ones go on from earlier ones."""
        if not self.continued:
            return [list(trials)]
        lengths = sorted({trial.values[self.continued] for trial in trials})
        return [[trial for trial in trials if trial.values[self.continued] == length] for length in lengths]

    def size(self, trial: StudyTrial) -> str:
        return " ".join(f"{name} {trial.values[name]:g}" for name in self.scale[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `Study` for this space, as plain values."""
        return {
            "name": self.name,
            "scale": list(self.scale),
            "measured_by": self.measured_by,
            "tune": {key: list(values) for key, values in self.tune.items()},
            "compare": {key: [p[key] for p in self.compare] for key in self.compare[0]},
            "seeds": self.seeds,
            "settings": dict(self.settings),
            **({"design": self.design} if len(self.tune) > 1 else {}),
            **({"continued": self.continued} if self.continued else {}),
        }


def _scale_points(scale: Points, measured_by: str | None) -> tuple[Point, ...]:
    """Sort points by size. Points of one name may repeat a value; all must set the same names."""
    given: list[Mapping[str, Any]] = []
    if isinstance(scale, Mapping):
        name, values = _one_axis("scale", scale)
        given = [{name: value} for value in values]
    elif isinstance(scale, Sequence) and not isinstance(scale, str):
        given = [_table("a point of scale", point) for point in scale]
    if not given or not given[0]:
        raise ConfigError(
            f"scale {shown(scale)} is not a name with its values, as {{'width': [64, 128]}}, nor a list of "
            "points, as [{'width': 64, 'depth': 2}, {'width': 128, 'depth': 4}]"
        )
    names = list(given[0])
    if other := next((point for point in given if set(point) != set(names)), None):
        raise ConfigError(f"scale: point {shown(other)} does not set {', '.join(names)} as the first does")
    measure = names[0] if measured_by is None else measured_by
    if measure not in names:
        raise ConfigError(f"measured_by {shown(measure)} is not one of {', '.join(names)}, which scale sets")
    columns = {name: _typed(f"scale {name}", [point[name] for point in given]) for name in names}
    numbers = _numbers(f"scale {measure}", columns[measure])
    if len(numbers) < len(given) and len(names) > 1:
        raise ConfigError(
            f"scale: two points have the same {measure}; give a measured_by that differs between points"
        )
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    points = {row[measure]: row for row in rows}
    return tuple(points[size] for size in numbers)


def _one_axis(where: str, axis: Any) -> tuple[str, list[Any]]:
    if not isinstance(axis, Mapping) or len(axis) != 1:
        raise ConfigError(f"{where} {shown(axis)} is not one name with its values, as {{'width': [64, 128]}}")
    ((name, values),) = axis.items()
    is_one = isinstance(values, str | Mapping) or not hasattr(values, "__iter__")
    if is_one or not (listed := list(values)):
        raise ConfigError(f"{where} {name} {shown(values)} is not a list of values, one at least")
    return name, listed


def _table(where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} {shown(values)} is not names with their values")
    return dict(values)


def _plain(name: str, value: Any) -> Value:
    if hasattr(value, "item") and callable(value.item):
        value = value.item()
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{name} {shown(value)} is not text, a number, True or False")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} {value} is not allowed: it must be a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{name} {shown(value)} is not allowed: it must fit 64 bits")
    return value


def _typed(name: str, values: Sequence[Any]) -> list[Value]:
    """Return values of one type; whole numbers beside real ones become real."""
    plain = [_plain(name, value) for value in values]
    kinds = {type(value) for value in plain}
    if kinds == {int, float}:
        return [float(value) for value in plain]
    if len(kinds) > 1:
        raise ConfigError(f"{name} mixes {' and '.join(sorted(k.__name__ for k in kinds))}: give one type")
    return plain


def _numbers(name: str, values: Sequence[Any], allow_zero: bool = False) -> tuple[Any, ...]:
    """Return numbers above 0 (or 0), each once, ascending."""
    numbers = _typed(name, values)
    for number in numbers:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not (number > 0 or (allow_zero and number == 0)):  # type: ignore[operator]
            allowed = "a number, 0 or more" if allow_zero else "a number above 0"
            raise ConfigError(f"{name} {shown(number)} is not allowed: it must be {allowed}")
    return tuple(sorted(set(numbers)))


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
        """Return whether nobody else gets the trial yet; a begin further ahead is of a wrong clock."""
        return abs(now - self.at) < self.patience


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
            if lease is None or not lease.runs(now):
                lease = self._parse(file)
            if lease is not None:
                self._read[file] = lease
                if lease.runs(now):
                    yield lease

    def missing(self) -> Iterator[StudyTrial]:
        """Yield trials of the grid without a result."""
        known, trials = self._store.known(), self._space.trials
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
                    trial = StudyTrial(self._space.name, values)
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
