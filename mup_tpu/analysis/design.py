"""Next runs that would settle whether a hyperparameter transfers, at the least cost.

They follow from the state of each scale and the cost of a run there; any table can ask. Runs are bought
where they bring a verdict nearer per cost. A run's worth follows from the draws of the valley: what its loss
would tell of the optimum. Seeds take noise away, and not what the valley's form leaves open; for that, values
in between are bought. Where no number of runs makes α's interval narrow enough, another scale is asked for.

Symbols: α drift exponent; Δ octaves from the smallest scale's optimum to the largest's; J squared ratio of
the widest interval to the width that the nearer verdict needs: at 1 it is settled.

Shapes: C values beside an optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mup_tpu.analysis.drift import NEEDED, Drift
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost
from mup_tpu.analysis.valley import MODEL_ERROR
from mup_tpu.analysis.verdict import MOST_LOOKS, PLAIN, Evidence, LookTaken, Question

_FIRST_LOOK = (-2, -1, 0, 1, 2)  # Octaves from a new scale's predicted optimum, a seed each: a pack
_EXPECTED = 0.6
"""Standard deviation of an expected optimum, octaves, from which a first look has all of its runs."""
REACH = 2.3  # Runs further than this from an optimum (octaves) are uninformative
_APART = 0.2  # Least distance of an added value from all that were run, octaves
_EDGE_STEP = 0.3  # No value is bought between an optimum and lost runs that are nearer than this, octaves


@dataclass(frozen=True)
class Cell:
    """Runs to add at one point of the grid."""

    scale: float
    x: float  # log2 of the hyperparameter
    runs: int  # Number of runs to add
    seeds: int  # Number of seeds after the batch
    beside: tuple[float, ...] = ()  # log2 of the hyperparameters that are tuned together with it

    @property
    def values(self) -> tuple[float, ...]:
        return self.x, *self.beside


@dataclass(frozen=True)
class Batch:
    """Next runs of one parametrization."""

    parametrization: str
    cells: tuple[Cell, ...]
    reason: Reason  # Purpose
    cost: float
    to_verdict: float
    """Expected cost until the verdict, this batch included; inf if it is out of reach, nan if too
    little is known to tell."""
    spent: float
    costs: Cost

    @classmethod
    def of(
        cls, parametrization: str, cells: Sequence[Cell], reason: Reason, costs: Cost, spent: float = 0.0,
        to_verdict: float = math.nan,
    ) -> Batch:  # fmt: skip
        cost = sum(cell.runs * costs.of(cell.scale) for cell in cells)
        return cls(parametrization, tuple(cells), reason, cost, to_verdict, spent, costs)

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for cell in plain["cells"]:
            if not cell["beside"]:
                del cell["beside"]
        return plain


def values_beside(estimate: Estimate) -> np.ndarray:
    """Return values within reach of an optimum, log2: those of the grid, and half-octaves up to lost runs."""
    optimum, curve = estimate.optimum, estimate.curve
    reach = max(REACH, curve.step)
    lost_x = curve.x_G[~np.isfinite(curve.mean_G)]
    low = max(lost_x[lost_x < optimum.best_x], default=-math.inf)
    high = min(lost_x[lost_x > optimum.best_x], default=math.inf)
    halves = optimum.best_x + np.arange(-2 * math.ceil(reach), 2 * math.ceil(reach) + 1) / 2
    new = halves[(np.abs(halves[:, None] - curve.x_G) > _APART).all(axis=1)]
    if _are_whole(curve.x_G).all():  # such as batch sizes
        new = new[_are_whole(new)]
    x_C = np.sort(np.concatenate([curve.x_G, new]))
    return x_C[(np.abs(x_C - optimum.x) <= reach) & (low < x_C) & (x_C < high)]


def _are_whole(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(2**x - np.round(2**x)) < 1e-6 * 2**x) & (x >= 0)


def to_come(estimates: Sequence[Estimate], planned: Sequence[float]) -> list[float]:
    # Those between others too: any may be added at any time.
    return sorted(set(planned) - {e.optimum.scale for e in estimates})


def new_scale(estimates: Sequence[Estimate], drift: Drift, planned: Sequence[float] = ()) -> list[Cell]:
    """Return a first look at the next planned scale, or twice the largest, around its expected optimum.

    Where that is known well, three of the five runs do: the other scales say the valley's shape. A drift is
    settled by its regret, so the smallest scale's optimum is run too where it lies beyond these runs.
    """
    last = estimates[-1].optimum
    scale = min(to_come(estimates, planned), default=2 * last.scale)
    x = drift.intercept + drift.alpha * math.log2(scale) if drift.is_known else last.x
    if not drift.is_known and len(estimates) == 2:
        first = estimates[0].optimum
        slope = (last.x - first.x) / math.log2(last.scale / first.scale)
        x = last.x + slope * math.log2(scale / last.scale)
    cells = first_look(estimates[-1], scale, x)
    if planned and drift.trend is not None and drift.trend.optimum(scale).variance < _EXPECTED**2:
        cells = cells[::2] if _is_wide(estimates[-1]) else cells[1:4]
    if planned and len(estimates) + 1 >= NEEDED:
        cells += source_rate(estimates, scale, [cell.x for cell in cells])
    return cells


def source_rate(estimates: Sequence[Estimate], scale: float, values: Sequence[float]) -> list[Cell]:
    """Return a run near the smallest scale's optimum, if that lies outside the values.

    It is the first step of the grid that reaches the optimum.
    """
    x = next((e.optimum.x for e in estimates if e.optimum.is_bracketed), values[0])
    step = max(1.0, estimates[-1].curve.step)
    beyond = max(x - max(values), 0.0) or min(x - min(values), 0.0)
    edge = max(values) if beyond > 0 else min(values)
    x = edge + math.copysign(math.ceil(abs(beyond) / step) * step, beyond)
    return [Cell(scale, float(x), 1, 1)] * bool(beyond)


def _is_wide(estimate: Estimate) -> bool:
    """Return whether runs two octaves from an optimum say more about its place than nearer ones."""
    curve, valley, best_x = estimate.curve, estimate.valley, estimate.optimum.best_x
    lost_x = curve.x_G[~np.isfinite(curve.mean_G)]
    if valley is None or curve.step > 1 or (np.abs(lost_x - best_x) <= _FIRST_LOOK[-1]).any():
        return False
    noise = float(np.median(estimate.error_G * np.sqrt(curve.weight_G)))

    def information(u: float) -> float:
        rise, further = (np.median(valley.rise(np.full(len(valley.x_R), v))) for v in (u, 1.1 * u))
        return float(((further - rise) / (0.1 * u)) ** 2 / (noise**2 + (MODEL_ERROR * rise) ** 2))

    return sum(information(u) for u in (-2.0, 2.0)) > sum(information(u) for u in (-1.0, 1.0))


def first_look(beside: Estimate, scale: float, x: float) -> list[Cell]:
    """Return a first look at a new scale around an expected optimum, on the grid of another scale."""
    step, origin = max(1.0, beside.curve.step), beside.optimum.best_x
    centre = origin + round((x - origin) / step) * step
    return [Cell(scale, centre + k * step, 1, 1) for k in _FIRST_LOOK]


def between(estimate: Estimate) -> list[Cell]:
    """Return values beside the best one: halfway to a lost one, or in a hole of the grid."""
    curve = estimate.curve
    best, step, values = int(np.argmin(curve.mean_G)), max(1.0, curve.step), []
    for beside in (best - 1, best + 1):
        if not 0 <= beside < len(curve.x_G):
            continue
        gap = float(curve.x_G[beside] - curve.x_G[best])
        if np.isinf(curve.mean_G[beside]) and abs(gap) > _EDGE_STEP:
            values.append(float(curve.x_G[best]) + gap / 2)
        elif round(abs(gap) / step) >= 2:
            values.append(float(curve.x_G[best]) + math.copysign(step, gap))
    seeds = int(np.median(curve.count_G))
    return [Cell(estimate.optimum.scale, x, seeds, seeds) for x in values]


def beyond(estimate: Estimate) -> list[Cell]:
    """Return two more values beyond the edge of an optimum, with the curve's usual number of seeds."""
    optimum, curve = estimate.optimum, estimate.curve
    seeds = int(np.median(curve.count_G))
    if optimum.status == "one value":
        grid = [optimum.x + k for k in (-2, -1, 1, 2)]
    else:
        upwards = optimum.status == "at upper edge"
        edge = float(curve.x_G[-1] if upwards else curve.x_G[0])
        grid = [edge + (1 if upwards else -1) * k * curve.step for k in (1, 2)]
    return [Cell(optimum.scale, x, seeds, seeds) for x in sorted(grid)]


