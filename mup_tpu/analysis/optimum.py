"""The optimum of a loss curve over log2 of a hyperparameter, with an interval.

Optimum and interval are those of draws of the curve's valley (valley.py). An optimum that nothing bounds has
draws beyond the grid: its interval is open and its standard error is octaves.
benchmarks/interval_coverage.py measures the coverage.

Shapes: R draws, G grid points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from mup_tpu.analysis.loss_curve import LossCurve, Noise
from mup_tpu.analysis.valley import MISS, Fit, Valley, draw, fit_valley, share

EPSILON = 0.01  # Largest regret that does not matter, nat per token
DRAWS = 8000
_BAND_DRAWS, _BAND_POINTS = 200, 201
_EVERY = 5  # One draw in this many has independent shapes at all scales; in the others they share one
_FLAT_STEPS = 4.0  # Grid steps that an interval spans, from which the valley counts as flat


class Status(StrEnum):
    """Position of an optimum in its grid."""

    BRACKETED = "bracketed"
    BY_DIVERGENCE = "bracketed by divergence"
    BY_STOPPED = "bracketed by stopped runs"
    BY_REFUSED = "bracketed by refused runs"
    FLAT = "flat"
    LOWER = "at lower edge"
    UPPER = "at upper edge"
    ONE_VALUE = "one value"  # Nothing was tuned
    NO_RUN = "no finite run"


_BY_LOST = {
    "diverged": Status.BY_DIVERGENCE,
    "stopped early": Status.BY_STOPPED,
    "refused": Status.BY_REFUSED,
}


@dataclass(frozen=True)
class Optimum:
    """Lowest point of a loss curve. All x are log2 of the hyperparameter; nan if unknown."""

    scale: float
    status: str
    """A `Status`."""
    x: float = math.nan
    low: float = math.nan
    high: float = math.nan
    """95 % interval of x."""
    loss: float = math.nan
    """Fitted loss at the optimum, nat per token."""
    best_x: float = math.nan
    """Best grid point."""
    band_low: float = math.nan
    band_high: float = math.nan
    """Range, within the grid, in which the expected loss is at most epsilon above that of the best choice."""
    se: float = math.nan
    """Standard error of x, octaves."""
    mean: float = math.nan
    """Mean of the draws, which lies beyond the grid where the optimum does."""
    missed_x: float = math.nan
    """Worst of the points near the optimum that the fit misses by more than 3 standard errors."""
    missed_by: float = math.nan
    """Mean loss at missed_x less the fit's, nat per token."""
    epsilon: float = EPSILON
    """Largest regret that does not matter, nat per token."""

    @property
    def is_bracketed(self) -> bool:
        return self.status in (Status.BRACKETED, Status.FLAT, *_BY_LOST.values())

    @property
    def is_known(self) -> bool:
        return self.is_bracketed or self.status == Status.ONE_VALUE

    @property
    def is_fitted(self) -> bool:
        return not math.isfinite(self.missed_by)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"status": str(self.status)}


@dataclass(frozen=True)
class Estimate:
    """Curve of one scale, draws of its valley, and its optimum."""

    curve: LossCurve
    fit: Fit | None  # None without a finite run
    valley: Valley | None
    optimum: Optimum
    error_G: np.ndarray  # Standard error of each mean, nat


def estimate(
    curve: LossCurve, noise: Noise, generator: np.random.Generator, epsilon: float = EPSILON
) -> Estimate:
    return estimates([curve], noise, generator, epsilon)[0]


