"""Proxies of a target: the sizes below it, the rungs that a budget pays, and what they would tell.

Every proxy has some of the target's growing fields smaller, down a ray to the least useful size, and the
others as the target has them. A sequence's first purchases (`analysis/design.py`) are a proxy's runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mup_tpu.analysis import TransferAnalysis
from mup_tpu.analysis.batch import look_around
from mup_tpu.analysis.design import Cell, first_batch
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.outlook import Assumed, runs_within_reach
from mup_tpu.analysis.reasons import Reason
from mup_tpu.config import Axis, Ladder, Trial
from mup_tpu.config.columns import configured
from mup_tpu.models import training_flops

GROWING = ("width", "depth", "batch_size", "steps")
# Loss that e times the compute saves, nat, by L(N, D) of Hoffmann et al. 2022 at 1e19 to 1e23 FLOP.
WORTH = 0.1
# Least useful sizes of a proxy, unless the base has smaller ones
_LEAST = {"width": 64, "depth": 2, "batch_size": 8, "steps": 100}
_MOST_RUNGS, _MOST_LEVELS = 5, 12
# Best learning rates at the smallest scale of stored sweeps: medians, to an octave
_USUAL_RATES = {"adamw": 2.0**-6, "muon": 2.0**-5}


def least_of(base: Trial) -> dict[str, int]:
    base_sizes = base.flat() | {"width": base.model.base_width}
    return {name: min(least, base_sizes[name]) for name, least in _LEAST.items()}


def levels_of(goal: Trial, base: Trial, fields: Mapping[str, int]) -> Iterator[list[dict[str, int]]]:
    """Yield the sizes on each ray below the target, ascending: a ray for every set of fields that shrink."""
    model = goal.model
    unit = model.head_size if model.growing_dimension == "heads" else model.base_width // model.head_size
    units = {"width": unit}
    floors = {
        name: -(-least // units.get(name, 1)) * units.get(name, 1) for name, least in least_of(base).items()
    }
    can_shrink = [name for name, value in fields.items() if value >= 2 * floors[name]]
    for count in range(1, len(can_shrink) + 1):
        for names in itertools.combinations(can_shrink, count):
            ratios = {name: fields[name] / floors[name] for name in names}
            steps = min(_MOST_LEVELS, max(NEEDED, round(math.log2(max(ratios.values())))))
            levels = []
            for i in range(steps):
                point = dict(fields)
                for name in names:
                    size = floors[name] * ratios[name] ** (i / steps)
                    point[name] = max(1, round(size / units.get(name, 1))) * units.get(name, 1)
                if point not in levels:
                    levels.append(point)
            yield levels


@dataclass(frozen=True)
class Ray:
    """Sizes between the least useful one and the target, under one rule."""

    points: tuple[dict[str, int], ...]
    """Fields that change, at each size."""
    trials: tuple[Trial, ...]
    costs: tuple[float, ...]
    """Cost of a run, FLOP."""
    scales: tuple[float, ...]
    """Value of the sweep's scale."""
    octaves: tuple[float, ...]
    """Distance from the target along the scale, below 0."""
    starts: tuple[tuple[Cell, ...], ...]
    """Cells that a sequence starts with, from each size on."""
    rule: str
    assumed: Assumed

    @classmethod
    def of(
        cls,
        levels: Sequence[dict[str, int]],
        goal: Trial,
        rule: str,
        vocab_size: int,
        analysis: TransferAnalysis | None,
        rates: Sequence[float],
    ) -> Ray:
        """Make the ray through some sizes.

        Args:
            levels: fields that grow, at each size.
            goal: the target.
            rule: name of the rule.
            vocab_size: tokens of the corpus.
            analysis: a table of one's own.
            rates: learning rates to start from; where there are none, the table, the trial or what is usual
                gives one.

        Raises:
            ConfigError: a size is not allowed.
        """
        changing = [name for name in levels[0] if len({level[name] for level in levels}) > 1]
        trials = tuple(goal.replace(**level) for level in levels)
        costs = tuple(training_flops(trial, vocab_size) for trial in trials)
        points = tuple({name: level[name] for name in changing} for level in levels)
        axis = axis_of(points)
        if isinstance(axis, Axis):
            column, at = axis.column, [float(point[changing[0]]) for point in points]
            whole = float(configured(goal)[column])
        else:
            column, at, whole = axis.column, list(costs), training_flops(goal, vocab_size)
        octaves = tuple(math.log2(value / whole) for value in at)
        assumed = Assumed.usual(column, rule)
        if analysis is not None and analysis.scale == column:
            assumed = Assumed.measured(analysis, rule)
        elif analysis is not None:
            only = {"assumed": assumed.source, "name": analysis.name, "column": analysis.scale}
            assumed = replace(assumed, source=Reason.of("only rates", **only))
        above_0 = [rate for rate in rates if rate > 0]
        guesses = [above_0 or [_guess(goal, rule, scale, analysis)] for scale in at]
        starts = tuple(
            first_batch(rule, scale, [math.log2(rate) for rate in guess]).cells
            for scale, guess in zip(at, guesses, strict=True)
        )
        return cls(points, trials, costs, tuple(at), octaves, starts, rule, assumed)

    def candidates(self, budget: float) -> Iterator[Candidate]:
        """Yield every choice of evenly spaced rungs that the budget pays."""
        for count, space, first in itertools.product(
            range(NEEDED, _MOST_RUNGS + 1), (1, 2, 3), range(len(self.trials))
        ):
            rungs = tuple(range(first, first + count * space, space))
            if rungs[-1] < len(self.trials) and self.octaves[rungs[-1]] < 0:
                candidate = Candidate(self, rungs)
                if candidate.flops <= budget:
                    yield candidate