_START, _START_SEEDS = 8, 3
"""Values at the smallest scale that a sequence starts with, an octave apart, and seeds of each: that optimum
is the cheapest to know well."""
_LEAST_SPAN = 3.0
"""Octaves that a given grid must span for a sequence to start inside it; else it is but a guess."""
_PATIENCE = 3  # Looks before an expected cost may end a sequence: before, too little is known to expect one
_HOPELESS = 10.0
"""Times the rest of a budget that a verdict must be expected to cost for a sequence to end before it."""
_WIDEST = 14.0  # Octaves that a grid may span and still hold no optimum
_MOST_PURCHASES = 25
"""Purchases after which a sequence ends in any case; eight looks at four scales take about eleven."""
_ENOUGH = 0.6  # J that a batch is meant to leave: at 1 half of the looks would come a little too early
_LEAST_SHARE, _SHARE = 0.1, 0.35
"""A batch's cost, as a share of what was spent: a look is worth some runs, and a plan holds for some."""
_FLOOR = 0.05**2  # Squared error of an optimum that enough runs reach at any scale, octaves²
_SOME = 3  # Runs that are bought at a scale at a time
_DRAWS = 2000  # Draws of a valley by which runs are valued
_LEAST_ALPHA, _LEAST_OCTAVES = 0.02, 0.05  # Least distances of α and Δ from a verdict's limits
_MOST_PACKS = 100  # Additions of runs after which a verdict counts as out of reach


