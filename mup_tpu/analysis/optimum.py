"""The optimum of a loss curve over log2 of a hyperparameter, with an interval.

What a curve may be stands in `valleys`; here the draws become one optimum, and a case is named: inside the
grid, at its edge, beside runs that diverge. How well the intervals cover: benchmarks/interval_coverage.py.

Shapes: G grid points, P draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from scipy import stats

from mup_tpu.analysis.curves import LossCurve, Noise
from mup_tpu.analysis.valleys import Particles, fit_valleys, noise_of_residuals

EPSILON = 0.01
"""Regret that does not matter, nat per token."""
_MISS = 3.0
"""Standard errors by which the fit may miss a point near its optimum before it is said."""
_SURE = 0.975
"""Probability from which an optimum counts as inside a grid whose lowest loss is at an end."""
_SHARE_MISSED = 0.1
"""Share of a point's rise that the fit may miss it by."""
_FLAT_STEPS = 4
"""Grid steps of an interval from which a valley is called flat."""


class Status(StrEnum):
    """Cases of an optimum."""

    BRACKETED = "bracketed"
    BY_DIVERGENCE = "bracketed by divergence"
    BY_STOPPED = "bracketed by stopped runs"
    FLAT = "flat"
    LOWER = "at lower edge"
    UPPER = "at upper edge"
    ONE_VALUE = "one value"
    """Nothing was tuned."""
    NONE = "no finite run"


_BRACKETED = (Status.BRACKETED, Status.BY_DIVERGENCE, Status.BY_STOPPED, Status.FLAT)


@dataclass(frozen=True)
class Optimum:
    """Where a loss curve is lowest. All x are log2 of the hyperparameter."""

    scale: float
    status: Status
    x: float
    low: float
    high: float
    """95 % interval of x."""
    loss: float
    """Fitted loss at the optimum, nat per token."""
    best_x: float
    """The best grid point."""
    band_low: float
    band_high: float
    """Range around the optimum in which the valley lies within epsilon of it."""
    se: float
    """Standard error of x, octaves."""
    missed_x: float = math.nan
    """The point near the optimum that the valley misses most, if by more than 3 standard errors."""
    missed_by: float = math.nan
    """Its mean loss less the valley's, nat per token."""
    epsilon: float = EPSILON
    """Loss over the optimum's that does not matter, nat per token."""

    @property
    def is_bracketed(self) -> bool:
        """Whether the grid holds the optimum inside."""
        return self.status in _BRACKETED

    @property
    def is_known(self) -> bool:
        """Whether `loss` is that of a tuned model: the optimum is bracketed, or nothing was to be tuned."""
        return self.is_bracketed or self.status == Status.ONE_VALUE

    @property
    def is_fitted(self) -> bool:
        """Whether the fit agrees with the runs near the optimum, within 3 standard errors."""
        return not math.isfinite(self.missed_by)

    def sentence(self) -> str:
        """What to say of it."""
        if self.status == Status.LOWER:
            return f"not bracketed: optimum ≤ 2^{self.best_x:.4g}; extend the grid downwards"
        if self.status == Status.UPPER:
            return f"not bracketed: optimum ≥ 2^{self.best_x:.4g}; extend the grid upwards"
        if self.status == Status.NONE:
            return "every run diverged; extend the grid downwards"
        if self.status == Status.FLAT:
            near = f"2^{self.band_low:.4g} to 2^{self.band_high:.4g}"
            return f"flat: a wide interval; within {self.epsilon:g} nat of the best from {near}"
        if not self.is_fitted:
            side = "below" if self.missed_by > 0 else "above"
            return (
                f"{self.status}; the fit lies {abs(self.missed_by):.2g} nat {side} the runs at 2^"
                f"{self.missed_x:.4g}, more than their errors allow"
            )
        return str(self.status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"sentence": self.sentence()}


def pooled_noise(curves: Sequence[LossCurve], rounding: float = 0.0) -> Noise:
    """Noise of single runs from replicates, else from given errors, else from what the valleys leave over.

    Args:
        curves: of one parametrization.
        rounding: smallest difference of losses in the table; its uniform error is a floor.
    """
    floor = rounding / np.sqrt(12)
    df_C = np.concatenate([c.df_G[c.near_G] for c in curves])
    squares_C = np.concatenate([c.squares_G[c.near_G] for c in curves])
    known = df_C > 0
    if known.any():
        # The median: one unstable point must not widen all others' intervals.
        sigma = np.sqrt(np.median(squares_C[known] / stats.chi2.median(df_C[known])))
        return Noise(max(float(sigma), floor), int(df_C.sum()), "seeds")
    if any(np.isfinite(c.error_G).any() for c in curves):
        return Noise(float(np.nanmean(np.concatenate([c.error_G for c in curves]))), 10**6, "given errors")
    sigma, df = noise_of_residuals(curves)
    return Noise(max(sigma, floor, 1e-6), df, "lack of fit")


@dataclass(frozen=True)
class Estimate:
    """One scale: its curve, what the curve may be, and its optimum."""

    curve: LossCurve
    optimum: Optimum
    particles: Particles | None
    """Draws of the curve by its own runs; None where nothing was tuned or no run is finite."""
    error_G: np.ndarray
    """Standard error of each mean of the curve, nat."""
    draws: Particles | None = None
    """Draws that go with those of all other scales, as their trend has it."""


def estimate(
    curve: LossCurve, noise: Noise, generator: np.random.Generator, epsilon: float = EPSILON
) -> Estimate:
    """The optimum of one curve by itself."""
    return estimates([curve], noise, generator, epsilon)[0]