def estimates(
    curves: Sequence[LossCurve],
    noise: Noise,
    generator: np.random.Generator,
    epsilon: float = EPSILON,
) -> list[Estimate]:
    """Draw the valleys of one rule's curves and find their optima.

    A valley's shape and height are weighed by its own points and, less, by those of the other scales.

    Args:
        curves: by scale.
        noise: of single runs.
        generator: of the draws.
        epsilon: largest regret that does not matter, nat per token.
    """
    errors = [noise.errors_G(curve) for curve in curves]
    fits = [
        fit_valley(c.x_G, c.mean_G, error_G, c.step, noise.freedom)
        for c, error_G in zip(curves, errors, strict=True)
    ]
    shared = iter(share([fit for fit in fits if fit is not None]))
    together_R = generator.uniform(size=DRAWS)
    made = []
    for curve, fit, error_G in zip(curves, fits, errors, strict=True):
        chance_R = np.where(np.arange(DRAWS) % _EVERY, together_R, generator.uniform(size=DRAWS))
        valley = draw(fit, generator, DRAWS, next(shared), chance_R) if fit is not None else None
        made.append(Estimate(curve, fit, valley, find_optimum(curve, fit, valley, epsilon), error_G))
    return made


def find_optimum(
    curve: LossCurve, fit: Fit | None, valley: Valley | None, epsilon: float = EPSILON
) -> Optimum:
    """Return the optimum of a curve: the median of its draws, with their 95 % interval."""
    if fit is None or valley is None:
        return Optimum(curve.scale, Status.NO_RUN, epsilon=epsilon)
    best = int(np.argmin(curve.mean_G))
    best_x, lowest = float(curve.x_G[best]), float(curve.mean_G[best])
    if len(curve.x_G) == 1:
        return Optimum(curve.scale, Status.ONE_VALUE, best_x, loss=lowest, best_x=best_x, epsilon=epsilon)
    low, x, high = (float(q) for q in np.quantile(valley.x_R, [0.025, 0.5, 0.975]))
    low, high = (low if low >= curve.x_G[0] else -math.inf), (high if high <= curve.x_G[-1] else math.inf)
    x = float(np.clip(x, curve.x_G[max(best - 1, 0)], curve.x_G[min(best + 1, len(curve.x_G) - 1)]))
    band = _band(curve, valley, epsilon)
    optimum = Optimum(
        curve.scale, Status.BRACKETED, x, low, high, float(np.median(valley.loss_R)), best_x, *band,
        se=float(valley.x_R.std()), mean=float(valley.x_R.mean()), epsilon=epsilon,
    )  # fmt: skip
    if best in (0, len(curve.x_G) - 1):
        status = Status.LOWER if best == 0 else Status.UPPER
        ends = (-math.inf, max(high, best_x)) if best == 0 else (min(low, best_x), math.inf)
        return replace(optimum, status=status, x=best_x, low=ends[0], high=ends[1], loss=lowest)
    beside_W = np.abs(fit.window - best) <= 1
    score_W = np.where(beside_W, np.abs(fit.residual_W) / np.sqrt(fit.variance_W), 0.0)
    worst = int(np.argmax(score_W))
    if score_W[worst] > MISS:
        missed_x = float(curve.x_G[fit.window[worst]])
        optimum = replace(optimum, missed_x=missed_x, missed_by=float(fit.residual_W[worst]))
    lost = [i for i in (best - 1, best + 1) if not np.isfinite(curve.mean_G[i])]
    if lost:
        return replace(optimum, status=_BY_LOST[curve.fate(lost)])
    if high - low > _FLAT_STEPS * curve.step:
        return replace(optimum, status=Status.FLAT)
    return optimum


def _band(curve: LossCurve, valley: Valley, epsilon: float) -> tuple[float, float]:
    """Return the range, within the finite grid, whose expected loss is at most epsilon above the least one.

    Where the optimum is not known, every value may lose more: what counts is the loss over the best choice.
    """
    finite_x = curve.x_G[np.isfinite(curve.mean_G)]
    part = valley.part(slice(_BAND_DRAWS))
    fine = np.linspace(finite_x[0], finite_x[-1], _BAND_POINTS)
    mean = part.rise(fine - part.x_R[:, None]).mean(axis=0)
    best = int(np.argmin(mean))
    sides = (slice(best, None, -1), slice(best, None))
    low, high = (
        float(np.interp(epsilon, np.maximum.accumulate(mean[side] - mean[best]), fine[side]))
        for side in sides
    )
    return low, high
