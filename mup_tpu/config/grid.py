"""Grids: named points along a scale, of hyperparameters and of compared values, and the trials there."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from mup_tpu.config.trial import field_column
from mup_tpu.config.values import require_count, require_name, require_one_of, shown
from mup_tpu.errors import ConfigError

Value = str | int | float | bool
Point = dict[str, Any]
Axis = Mapping[str, Sequence[Any]]  # names with their values
Points = Axis | Sequence[Mapping[str, Any]]  # one name with its values, or points that set several names

T = TypeVar("T")

MOST_TRIALS = 100_000  # most trials of one grid; planning them takes seconds
MOST_TUNED = 4  # hyperparameters that are tuned together
DESIGNS = ("composite", "grid")
# Names of the work by which a plan orders sizes of somebody's own training; they set nothing
ORDERS = ("flops", "work")


@dataclass(frozen=True)
class Axes:
    """Names that change along a grid, as its store keeps them; a store without axes has the defaults."""

    scale: tuple[str, ...] = ("width",)
    size: str = "width"  # column that places the points of the scale
    tune: tuple[str, ...] = ("learning_rate",)
    compare: tuple[str, ...] = ("parametrization",)
    is_study: bool = False  # whether names are the user's, and columns too; else fields of a trial

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names) if self.is_study else tuple(map(field_column, names))

    @property
    def tuned(self) -> tuple[str, ...]:
        return self.columns(self.tune)

    @property
    def compared(self) -> str:
        return self.columns(self.compare)[0]

    def __str__(self) -> str:
        # A study that compares nothing has its name in place of the rule.
        compared = "" if self.compare == ("experiment",) else f", comparing {self.compare[0]}"
        return f"{' and '.join(self.tune)} by {' with '.join(self.scale)}{compared}"


@dataclass(frozen=True)
class Grid(ABC, Generic[T]):
    """Trials at points of a scale × compared points × tuned points × seeds.

    Subclasses say what their names are, and make a trial of its values.
    """

    experiment: str  # name of the experiment; a results folder holds one
    _: KW_ONLY
    scale: Points | None = None
    """Scale: one name with its values, or a list of points that set several names (a ladder)."""
    tune: Axis | None = None
    """Hyperparameter with its values; or two to four, which are tuned together."""
    compare: Axis | None = None  # compared name with its values, which need not be numbers
    num_seeds: int = 1  # seeds per cell: 0 to num_seeds - 1
    measured_by: str | None = None  # measure or name that places the points of a ladder
    design: str | None = None
    """Points of several hyperparameters: "composite", the default, has a centre, axes and corners; "grid" all
    combinations."""
    target: Mapping[str, Any] | None = field(default=None, compare=False)  # [target] of a plan's file

    _measures: ClassVar[Mapping[str, str]] = {}
    """Columns of run tables by a measure of points; the first measures a ladder by default."""

    def __post_init__(self) -> None:
        require_name("experiment", self.experiment)
        require_count("num_seeds", self.num_seeds, most=MOST_TRIALS)
        count = len(self.points) * len(self.tuned_points) * len(self.compared) * self.num_seeds
        if count > MOST_TRIALS:
            raise ConfigError(f"the grid has {count:,} trials; at most {MOST_TRIALS:,} are planned at once")
        names = [*self.fields, *self._shared()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]} is on two axes: each name may be in one place")
        # Equal grids are equal however they were written.
        given = {"scale": self.points, "tune": self.tuned}
        given["compare"] = {name: tuple(p[name] for p in self.compared) for name in self.compared[0]}
        for axis, values in given.items():
            if getattr(self, axis) is not None:
                object.__setattr__(self, axis, values)

    @abstractmethod
    def trial(self, values: Mapping[str, Value], seed: int) -> T:
        """Return the trial at a point of each axis."""

    @abstractmethod
    def _check(self, where: str, name: str, value: Any) -> Value:
        """Return a value of an axis as trials have it; refuse a name or value that is not allowed."""

    @property
    @abstractmethod
    def axes(self) -> Axes: ...

    def _shared(self) -> Sequence[str]:
        return ()

    def _given(self, axis: str) -> Any:
        if (given := getattr(self, axis)) is None and axis != "compare":
            raise ConfigError(f"{axis} is missing")
        return given

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of all axes."""
        return *self.points[0], *self.tuned, *self.compared[0]

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Return the points of the scale, the smallest first where a name measures them."""
        scale = self._given("scale")
        rows: list[Mapping[str, Any]] = []
        if isinstance(scale, Mapping):
            name, values = _one_name("scale", scale)
            rows = [{name: value} for value in values]
        elif isinstance(scale, Sequence) and not isinstance(scale, str):
            rows = [point for point in scale if isinstance(point, Mapping)]
        if not rows or not rows[0] or len(rows) < len(scale):
            raise ConfigError(
                f"scale {shown(scale)} is not a name with its values, as {{'width': [64, 128]}}, nor a list "
                "of points, as [{'width': 64, 'depth': 2}, {'width': 128, 'depth': 4}]"
            )
        names = [*rows[0]]
        if other := next((point for point in rows if set(point) != set(names)), None):
            raise ConfigError(
                f"scale: point {shown(other)} does not set {', '.join(names)} as the first does"
            )
        columns = {name: self._values("scale", name, [point[name] for point in rows]) for name in names}
        points = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if self.measured_by is not None:
            require_one_of("measured_by", self.measured_by, (*self._measures, *names))
        if (measure := self._measure(names)) in names:
            sizes = {point[measure]: point for point in points}
            ascending = _ascending("scale", measure, columns[measure])
            if len(sizes) < len(points) and len(names) > 1:
                raise ConfigError(
                    f"scale: two points have the same {measure}; give a measured_by that differs between them"
                )
            points = [sizes[size] for size in ascending]
        return tuple(points)

    @cached_property
    def measure(self) -> str:
        return self._measure([*self.points[0]])

    def _measure(self, names: Sequence[str]) -> str:
        default = next(iter(self._measures), names[0]) if len(names) > 1 else names[0]
        return self.measured_by or default

    @cached_property
    def tuned(self) -> dict[str, tuple[float, ...]]:
        """Return the values of each hyperparameter, ascending."""
        given = self._given("tune")
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(f"tune {shown(given)} is not names with values, as {{'learning_rate': [...]}}")
        tuned = {}
        for name, values in given.items():
            _one_name("tune", {name: values})
            tuned[name] = _ascending("tune", name, self._values("tune", name, values), allow_zero=True)
        return tuned

    @cached_property
    def tuned_points(self) -> tuple[Point, ...]:
        if len(self.tuned) > 1:
            return design_points(self.tuned, self.design or DESIGNS[0])
        if self.design is not None:
            raise ConfigError(f"design {shown(self.design)} needs a tune with several hyperparameters")
        ((name, values),) = self.tuned.items()
        return tuple({name: value} for value in values)

    @cached_property
    def compared(self) -> tuple[Point, ...]:
        if not (given := self._given("compare")):
            return ({},)
        name, values = _one_name("compare", given)
        return tuple({name: value} for value in dict.fromkeys(self._values("compare", name, values)))

    @cached_property
    def rules(self) -> Mapping[str, Point]:
        """Return the compared points by their names in run tables."""
        return {str(next(iter(point.values()), self.experiment)): point for point in self.compared}

    def _values(self, where: str, name: str, values: Sequence[Any]) -> list[Value]:
        """Return values of one type; whole numbers beside real ones become real."""
        checked = [self._check(where, name, value) for value in values]
        kinds = {type(value) for value in checked}
        if kinds == {int, float}:
            return [float(value) for value in checked]
        if len(kinds) > 1:
            mixed = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise ConfigError(f"{where} {name} mixes {mixed}: give one type")
        return checked

    @cached_property
    def _trials(self) -> tuple[T, ...]:
        cells = itertools.product(self.points, self.compared, self.tuned_points, range(self.num_seeds))
        return tuple(self.trial({**at, **compared, **tuned}, seed) for at, compared, tuned, seed in cells)

    def trials(self) -> list[T]:
        """Return all trials, small scales first."""
        return [*self._trials]

    def by_column(self, values: Mapping[str, Value]) -> Point:
        return dict(zip(self.axes.columns([*values]), values.values(), strict=True))


def _one_name(where: str, axis: Any) -> tuple[str, list[Any]]:
    if not isinstance(axis, Mapping) or len(axis) != 1:
        raise ConfigError(
            f"{where} {shown(axis)} is not one name with its values, as {{width = [64, 128]}}; a scale of "
            "several names is a list of points, each a [[scale]] table"
        )
    ((name, values),) = axis.items()
    is_one = isinstance(values, str | Mapping) or not hasattr(values, "__iter__")
    if is_one or not (listed := list(values)):
        raise ConfigError(f"{where} {name} {shown(values)} is not a list of values, one at least")
    return name, listed


def _ascending(where: str, name: str, values: Sequence[Any], allow_zero: bool = False) -> tuple[Any, ...]:
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{where} {name} {shown(value)} is not a number; compare its values instead")
        if value < 0 or (value == 0 and not allow_zero):
            least = "0 or more" if allow_zero else "above 0"
            raise ConfigError(f"{where} {name} {shown(value)} is not allowed: it must be {least}")
    return tuple(sorted(set(values)))


def design_points(values: Mapping[str, Sequence[Any]], design: str) -> tuple[Point, ...]:
    """Return the points of two to four hyperparameters that are tuned together.

    "grid" takes all combinations. "composite" takes those that are nearest to a rotatable central composite
    design (Box and Wilson 1951, J. R. Stat. Soc. B 13:1; Box and Hunter 1957, Ann. Math. Stat. 28:195): the
    centre, both ends of each axis, and corners at 2^(-H/4) of the way to the ends, in log2. Values ascend.
    """
    require_one_of("design", design, DESIGNS)
    if len(values) > MOST_TUNED:
        raise ConfigError(f"tune has {len(values)} hyperparameters: at most {MOST_TUNED} are tuned together")
    for name, given in values.items():
        if len(given) < 3 or given[0] <= 0:
            has = "fewer than three values" if len(given) < 3 else f"the value {given[0]:g}"
            raise ConfigError(
                f"tune: {name} has {has}: hyperparameters tuned together need three each, all above 0"
            )
    if design == "grid":
        points = [*itertools.product(*values.values())]
    else:
        centre, corners, reach = list[Any](), list[tuple[Any, Any]](), 2 ** (-len(values) / 4)
        for given in values.values():
            low, high = math.log2(given[0]), math.log2(given[-1])
            middle, half = (low + high) / 2, (high - low) / 2
            centre.append(_nearest(given[1:-1], middle))
            below, above = ([v for v in given if sign * (v - centre[-1]) > 0] for sign in (-1, 1))
            corners.append((_nearest(below, middle - reach * half), _nearest(above, middle + reach * half)))
        ends = [(i, end) for i, given in enumerate(values.values()) for end in (given[0], given[-1])]
        axial = [(*centre[:i], end, *centre[i + 1 :]) for i, end in ends]
        points = [tuple(centre), *axial, *itertools.product(*corners)]
    return tuple(dict(zip(values, point, strict=True)) for point in dict.fromkeys(points))


def _nearest(values: Sequence[Any], x: float) -> Any:
    return min(values, key=lambda value: abs(math.log2(value) - x))


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
