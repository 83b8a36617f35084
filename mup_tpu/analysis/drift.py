"""Drift of an optimum with scale: a random-effects regression, and two checks that use whole curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import scipy

from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.optimum import Optimum

NEEDED = 3
"""Least number of scales with a bracketed optimum for a drift exponent, and so for a verdict."""
_TAU_K = 0.08 * np.tan(np.pi / 2 * (np.arange(30) + 0.5) / 30)
"""Scatters of optima, octaves, equally likely at first: half-Cauchy with a median of 0.08."""
_LEAST_ERROR = 1e-3
"""Least standard error of an optimum, octaves."""
WIDEST_TOLD = 2.0
"""Width of an interval around 0 at which it tells nothing about α: from ∝ 1/scale to ∝ scale."""
WIDEST_COLLAPSE = 2.5
"""Largest exponent, up or down, in the search for the one that brings whole curves together."""


@dataclass(frozen=True)
class Drift:
    """Exponent α in lr* ∝ scale^α, over the bracketed scales."""

    alpha: float
    """Exponent of the scale; nan with fewer than three bracketed scales."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end of its 95 % interval."""
    tau: float
    """Scatter of the optima beyond their own errors, octaves: median of its distribution."""
    intercept: float
    """log2 lr* at scale 1."""
    scales: tuple[float, ...]
    weight_K: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)
    """Probability of each scatter in `_TAU_K`."""

    @property
    def is_known(self) -> bool:
        """Whether there were at least three bracketed scales."""
        return math.isfinite(self.alpha)

    @property
    def is_told(self) -> bool:
        """Whether the interval tells something about α; along a flat valley it does not."""
        return is_told(self.low, self.high)

    @property
    def excludes_0(self) -> bool:
        """Whether α's interval excludes 0; False if α is unknown."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {name: value for name, value in asdict(self).items() if name != "weight_K"}


def is_told(low: float, high: float) -> bool:
    """Whether an interval of α excludes 0, or is narrower than from ∝ 1/scale to ∝ scale."""
    return low > 0 or high < 0 or high - low < WIDEST_TOLD


def bends(optima: Sequence[Optimum]) -> bool:
    """Whether optima depart from a power law: the curvature of a parabola through them is not 0 (95 %).

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
    return bool(abs(beta[0]) > scipy.stats.t.ppf(0.975, left) * math.sqrt(scatter * covariance[0, 0]))


@dataclass(frozen=True)
class WiderIsBetter:
    """Pairs of neighbouring scales, all else equal, in which the larger has the lower final loss."""

    held: int
    pairs: int
    p_value: float
    """p-value of Page's trend test that loss falls with scale; nan with fewer than three scales."""
    optima_held: int = 0
    """Pairs that hold, each scale at its own optimum."""
    optima: int = 0
    """Pairs with two known optima."""

    @property
    def share(self) -> float:
        """Share of pairs that hold."""
        return self.held / self.pairs if self.pairs else math.nan


def fit_drift(optima: Sequence[Optimum]) -> Drift:
    """Random-effects regression of log2 lr* on log2 scale, averaged over the scatter τ of the optima.

    τ has a half-Cauchy prior: a handful of optima cannot tell it, and an interval with one estimate of τ
    covers too little. Errors of optima are normal and include the uncertainty of the noise.
    """
    known = [o for o in optima if o.is_bracketed]
    scales = tuple(o.scale for o in known)
    if len(known) < NEEDED:
        return Drift(math.nan, math.nan, math.nan, math.nan, math.nan, scales)
    slope_K, deviation_K, weight_K, intercept_K = _by_scatter(known)
    low, high = (_quantile(q, slope_K, deviation_K, weight_K) for q in (0.025, 0.975))
    tau = float(np.interp(0.5, np.cumsum(weight_K), _TAU_K))
    alpha, intercept = float(weight_K @ slope_K), float(weight_K @ intercept_K)
    return Drift(alpha, low, high, tau, intercept, scales, weight_K)


def drift_reach(scales: Sequence[float], variance_S: np.ndarray, weight_K: np.ndarray) -> float:
    """Half-width of the 95 % interval of α.

    Args:
        scales: scales with a bracketed optimum.
        variance_S: squared standard error of each optimum, octaves².
        weight_K: probability of each scatter.
    """
    *_, information_K = _weighted(np.log2(scales), variance_S)
    return _quantile(0.975, np.zeros_like(_TAU_K), information_K**-0.5, weight_K)


