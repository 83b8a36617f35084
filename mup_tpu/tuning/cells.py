"""Cells of a plan: what is believed of an optimum before they are run, and which of them are run.

Rungs of a ladder shrink all sizes together; some cells have one size of a further rung, for its exponent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mup_tpu.analysis import TransferAnalysis
from mup_tpu.analysis.design import Cell
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.planned import Assumed, runs_within_reach
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.trend import LAWFUL, NORMAL_95, Priors, Trend, claims, fixed, kind_of, priors_of
from mup_tpu.tuning.target import Goal, Values
from mup_tpu.words.plans import WORTH

_LEVELS, _MOST_CELLS = 10, 9
_SAME_RATES = 0.8  # share of a longer size's runs whose rate a shorter one has run: four of five
_OPEN = 0.8  # share of somebody's own run before its decay, from where a longer one goes on


@dataclass(frozen=True)
class Step:
    """Runs of one size, and what is expected after them and those before."""

    values: Values  # of the runs, by the names of whoever trains
    sizes: Mapping[str, float]
    looks: tuple[Cell, ...]  # learning rates and seeds
    cost: float  # of all of its runs: seconds, or FLOP on a machine of unknown speed
    is_continued: bool = False  # whether its runs go on from those of a shorter size
    half_width: float = math.inf
    """Half of the 95 % interval of log2 of the target's learning rate after this step."""
    beside: tuple[float, ...] = ()  # the same of further hyperparameters
    regret: float = math.inf  # expected regret of the prediction after this step, nat

    @property
    def runs(self) -> int:
        return sum(look.runs for look in self.looks)


@dataclass(frozen=True)
class Belief:
    """What is assumed of a rule: errors, valleys, and the drift along each size that shrinks."""

    goal: Goal
    assumed: Assumed
    priors: tuple[tuple[Priors, ...], ...]  # of each hyperparameter, along each size
    lawful: float = 0.0  # as in `Trend`; cells are chosen without, for sizes that interact

    @property
    def promised(self) -> Belief:
        return replace(self, lawful=LAWFUL if len(self.goal.shrinks) > 1 else 0.0)

    def variances(self, steps: Sequence[Step], whole_size: str = "") -> list[float]:
        """Return the expected variance of the target's optimum in each hyperparameter.

        Runs have the target's `whole_size`.
        """
        target = self.goal.sizes(self.goal.values)
        names = self.goal.shrinks
        octaves_SA = np.array(
            [[0.0 if n == whole_size else math.log2(s.sizes[n] / target[n]) for n in names] for s in steps]
        )
        # Hyperparameters share what the runs of a size tell.
        runs = [runs_within_reach(step.looks) / len(self.priors) for step in steps]
        errors = np.sqrt([*map(self.assumed.error, runs)])
        known, one = (2.0**octaves_SA, np.zeros(len(steps)), errors), [1.0] * len(names)
        return [Trend(*known, p, lawful=self.lawful).expected_variance(one) for p in self.priors]

    def regret(self, steps: Sequence[Step]) -> float:
        return self.assumed.regret(sum(self.variances(steps)))

    def copied(self, step: Step) -> float:
        """Return the expected regret at the target of this cell's optimum, nat."""
        moved, target = 0.0, self.goal.sizes(self.goal.values)
        for priors in self.priors:
            for prior, size in zip(priors, self.goal.shrinks, strict=True):
                moved += prior.moves(abs(math.log2(step.sizes[size] / target[size])))[1]
        scatter = max((prior.scatter for priors in self.priors for prior in priors), default=0.1)
        error2 = self.assumed.error(runs_within_reach(step.looks) / len(self.priors))
        return self.assumed.regret(moved + len(self.priors) * (2 * scatter**2 + error2))


def belief_of(
    goal: Goal, rule: str, fixes: Mapping[str, float], analysis: TransferAnalysis | None, tuned: Sequence[str]
) -> Belief:
    """Assume what usual sweeps, or those of a table, show."""
    kinds = {name: kind_of(name) for name in goal.shrinks}
    each = {name: Assumed.usual(name, rule) for name in goal.shrinks}
    curvature = float(np.mean([a.curvature for a in each.values()])) if each else 0.05
    kept = [name for name in goal.shrinks if claims(rule, kinds[name])]
    count = sum(a.priors.sweeps for a in each.values())
    source = Reason.of("usual sweeps", count=count, kind=", ".join(goal.shrinks), keeps=rule if kept else "")
    first = next(iter(each.values()), Assumed.usual("width", rule))
    assumed = replace(first, curvature=curvature, source=source)
    known = {name: fixed(fixes[name]) for name in goal.shrinks if name in fixes}
    priors = [
        {n: known.get(n) or priors_of(n, claims(rule, kinds[n], one)) for n in goal.shrinks} for one in tuned
    ]
    if analysis is not None:
        along = next((n for n in goal.shrinks if kinds[n] and kinds[n] == kind_of(analysis.scale)), None)
        if along is None:
            of_rates = Reason.of("only rates", assumed=source, name=analysis.name, column=analysis.scale)
            assumed = replace(assumed, source=of_rates)
        else:
            assumed = Assumed.measured(analysis, rule)
            if along not in fixes:
                priors[0][along] = assumed.priors
    return Belief(goal, assumed, tuple(tuple(one.values()) for one in priors))


