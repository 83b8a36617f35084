"""Next runs that would settle whether a hyperparameter transfers, at the least cost.

They follow from the state of each scale and the cost of a run there; any table can ask. Seeds are bought
where they bring a verdict nearer per cost, on cells an octave apart beside an optimum: half-steps and the
optimum itself tell less of where it lies. Where no number of seeds makes α's interval narrow enough,
another scale is asked for.

Symbols: α drift exponent; Δ octaves from the smallest scale's optimum to the largest's; J squared ratio of
the widest interval to the width that the nearer verdict needs: at 1 it is settled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mup_tpu.analysis.batch import (
    PACK,
    Batch,
    Cell,
    between,
    beyond,
    first_look,
    new_scale,
    replicates,
    runs_beside,
    source_rate,
    to_come,
)  # fmt: skip
from mup_tpu.analysis.cost import Cost
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.looks import Evidence, LookTaken, Question
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.verdict import MOST_LOOKS, PLAIN

_START, _START_SEEDS = 8, 3
"""Values at the smallest scale that a sequence starts with, an octave apart, and seeds of each: that optimum
is the cheapest to know well."""
_LEAST_SPAN = 3.0
"""Octaves that a given grid must span for a sequence to start inside it; else it is but a guess."""
_PATIENCE = 3
"""Looks before an expected cost may end a sequence: before, too little is known to expect one."""
_HOPELESS = 10.0
"""Times the rest of a budget that a verdict must be expected to cost for a sequence to end before it."""
_WIDEST = 14.0
"""Octaves that a grid may span and still hold no optimum."""
_MOST_PURCHASES = 25
"""Purchases after which a sequence ends in any case; eight looks at four scales take about eleven."""
_ENOUGH = 0.6
"""J that a batch is meant to leave: at 1 half of the looks would come a little too early."""
_LEAST_SHARE, _SHARE = 0.1, 0.35
"""A batch's cost, as a share of what was spent: a look is worth some runs, and a plan holds for some."""
_FLOOR = 0.05**2
"""Squared standard error of an optimum that no seed takes away, octaves²: the valley's unknown shape. Median
of four sweeps with a ten-thousandth of their noise."""
_SOME = 3
"""Runs that are bought at a scale at a time."""
_LEAST_ALPHA, _LEAST_OCTAVES = 0.02, 0.05
"""Least distances of α and Δ from a verdict's limits."""
_MOST_PACKS = 100
"""Additions of runs after which a verdict counts as out of reach."""


