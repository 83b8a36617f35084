"""Which runs next would settle whether a hyperparameter transfers, at the least cost.

A function of what is known of each scale and of what a run costs there; any table can ask. Strategies are
asked in order: grids that hold no optimum are extended, missing scales looked at, gaps beside an optimum
filled. Then seeds are bought where they bring a verdict nearer per cost, on cells an octave apart beside an
optimum: half-steps and the optimum itself tell less of where it lies. Where the optima's own scatter holds
the verdict open, no seed helps, and another scale is asked for.

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
from mup_tpu.analysis.drift import NEEDED, Drift, slope_variance
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.looks import Evidence, LookTaken, Question
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.verdict import MOST_LOOKS, PLAIN
from mup_tpu.config.columns import CONFIGURED, label, write_scale

_START = 8
"""Values at the smallest scale that a sequence starts with, an octave apart, a seed each."""
_LEAST_SPAN = 3.0
"""Octaves that a given grid must span for a sequence to start inside it; else it is but a guess."""
_FIRST_LOOK = ((-2, 1), (-1, 1), (0, 1), (1, 1), (2, 1))
"""Octaves from a new scale's predicted optimum, and seeds there."""
_PACK = 5
"""Runs that are weighed together when seeds are bought."""
_REACH = 2.3
"""Octaves from an optimum within which a run tells where it lies."""
_SHARE = 0.6
"""A batch's cost, as a share of what was spent."""
_FLOOR = 0.05**2
"""Squared standard error of an optimum that no seed takes away, octaves²: the valley's unknown shape."""
_LEAST_ALPHA, _LEAST_OCTAVES = 0.02, 0.05
"""Least distances from a verdict's limits: closer ones are not told apart."""
_SCATTERED = 0.7
"""Share of α's interval that known optima would leave, from which it is their scatter's, not the noise's."""
_ENOUGH = 0.8
"""J that a batch aims at: what it finds will differ from what is expected."""
_MOST_PACKS = 200
"""Packs after which a verdict counts as out of reach."""
_PATIENCE = 3
"""Looks before an expected cost may end a sequence: before, too little is known to expect one."""
_WIDEST = 14.0
"""Octaves that a grid may span and still hold no optimum."""
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
    """One scale as it is known, or would be after more runs."""

    scale: float
    variance: float
    """Squared standard error of the optimum, octaves²."""
    runs: int
    """Beside the optimum."""

    @property
    def ideal(self) -> _Known:
        """After any number of runs."""
        return replace(self, variance=min(self.variance, _FLOOR))

    def with_runs(self, runs: int) -> _Known:
        """After that many more runs."""
        total, floor = self.runs + runs, self.ideal.variance
        return replace(self, variance=floor + (self.variance - floor) * self.runs / total, runs=total)


@dataclass(frozen=True)
class _Distance:
    """How far a verdict is, given what is known of each scale."""

    drift: Drift
    known: tuple[_Known, ...]
    """Scales as they are known now."""
    reach: float
    """Half-width of α's interval now."""
    apart: float
    """|Δ|, octaves."""
    spread: float
    """Half-width of Δ's interval now."""
    tolerated: float
    """The |Δ| whose regret is ε."""
    delta: float

    @classmethod
    def of(cls, evidence: Evidence, question: Question) -> _Distance:
        """From evidence of three scales or more, all bracketed."""
        first, last = evidence.estimates[0].draws, evidence.estimates[-1].draws
        assert first is not None and last is not None
        drift, tail = evidence.drift, 0.01 if question.planned else 0.025
        low, apart, high = np.quantile(last.optimum_P - first.optimum_P, (tail, 0.5, 1 - tail)).tolist()
        tolerated = math.sqrt(2 * question.epsilon / float(np.median(last.curvature_P)))
        return cls(
            drift,
            tuple(_known(evidence)),
            (drift.high_95 - drift.low_95) / 2,
            abs(apart),
            (high - low) / 2,
            tolerated,
            question.delta,
        )

    def reach_of(self, known: Sequence[_Known]) -> float:
        """Half-width of α's interval."""
        was, will = (
            slope_variance([k.scale for k in ks], np.array([k.variance for k in ks]) + self.drift.tau**2)
            for ks in (self.known, known)
        )
        return self.reach * math.sqrt(will / was)

    def spread_of(self, known: Sequence[_Known]) -> float:
        """Half-width of Δ's interval."""
        was, will = (ks[0].variance + ks[-1].variance for ks in (self.known, known))
        # The ends are told by their own runs and by the trend of all.
        return self.spread * min(self.reach_of(known) / self.reach, math.sqrt(will / was))

    def is_held_by_scatter(self, known: Sequence[_Known]) -> bool:
        """Whether the optima's own scatter, not their errors, holds the verdict open: no seed helps that."""
        ideal = [k.ideal for k in known]
        is_scattered = self.reach_of(ideal) > _SCATTERED * self.reach_of(known)
        return self.nearest(known)[1] == "α" and is_scattered and self.of_verdict(ideal) > 1

    def nearest(self, known: Sequence[_Known]) -> tuple[float, str]:
        """J of the nearer verdict, and the interval that holds it open: "α" or "Δ".

        Verdicts that no number of runs would bring are left out, if another can be had.
        """
        now = [max((ratio**2, what) for what, ratio in terms.items()) for terms in self._verdicts(known)]
        ideal = [max(terms.values()) for terms in self._verdicts([k.ideal for k in known])]
        return min([j for j, least in zip(now, ideal, strict=True) if least <= 1] or now)

    def _verdicts(self, known: Sequence[_Known]) -> tuple[dict[str, float], ...]:
        """How many times too wide intervals are: for TRANSFERS, DRIFTS, and DRIFTS without a power law."""
        reach, alpha = self.reach_of(known), abs(self.drift.alpha)
        spread, room = self.spread_of(known), self.tolerated - self.apart
        transfers = {
            "α": reach / max(self.delta - alpha, _LEAST_ALPHA),
            "Δ": spread / max(room, _LEAST_OCTAVES),
        }
        drifts = {"α": reach / max(alpha, _LEAST_ALPHA), "Δ": spread / max(-room, _LEAST_OCTAVES)}
        # A regret grows as the square of the octaves.
        beyond = self.apart - math.sqrt(PLAIN) * self.tolerated
        return transfers, drifts, {"Δ": spread / max(beyond, _LEAST_OCTAVES)}

    def of_verdict(self, known: Sequence[_Known]) -> float:
        """J of the nearer verdict."""
        return self.nearest(known)[0]

    def is_out_of_reach(self) -> bool:
        """Whether no number of runs would settle it, wherever in their intervals α and Δ turn out to lie."""
        ideal = [k.ideal for k in self.known]
        ends = [
            replace(
                self, drift=replace(self.drift, alpha=alpha), apart=max(0.0, self.apart + sign * self.spread)
            )
            for sign in (-1, 1)
            for alpha in [max(0.0, abs(self.drift.alpha) + sign * self.reach)]
        ]
        return all(end.of_verdict(ideal) > 1 for end in (self, *ends))


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


