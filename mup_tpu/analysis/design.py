"""Which runs next would settle whether a hyperparameter transfers, at the least cost.

A function of what is known of each scale and of what a run costs there; any table can ask. Seeds are bought
where they bring a verdict nearer per cost, on cells an octave apart beside an optimum: half-steps and the
optimum itself tell less of where it lies. What staying at the smallest scale's optimum costs is read at the
largest in the two cells beside it: where their noise holds the verdict open, seeds are bought there. Where
the optima's own scatter does, no seed helps, and another scale is asked for.

Symbols: α drift exponent; Δ octaves from the smallest scale's optimum to the largest's; J how many times too
wide the widest interval is, squared, for the nearer verdict: 1 is settled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mup_tpu.analysis.cost import Cost
from mup_tpu.analysis.drift import NEEDED, Drift, drift_reach, scatter_weights
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.looks import Evidence, LookTaken, Question
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.verdict import MOST_LOOKS, PLAIN
from mup_tpu.config.columns import CONFIGURED, label, write_scale

_START = 8
"""Values at the smallest scale that a sequence starts with, an octave apart, a seed each."""
_LEAST_SPAN = 3.0
"""Octaves that a given grid must span for a sequence to start inside it; else it is but a guess."""
_FIRST_LOOK = ((-2, 1), (-1, 2), (0, 2), (1, 2), (2, 1))
"""Octaves from a new scale's predicted optimum, and seeds there: a pack."""
_PACK = sum(seeds for _, seeds in _FIRST_LOOK)
_REACH = 2.3
"""Octaves from an optimum within which a run tells where it lies."""
_SHARE = 0.35
"""A batch's cost, as a share of what was spent."""
_FLOOR = 0.04**2
"""Squared standard error of an optimum that no seed takes away, octaves²: the valley's unknown shape."""
_LEAST_ALPHA, _LEAST_OCTAVES, _LEAST_NAT = 0.02, 0.05, 0.001
"""Least distances from a verdict's limits: closer ones are not told apart."""
_SCATTERED = 0.7
"""Share of α's interval that known optima would leave, from which it is their scatter's, not the noise's."""
_MOST_PACKS = 200
"""Packs after which a verdict counts as out of reach."""
_PATIENCE = 3
"""Looks before an expected cost may end a sequence: before, too little is known to expect one."""
_WIDEST = 14.0
"""Octaves that a grid may span and still hold no optimum."""
_BESIDE = -1
"""Where runs go that narrow the regret: beside the smallest scale's optimum at the largest scale."""
_EDGE_STEP = 0.3
"""Octaves between an optimum and where runs are lost within which nothing is looked for."""
_MOST_PURCHASES = 25
"""Purchases after which a sequence ends in any case; six looks at four scales take about nine."""


_SHORT = {"parametrization": "--parametrizations ", "width": "--widths ", "lr": "--learning-rates "}
"""Short options of a sweep's usual axes, by column."""


def _option(column: str, role: str) -> str:
    """Option of a sweep's command that sets the values of an axis, up to the first of them."""
    return _SHORT.get(column) or f"--{role} {CONFIGURED[column].field}="


@dataclass(frozen=True)
class Cell:
    """Runs to add at one point of the grid."""

    scale: float
    x: float
    """log2 of the hyperparameter."""
    runs: int
    """How many to add."""
    seeds: int
    """How many there are then."""


