"""Sweeps, whose axes are a scale, a tuned hyperparameter and a compared field; and searches of a space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mup_tpu.config.trial import Trial, field_column, part_of_field
from mup_tpu.config.values import (
    LearningRate,
    as_word,
    described,
    require_name,
    require_one_of,
    require_valid,
    shown,
    unknown_key,
)
from mup_tpu.errors import ConfigError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS


@dataclass(frozen=True)
class Axis:
    """A field of a trial and its values along a sweep."""

    field: str  # name of the field, such as "width" or "weight_decay"
    values: tuple[Any, ...]  # values of the field

    def __post_init__(self) -> None:
        if self.field not in part_of_field():
            raise ConfigError(unknown_key(self.field, part_of_field()))
        if not self.values:
            raise ConfigError(f"{self.field} of the sweep has no values: give at least one")

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    @property
    def points(self) -> tuple[dict[str, Any], ...]:
        values = dict.fromkeys(self.values)
        return tuple({self.field: v} for v in (sorted(values) if self.is_numeric else values))

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def column(self) -> str:
        return field_column(self.field)


@dataclass(frozen=True)
class Ladder:
    """A scale of several fields that change together: width with depth, batch size with steps."""

    points: tuple[dict[str, Any], ...]
    """Fields and values that each point sets; all points set the same fields."""
    measured_by: str = "flops"
    """Measure that places the points: "params" (without embeddings), "flops" or "tokens" (of the whole run),
    "active" (parameters that a token uses), or one of the fields."""

    is_numeric = True

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("ladder has no points: give at least one")
        if not self.fields:
            raise ConfigError("ladder: its first point sets no field")
        for point in self.points:
            for name in point:
                if name not in part_of_field():
                    raise ConfigError(f"ladder: {unknown_key(name, part_of_field())}")
            if set(point) != set(self.fields):
                raise ConfigError(
                    f"ladder: the point {shown(point)} does not set the first one's fields: "
                    f"{', '.join(self.fields)}"
                )
        require_one_of("measured_by", self.measured_by, (*_MEASURES, *self.fields))

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.points[0])

    @property
    def column(self) -> str:
        return _MEASURES.get(self.measured_by) or field_column(self.measured_by)


# Columns of run tables by the measure of a ladder
_MEASURES = {
    "params": "params_non_embedding",
    "flops": "flops",
    "tokens": "tokens_planned",
    "active": "params_active",
}

MOST_TUNED = 4  # hyperparameters that are tuned together
DESIGNS = ("composite", "grid")


def design_points(values: Mapping[str, Sequence[Any]], design: str) -> tuple[dict[str, Any], ...]:
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


@dataclass(frozen=True)
class Design:
    """Two to four hyperparameters that are tuned together."""

    axes: tuple[Axis, ...]
    kind: str = "composite"  # one of `DESIGNS`

    is_numeric = True

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not axis.is_numeric:
                raise ConfigError(f"tune: {axis.field} is not a number; compare its values instead")
        self.points  # noqa: B018 (checks values)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(axis.field for axis in self.axes)

    @property
    def points(self) -> tuple[dict[str, Any], ...]:
        values = {axis.field: [point[axis.field] for point in axis.points] for axis in self.axes}
        return design_points(values, self.kind)

    @property
    def column(self) -> str:
        return self.axes[0].column


_follow_depth = {name for name, rule in PARAMETRIZATIONS.items() if "depth" in rule.follows}

WIDTHS = (64, 128, 256)

MOST_TRIALS = 100_000  # most trials of one sweep; planning them takes seconds

LEARNING_RATES = tuple(2.0**e for e in range(-11, -4))


@dataclass(frozen=True)
class Sweep:
    """A known grid of trials: compared values × a scale × a tuned hyperparameter × seeds.

    `widths`, `learning_rates` and `parametrizations` are the short forms of the usual axes.

    Examples:
        >>> sweep = Sweep("mine", widths=(64, 128), learning_rates=(2**-8, 2**-7), num_seeds=2)
        >>> len(sweep.trials())  # in SP and in μP
        16
    """

    experiment: str  # name of the experiment; a results folder holds one
    base: Trial = field(default_factory=Trial)  # trial with the fields that all trials share
    parametrizations: tuple[str, ...] | None = None
    """Parametrizations to compare; by default ("sp", "mup") along the width, else the base's alone."""
    widths: tuple[int, ...] | None = None  # model widths; (64, 128, 256) unless there is another scale
    learning_rates: tuple[LearningRate, ...] | None = None
    """Peak learning rates at the base, plain or as 2^-8; 2^-11 to 2^-5 unless something else is tuned."""
    num_seeds: int = described(1, above=0)  # seeds per cell: 0 to num_seeds - 1
    scale: Axis | Ladder | None = None  # scale in place of the width
    tune: Axis | Design | None = None  # tuned hyperparameter in place of the learning rate, or several
    compare: Axis | None = None
    """Compared field in place of the parametrization; its values need not be numbers."""

    def __post_init__(self) -> None:
        require_valid(self)
        require_name("experiment", self.experiment)
        for short, axis in (("widths", "scale"), ("learning_rates", "tune"), ("parametrizations", "compare")):
            if getattr(self, short) is not None and getattr(self, axis) is not None:
                raise ConfigError(
                    f"{axis} and {short} of the sweep were both given: {short} is short for one"
                )
            if getattr(self, short) == ():
                raise ConfigError(f"{short} of the sweep is empty: give at least one")
        for name in ("scale", "tune"):
            axis = getattr(self, f"{name}_axis")
            if not axis.is_numeric:
                raise ConfigError(
                    f"{name} {axis.field} of the sweep is not a number; compare its values instead"
                )
        fields = [f for axis in self.axes for f in axis.fields]
        # Seeds are replicates: the analysis pools them, and a scale or a tuned value never is one.
        if "seed" in fields:
            raise ConfigError("seed is no axis of a sweep: num_seeds gives the seeds of every cell")
        if twice := [f for f in fields if fields.count(f) > 1]:
            raise ConfigError(f"{twice[0]} is on two axes of the sweep: each field may change along one")
        if any(point.get("precision") == "auto" for axis in self.axes for point in axis.points):
            raise ConfigError("precision 'auto' cannot be on an axis: give 'float32', 'bf16' or 'float64'")
        # A rule for the scale without a base would change nothing, silently. Trials check the bases of batch
        # and token rules themselves.
        train = self.base.train
        bases = {
            "depth": (self.base.model.base_depth, "base_depth", "parametrization", _follow_depth),
            "batch_size": (train.base_batch_size, "base_batch_size", "decay_rule", {"timescale"}),
            "steps": (train.base_steps, "base_steps", "decay_rule", {"timescale"}),
        }
        for field_name in self.scale_axis.fields:
            if field_name not in bases:
                continue
            base, base_name, rule, that_follow = bases[field_name]
            if base or base_name in fields:
                continue
            names = {point.get(rule, self.base.flat()[rule]) for point in self.compare_axis.points}
            if following := sorted(names & that_follow):
                raise ConfigError(
                    f"{rule} {following[0]!r} follows {field_name}, which grows along this sweep, but "
                    f"{base_name} is 0 (each trial's own), so it would change nothing: give {base_name}"
                )
        count = math.prod(len(axis.points) for axis in self.axes) * self.num_seeds
        if count > MOST_TRIALS:
            raise ConfigError(f"the sweep has {count:,} trials; at most {MOST_TRIALS:,} are planned at once")

    @property
    def scale_axis(self) -> Axis | Ladder:
        return self.scale or Axis("width", self.widths or WIDTHS)

    @property
    def tune_axis(self) -> Axis | Design:
        return self.tune or Axis("learning_rate", self.learning_rates or LEARNING_RATES)

    @property
    def compare_axis(self) -> Axis:
        if self.compare is not None:
            return self.compare
        default = ("sp", "mup") if "width" in self.scale_axis.fields else (self.base.model.parametrization,)
        return Axis("parametrization", self.parametrizations or default)

    @property
    def axes(self) -> tuple[Axis | Ladder | Design, ...]:
        return self.scale_axis, self.tune_axis, self.compare_axis

    def trials(self) -> list[Trial]:
        """Return all trials, small scales first."""
        scale, tune, compare = self.axes
        grid = itertools.product(scale.points, compare.points, tune.points, range(self.num_seeds))
        return [
            self.base.replace(**at, **compared, **tuned, seed=self.base.train.seed + s)
            for at, compared, tuned, s in grid
        ]