def rungs_of(goal: Goal) -> list[dict[str, float]]:
    target = goal.sizes(goal.values)
    low, shares = goal.floors, [i / _LEVELS for i in range(_LEVELS)]
    return [{n: low[n] * (target[n] / low[n]) ** share for n in goal.shrinks} for share in shares]


Designed = tuple[tuple[Step, ...], Step | None, float]
"""Chosen cells, the next larger one, and the regret that it would save (nan if it is not paid)."""


def design(
    belief: Belief,
    rungs: Sequence[Mapping[str, float]],
    first: Sequence[Cell],
    around: Sequence[Cell],
    cost: Callable[[Values, int], float],
    budget: float,
    whole: float,
) -> Designed | None:
    """Choose cells one by one, the cheapest first; None if three cost too much.

    `rungs` are sizes of the ladder, `first` the looks at the smallest size and `around` those at each other
    one, `cost` the price of some runs of a size, and `whole` that of the target's run. Returns the design.
    """
    goal = belief.goal
    apart = [
        {**rungs[i], name: rungs[j][name]}
        for i, further, name in itertools.product(range(0, _LEVELS - 2, 2), (2, 4), goal.shrinks)
        if (j := i + further) < _LEVELS and len(goal.shrinks) > 1
    ]
    pool, seen, least = list[Step](), set[float](), goal.steps(goal.values_at(goal.floors))[0]
    for sizes in (*rungs, *apart):
        values = goal.values_at(sizes)
        work = goal.compute(values)
        is_short = goal.steps(values)[0] < 0.9 * least  # mostly warm-up
        if values == goal.values or work in seen or is_short:
            continue
        seen.add(work)
        looks = tuple(around if pool else first)
        runs = sum(look.runs for look in looks)
        pool.append(Step(values, goal.sizes(values), looks, cost(values, runs)))
    if len(pool) < NEEDED:
        return None

    def priced(steps: Sequence[Step]) -> list[float]:
        costs = []
        for step in steps:
            shared = max((_shared(goal, other.values, step.values) for other in steps), default=0.0)
            costs.append(step.cost * (1 - _SAME_RATES * shared))
        return costs

    def score_of(steps: Sequence[Step]) -> float:
        return belief.regret(steps) + WORTH * sum(priced(steps)) / whole

    chosen, score = [pool[0]], math.inf
    while len(chosen) < _MOST_CELLS:
        left = budget - sum(priced(chosen))
        others = [step for step in pool if step not in chosen]
        # What the least number of sizes still needs, at the cheapest, is kept.
        needed = sum(sorted(step.cost for step in others)[: max(0, NEEDED - len(chosen) - 1)])
        options = [step for step in others if step.cost <= left - needed]
        scored = [(score_of([*chosen, step]), i) for i, step in enumerate(options)]
        best, i = min(scored, default=(math.inf, 0))
        if best >= score and len(chosen) >= NEEDED or not options:
            break
        chosen.append(options[i])
        score = best
    for step in chosen[1:]:  # drop cells that later ones have made superfluous
        fewer = [other for other in chosen if other is not step]
        if len(fewer) >= NEEDED and (without := score_of(fewer)) < score:
            chosen, score = fewer, without
    if len(chosen) < NEEDED or sum(priced(chosen)) > budget:
        return None
    chosen.sort(key=lambda step: (step is not pool[0], step.cost / step.runs))
    steps, costs, belief = list[Step](), priced(chosen), belief.promised
    for i, step in enumerate(chosen):
        regret = belief.regret(chosen[: i + 1])
        widths = [NORMAL_95 * math.sqrt(v) for v in belief.variances(chosen[: i + 1])]
        known: dict[str, Any] = {"half_width": widths[0], "beside": tuple(widths[1:]), "regret": regret}
        steps.append(replace(step, cost=costs[i], is_continued=costs[i] < step.cost, **known))
    larger = [step for step in pool if step.cost / step.runs > chosen[-1].cost / chosen[-1].runs]
    if not larger:
        return tuple(steps), None, math.nan
    is_paid = larger[0].cost <= budget - sum(costs)
    saved = max(steps[-1].regret - belief.regret([*chosen, larger[0]]), 0.0) if is_paid else math.nan
    return tuple(steps), larger[0], saved


def _shared(goal: Goal, shorter: Values, values: Values) -> float:
    """Return the share of a run's steps that a shorter run of the same size has made, if it can go on."""
    if not goal.is_continued or {**shorter, "steps": 0} != {**values, "steps": 0}:
        return 0.0
    before, steps = goal.steps(shorter)[0], goal.steps(values)[0]
    return _OPEN * before / steps if before < steps else 0.0