def first_batch(parametrization: str, scale: float, grid: Sequence[float]) -> Batch:
    """Return the start of a sequence: a few seeds of values an octave apart at the smallest scale.

    `grid` has log2 of the values that were asked for; where they span less than three octaves, it is a guess.
    """
    middle = (min(grid) + max(grid)) / 2
    centre = min(grid, key=lambda x: (abs(x - middle), -x))
    values = [centre + k for k in range(-_START // 2, _START // 2)]
    if max(grid) - min(grid) >= _LEAST_SPAN:
        values = [x for x in values if min(grid) - 1e-6 <= x <= max(grid) + 1e-6]
    cells = [Cell(scale, x, _START_SEEDS, _START_SEEDS) for x in values]
    return Batch.of(parametrization, cells, Reason.of("start"), Cost(0.0, 1.0, "runs"))


def next_batch(parametrization: str, evidence: Evidence, costs: Cost, question: Question) -> Batch:
    """Return the next runs of a parametrization whose verdict is open.

    Planned scales are run and no others; each gets its first look before seeds are bought.
    """
    estimates, planned = evidence.estimates, question.planned
    spent = float(sum(c.count_G.sum() * costs.of(c.scale) for c in evidence.curves))
    batch = partial(Batch.of, parametrization, costs=costs, spent=spent)
    # Values beyond the edge of grids without an optimum, and a new scale if there are too few
    bracketed = [e for e in estimates if e.optimum.is_bracketed]
    outside = [e for e in estimates if not e.optimum.is_bracketed]
    if outside:
        scales = [e.optimum.scale for e in outside]
        extension = [cell for e in outside for cell in beyond(e)]
        if planned or not bracketed or len(estimates) >= NEEDED:
            return batch(extension, Reason.of("extend grids", scales=scales))
        new = first_look(bracketed[-1], 2 * estimates[-1].optimum.scale, bracketed[-1].optimum.x)
        reason = Reason.of("extend grids and add a scale", scales=scales, needed=NEEDED, known=len(estimates))
        return batch([*extension, *new], reason)
    # A second run of the best one, where a single one would decide
    headline = evidence.headline
    if evidence.luck and headline is not None and headline.low > question.epsilon:
        last = estimates[-1].optimum
        return batch([Cell(last.scale, last.best_x, 1, 2)], Reason.of("one run", at=last.scale))
    # The smallest scale's optimum at the largest, whose regret is then measured
    if headline is not None and not headline.is_run and len(estimates) >= NEEDED:
        curve = estimates[-1].curve
        (cell,) = source_rate(estimates, headline.target, curve.x_G.tolist())
        seeds = int(np.median(curve.count_G))
        reason = Reason.of("source not run", at=headline.target, scales=[headline.source])
        return batch([replace(cell, runs=seeds, seeds=seeds)], reason)
    # Scales that a verdict needs, or that are planned
    unseen = to_come(estimates, planned)
    if len(estimates) < NEEDED or unseen:
        reason = Reason.of("planned scale", at=min(unseen, default=math.nan))
        if len(estimates) < NEEDED:
            reason = Reason.of("few scales", needed=NEEDED, known=len(estimates))
        return batch(new_scale(estimates, evidence.drift, planned), reason)
    # Values beside an optimum where runs are lost or missing
    if halfway := [cell for e in estimates for cell in between(e)]:
        return batch(halfway, Reason.of("holes", scales=sorted({cell.scale for cell in halfway})))
    # One more scale, if no number of seeds makes α's interval narrow enough
    known = [Known.of(e) for e in estimates]
    distance, ideal = Distance.of(evidence, question, known), [k.ideal for k in known]
    if not planned and (nearest := distance.nearest(ideal))[0] > 1 and nearest[1] == "α":
        settles = distance.nearest([*ideal, float(np.median(ideal))])[0] <= 1
        reason = Reason.of("another scale", count=len(estimates) + 1, settles=settles)
        made = batch(new_scale(estimates, evidence.drift), reason)
        return replace(made, to_verdict=made.cost) if settles else made
    # Runs beside the optima, where they bring a verdict nearer per cost
    bought, to_verdict = buy(distance, known, costs, spent)
    cells = [cell for before, after in zip(known, bought, strict=True) for cell in after.added_to(before)]
    quantity = "α" if distance.quantity() == "α" else "regret"
    reason = Reason.of("wide interval", quantity=quantity, scales=sorted({cell.scale for cell in cells}))
    return batch(cells, reason, to_verdict=to_verdict)


def why_stop(look: LookTaken, batch: Batch, left: float = math.inf) -> Reason | None:
    """Return the reason to end a sequence although nothing is settled; None to go on.

    `left` is the rest of the budget, in the unit of the batch's costs. What seems out of reach of any cost is
    often settled all the same (benchmarks/settle.py): then a sequence goes on.
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


@dataclass(frozen=True, eq=False)
class Known:
    """What is known at one scale of its optimum, and of the losses at values beside it."""

    scale: float
    x_C: np.ndarray  # Values where runs may be added, log2
    runs_C: np.ndarray
    noise_C: np.ndarray  # Variance of a single run, nat²
    form_C: np.ndarray
    """Variance by which the valley's form misses the loss at a value, however many runs there are, nat²."""
    covariance: np.ndarray  # Of the optimum and the losses at the values, (1 + C)²

    @classmethod
    def of(cls, estimate: Estimate) -> Known:
        curve, optimum, valley = estimate.curve, estimate.optimum, estimate.valley
        assert valley is not None, "the optimum is bracketed"
        x_C = values_beside(estimate)
        part = valley.part(slice(None, None, len(valley.x_R) // _DRAWS))
        loss_RC = part.loss(x_C)
        rise_RC = part.rise(np.tile(x_C - optimum.x, (len(loss_RC), 1)))
        form_C = (MODEL_ERROR * np.median(rise_RC, axis=0)) ** 2
        finite_G = np.isfinite(curve.mean_G)
        noise_G = (estimate.error_G**2 * curve.weight_G)[finite_G]
        is_run_CG = np.isclose(x_C[:, None], curve.x_G)
        covariance = np.cov(np.column_stack([part.x_R, loss_RC]), rowvar=False)
        runs_C, noise_C = is_run_CG @ curve.count_G, np.interp(x_C, curve.x_G[finite_G], noise_G)
        return cls(optimum.scale, x_C, runs_C, noise_C, form_C, covariance)

    @property
    def variance(self) -> float:
        # Squared standard error of the optimum, octaves²
        return float(self.covariance[0, 0])

    def _error_C(self, more: float) -> np.ndarray:
        """Return the variance of what some more runs at each value tell beside its runs so far."""
        with np.errstate(divide="ignore"):
            before_C, after_C = (self.noise_C / n + self.form_C for n in (self.runs_C, self.runs_C + more))
            return np.asarray(1 / np.maximum(1 / np.maximum(after_C, 1e-12) - 1 / before_C, 1e-12))

    def _observed(self, c: int, error: float) -> np.ndarray:
        """Return the covariance after a loss is measured at a value with an error (Kalman's filter)."""
        with_c = self.covariance[c + 1]
        return np.asarray(self.covariance - np.outer(with_c, with_c) / (with_c[c + 1] + error))

    @property
    def ideal(self) -> float:
        """Return the least squared error that runs without number leave, octaves²."""
        known, error_C = self, self._error_C(math.inf)
        for c in range(len(self.x_C)):
            known = replace(known, covariance=known._observed(c, error_C[c]))
        # Where the optimum is hardly known, the filter, which is linear, sees too little of what runs tell.
        return min(known.variance, _FLOOR)

    def with_runs(self, runs: int) -> Known:
        """Return the state after some runs, each at the value that tells most of the optimum."""
        known = self
        for _ in range(runs):
            error_C = known._error_C(1)
            gain_C = known.covariance[0, 1:] ** 2 / (np.diag(known.covariance)[1:] + error_C)
            c = int(np.argmax(gain_C))
            runs_C = known.runs_C + (np.arange(len(self.x_C)) == c)
            known = replace(known, covariance=known._observed(c, error_C[c]), runs_C=runs_C)
        return known

    def added_to(self, before: Known) -> list[Cell]:
        of_C = zip(self.x_C, self.runs_C - before.runs_C, self.runs_C, strict=True)
        return [Cell(self.scale, float(x), int(added), int(total)) for x, added, total in of_C if added]


@dataclass(frozen=True)
class Distance:
    """Distance of a verdict, by the state of each scale. Intervals shrink as their scales' errors do."""

    scales: tuple[float, ...]
    variances: tuple[float, ...]
    """Squared errors of the optima when the intervals below were computed, octaves²."""
    alpha: float  # Size of the optima's slope
    reach: float  # Half-width of its interval
    delta: float
    apart: float  # |Δ|, octaves; nan if the larger scale has no loss at the smaller's optimum
    tolerated: float  # |Δ| at which the regret is ε
    ends: tuple[float, float]  # |Δ| at the regret's bounds

    @classmethod
    def of(cls, evidence: Evidence, question: Question, known: Sequence[Known]) -> Distance:
        """Return the distance by evidence of three scales or more, all bracketed."""
        first, last = evidence.estimates[0], evidence.estimates[-1]
        tolerated = max((last.optimum.band_high - last.optimum.band_low) / 2, _LEAST_OCTAVES)
        drift, headline = evidence.drift, evidence.headline
        apart, ends = math.nan, (math.nan, math.nan)
        if headline is not None and headline.status == "estimated":
            apart = abs(last.optimum.x - first.optimum.x)
            # A regret grows as the square of the octaves.
            least, most = (
                tolerated * math.sqrt(bound / question.epsilon) for bound in (headline.low, headline.high)
            )
            ends = min(least, apart), max(most, apart)
        state = tuple(k.scale for k in known), tuple(k.variance for k in known)
        slope, low, high = drift.moved
        return cls(*state, abs(slope), (high - low) / 2, question.delta, apart, tolerated, ends)

    def nearest(self, variances: Sequence[float]) -> tuple[float, str]:
        """Return J of the nearer verdict, and the symbol of its widest interval."""
        return min(max((ratio**2, what) for what, ratio in terms.items()) for terms in self._terms(variances))

    def quantity(self) -> str:
        """Return the symbol of the widest interval for the verdict that the estimates tend to."""
        *copied, drifts, without_a_power = self._terms(self.variances)
        likely = copied if not self.apart > self.tolerated else (drifts, without_a_power)
        return min(max((ratio, what) for what, ratio in terms.items()) for terms in likely)[1]

    def _terms(self, variances: Sequence[float]) -> tuple[dict[str, float], ...]:
        """Return intervals over needed widths, by verdict.

        They are TRANSFERS, MOVES AT NO COST, DRIFTS, and DRIFTS without a power law.

        One squared error more than now is that of another scale's optimum.
        """
        scales = [*self.scales, 2 * self.scales[-1]][: len(variances)]
        reach = self.reach * _slope_error(scales, variances) / _slope_error(self.scales, self.variances)
        transfers = {"α": _over(reach, self.delta - self.alpha, _LEAST_ALPHA), "Δ": math.inf}
        drifts = {"α": _over(reach, self.alpha, _LEAST_ALPHA), "Δ": 0.0}
        without_a_power = {"Δ": math.inf}
        if math.isfinite(self.apart):
            now = self.variances[0] + self.variances[-1]
            ratio = math.sqrt((variances[0] + variances[-1]) / now)
            below, above = (ratio * abs(self.apart - end) for end in self.ends)
            transfers["Δ"] = _over(above, self.tolerated - self.apart, _LEAST_OCTAVES)
            drifts["Δ"] = _over(below, self.apart - self.tolerated, _LEAST_OCTAVES)
            plain = math.sqrt(PLAIN) * self.tolerated
            without_a_power["Δ"] = _over(below, self.apart - plain, _LEAST_OCTAVES)
        moves = {"α": _over(reach, self.alpha - self.delta / 2, _LEAST_ALPHA), "Δ": transfers["Δ"]}
        return transfers, moves, drifts, without_a_power


def _over(reach: float, room: float, least: float) -> float:
    """Return an interval's reach over the room that a verdict leaves it.

    Where the estimate lies on the other side it has to move as well: a narrow interval there shows nothing.
    """
    return (reach + max(0.0, -room)) / max(room, least)


def _slope_error(scales: Sequence[float], variances: Sequence[float]) -> float:
    """Return the standard error of a least-squares slope through the optima, octaves per octave."""
    r_S = np.log2(scales)
    away_S = r_S - r_S.mean()
    return math.sqrt(float(away_S**2 @ variances)) / float(away_S @ away_S)


def buy(distance: Distance, known: Sequence[Known], costs: Cost, spent: float) -> tuple[list[Known], float]:
    """Return the states after runs of the largest drop of J per cost, and the cost until J is 1.

    The cost is inf if J stays above 1.
    """
    known, bought = [*known], [*known]
    cost = total = 0.0
    now, _ = distance.nearest([k.variance for k in known])
    after = [k.with_runs(_SOME) for k in known]
    for pack in range(_MOST_PACKS):
        if now <= _ENOUGH and cost >= _LEAST_SHARE * spent:
            break
        options = []
        for i, k in enumerate(after):
            variances = [one.variance for one in (*known[:i], k, *known[i + 1 :])]
            options.append(((now - distance.nearest(variances)[0]) / costs.of(k.scale), i))
        _, i = max(options)
        known[i] = after[i]
        total += _SOME * costs.of(known[i].scale)
        if pack == 0 or cost < _SHARE * spent:
            cost, bought = total, [*known]
        after[i] = known[i].with_runs(_SOME)
        now, _ = distance.nearest([k.variance for k in known])
    return bought, total if now <= 1 else math.inf