@dataclass(frozen=True)
class Domain:
    """Values that a hyperparameter may take."""

    kind: Literal["loguniform", "uniform", "choice"] = "loguniform"  # distribution of the values
    low: float = 0.0  # least value (loguniform, uniform)
    high: float = 0.0  # largest value (loguniform, uniform)
    values: tuple[float, ...] = ()  # the values of a choice

    def __post_init__(self) -> None:
        require_valid(self)
        if self.kind == "choice":
            if not self.values:
                raise ConfigError("values of a choice are empty: give at least one")
            return
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise ConfigError(f"low {self.low:g} is not below high {self.high:g}")
        if self.kind == "loguniform" and self.low <= 0:
            raise ConfigError(f"low {self.low:g} of a loguniform is not above 0")


@dataclass(frozen=True)
class Search:
    """A search: fields that all trials share, and the space."""

    experiment: str  # name of the experiment; a results folder holds one
    base: Trial = field(default_factory=Trial)  # trial with the fields that all trials share
    space: dict[str, Domain] = field(default_factory=dict)
    """Domains by name of a trial's field, e.g. learning_rate, warmup, weight_decay, alpha_out, init_std."""

    def __post_init__(self) -> None:
        require_valid(self)
        require_name("experiment", self.experiment)
        if not self.space:
            raise ConfigError("space of the search is empty: give at least one domain, e.g. learning_rate")
        for name, domain in self.space.items():
            for value in domain.values or (domain.low, domain.high):
                try:
                    self.trial({name: value})
                except ConfigError as error:
                    raise ConfigError(f"space of {as_word(name)}: {error}") from None

    def trial(self, point: dict[str, float]) -> Trial:
        """Return the trial at a point of the space; fields of whole numbers are rounded."""
        flat = self.base.flat()
        exact = {
            name: round(value) if type(flat.get(name)) is int else value for name, value in point.items()
        }
        return self.base.replace(**exact)
