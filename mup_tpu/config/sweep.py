"""Sweeps, grids of trials of our networks; and searches of a space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import tyro

from mup_tpu.config.columns import configured
from mup_tpu.config.grid import Axes, Grid, Point, Value
from mup_tpu.config.trial import Trial, field_column, field_type
from mup_tpu.config.values import (
    Real,
    as_kind,
    as_word,
    described,
    parse_limit,
    parse_number,
    require_name,
    require_valid,
    require_value,
    shown,
)
from mup_tpu.errors import ConfigError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

_follow_depth = {name for name, rule in PARAMETRIZATIONS.items() if "depth" in rule.follows}

WIDTHS = (64, 128, 256)
LEARNING_RATES = tuple(2.0**e for e in range(-11, -4))


@dataclass(frozen=True)
class Sweep(Grid[Trial]):
    """A grid of trials of our networks: names are fields of a trial.

    By default the width grows, the learning rate is tuned, and along the width SP is compared with μP.

    Examples:
        >>> rates = {"learning_rate": ("2^-8", "2^-7")}
        >>> sweep = Sweep("mine", scale={"width": (64, 128)}, tune=rates, num_seeds=2)
        >>> len(sweep.trials())  # in SP and in μP
        16
    """

    base: Trial = field(default_factory=Trial, kw_only=False)  # trial with the fields that all trials share

    _measures = {
        "flops": "flops",  # of the whole run
        "params": "params_non_embedding",
        "tokens": "tokens_planned",
        "active": "params_active",  # parameters that a token uses
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_valid(self.base)
        changing = (*self.points, *self.tuned_points, *self.compared)
        if any(point.get("precision") == "auto" for point in changing):
            raise ConfigError("precision 'auto' cannot be on an axis: give 'float32', 'bf16' or 'float64'")
        # A rule for the scale without a base would change nothing, silently. Trials check the bases of batch
        # and token rules themselves.
        train, flat = self.base.train, self.base.flat()
        for name, base, rule, that_follow in (
            ("depth", self.base.model.base_depth, "parametrization", _follow_depth),
            ("batch_size", train.base_batch_size, "decay_rule", {"timescale"}),
            ("steps", train.base_steps, "decay_rule", {"timescale"}),
        ):
            if name not in self.points[0] or base or any(f"base_{name}" in point for point in changing):
                continue
            if following := sorted({point.get(rule, flat[rule]) for point in self.compared} & that_follow):
                raise ConfigError(
                    f"{rule} {following[0]!r} follows {name}, which grows along this sweep, but base_{name} "
                    f"is 0 (each trial's own), so it would change nothing: give base_{name}"
                )

    def _given(self, axis: str) -> Any:
        given = getattr(self, axis)
        if given or (given is not None and axis != "compare"):
            return super()._given(axis)
        if axis == "scale":
            return {"width": WIDTHS}
        if axis == "tune":
            return {"learning_rate": LEARNING_RATES}
        compares = given is None and "width" in self.points[0]  # an empty one compares nothing
        rules = ("sp", "mup") if compares else (self.base.model.parametrization,)
        return {"parametrization": rules}

    def _check(self, where: str, name: str, value: Any) -> Value:
        # Seeds are replicates: the analysis pools them, and a scale or a tuned value never is one.
        if name == "seed":
            raise ConfigError("seed is no axis of a sweep: num_seeds gives the seeds of every cell")
        kind = field_type(name, where)
        read: Value = as_kind(kind, value, f"{where}: {name}")
        require_value(f"{where}: {name}", read, kind)
        return read

    @property
    def axes(self) -> Axes:
        size = self._measures.get(self.measure) or field_column(self.measure)
        return Axes(tuple(self.points[0]), size, tuple(self.tuned), tuple(self.compared[0]))

    @cached_property
    def rules(self) -> Mapping[str, Point]:
        names = (configured(self.trial({**self.points[0], **point}, 0)) for point in self.compared)
        return {str(row[self.axes.compared]): point for row, point in zip(names, self.compared, strict=True)}

    def trial(self, values: Mapping[str, Value], seed: int) -> Trial:
        return self.base.replace(**values, seed=self.base.train.seed + seed)


@dataclass(frozen=True)
class Domain:
    """Values that a hyperparameter may take."""

    kind: Literal["loguniform", "uniform", "choice"] = "loguniform"  # distribution of the values
    low: float = 0.0  # least value (loguniform, uniform)
    high: float = 0.0  # largest value (loguniform, uniform)
    values: tuple[Value, ...] = ()  # the values of a choice

    def __post_init__(self) -> None:
        require_valid(self)
        if self.kind == "choice":
            powers = (parse_number(v) if isinstance(v, str) and "^" in v else v for v in self.values)
            object.__setattr__(self, "values", tuple(powers))
            if len({*self.values}) < 2:
                raise ConfigError(
                    f"values {shown(self.values)} of a choice leave nothing to choose: give two at least, "
                    "and set a single value for all trials"
                )
            return
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise ConfigError(f"low {self.low:g} is not below high {self.high:g}")
        if self.kind == "loguniform" and self.low <= 0:
            raise ConfigError(f"low {self.low:g} of a loguniform is not above 0")

    @property
    def ends(self) -> tuple[Value, ...]:
        """Return the values of a choice, or the least and the largest value."""
        return self.values or (self.low, self.high)


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    algorithm: Literal["random", "hyperopt", "optuna", "bohb"] = "optuna"
    """Search algorithm: uniformly random, HyperOpt's TPE, Optuna's TPE, or BOHB, which models each length."""
    scheduler: Literal["asha", "median", "none"] = "asha"
    """Scheduler that stops hopeless trials early: asynchronous successive halving, what is worse than the
    median, or none."""
    num_samples: int = described(32, above=0, most=10_000)
    """Trials in all."""
    evaluations: int = described(10, above=0)
    """Evaluations per trial of our networks; at each the trial is checkpointed, and may be stopped."""
    grace: Annotated[Real, tyro.conf.Suppress] = described(0.2, above=0, most=1)
    """Share of its steps before a trial may be stopped."""
    reduction_factor: Annotated[Real, tyro.conf.Suppress] = described(3.0, above=1)
    """Number of trials at a rung of ASHA for each one that continues."""
    budget: str | None = None
    """Longest time of this call, as 90s, 30m or 2h; run the same command to continue."""
    max_concurrent: int = described(0, least=0)
    """Most trials (packs of our networks) at once; 0 takes as many as there is room for."""
    seed: Annotated[int, tyro.conf.Suppress] = described(0, least=0, most=2**32 - 1)
    """Seed of the algorithm."""

    def __post_init__(self) -> None:
        require_valid(self)
        parse_limit("budget", self.budget)


@dataclass(frozen=True)
class Search:
    """A search: fields that all trials share, and the space."""

    experiment: str  # name of the experiment; a results folder holds one
    base: Trial = field(default_factory=Trial)  # trial with the fields that all trials share
    space: dict[str, Domain] = field(default_factory=dict)
    """Domains by name of a trial's field, e.g. learning_rate, warmup, weight_decay, alpha_out, init_std."""
    search: SearchOptions = SearchOptions()  # algorithm, scheduler, limits

    def __post_init__(self) -> None:
        require_valid(self)
        require_name("experiment", self.experiment)
        if not self.space:
            raise ConfigError("space of the search is empty: give at least one domain, e.g. learning_rate")
        for name, domain in self.space.items():
            for value in domain.ends:
                try:
                    self.trial({name: value})
                except ConfigError as error:
                    raise ConfigError(f"space of {as_word(name)}: {error}") from None

    def trial(self, point: Mapping[str, Any]) -> Trial:
        """Return the trial at a point of the space; fields of whole numbers are rounded."""
        kinds = {name: type(value) for name, value in self.base.flat().items()}
        # An infinite value has no whole number: it is refused by the field.
        finite = {n: x for n, x in point.items() if isinstance(x, float) and math.isfinite(x)}
        whole = {n: round(x) for n, x in finite.items() if kinds.get(n) is int}
        return self.base.replace(**{n: as_kind(kinds.get(n), x, n) for n, x in {**point, **whole}.items()})