@dataclass(frozen=True)
class Batch:
    """What to run next of one parametrization."""

    parametrization: str
    cells: tuple[Cell, ...]
    reason: str
    """What it is for, one sentence without a full stop."""
    cost: float
    to_verdict: float
    """Expected cost until the verdict, this batch included; inf where it is out of reach, nan where too
    little is known to tell."""
    spent: float
    costs: Cost

    def commands(self, columns: Columns, command: str | None) -> tuple[str, ...]:
        """Command lines that run it where the experiment is ours, else sentences.

        Args:
            columns: names of what scales and what is tuned.
            command: command line that adds runs to the table, or None.
        """
        groups: dict[tuple[float, int], list[float]] = {}
        for cell in sorted(self.cells, key=lambda c: (c.scale, c.seeds, c.x)):
            groups.setdefault((cell.scale, cell.seeds), []).append(cell.x)
        axes = (columns.parametrization, columns.scale, columns.hyperparameter)
        is_ours = command is not None and set(columns.along) <= set(axes) <= set(CONFIGURED)
        lines = []
        for (scale, seeds), grid in groups.items():
            values = " ".join(f"2^{x:.4g}" for x in grid)
            if is_ours:
                roles = ("compare", "scale", "tune")
                compared, grown, tuned = (_option(*axis) for axis in zip(axes, roles, strict=True))
                lines.append(
                    f"{command} {compared}{self.parametrization} {grown}{scale:g} --num-seeds {seeds} "
                    f"{tuned}{values if tuned.endswith(' ') else values.replace(' ', ',')}"
                )
            else:
                at = write_scale(columns.scale, scale)
                many = "1 seed" if seeds == 1 else f"{seeds} seeds each"
                lines.append(f"add {columns.hyperparameter} {values} at {label(columns.scale)} {at}, {many}")
        return tuple(lines)

    def price(self) -> str:
        """What it costs, beside what was spent and what the verdict may cost."""
        costs = f"it costs {self.costs.write(self.cost)}, {self.costs.write(self.spent)} were spent"
        if math.isinf(self.to_verdict):
            return f"{costs}; how much more a verdict costs cannot be told yet"
        if math.isfinite(self.to_verdict):
            return f"{costs}; about {self.costs.write(self.to_verdict)} to a verdict ({self.costs.source})"
        return f"{costs} ({self.costs.source})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Known:
    """What is known of one scale, or would be after more runs."""

    scale: float
    variance: float
    """Squared standard error of the optimum, octaves²."""
    runs: int
    """Beside the optimum."""
    beside: tuple[int, ...] = ()
    """At the largest scale: runs of each of the cells that the regret is read from."""

    @property
    def ideal(self) -> _Known:
        """After any number of runs."""
        return replace(self, variance=min(self.variance, _FLOOR), beside=())

    @property
    def read(self) -> float:
        """Runs of the scarcer of the cells that the regret is read from."""
        return min(self.beside, default=math.inf)

    def with_runs(self, runs: int) -> _Known:
        """After so many more runs."""
        total, floor = self.runs + runs, self.ideal.variance
        return replace(self, variance=floor + (self.variance - floor) * self.runs / total, runs=total)

    def with_runs_beside(self, runs: int) -> _Known:
        """After so many more runs in the cells that the regret is read from."""
        beside = {float(k): runs_there for k, runs_there in enumerate(self.beside)}
        _fill(beside, runs)
        return replace(self.with_runs(runs), beside=tuple(beside.values()))


