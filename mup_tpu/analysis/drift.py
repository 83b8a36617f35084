"""Drift of an optimum with scale: a random-effects regression, and a check by whole curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import stdtrit

from mup_tpu.analysis.optimum import LossCurve, Optimum
from mup_tpu.analysis.trend import VAGUE, Trend, fit_trend, kind_of
from mup_tpu.analysis.valley import Valley

NEEDED = 3  # Least number of scales with a bracketed optimum for a drift exponent, and so for a verdict
WIDEST_TOLD = 2.0
"""Width of an interval around 0 at which it tells nothing about α: from ∝ 1/scale to ∝ scale."""


@dataclass(frozen=True)
class Drift:
    """Exponent α in lr* ∝ scale^α, over the bracketed scales."""

    alpha: float  # Exponent of the scale; nan with fewer than three bracketed scales
    low: float  # Lower end of its 95 % interval
    high: float  # Upper end of its 95 % interval
    tau: float  # Scatter of the optima beyond their own errors, octaves: median of its distribution
    intercept: float  # log2 lr* at scale 1
    scales: tuple[float, ...]
    moved: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    """Least-squares slope of the optima that were run, with its 95 % interval: their scatter is no error."""
    rests_on_prior: bool = False
    """Whether half or twice the prior scatter decides if `moved` excludes 0, or lies within ±δ."""
    trend: Trend | None = field(default=None, repr=False, compare=False)

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.alpha)

    @property
    def is_told(self) -> bool:
        return is_told(self.low, self.high)

    @property
    def has_moved(self) -> bool:
        return self.has_moved_by(0.0)

    def has_moved_by(self, slope: float) -> bool:
        _, low, high = self.moved
        return low > slope or high < -slope

    def has_stayed(self, delta: float) -> bool:
        _, low, high = self.moved
        return -delta < low and high < delta

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "trend"}


def is_told(low: float, high: float) -> bool:
    return low > 0 or high < 0 or high - low < WIDEST_TOLD


def bends(optima: Sequence[Optimum]) -> bool:
    """Return whether optima bend away from a power law: the 95 % interval of their curvature excludes 0.

    Least squares in log2 scale, weighted by the optima's errors; scatter beyond these widens the interval.
    """
    known = [o for o in optima if o.is_bracketed]
    left = len(known) - 3
    if left < 1:
        return False
    x, y = np.log2([o.scale for o in known]), np.array([o.x for o in known])
    design = np.vander(x - x.mean(), 3)
    weights = np.maximum([o.se for o in known], 1e-3) ** -2.0
    covariance = np.linalg.inv(design.T @ (weights[:, None] * design))
    beta = covariance @ (design.T @ (weights * y))
    scatter = max(1.0, float((weights * (y - design @ beta) ** 2).sum()) / left)
    return bool(abs(beta[0]) > stdtrit(left, 0.975) * math.sqrt(scatter * covariance[0, 0]))


@dataclass(frozen=True)
class WiderIsBetter:
    """Pairs of neighbouring scales, all else equal, in which the larger has the lower final loss."""

    better: int = 0
    pairs: int = 0
    optima_held: int = 0  # Pairs in which the larger has the lower loss at its own optimum
    optima: int = 0  # Pairs with two known optima

    @property
    def share(self) -> float:
        return self.better / self.pairs if self.pairs else math.nan


def fit_drift(
    optima: Sequence[Optimum],
    scale: str = "",
    delta: float = 0.2,
    valleys: Sequence[Valley | None] = (),
) -> Drift:
    """Return the drift exponent: the slope of the trend (trend.py) through the bracketed optima.

    A verdict tests what a rule claims by its own runs, so neither the claim nor the atlas is in its prior.
    """
    scales = tuple(o.scale for o in optima if o.is_bracketed)
    priors = VAGUE[kind_of(scale)]
    trend = fit_trend(optima, priors, valleys, bracketed=True) if len(scales) >= NEEDED else None
    if trend is None:
        return Drift(math.nan, math.nan, math.nan, math.nan, math.nan, scales)
    # Of few optima the scatter is hardly known, and it is the exponent's error: the interval also holds that
    # of a prior with heavier tails, which alone would take a clear drift for scatter.
    slope, wider = trend.slope(), replace(trend, priors=(replace(priors, tails=2),)).slope()
    low = min(slope.quantile(0.025), wider.quantile(0.025))
    high = max(slope.quantile(0.975), wider.quantile(0.975))
    intercept = float(np.average(trend.x_S, weights=1 / (trend.error_S**2 + trend.tau**2)))
    away = np.average(np.log2(scales), weights=1 / (trend.error_S**2 + trend.tau**2))
    moved = []
    for factor in (1.0, 0.5, 2.0):
        other = replace(trend, priors=(replace(priors, scatter=factor * priors.scatter),)).movement()
        moved.append((other.mean, other.quantile(0.025), other.quantile(0.975)))
    drift = Drift(
        slope.mean, low, high, trend.tau,
        intercept - slope.mean * float(away), scales, moved[0], False, trend,
    )  # fmt: skip
    each = [replace(drift, moved=of_prior) for of_prior in moved]
    return replace(drift, rests_on_prior=len({(d.has_moved, d.has_stayed(delta)) for d in each}) > 1)


def wider_is_better(curves: Sequence[LossCurve], optima: Sequence[Optimum] = ()) -> WiderIsBetter:
    """Compare neighbouring scales of one rule at each hyperparameter that both have, and at their optima."""
    falling = pairs = 0
    for small, large in pairwise(curves):
        _, i, j = np.intersect1d(small.x_G, large.x_G, return_indices=True)
        both = np.isfinite(small.mean_G[i])
        falling += int((large.mean_G[j][both] < small.mean_G[i][both]).sum())
        pairs += int(both.sum())
    known = [(a, b) for a, b in pairwise(optima) if a.is_known and b.is_known]
    optima_held = sum(b.loss < a.loss for a, b in known)
    return WiderIsBetter(falling, pairs, optima_held, len(known))