def first_batch(parametrization: str, scale: float, grid: Sequence[float]) -> Batch:
    """Start of a sequence: a few seeds of values an octave apart at the smallest scale.

    Args:
        parametrization: name of the rule.
        scale: the smallest scale.
        grid: log2 of the values that were asked for; where they span less than three octaves, a guess.
    """
    middle = (min(grid) + max(grid)) / 2
    centre = min(grid, key=lambda x: (abs(x - middle), -x))
    values = [centre + k for k in range(-_START // 2, _START // 2)]
    if max(grid) - min(grid) >= _LEAST_SPAN:
        values = [x for x in values if min(grid) - 1e-6 <= x <= max(grid) + 1e-6]
    cells = tuple(Cell(scale, x, _START_SEEDS, _START_SEEDS) for x in values)
    costs = Cost(0.0, 1.0, "runs")
    runs = sum(cell.runs for cell in cells)
    return Batch(parametrization, cells, Reason.of("start"), runs, math.nan, 0.0, costs)


def next_batch(parametrization: str, evidence: Evidence, costs: Cost, question: Question) -> Batch:
    """Return the next runs of a parametrization whose verdict is open.

    Args:
        parametrization: name of the rule.
        evidence: evidence of its curves.
        costs: costs of a run.
        question: limits and planned scales. Planned scales are run and no others; each gets its first look
            before seeds are bought.
    """
    open_ = _Open(parametrization, evidence, costs, question)
    return next(batch for strategy in _STRATEGIES if (batch := strategy(open_)) is not None)


@dataclass(frozen=True)
class _Open:
    """An open verdict."""

    parametrization: str
    evidence: Evidence
    costs: Cost
    question: Question

    @property
    def spent(self) -> float:
        return float(sum(c.count_G.sum() * self.costs.of(c.scale) for c in self.evidence.curves))

    def batch(self, cells: Sequence[Cell], reason: Reason, to_verdict: float = math.nan) -> Batch:
        cost = sum(cell.runs * self.costs.of(cell.scale) for cell in cells)
        return Batch(self.parametrization, tuple(cells), reason, cost, to_verdict, self.spent, self.costs)


def _extended_grids(ask: _Open) -> Batch | None:
    """Return values beyond the edge of grids without an optimum, and a new scale if there are too few."""
    estimates, planned = ask.evidence.estimates, ask.question.planned
    outside = [e for e in estimates if not e.optimum.is_bracketed]
    if not outside:
        return None
    scales = [e.optimum.scale for e in outside]
    extension = [cell for e in outside for cell in beyond(e)]
    bracketed = [e for e in estimates if e.optimum.is_bracketed]
    if planned or not bracketed or len(estimates) >= NEEDED:
        return ask.batch(extension, Reason.of("extend grids", scales=scales))
    new = first_look(bracketed[-1], 2 * estimates[-1].optimum.scale, bracketed[-1].optimum.x)
    reason = Reason.of("extend grids and add a scale", scales=scales, needed=NEEDED, known=len(estimates))
    return ask.batch([*extension, *new], reason)


def _scales_needed(ask: _Open) -> Batch | None:
    """Return scales that a verdict needs, or that are planned."""
    estimates, planned = ask.evidence.estimates, ask.question.planned
    unseen = to_come(estimates, planned)
    if len(estimates) < NEEDED:
        reason = Reason.of("few scales", needed=NEEDED, known=len(estimates))
    elif unseen:
        reason = Reason.of("planned scale", at=min(unseen))
    else:
        return None
    return ask.batch(new_scale(estimates, ask.evidence.drift, planned), reason)


def _source_rate(ask: _Open) -> Batch | None:
    """Return the smallest scale's optimum at the largest, whose regret is then measured."""
    headline, estimates = ask.evidence.headline, ask.evidence.estimates
    if headline is None or headline.is_run or len(estimates) < NEEDED:
        return None
    curve = estimates[-1].curve
    (cell,) = source_rate(estimates, headline.target, curve.x_G.tolist())
    seeds = int(curve.count_G[int(np.argmin(curve.mean_G))])
    reason = Reason.of("source not run", at=headline.target, scales=[headline.source])
    return ask.batch([replace(cell, runs=seeds, seeds=seeds)], reason)


def _holes(ask: _Open) -> Batch | None:
    """Return values beside an optimum where runs are lost or missing."""
    halfway = [cell for e in ask.evidence.estimates for cell in between(e)]
    if not halfway:
        return None
    return ask.batch(halfway, Reason.of("holes", scales=sorted({cell.scale for cell in halfway})))


def _another_scale(ask: _Open) -> Batch | None:
    """Return one more scale, if no number of seeds makes α's interval narrow enough."""
    distance, known = Distance.of(ask.evidence, ask.question), known_of(ask.evidence)
    ideal = [k.ideal for k in known]
    if ask.question.planned or distance.nearest(ideal)[1] != "α" or distance.of_verdict(ideal) <= 1:
        return None
    settles = distance.of_verdict([k.ideal for k in [*known, new_known(known)]]) <= 1
    cells = new_scale(ask.evidence.estimates, ask.evidence.drift)
    count = len(ask.evidence.estimates) + 1
    reason = Reason.of("another scale", count=count, settles=settles)
    batch = ask.batch(cells, reason)
    return replace(batch, to_verdict=batch.cost) if settles else batch


def _seeds(ask: _Open) -> Batch:
    """Return seeds where they bring a verdict nearer per cost."""
    distance, known = Distance.of(ask.evidence, ask.question), known_of(ask.evidence)
    bought, to_verdict = buy(distance, known, ask.costs, ask.spent)
    cells = [
        cell for i in sorted(bought) for cell in replicates(ask.evidence.estimates[i], _SOME * bought[i])
    ]
    scales = [known[i].scale for i in sorted(bought)]
    quantity = "α" if distance.held_by(known) == "α" else "regret"
    return ask.batch(cells, Reason.of("wide interval", quantity=quantity, scales=scales), to_verdict)


_STRATEGIES: tuple[Callable[[_Open], Batch | None], ...] = (
    _extended_grids,
    _source_rate,
    _scales_needed,
    _holes,
    _another_scale,
    _seeds,
)
"""Strategies; the first one with a batch wins."""


def why_stop(look: LookTaken, batch: Batch, question: Question, left: float = math.inf) -> Reason | None:
    """Return the reason to end a sequence although nothing is settled; None to go on.

    Args:
        look: the last look.
        batch: the next batch.
        question: limits and planned scales.
        left: rest of the budget, in the unit of the batch's costs. What seems out of reach of any cost is
            found all the same often enough (benchmarks/settle.py): then a sequence goes on.
    """
    if look.number >= MOST_LOOKS:
        return Reason.of("looks used up", looks=MOST_LOOKS)
    if look.purchase >= _MOST_PURCHASES:
        return Reason.of("purchases used up", purchases=look.purchase)
    for e in look.evidence.estimates:
        span = e.curve.x_G[-1] - e.curve.x_G[0]
        if not e.optimum.is_bracketed and span >= _WIDEST:
            return Reason.of("no optimum in a wide grid", at=e.optimum.scale, octaves=float(span))
    if look.number >= _PATIENCE and _HOPELESS * left < batch.to_verdict < math.inf:
        return Reason.of("over budget", costs=batch.costs, cost=batch.to_verdict, left=max(left, 0.0))
    return None


@dataclass(frozen=True)
class Known:
    """State of one scale, or its state after more runs."""

    scale: float
    variance: float
    """Squared standard error of the optimum, octaves²."""
    runs: int
    """Beside the optimum."""

    @property
    def ideal(self) -> Known:
        return replace(self, variance=min(self.variance, _FLOOR))

    def with_runs(self, runs: int) -> Known:
        total, floor = self.runs + runs, self.ideal.variance
        return replace(self, variance=floor + (self.variance - floor) * self.runs / total, runs=total)


@dataclass(frozen=True)
class Distance:
    """Distance of a verdict, by the state of each scale. Intervals shrink as their scales' errors do."""

    known: tuple[Known, ...]
    """States of the scales when the intervals below were computed."""
    alpha: float
    """|α|."""
    reach: float
    """Half-width of its interval."""
    delta: float
    apart: float
    """|Δ|, octaves; nan if the larger scale has no loss at the smaller's optimum."""
    tolerated: float
    """|Δ| at which the regret is ε."""
    ends: tuple[float, float]
    """|Δ| at the regret's bounds."""

    @classmethod
    def of(cls, evidence: Evidence, question: Question) -> Distance:
        """Return the distance by evidence of three scales or more, all bracketed."""
        first, last = evidence.estimates[0], evidence.estimates[-1]
        tolerated = max((last.optimum.band_high - last.optimum.band_low) / 2, _LEAST_OCTAVES)
        drift, headline, known = evidence.drift, evidence.headline, tuple(known_of(evidence))
        apart, ends = math.nan, (math.nan, math.nan)
        if headline is not None and headline.status == "estimated":
            apart = abs(last.optimum.x - first.optimum.x)
            # A regret grows as the square of the octaves.
            least, most = (
                tolerated * math.sqrt(bound / question.epsilon) for bound in (headline.low, headline.high)
            )
            ends = min(least, apart), max(most, apart)
        return cls(
            known, abs(drift.alpha), (drift.high - drift.low) / 2, question.delta, apart, tolerated, ends
        )

    def nearest(self, known: Sequence[Known]) -> tuple[float, str]:
        return min(max((ratio**2, what) for what, ratio in terms.items()) for terms in self._terms(known))

    def held_by(self, known: Sequence[Known]) -> str:
        """Return the symbol of the widest interval for the verdict that the estimates tend to."""
        transfers, *drifts = self._terms(known)
        if self.alpha < self.delta and not self.apart > self.tolerated:
            return max((ratio, what) for what, ratio in transfers.items())[1]
        return min(max((ratio, what) for what, ratio in terms.items()) for terms in drifts)[1]

    def _terms(self, known: Sequence[Known]) -> tuple[dict[str, float], ...]:
        """Return intervals over needed widths: for TRANSFERS, DRIFTS, and DRIFTS without a power law."""
        reach = self.reach * _slope_error(known) / _slope_error(self.known)
        transfers = {"α": reach / max(self.delta - self.alpha, _LEAST_ALPHA), "Δ": math.inf}
        drifts = {"α": reach / max(self.alpha, _LEAST_ALPHA), "Δ": 0.0}
        without_a_power = {"Δ": math.inf}
        if math.isfinite(self.apart):
            ratio = math.sqrt(
                (known[0].variance + known[-1].variance) / (self.known[0].variance + self.known[-1].variance)
            )
            below, above = (ratio * abs(self.apart - end) for end in self.ends)
            transfers["Δ"] = above / max(self.tolerated - self.apart, _LEAST_OCTAVES)
            drifts["Δ"] = below / max(self.apart - self.tolerated, _LEAST_OCTAVES)
            beyond = self.apart - math.sqrt(PLAIN) * self.tolerated
            without_a_power["Δ"] = below / max(beyond, _LEAST_OCTAVES)
        return transfers, drifts, without_a_power

    def of_verdict(self, known: Sequence[Known]) -> float:
        return self.nearest(known)[0]


def _slope_error(known: Sequence[Known]) -> float:
    """Return the standard error of a least-squares slope through the optima, octaves per octave."""
    r_S = np.log2([k.scale for k in known])
    away_S = r_S - r_S.mean()
    return math.sqrt(float(away_S**2 @ [k.variance for k in known])) / float(away_S @ away_S)


def known_of(evidence: Evidence) -> list[Known]:
    """Return states of all scales."""
    return [
        Known(e.optimum.scale, max(e.optimum.se, 1e-3) ** 2, max(1, runs_beside(e)))
        for e in evidence.estimates
    ]


def buy(distance: Distance, known: Sequence[Known], costs: Cost, spent: float) -> tuple[Counter[int], float]:
    """Return runs of the largest drop of J per cost, and the cost until J is 1.

    Returns:
        Additions of runs by the index of the scale; the cost, inf if J stays above 1.
    """
    bought: Counter[int] = Counter()
    cost = total = 0.0
    now = distance.of_verdict(known)
    for _ in range(_MOST_PACKS):
        if now <= _ENOUGH and cost >= _LEAST_SHARE * spent:
            break
        options = []
        for i, k in enumerate(known):
            trial = [*known[:i], k.with_runs(_SOME), *known[i + 1 :]]
            options.append(((now - distance.of_verdict(trial)) / costs.of(k.scale), i, trial))
        _, i, known = max(options, key=lambda option: option[0])
        total += _SOME * costs.of(known[i].scale)
        if not bought or cost < _SHARE * spent:
            cost = total
            bought[i] += 1
        now = distance.of_verdict(known)
    return bought, total if now <= 1 else math.inf


def new_known(known: Sequence[Known]) -> Known:
    per_run = float(np.median([k.variance * k.runs for k in known]))
    return Known(2 * known[-1].scale, max(_FLOOR, per_run / PACK), PACK)