@dataclass(frozen=True)
class _Distance:
    """How far a verdict is, given what is known of each scale."""

    drift: Drift
    weight_K: np.ndarray
    """Probability of each scatter of the optima."""
    apart: float
    """|Δ|, octaves; nan where the larger scale has no loss at the smaller's optimum."""
    tolerated: float
    """The |Δ| whose regret is ε."""
    delta: float
    epsilon: float
    regret: float
    """Of |Δ|, nat: where one is read, noise biases it upwards."""
    below: float
    above: float
    """By how much the regret's interval reaches further from it than Δ's tells, nat."""
    read: float
    """Runs of the scarcer of the cells that the regret is read from."""

    @classmethod
    def of(cls, evidence: Evidence, question: Question) -> _Distance:
        """From evidence of three scales or more, all bracketed."""
        first, last = evidence.estimates[0], evidence.estimates[-1]
        coefficients, u = last.fit.coefficients_R4[0], last.optimum.x - last.fit.centre_R[0]
        curvature = max(2 * float(coefficients[2] + 3 * coefficients[3] * u), 1e-3)
        tolerated = math.sqrt(2 * question.epsilon / curvature)
        apart = regret = below = above = math.nan
        known, headline = _known(evidence), evidence.headline
        if headline is not None and headline.status == "estimated":
            apart, spread = abs(last.optimum.x - first.optimum.x), cls._spread(known)
            least, regret, most = (
                curvature / 2 * octaves**2 for octaves in (max(0.0, apart - spread), apart, apart + spread)
            )
            below = math.sqrt(max(0.0, (headline.low - regret) ** 2 - (regret - least) ** 2))
            above = math.sqrt(max(0.0, (headline.high - regret) ** 2 - (most - regret) ** 2))
        limits = (question.delta, question.epsilon)
        read = known[-1].read
        weight_K = scatter_weights([e.optimum for e in evidence.estimates])
        return cls(evidence.drift, weight_K, apart, tolerated, *limits, regret, below, above, read)

    @staticmethod
    def _spread(known: Sequence[_Known]) -> float:
        """Half-width of Δ's interval, octaves."""
        return 2 * math.sqrt(known[0].variance + known[-1].variance)

    def reach(self, known: Sequence[_Known]) -> float:
        """Half-width of α's interval."""
        variance_S = np.array([k.variance for k in known])
        return drift_reach([k.scale for k in known], variance_S, self.weight_K)

    def is_held_by_scatter(self, known: Sequence[_Known]) -> bool:
        """Whether the optima's own scatter, not their errors, holds the verdict open: no seed helps that."""
        ideal = [k.ideal for k in known]
        is_scattered = self.reach(ideal) > _SCATTERED * self.reach(known)
        return self.nearest(known)[1] == "α" and is_scattered and self.of_verdict(ideal) > 1

    def nearest(self, known: Sequence[_Known]) -> tuple[float, str]:
        """J of the nearer verdict, and what holds it open: "α", "Δ", or "read", the noise beside it."""
        return min(max((ratio**2, what) for what, ratio in terms.items()) for terms in self._terms(known))

    def held_by(self, known: Sequence[_Known]) -> str:
        """What holds the verdict open that the estimates tend to: "α", "Δ" or "read"."""
        transfers, *drifts = self._terms(known)
        if abs(self.drift.alpha) < self.delta and not self.apart > self.tolerated:
            return max((ratio, what) for what, ratio in transfers.items())[1]
        return min(max((ratio, what) for what, ratio in terms.items()) for terms in drifts)[1]

    def _terms(self, known: Sequence[_Known]) -> tuple[dict[str, float], ...]:
        """How many times too wide intervals are: for TRANSFERS, DRIFTS, and DRIFTS without a power law."""
        reach, alpha = self.reach(known), abs(self.drift.alpha)
        transfers = {"α": reach / max(self.delta - alpha, _LEAST_ALPHA), "Δ": math.inf}
        drifts = {"α": reach / max(alpha, _LEAST_ALPHA), "Δ": 0.0}
        without_a_power = {"Δ": math.inf}
        if math.isfinite(self.apart):
            spread, room = self._spread(known), self.tolerated - self.apart
            transfers["Δ"] = spread / max(room, _LEAST_OCTAVES)
            drifts["Δ"] = spread / max(-room, _LEAST_OCTAVES)
            # A regret grows as the square of the octaves.
            beyond = self.apart - math.sqrt(PLAIN) * self.tolerated
            without_a_power["Δ"] = spread / max(beyond, _LEAST_OCTAVES)
            noise = math.sqrt(self.read / known[-1].read)
            transfers["read"] = noise * self.above / max(self.epsilon - self.regret, _LEAST_NAT)
            drifts["read"] = noise * self.below / max(self.regret - self.epsilon, _LEAST_NAT)
            plain = PLAIN * self.epsilon
            without_a_power["read"] = noise * self.below / max(self.regret - plain, _LEAST_NAT)
        return transfers, drifts, without_a_power

    def of_verdict(self, known: Sequence[_Known]) -> float:
        """J of the nearer verdict."""
        return self.nearest(known)[0]


