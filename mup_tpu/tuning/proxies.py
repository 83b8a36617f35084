"""Proxies of a target: the sizes below it, the rungs and seeds that a budget pays, and what they would tell.

Every proxy has some of the target's growing fields smaller, down a ray to the least useful size, and the
others as the target has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mup_tpu.analysis import TransferAnalysis
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.outlook import PACK, Assumed
from mup_tpu.config import Axis, Ladder, Trial
from mup_tpu.config.columns import configured
from mup_tpu.models import training_flops

GROWING = ("width", "depth", "batch_size", "steps")
WORTH = 0.1
"""Loss that e times the compute saves, nat, by L(N, D) of Hoffmann et al. 2022 at 1e19 to 1e23 FLOP."""
_LEAST = {"width": 64, "depth": 2, "batch_size": 8, "steps": 100}
"""Least useful sizes of a proxy, unless the base has smaller ones."""
_MOST_RUNGS, _MOST_LEVELS, _MOST_PACKS = 5, 12, 24


def least_of(base: Trial) -> dict[str, int]:
    """Least useful sizes of a proxy, none above the base's."""
    own = base.flat() | {"width": base.model.base_width}
    return {name: min(least, own[name]) for name, least in _LEAST.items()}


def levels_of(goal: Trial, base: Trial, fields: Mapping[str, int]) -> Iterator[list[dict[str, int]]]:
    """Sizes on each ray below the target, ascending: a ray for every set of fields that shrink."""
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
            found = []
            for i in range(steps):
                point = dict(fields)
                for name in names:
                    size = floors[name] * ratios[name] ** (i / steps)
                    point[name] = max(1, round(size / units.get(name, 1))) * units.get(name, 1)
                if point not in found:
                    found.append(point)
            yield found


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
    ) -> Ray:
        """The ray through some sizes.

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
            source = f"{assumed.source}; {analysis.name} is along {analysis.scale}: only its rates are taken"
            assumed = replace(assumed, source=source)
        return cls(points, trials, costs, tuple(at), octaves, rule, assumed)

    def candidates(self, budget: float) -> Iterator[Candidate]:
        """Every choice of evenly spaced rungs, a pack each, that the budget pays."""
        for count, space, first in itertools.product(
            range(NEEDED, _MOST_RUNGS + 1), (1, 2, 3), range(len(self.trials))
        ):
            rungs = tuple(range(first, first + count * space, space))
            if rungs[-1] < len(self.trials) and self.octaves[rungs[-1]] < 0:
                candidate = Candidate(self, rungs, (1,) * count)
                if candidate.flops <= budget:
                    yield candidate


@dataclass(frozen=True)
class Candidate:
    """Rungs of a ray, and the packs of runs at each."""

    ray: Ray
    rungs: tuple[int, ...]
    packs: tuple[int, ...]

    @property
    def flops(self) -> float:
        """Cost of all runs."""
        return sum(PACK * n * self.ray.costs[i] for i, n in zip(self.rungs, self.packs, strict=True))

    @property
    def variance(self) -> float:
        """Variance of the prediction at the target, octaves²."""
        at = [self.ray.octaves[i] for i in self.rungs]
        return self.ray.assumed.variance(at, [PACK * n for n in self.packs])

    @property
    def regret(self) -> float:
        """Expected regret at the target, nat."""
        return self.ray.assumed.regret(self.variance)

    def seeded(self, budget: float, whole: float) -> Candidate:
        """This candidate with further packs, as long as each pays."""
        now = self
        for _ in range(_MOST_PACKS):
            packs = [
                replace(now, packs=(*now.packs[:i], now.packs[i] + 1, *now.packs[i + 1 :]))
                for i in range(len(now.packs))
            ]
            packs = [more for more in packs if more.flops <= budget]
            if not packs:
                return now
            best = min(packs, key=lambda more: more.regret + WORTH * more.flops / whole)
            if best.regret + WORTH * best.flops / whole >= now.regret + WORTH * now.flops / whole:
                return now
            now = best
        return now


def axis_of(points: Sequence[dict[str, int]]) -> Axis | Ladder:
    """The scale of a sweep over some points: an axis where one field changes, else a ladder by FLOPs."""
    if len(points[0]) == 1:
        ((name, _),) = points[0].items()
        return Axis(name, tuple(point[name] for point in points))
    return Ladder(tuple(points))
