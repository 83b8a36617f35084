"""Distance of a verdict: the excess width of its intervals, and the seeds that narrow them most per cost.

Symbols: α drift exponent; Δ octaves from the smallest scale's optimum to the largest's; J squared ratio of
the widest interval to the width that the nearer verdict needs: at 1 it is settled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mup_tpu.analysis.cells import PACK, runs_beside
from mup_tpu.analysis.cost import Cost
from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.looks import Evidence, Question
from mup_tpu.analysis.optimum import estimates
from mup_tpu.analysis.verdict import PLAIN

_LEAST_SHARE, _SHARE = 0.1, 0.35
"""A batch's cost, as a share of what was spent: a look is worth some runs, and a plan holds for some."""
_FLOOR = 0.04**2
"""Squared standard error of an optimum that no seed takes away, octaves²: the valley's unknown shape."""
_LEAST_ALPHA, _LEAST_OCTAVES = 0.02, 0.05
"""Least distances of α and Δ from a verdict's limits."""
_SCATTERED = 0.7
"""Share of α's interval that exact optima would leave, above which their own scatter, not noise, makes it."""
_Z = 2.1
"""Half-width of an interval over the root mean square of its mixture's deviations."""
_MOST_PACKS = 100
"""Packs after which a verdict counts as out of reach."""


@dataclass(frozen=True)
class Known:
    """State of one scale, or its state after more runs."""

    scale: float
    variance: float
    """Squared standard error of the optimum, octaves²."""
    runs: int
    """Beside the optimum."""
    floor: float = 0.0
    """Part of the variance that no seed takes away: the valley's unknown shape."""

    @property
    def ideal(self) -> Known:
        """State after any number of runs."""
        return replace(self, variance=min(self.variance, max(self.floor, _FLOOR)))

    def with_runs(self, runs: int) -> Known:
        """State after more runs."""
        total, floor = self.runs + runs, self.ideal.variance
        return replace(self, variance=floor + (self.variance - floor) * self.runs / total, runs=total)


@dataclass(frozen=True)
class Distance:
    """Distance of a verdict, by the state of each scale."""

    drift: Drift
    apart: float
    """|Δ|, octaves; nan if the larger scale has no loss at the smaller's optimum."""
    tolerated: float
    """|Δ| at which the regret is ε."""
    delta: float

    @classmethod
    def of(cls, evidence: Evidence, question: Question) -> Distance:
        """Distance by evidence of three scales or more, all bracketed."""
        first, last = evidence.estimates[0], evidence.estimates[-1]
        tolerated = max((last.optimum.band_high - last.optimum.band_low) / 2, _LEAST_OCTAVES)
        headline = evidence.headline
        is_read = headline is not None and headline.status == "estimated"
        apart = abs(last.optimum.x - first.optimum.x) if is_read else math.nan
        return cls(evidence.drift, apart, tolerated, question.delta)

    @staticmethod
    def _spread(known: Sequence[Known]) -> float:
        """Half-width of Δ's interval, octaves."""
        return 2 * math.sqrt(known[0].variance + known[-1].variance)

    def reach(self, known: Sequence[Known]) -> float:
        """Half-width of α's interval."""
        trend = self.drift.trend
        assert trend is not None, "three scales are bracketed"
        return _Z * trend.slope_error([k.scale for k in known], np.array([k.variance for k in known]))

    def is_held_by_scatter(self, known: Sequence[Known]) -> bool:
        """Whether the optima's own scatter, which no seed reduces, holds the verdict open."""
        ideal = [k.ideal for k in known]
        is_scattered = self.reach(ideal) > _SCATTERED * self.reach(known)
        return self.nearest(known)[1] == "α" and is_scattered and self.of_verdict(ideal) > 1

    def nearest(self, known: Sequence[Known]) -> tuple[float, str]:
        """J of the nearer verdict, and the symbol of its widest interval: "α" or "Δ"."""
        return min(max((ratio**2, what) for what, ratio in terms.items()) for terms in self._terms(known))

    def held_by(self, known: Sequence[Known]) -> str:
        """Symbol of the widest interval, "α" or "Δ", for the verdict that the estimates tend to."""
        transfers, *drifts = self._terms(known)
        if abs(self.drift.alpha) < self.delta and not self.apart > self.tolerated:
            return max((ratio, what) for what, ratio in transfers.items())[1]
        return min(max((ratio, what) for what, ratio in terms.items()) for terms in drifts)[1]

    def _terms(self, known: Sequence[Known]) -> tuple[dict[str, float], ...]:
        """Ratios of intervals to needed widths, for TRANSFERS, DRIFTS, and DRIFTS without a power law."""
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
        return transfers, drifts, without_a_power

    def of_verdict(self, known: Sequence[Known]) -> float:
        """J of the nearer verdict."""
        return self.nearest(known)[0]


def known_of(evidence: Evidence) -> list[Known]:
    """States of all scales. What no seed takes away follows from fits with a quarter of the noise's
    variance.
    """
    curves = [e.curve for e in evidence.estimates]
    known = []
    for e, quiet in zip(
        evidence.estimates,
        estimates(curves, evidence.noise, np.random.default_rng(0), quiet=4.0),
        strict=True,
    ):
        variance = max(e.optimum.se, 1e-3) ** 2
        floor = float(np.clip((4 * quiet.optimum.se**2 - variance) / 3, 0.0, variance))
        known.append(Known(e.optimum.scale, variance, max(1, runs_beside(e)), floor))
    return known


def buy(distance: Distance, known: Sequence[Known], costs: Cost, spent: float) -> tuple[Counter[int], float]:
    """Packs of the largest drop of J per cost, and the cost until J is 1.

    Returns:
        Number of packs by the index of the scale; the cost, inf if J stays above 1.
    """
    bought: Counter[int] = Counter()
    cost = total = 0.0
    now = distance.of_verdict(known)
    for _ in range(_MOST_PACKS):
        if now <= 1 and cost >= _LEAST_SHARE * spent:
            break
        options = []
        for i, k in enumerate(known):
            trial = [*known[:i], k.with_runs(PACK), *known[i + 1 :]]
            options.append(((now - distance.of_verdict(trial)) / costs.of(k.scale), i, trial))
        _, i, known = max(options, key=lambda option: option[0])
        total += PACK * costs.of(known[i].scale)
        if not bought or cost < _SHARE * spent:
            cost = total
            bought[i] += 1
        now = distance.of_verdict(known)
    return bought, total if now <= 1 else math.inf


def new_known(known: Sequence[Known]) -> Known:
    """State of the next scale after a first look, by the variance that a run of the others bought."""
    per_run = float(np.median([k.variance * k.runs for k in known]))
    return Known(2 * known[-1].scale, max(_FLOOR, per_run / PACK), PACK)