def estimates(
    curves: Sequence[LossCurve], noise: Noise, generator: np.random.Generator, epsilon: float = EPSILON
) -> list[Estimate]:
    """The optima of all curves of a rule, whose valleys are alike."""
    particles = fit_valleys(curves, noise, generator)
    return [
        Estimate(curve, find_optimum(curve, noise, draws, epsilon), draws, noise.errors_G(curve))
        for curve, draws in zip(curves, particles, strict=True)
    ]


def find_optimum(
    curve: LossCurve, noise: Noise, particles: Particles | None, epsilon: float = EPSILON
) -> Optimum:
    """The optimum of a curve from draws of it."""
    nothing = dict.fromkeys(("x", "low", "high", "loss", "best_x", "band_low", "band_high", "se"), math.nan)
    if not np.isfinite(curve.mean_G).any():
        return Optimum(curve.scale, Status.NONE, **nothing, epsilon=epsilon)
    best = int(np.argmin(curve.mean_G))
    best_x, best_loss = float(curve.x_G[best]), float(curve.mean_G[best])
    if particles is None:
        value = nothing | {"x": best_x, "best_x": best_x, "loss": best_loss}
        return Optimum(curve.scale, Status.ONE_VALUE, **value, epsilon=epsilon)
    optimum_P = particles.optimum_P
    low, x, high = (float(q) for q in particles.quantiles(optimum_P, (0.025, 0.5, 0.975)))
    band = _band(curve, particles, x, epsilon)
    known = {"best_x": best_x, "band_low": band[0], "band_high": band[1], "epsilon": epsilon}
    edge = _edge(curve, particles, best)
    if edge is not None:
        low, high = (-math.inf, max(high, best_x)) if edge == Status.LOWER else (min(low, best_x), math.inf)
        return Optimum(curve.scale, edge, best_x, low, high, loss=best_loss, se=math.nan, **known)
    if low < curve.x_G[0] and np.isfinite(curve.mean_G[0]):
        low = -math.inf
    if high > curve.x_G[-1] and np.isfinite(curve.mean_G[-1]):
        high = math.inf
    x = float(np.clip(x, curve.x_G[0], curve.x_G[-1]))
    loss = float(particles.quantiles(particles.loss_P, (0.5,))[0])
    se = math.sqrt(float(particles.weight_P @ (optimum_P - particles.weight_P @ optimum_P) ** 2))
    found = Optimum(curve.scale, _inner_status(curve, best, high - low), x, low, high, loss, se=se, **known)
    return _with_miss(found, curve, noise, particles)


def _edge(curve: LossCurve, particles: Particles, best: int) -> Status | None:
    """The edge of the grid that the optimum lies at, if it does."""
    inside_P = (particles.optimum_P > curve.x_G[0]) & (particles.optimum_P < curve.x_G[-1])
    if particles.weight_P @ inside_P >= _SURE:
        return None
    if best == 0:
        return Status.LOWER
    return Status.UPPER if best == len(curve.x_G) - 1 else None


def _inner_status(curve: LossCurve, best: int, width: float) -> Status:
    """The case of an optimum inside the grid whose interval is so wide."""
    beside = [i for i in (best - 1, best + 1) if 0 <= i < len(curve.x_G)]
    lost = [i for i in beside if np.isinf(curve.mean_G[i])]
    if lost:
        return Status.BY_DIVERGENCE if curve.diverged_G[lost].any() else Status.BY_STOPPED
    return Status.FLAT if width > _FLAT_STEPS * curve.step else Status.BRACKETED


def _band(curve: LossCurve, particles: Particles, x: float, epsilon: float) -> tuple[float, float]:
    """Range around an optimum in which the valley lies within epsilon of it, inside grid and edges."""
    finite_x = curve.x_G[np.isfinite(curve.mean_G)]
    ends = []
    for end, edge_P in ((finite_x[0], particles.low_P), (finite_x[-1], particles.high_P)):
        side = 1 if end >= x else -1
        edge = float(particles.quantiles(side * edge_P, (0.5,))[0])
        reach = max(0.0, min(side * (end - x), edge - side * x))
        fine = x + side * np.linspace(0.0, reach, 61)
        rise = particles.median_at(fine)
        rise -= rise[0]
        within = np.flatnonzero(np.maximum.accumulate(rise) <= epsilon)
        ends.append(float(fine[within[-1]]))
    return min(ends[0], x), max(ends[1], x)


def _with_miss(found: Optimum, curve: LossCurve, noise: Noise, particles: Particles) -> Optimum:
    """The optimum with the point near it that the valley misses, if there is one.

    Where no edge explains the miss, the interval reaches to the points beside the best.
    """
    best = int(np.argmin(curve.mean_G))
    near_G = np.isfinite(curve.mean_G) & (curve.near_G | (np.abs(np.arange(len(curve.x_G)) - best) <= 1))
    x_M, mean_M = curve.x_G[near_G], curve.mean_G[near_G]
    left_M = mean_M - particles.median_at(x_M)
    error_M = np.hypot(noise.errors_G(curve)[near_G], _SHARE_MISSED * (mean_M - mean_M.min()))
    miss_M = np.abs(left_M) / np.maximum(error_M, 1e-4)
    worst = int(np.argmax(miss_M))
    if miss_M[worst] <= _MISS:
        return found
    beyond_P = (particles.low_P > x_M[worst]) | (particles.high_P < x_M[worst])
    low, high = found.low, found.high
    if particles.weight_P @ beyond_P < 0.5:
        ends = curve.x_G[max(best - 1, 0)], curve.x_G[min(best + 1, len(curve.x_G) - 1)]
        low, high = min(low, float(ends[0])), max(high, float(ends[1]))
    return replace(found, low=low, high=high, missed_x=float(x_M[worst]), missed_by=float(left_M[worst]))