def _weighted(x_S: np.ndarray, variance_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precisions of the optima (K, S), their weighted mean of x and information on the slope (K,)."""
    precision_KS = 1 / (variance_S + _TAU_K[:, None] ** 2)
    mean_K = precision_KS @ x_S / precision_KS.sum(axis=1)
    return precision_KS, mean_K, (precision_KS * (x_S - mean_K[:, None]) ** 2).sum(axis=1)


def _by_scatter(known: Sequence[Optimum]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slope, its standard error, probability and intercept for each scatter (K,)."""
    x, y = np.log2([o.scale for o in known]), np.array([o.x for o in known])
    variance_S = np.maximum([o.se for o in known], _LEAST_ERROR) ** 2
    precision_KS, x_K, information_K = _weighted(x, variance_S)
    total_K = precision_KS.sum(axis=1)
    y_K = precision_KS @ y / total_K
    from_x_KS, from_y_KS = x - x_K[:, None], y - y_K[:, None]
    slope_K = (precision_KS * from_x_KS * from_y_KS).sum(axis=1) / information_K
    chi2_K = (precision_KS * (from_y_KS - slope_K[:, None] * from_x_KS) ** 2).sum(axis=1)
    # Restricted likelihood: slope and intercept have flat priors.
    log_K = 0.5 * (np.log(precision_KS).sum(axis=1) - np.log(total_K) - np.log(information_K) - chi2_K)
    weight_K = np.exp(log_K - log_K.max())
    return slope_K, information_K**-0.5, weight_K / weight_K.sum(), y_K - slope_K * x_K


def _quantile(q: float, mean_K: np.ndarray, deviation_K: np.ndarray, weight_K: np.ndarray) -> float:
    """Quantile of a mixture of normals, by bisection."""
    low, high = float((mean_K - 6 * deviation_K).min()), float((mean_K + 6 * deviation_K).max())
    for _ in range(25):
        middle = (low + high) / 2
        if weight_K @ scipy.special.ndtr((middle - mean_K) / deviation_K) < q:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def wider_is_better(curves: Sequence[LossCurve], optima: Sequence[Optimum] = ()) -> WiderIsBetter:
    """Compare neighbouring scales at each hyperparameter that both have, and at their optima.

    Args:
        curves: loss curves of one parametrization, by scale.
        optima: optima of the same scales.

    Returns:
        Pairs that hold, and Page's test (1963) of the trend over all scales, a row a hyperparameter.
    """
    held = pairs = 0
    for small, large in pairwise(curves):
        _, i, j = np.intersect1d(small.x_G, large.x_G, return_indices=True)
        both = np.isfinite(small.mean_G[i])
        held += int((large.mean_G[j][both] < small.mean_G[i][both]).sum())
        pairs += int(both.sum())
    known = [(a, b) for a, b in pairwise(optima) if a.is_known and b.is_known]
    optima_held = sum(b.loss < a.loss for a, b in known)
    return WiderIsBetter(held, pairs, _trend(curves), optima_held, len(known))


def _trend(curves: Sequence[LossCurve]) -> float:
    """p-value of Page's test that loss falls with scale."""
    shared = sorted(set.intersection(*(set(c.x_G[np.isfinite(c.mean_G)]) for c in curves))) if curves else []
    if len(curves) >= 3 and len(shared) >= 2:
        rows = [[-float(c.mean_G[np.flatnonzero(c.x_G == x)[0]]) for c in curves] for x in shared]
        return float(scipy.stats.page_trend_test(rows).pvalue)
    return math.nan


def collapse_exponent(curves: Sequence[LossCurve]) -> float:
    """Octaves of shift per octave of scale that bring the excess-loss curves closest together.

    Each curve's loss over its own minimum is moved by -β·log2(scale ratio) and compared with the others where
    they overlap; β minimises the mean squared distance. It estimates the drift from whole curves, not from
    minima alone.
    """
    usable = [c for c in curves if np.isfinite(c.mean_G).sum() >= 4]
    if len(usable) < 2:
        return math.nan
    excess = [
        (c.x_G[np.isfinite(c.mean_G)], c.mean_G[np.isfinite(c.mean_G)] - c.mean_G.min()) for c in usable
    ]
    shifts = np.log2([c.scale / usable[0].scale for c in usable])

    def distance(beta: float) -> float:
        moved = [(x - beta * s, y) for (x, y), s in zip(excess, shifts, strict=True)]
        low, high = max(x[0] for x, _ in moved), min(x[-1] for x, _ in moved)
        if high - low < 1.0:
            return math.inf
        grid = np.linspace(low, high, 64)
        values = np.array([np.interp(grid, x, y) for x, y in moved])
        near = values.min(axis=0) < 0.5  # far from the optimum losses saturate
        return float(values[:, near].var(axis=0).mean()) if near.any() else math.inf

    betas = np.linspace(-WIDEST_COLLAPSE, WIDEST_COLLAPSE, 201)
    distances = [distance(b) for b in betas]
    return float(betas[int(np.argmin(distances))]) if np.isfinite(distances).any() else math.nan