@dataclass(frozen=True)
class _Plan:
    """Runs that a strategy asks for."""

    cells: list[Cell]
    reason: str
    to_verdict: float = math.nan
    """Expected cost until the verdict, as in `Batch`."""


@dataclass(frozen=True)
class _Open:
    """An open verdict: all that a strategy looks at."""

    evidence: Evidence
    costs: Cost
    question: Question

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Scales that were run."""
        return self.evidence.estimates

    @property
    def planned(self) -> tuple[float, ...]:
        """Scales of a sequence; none where any scale may be added."""
        return self.question.planned

    @property
    def spent(self) -> float:
        """Cost of all runs."""
        return float(sum(c.count_G.sum() * self.costs.of(c.scale) for c in self.evidence.curves))

    def at(self, scales: Sequence[float]) -> str:
        """Scales as words, with what they are scales of."""
        columns = self.question.columns
        return f"{label(columns.scale)} {_and([write_scale(columns.scale, scale) for scale in scales])}"

    def needs(self) -> str:
        """How many scales a verdict needs, as words."""
        name = label(self.question.columns.scale)
        return f"a verdict needs {NEEDED} {name}s, there are {len(self.estimates)}"


def next_batch(parametrization: str, evidence: Evidence, costs: Cost, question: Question) -> Batch:
    """The next runs of a parametrization whose verdict is open, by the first strategy that has any.

    Args:
        parametrization: whose.
        evidence: what is known of it.
        costs: of a run.
        question: what is asked. The scales that it plans are run and no others; each gets its first look
            before seeds are bought.
    """
    state = _Open(evidence, costs, question)
    plan = next(plan for strategy in _STRATEGIES if (plan := strategy(state)) is not None)
    cost = sum(cell.runs * costs.of(cell.scale) for cell in plan.cells)
    return Batch(parametrization, tuple(plan.cells), plan.reason, cost, plan.to_verdict, state.spent, costs)


def _extend_grids(state: _Open) -> _Plan | None:
    """Values beyond the grids that hold no optimum, and a third scale with them."""
    estimates = state.estimates
    open_ = [e for e in estimates if not e.optimum.is_bracketed]
    if not open_:
        return None
    ends = f"no optimum inside the grid at {state.at([e.optimum.scale for e in open_])}"
    beyond = [cell for e in open_ for cell in _beyond(e)]
    bracketed = [e for e in estimates if e.optimum.is_bracketed]
    if state.planned or not bracketed or len(estimates) >= NEEDED:
        return _Plan(beyond, f"{ends}: extend it there first")
    largest = estimates[-1].optimum.scale
    third = _first_look(bracketed[-1], 2 * largest, bracketed[-1].optimum.x)
    return _Plan([*beyond, *third], f"{ends}: extend it there; {state.needs()}: add one too")


def _add_scales(state: _Open) -> _Plan | None:
    """A first look at another scale, while fewer than a verdict needs were run."""
    if len(state.estimates) >= NEEDED:
        return None
    return _Plan(_new_scale(state.estimates, state.evidence.drift, state.planned), state.needs())


def _look_at_planned(state: _Open) -> _Plan | None:
    """A first look at the smallest planned scale that was not run."""
    to_come = _to_come(state.estimates, state.planned)
    if not to_come:
        return None
    reason = f"nothing is shown yet, and {state.at([min(to_come)])} is planned: a first look at it"
    return _Plan(_new_scale(state.estimates, state.evidence.drift, state.planned), reason)


def _run_between(state: _Open) -> _Plan | None:
    """A value between an optimum and the lost or missing runs beside it: seeds tell nothing there."""
    gaps = [(e, _gaps(e)) for e in state.estimates]
    cells = [
        Cell(e.optimum.scale, x, seeds, seeds)
        for e, between in gaps
        for x in between
        for seeds in [int(e.curve.count_G[np.argmin(e.curve.mean_G)])]
    ]
    if not cells:
        return None
    at = state.at([e.optimum.scale for e, between in gaps if between])
    return _Plan(cells, f"runs are lost or missing beside the optimum at {at}: a value in between")


def _add_scale_for_scatter(state: _Open) -> _Plan | None:
    """Another scale, where the optima's own scatter holds the verdict open."""
    distance, known = _Distance.of(state.evidence, state.question), _known(state.evidence)
    if state.planned or not distance.is_held_by_scatter(known):
        return None
    settles = distance.of_verdict([k.ideal for k in [*known, _new_known(known)]]) <= 1
    cells = _new_scale(state.estimates, state.evidence.drift)
    reason = _scatter_reason(state.evidence, state.question, settles)
    cost = sum(cell.runs * state.costs.of(cell.scale) for cell in cells)
    return _Plan(cells, reason, cost if settles else math.nan)