@dataclass(frozen=True)
class Candidate:
    """Rungs of a ray."""

    ray: Ray
    rungs: tuple[int, ...]

    @property
    def looks(self) -> list[Sequence[Cell]]:
        """Return the cells that a sequence buys first at each rung, around its guess."""
        first, *wider = self.rungs
        start = self.ray.starts[first]
        return [start, *(look_around(self.ray.scales[i], start[len(start) // 2].x) for i in wider)]

    @property
    def runs(self) -> list[int]:
        return [sum(cell.runs for cell in look) for look in self.looks]

    @property
    def flops(self) -> float:
        return sum(n * self.ray.costs[i] for i, n in zip(self.rungs, self.runs, strict=True))

    @property
    def variance(self) -> float:
        """Variance of the prediction at the target, octaves²."""
        at = [self.ray.octaves[i] for i in self.rungs]
        return self.ray.assumed.variance(at, [runs_within_reach(look) for look in self.looks])

    @property
    def regret(self) -> float:
        """Expected regret at the target, nat."""
        return self.ray.assumed.regret(self.variance)

    def score(self, whole: float) -> float:
        """Return expected regret plus price, nat, where a run of the target costs `whole`."""
        return self.regret + WORTH * self.flops / whole


def _guess(goal: Trial, rule: str, scale: float, analysis: TransferAnalysis | None) -> float:
    """Guess a learning rate: the optimum of the table's nearest scale, the trial's rate, or a typical one."""
    if analysis is not None and analysis.hyperparameter == "lr":
        results = {result.compared: result for result in analysis.results}
        known = [o for o in results.get(rule, analysis.results[0]).optima if o.is_bracketed]
        if known:
            return 2.0 ** round(min(known, key=lambda o: abs(math.log2(o.scale / scale))).x)
    default, rate = type(goal.optimizer)().learning_rate, goal.optimizer.learning_rate
    rate = _USUAL_RATES.get(goal.optimizer.optimizer, rate) if rate == default else rate
    return 2.0 ** round(math.log2(rate))


def axis_of(points: Sequence[dict[str, int]]) -> Axis | Ladder:
    """Return the scale of a sweep over points: an axis where one field changes, else a ladder by FLOPs."""
    if len(points[0]) == 1:
        ((name, _),) = points[0].items()
        return Axis(name, tuple(point[name] for point in points))
    return Ladder(tuple(points))
