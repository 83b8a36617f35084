"""A search: a space around a base trial, from Python or TOML."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mup_tpu.config.fields import described, require_name, require_valid
from mup_tpu.config.toml import from_dict, read_toml
from mup_tpu.config.trial import Trial
from mup_tpu.config.values import Real, as_word, parse_seconds
from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class Domain:
    """Values that a hyperparameter may take."""

    kind: Literal["loguniform", "uniform", "choice"] = "loguniform"
    """Distribution of the values."""
    low: float = 0.0
    """Least value (loguniform, uniform)."""
    high: float = 0.0
    """Largest value (loguniform, uniform)."""
    values: tuple[float, ...] = ()
    """The values of a choice."""

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

    experiment: str
    """Name of the experiment; a results folder holds one."""
    base: Trial = field(default_factory=Trial)
    """Trial with the fields that all trials share."""
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
        """Trial at a point of the space; fields of whole numbers are rounded."""
        flat = self.base.flat()
        exact = {
            name: round(value) if type(flat.get(name)) is int else value for name, value in point.items()
        }
        return self.base.replace(**exact)


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    algorithm: Literal["random", "hyperopt", "optuna"] = "optuna"
    """Search algorithm: uniformly random, HyperOpt's TPE, or Optuna's TPE."""
    scheduler: Literal["asha", "none"] = "asha"
    """Scheduler that stops hopeless trials early: asynchronous successive halving, or none."""
    num_samples: int = described(32, above=0, most=100_000)
    """Trials in all."""
    evaluations: int = described(10, above=0)
    """Evaluations per trial; at each the trial is checkpointed, and may be stopped."""
    grace: Real = described(0.2, above=0, most=1)
    """Share of its steps before a trial may be stopped."""
    reduction_factor: Real = described(3.0, above=1)
    """Number of trials at a rung of ASHA for each one that goes on."""
    budget: str | None = None
    """Longest time, as 90s, 30m or 2h; --resume goes on with unfinished trials."""
    max_concurrent: int = described(0, least=0)
    """Most packs at once; 0 takes as many as there is room for."""
    max_failures: int = described(2, least=0)
    """Times that a trial goes on from its last checkpoint after its process died or hung."""
    seed: int = described(0, least=0, most=2**32 - 1)
    """Seed of the algorithm."""

    def __post_init__(self) -> None:
        require_valid(self)
        self.seconds  # noqa: B018 (checks budget)

    @property
    def seconds(self) -> float | None:
        """The time budget in seconds."""
        return None if self.budget is None else parse_seconds("budget", self.budget)


def load_search(path: str | Path) -> Search:
    """A search from a TOML file: experiment, [base.model] and so on, and [space.NAME] with its domain.

    Raises:
        ConfigError: no such file, not TOML, an unknown key or a value that is not allowed.
    """
    return from_dict(Search, read_toml(path), str(path))