def _buy_seeds(state: _Open) -> _Plan:
    """Seeds beside the optima that decide, or nothing where none help."""
    evidence = state.evidence
    distance, known = _Distance.of(evidence, state.question), _known(evidence)
    held_by = distance.nearest(known)[1]
    bought, to_verdict = _buy(distance, known, state.costs, state.spent)
    if distance.is_out_of_reach() and not state.planned:
        return _Plan([], "no amount of runs at these scales is expected to settle it", to_verdict)
    cells = [cell for i in sorted(bought) for cell in _replicates(evidence, i, _PACK * bought[i])]
    at = state.at([known[i].scale for i in sorted(bought)])
    what = "α's interval" if held_by == "α" else "the regret's interval"
    return _Plan(cells, f"{what} is too wide: seeds beside the optimum at {at} narrow it most", to_verdict)


_STRATEGIES: tuple[Callable[[_Open], _Plan | None], ...] = (
    _extend_grids,
    _add_scales,
    _look_at_planned,
    _run_between,
    _add_scale_for_scatter,
    _buy_seeds,
)
"""Strategies in the order in which they are asked; the last always answers."""


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
    return [
        _Known(e.optimum.scale, max(e.optimum.se, 1e-3) ** 2, max(1, _runs_beside(e)))
        for e in evidence.estimates
    ]


def _fill(seeds: dict[float, int], runs: int, x: float = 0.0) -> None:
    """Add runs to cells one by one: the fewest first, then the nearest to x."""
    for _ in range(runs):
        seeds[min(seeds, key=lambda at: (seeds[at], abs(at - x)))] += 1


def _buy(
    distance: _Distance, known: Sequence[_Known], costs: Cost, spent: float
) -> tuple[Counter[int], float]:
    """Packs of the largest drop of J per cost, and the cost until J is 1.

    Returns:
        How many packs for each scale, by its number; the cost.
    """
    bought: Counter[int] = Counter()
    total = 0.0
    is_full = False
    now = distance.of_verdict(known)
    for _ in range(_MOST_PACKS):
        if now <= _ENOUGH and bought:
            break
        options = []
        for i, k in enumerate(known):
            trial = [*known[:i], k.with_runs(_PACK), *known[i + 1 :]]
            options.append(((now - distance.of_verdict(trial)) / costs.of(k.scale), i, trial))
        _, i, known = max(options, key=lambda option: option[0])
        total += _PACK * costs.of(known[i].scale)
        is_full = is_full or (bool(bought) and total > _SHARE * spent)
        bought[i] += not is_full
        now = distance.of_verdict(known)
    return +bought, total if now <= _ENOUGH else math.inf


def _new_known(known: Sequence[_Known]) -> _Known:
    """What a first look at the next scale would tell, by what the others' runs told."""
    per_run = float(np.median([k.variance * k.runs for k in known]))
    return _Known(2 * known[-1].scale, max(_FLOOR, per_run / _PACK), _PACK)


def _runs_beside(estimate: Estimate) -> int:
    curve = estimate.curve
    beside_G = np.isfinite(curve.mean_G) & (np.abs(curve.x_G - estimate.optimum.x) <= _REACH)
    return int(curve.count_G[beside_G].sum())


def _replicates(evidence: Evidence, number: int, runs: int) -> list[Cell]:
    """Seeds for the cells an octave apart beside the optimum of a scale."""
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
    before = dict(seeds)
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


def _gaps(estimate: Estimate) -> list[float]:
    """Values to run beside the best one: halfway to a lost one, or where the grid has a hole."""
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
    return found


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