def first_batch(parametrization: str, scale: float, grid: Sequence[float]) -> Batch:
    """What a sequence starts with: one seed of values an octave apart at the smallest scale.

    Args:
        parametrization: whose.
        scale: the smallest.
        grid: log2 of the values that were asked for; where they span less than three octaves, a guess.
    """
    middle = (min(grid) + max(grid)) / 2
    centre = min(grid, key=lambda x: (abs(x - middle), -x))
    values = [centre + k for k in range(-_START // 2, _START // 2)]
    if max(grid) - min(grid) >= _LEAST_SPAN:
        values = [x for x in values if min(grid) - 1e-6 <= x <= max(grid) + 1e-6]
    cells = tuple(Cell(scale, x, 1, 1) for x in values)
    costs = Cost(0.0, 1.0, "runs", "not measured yet")
    return Batch(parametrization, cells, "a start at the smallest scale", len(cells), math.nan, 0.0, costs)


def next_batch(parametrization: str, evidence: Evidence, costs: Cost, question: Question) -> Batch:
    """The next runs of a parametrization whose verdict is open.

    Args:
        parametrization: whose.
        evidence: what is known of it.
        costs: of a run.
        question: what is asked. The scales that it plans are run and no others; each gets its first look
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
        """Cost of all runs."""
        return float(sum(c.count_G.sum() * self.costs.of(c.scale) for c in self.evidence.curves))

    @property
    def scale(self) -> str:
        """Label of what grows."""
        return label(self.question.columns.scale)

    def written(self, scales: Sequence[float]) -> str:
        """Scales, for people."""
        return _and([write_scale(self.question.columns.scale, scale) for scale in scales])

    def batch(self, cells: Sequence[Cell], reason: str, to_verdict: float = math.nan) -> Batch:
        """Cells to run and why."""
        cost = sum(cell.runs * self.costs.of(cell.scale) for cell in cells)
        return Batch(self.parametrization, tuple(cells), reason, cost, to_verdict, self.spent, self.costs)


def _extended_grids(ask: _Open) -> Batch | None:
    """Values beyond the edge of grids that hold no optimum, with a new scale where there are too few."""
    estimates, planned = ask.evidence.estimates, ask.question.planned
    outside = [e for e in estimates if not e.optimum.is_bracketed]
    if not outside:
        return None
    ends = f"no optimum inside the grid at {ask.scale} {ask.written([e.optimum.scale for e in outside])}"
    beyond = [cell for e in outside for cell in _beyond(e)]
    bracketed = [e for e in estimates if e.optimum.is_bracketed]
    if planned or not bracketed or len(estimates) >= NEEDED:
        return ask.batch(beyond, f"{ends}: extend it there first")
    needs = f"a verdict needs {NEEDED} {ask.scale}s, there are {len(estimates)}: add one too"
    new = _first_look(bracketed[-1], 2 * estimates[-1].optimum.scale, bracketed[-1].optimum.x)
    return ask.batch([*beyond, *new], f"{ends}: extend it there; {needs}")


def _scales_needed(ask: _Open) -> Batch | None:
    """Scales that a verdict needs, or that are planned."""
    estimates, planned = ask.evidence.estimates, ask.question.planned
    to_come = _to_come(estimates, planned)
    if len(estimates) < NEEDED:
        reason = f"a verdict needs {NEEDED} {ask.scale}s, there are {len(estimates)}"
    elif to_come:
        at = ask.written([min(to_come)])
        reason = f"nothing is shown yet, and {ask.scale} {at} is planned: a first look at it"
    else:
        return None
    return ask.batch(_new_scale(estimates, ask.evidence.drift, planned), reason)


def _holes(ask: _Open) -> Batch | None:
    """Values beside an optimum where runs are lost or missing."""
    between = [cell for e in ask.evidence.estimates for cell in _between(e)]
    if not between:
        return None
    at = ask.written(sorted({cell.scale for cell in between}))
    where = f"beside the optimum at {ask.scale} {at}"
    return ask.batch(between, f"runs are lost or missing {where}: a value in between")


def _another_scale(ask: _Open) -> Batch | None:
    """One more scale, where the optima's own scatter holds the verdict open."""
    distance, known = _Distance.of(ask.evidence, ask.question), _known(ask.evidence)
    if ask.question.planned or not distance.is_held_by_scatter(known):
        return None
    settles = distance.of_verdict([k.ideal for k in [*known, _new_known(known)]]) <= 1
    cells = _new_scale(ask.evidence.estimates, ask.evidence.drift)
    found = ask.batch(cells, _scatter_reason(ask.evidence, ask.question, settles))
    return replace(found, to_verdict=found.cost) if settles else found


def _seeds(ask: _Open) -> Batch:
    """Seeds where they bring a verdict nearer per cost."""
    distance, known = _Distance.of(ask.evidence, ask.question), _known(ask.evidence)
    bought, to_verdict = _buy(distance, known, ask.costs, ask.spent)
    packs_beside = bought.pop(_BESIDE, 0)
    places = []
    if bought:
        places.append(f"the optimum at {ask.scale} {ask.written([known[i].scale for i in sorted(bought)])}")
    if packs_beside:
        source, target = (ask.written([known[i].scale]) for i in (0, -1))
        places.append(f"the optimum of {source} at {ask.scale} {target}")
    cells = [
        cell
        for i in range(len(known))
        for cell in _replicates(
            ask.evidence, i, _PACK * bought[i], _PACK * packs_beside if i == len(known) - 1 else 0
        )
    ]
    what = "α's interval" if distance.held_by(known) == "α" else "the regret's interval"
    return ask.batch(cells, f"{what} is too wide: seeds beside {_and(places)} help most", to_verdict)


_STRATEGIES: tuple[Callable[[_Open], Batch | None], ...] = (
    _extended_grids,
    _scales_needed,
    _holes,
    _another_scale,
    _seeds,
)
"""What helps, in the order in which it is tried."""


def why_stop(look: LookTaken, batch: Batch, question: Question, left: float = math.inf) -> str:
    """Why a sequence is not to go on although nothing is settled, as a sentence; "" where it is.

    Args:
        look: the last.
        batch: what would be next.
        question: what is asked.
        left: of the budget, in the unit of the batch's costs. Without one a sequence goes on to its last
            look: what seems out of reach is found all the same often enough (benchmarks/settle.py).
    """
    columns = question.columns
    if look.number >= MOST_LOOKS:
        return f"{MOST_LOOKS} looks were taken, as many as the verdict's error rates were measured for"
    if look.purchase >= _MOST_PURCHASES:
        return f"{look.purchase} purchases were made and nothing is settled"
    for e in look.evidence.estimates:
        span = e.curve.x_G[-1] - e.curve.x_G[0]
        if not e.optimum.is_bracketed and span >= _WIDEST:
            at = f"{label(columns.scale)} {write_scale(columns.scale, e.optimum.scale)}"
            return f"the grid at {at} spans {span:.0f} octaves and holds no optimum"
    if look.number >= _PATIENCE and batch.to_verdict > left:
        known = _known(look.evidence)
        if math.isfinite(batch.to_verdict):
            cost, rest = batch.costs.write(batch.to_verdict), batch.costs.write(max(left, 0.0))
            return f"a verdict is expected to cost {cost} more, and {rest} of the budget are left"
        if _Distance.of(look.evidence, question).is_held_by_scatter(known):
            return _scatter_reason(look.evidence, question, settles=True)
        return "no amount of such runs is expected to settle it"
    return ""


def _scatter_reason(evidence: Evidence, question: Question, settles: bool) -> str:
    scale = label(question.columns.scale)
    helps = "would settle this" if settles else "is the next step"
    return (
        f"the optima scatter by {evidence.drift.tau:.2f} octave between {scale}s: "
        f"{_ordinal(len(evidence.estimates) + 1)} {scale} {helps}, seeds would not"
    )


def _known(evidence: Evidence) -> list[_Known]:
    known = [
        _Known(e.optimum.scale, max(e.optimum.se, 1e-3) ** 2, max(1, _runs_beside(e)))
        for e in evidence.estimates
    ]
    known[-1] = replace(known[-1], beside=tuple(_cells_beside(evidence).values()))
    return known


def _cells_beside(evidence: Evidence) -> dict[float, int]:
    """The cells of the largest scale on both sides of the smallest's optimum, and their runs."""
    curve, x = evidence.estimates[-1].curve, evidence.estimates[0].optimum.x
    right = int(np.searchsorted(curve.x_G, x))
    around = slice(max(0, right - 1), right + 1)
    return {
        float(at): int(count)
        for at, count, mean in zip(
            curve.x_G[around], curve.count_G[around], curve.mean_G[around], strict=True
        )
        if np.isfinite(mean)
    }


def _fill(seeds: dict[float, int], runs: int, x: float = 0.0) -> None:
    """Add runs to cells one by one: the fewest first, then the nearest to x."""
    for _ in range(runs):
        seeds[min(seeds, key=lambda at: (seeds[at], abs(at - x)))] += 1


def _buy(
    distance: _Distance, known: Sequence[_Known], costs: Cost, spent: float
) -> tuple[Counter[int], float]:
    """Packs of the largest drop of J per cost, and the cost until J is 1.

    Returns:
        How many packs for each scale's optimum, by its number, and for the regret (`_BESIDE`); the cost.
    """
    bought: Counter[int] = Counter()
    cost = total = 0.0
    now = distance.of_verdict(known)
    for _ in range(_MOST_PACKS):
        if now <= 1 and bought:
            break
        options = []
        for i, k in enumerate(known):
            trial = [*known[:i], k.with_runs(_PACK), *known[i + 1 :]]
            options.append(((now - distance.of_verdict(trial)) / costs.of(k.scale), i, trial))
        if known[-1].beside:
            trial = [*known[:-1], known[-1].with_runs_beside(_PACK)]
            options.append(((now - distance.of_verdict(trial)) / costs.of(known[-1].scale), _BESIDE, trial))
        _, i, known = max(options, key=lambda option: option[0])
        total += _PACK * costs.of(known[i].scale)
        if not bought or cost < _SHARE * spent:
            cost = total
            bought[i] += 1
        now = distance.of_verdict(known)
    return bought, total if now <= 1 else math.inf


def _new_known(known: Sequence[_Known]) -> _Known:
    """What a first look at the next scale would tell, by what the others' runs told."""
    per_run = float(np.median([k.variance * k.runs for k in known]))
    return _Known(2 * known[-1].scale, max(_FLOOR, per_run / _PACK), _PACK)


def _runs_beside(estimate: Estimate) -> int:
    curve = estimate.curve
    beside_G = np.isfinite(curve.mean_G) & (np.abs(curve.x_G - estimate.optimum.x) <= _REACH)
    return int(curve.count_G[beside_G].sum())


def _replicates(evidence: Evidence, number: int, runs: int, runs_beside: int) -> list[Cell]:
    """Seeds for one scale.

    Args:
        evidence: of all scales.
        number: the scale's.
        runs: for the cells an octave apart beside its optimum.
        runs_beside: for those that the regret is read from.
    """
    optimum, curve = evidence.estimates[number].optimum, evidence.estimates[number].curve
    step = max(1.0, curve.step)
    seeds: dict[float, int] = {}
    for at in (optimum.best_x + k * step for k in range(-3, 4)):
        there = np.flatnonzero(np.abs(curve.x_G - at) < 1e-6)
        if abs(at - optimum.x) > max(_REACH, step):
            continue
        if not len(there):
            seeds[at] = 0
        elif np.isfinite(curve.mean_G[there[0]]):
            seeds[float(curve.x_G[there[0]])] = int(curve.count_G[there[0]])
    beside = _cells_beside(evidence) if runs_beside else {}
    before = seeds | beside
    _fill(beside, runs_beside, optimum.x)
    seeds |= beside
    _fill(seeds, runs, optimum.x)
    return [Cell(optimum.scale, at, n - before[at], n) for at, n in sorted(seeds.items()) if n > before[at]]


def _to_come(estimates: Sequence[Estimate], planned: Sequence[float]) -> list[float]:
    """Planned scales that were not looked at yet, those between others too: any may be added at any time."""
    return sorted(set(planned) - {e.optimum.scale for e in estimates})


def _new_scale(estimates: Sequence[Estimate], drift: Drift, planned: Sequence[float] = ()) -> list[Cell]:
    """A first look at the next planned scale, or twice the largest, around where its optimum is expected."""
    last = estimates[-1].optimum
    scale = min(_to_come(estimates, planned), default=2 * last.scale)
    x = drift.intercept + drift.alpha * math.log2(scale) if drift.is_known else last.x
    if not drift.is_known and len(estimates) == 2:
        first = estimates[0].optimum
        slope = (last.x - first.x) / math.log2(last.scale / first.scale)
        x = last.x + slope * math.log2(scale / last.scale)
    return _first_look(estimates[-1], scale, x)


def _first_look(beside: Estimate, scale: float, x: float) -> list[Cell]:
    """A first look at a new scale around an expected optimum, on the grid of another scale."""
    step = max(1.0, beside.curve.step)
    origin = beside.optimum.best_x
    centre = origin + round((x - origin) / step) * step
    return [Cell(scale, centre + k * step, seeds, seeds) for k, seeds in _FIRST_LOOK]


def _between(estimate: Estimate) -> list[Cell]:
    """Values beside the best one, with as many seeds: halfway to a lost one, or where the grid has a hole."""
    curve = estimate.curve
    best, found = int(np.argmin(curve.mean_G)), []
    for beside in (best - 1, best + 1):
        if not 0 <= beside < len(curve.x_G):
            continue
        gap = float(curve.x_G[beside] - curve.x_G[best])
        if np.isinf(curve.mean_G[beside]) and abs(gap) > _EDGE_STEP:
            found.append(float(curve.x_G[best]) + gap / 2)
        elif round(abs(gap) / curve.step) >= 2 and curve.step >= _EDGE_STEP:
            found.append(float(curve.x_G[best]) + math.copysign(curve.step, gap))
    seeds = int(curve.count_G[best])
    return [Cell(estimate.optimum.scale, x, seeds, seeds) for x in found]


def _beyond(estimate: Estimate) -> list[Cell]:
    """Two more values beyond the edge that an optimum lies at, with as many seeds as there are."""
    optimum, curve = estimate.optimum, estimate.curve
    seeds = int(curve.count_G.max())
    if optimum.status == "one value":
        grid = [optimum.x + k for k in (-2, -1, 1, 2)]
    else:
        upwards = optimum.status == "at upper edge"
        edge = float(curve.x_G[-1] if upwards else curve.x_G[0])
        grid = [edge + (1 if upwards else -1) * k * curve.step for k in (1, 2)]
    return [Cell(optimum.scale, x, seeds, seeds) for x in sorted(grid)]


def _ordinal(number: int) -> str:
    words = {4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}
    return words.get(number, f"the {number}th")


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
