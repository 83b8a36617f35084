"""The optimum of a loss curve over log2 of a hyperparameter, with an interval.

The optimum is the minimum of a weighted cubic through the points around the best one (curve_fit.py). Its
interval is a parametric bootstrap of noise and model error that repeats bracketing and fit in each draw:
resampling three seeds covers far less than it claims. benchmarks/interval_coverage.py measures the coverage.

Shapes: R draws, G grid points.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from mup_tpu.analysis.curve_fit import LEAST_ERROR, MISS, MODEL_ERROR, STEEP, Draws, fit_curves
from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.noise import Noise

EPSILON = 0.01
"""Largest regret that does not matter, nat per token."""
DRAWS = 2000
_REMAINDER, _MOST_REMAINDER = 0.035, 0.3
"""Standard error in the bootstrap of a point's rise, as a share of the rise: 0.035·u² at u octaves from the
optimum, at most 0.3. A cubic misses a share u²/16 of a valley with straight sides, a²·u²/12 of one that rises
as exp(a·u)."""
_USUAL_MISS = 1.25
"""Standard errors by which a fit may miss a point near its optimum before the bootstrap's noise grows."""


class Status(StrEnum):
    """Position of an optimum in its grid."""

    BRACKETED = "bracketed"
    BY_DIVERGENCE = "bracketed by divergence"
    BY_STOPPED = "bracketed by stopped runs"
    FLAT = "flat"
    LOWER = "at lower edge"
    UPPER = "at upper edge"
    ONE_VALUE = "one value"
    """Nothing was tuned."""
    NO_RUN = "no finite run"


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
    """Range around the optimum, within the grid, in which the loss is at most epsilon higher."""
    se: float = math.nan
    """Standard error of x, octaves."""
    missed_x: float = math.nan
    """Worst of the points near the optimum that the fit misses by more than 3 standard errors."""
    missed_by: float = math.nan
    """Mean loss at missed_x less the fit's, nat per token."""
    below: float = math.nan
    """Loss of the best run less the fit's at the optimum, nat per token; nan if it is small."""
    epsilon: float = EPSILON
    """Largest regret that does not matter, nat per token."""

    @property
    def is_bracketed(self) -> bool:
        """Whether the optimum lies inside the grid."""
        return self.status in (Status.BRACKETED, Status.BY_DIVERGENCE, Status.BY_STOPPED, Status.FLAT)

    @property
    def is_known(self) -> bool:
        """Whether `loss` belongs to a tuned model: the optimum is bracketed, or nothing was to be tuned."""
        return self.is_bracketed or self.status == Status.ONE_VALUE

    @property
    def is_fitted(self) -> bool:
        """Whether the fit agrees with the runs near the optimum and does not lie far below all of them."""
        return not (math.isfinite(self.missed_by) or math.isfinite(self.below))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"status": str(self.status)}


@dataclass(frozen=True)
class Estimate:
    """Curve of one scale, its fit, its bootstrap and its optimum."""

    curve: LossCurve
    fit: Draws
    """Fit of the measured means, as a single draw."""
    draws: Draws
    optimum: Optimum
    missed_G: np.ndarray
    """Whether the fit misses a point by more than 3 standard errors."""
    error_G: np.ndarray
    """Standard error of each mean, nat."""


def estimate(
    curve: LossCurve, noise: Noise, generator: np.random.Generator, epsilon: float = EPSILON
) -> Estimate:
    """Bootstrap a curve and find its optimum."""
    error_G = noise.errors_G(curve)
    fit = fit_curves(curve.x_G, curve.mean_G[None], error_G, curve.step)
    misses_G = misses(curve, noise, fit)
    draws = draw_curve(curve, noise, fit, misses_G, generator)
    optimum = find_optimum(curve, fit, draws, misses_G, epsilon)
    return Estimate(curve, fit, draws, optimum, np.abs(misses_G) > MISS, error_G)


def draw_curve(
    curve: LossCurve,
    noise: Noise,
    fit: Draws,
    misses_G: np.ndarray,
    generator: np.random.Generator,
    draws: int = DRAWS,
) -> Draws:
    """Bootstrap a curve: redraw its means, then repeat bracketing and fit in each draw.

    Each mean gets its noise, wider where the fit misses points near the optimum by more than that; each rise
    above the best a factor, for what a cubic leaves out of a valley.
    """
    error_G = noise.errors_G(curve)
    shape = (draws, len(curve.x_G))
    lowest = curve.mean_G.min()
    if not np.isfinite(lowest):
        return fit_curves(curve.x_G, np.full(shape, np.inf), error_G, curve.step)
    x = fit.x_R[0] if np.isfinite(fit.x_R[0]) else fit.centre_R[0]
    share_G = np.minimum(_REMAINDER * (curve.x_G - x) ** 2, _MOST_REMAINDER)
    rises_RG = (curve.mean_G - lowest) * np.exp(share_G * generator.standard_normal(shape))
    worst = float(np.abs(misses_G)[_beside_best(curve)].max())
    sd_R1 = noise.draw_factors(generator, draws)[:, None] * max(1.0, worst / _USUAL_MISS)
    shocks_RG = generator.standard_normal(shape) * sd_R1 * error_G
    return fit_curves(curve.x_G, lowest + rises_RG + shocks_RG, error_G, curve.step)


def misses(curve: LossCurve, noise: Noise, fit: Draws) -> np.ndarray:
    """Height of each point above a fit, in standard errors of noise and model (G,); 0 for lost points."""
    finite_G = np.isfinite(curve.mean_G)
    mean_G = np.where(finite_G, curve.mean_G, curve.mean_G.min() if finite_G.any() else 0.0)
    error_G = np.hypot(np.maximum(noise.errors_G(curve), LEAST_ERROR), MODEL_ERROR * (mean_G - mean_G.min()))
    return np.where(finite_G, (mean_G - fit.fitted(curve.x_G)) / error_G, 0.0)


def _beside_best(curve: LossCurve) -> np.ndarray:
    """Mask of the best point, its neighbours, and other points as near as neighbours usually are (G,)."""
    return curve.near_G | (np.abs(np.arange(len(curve.x_G)) - int(np.argmin(curve.mean_G))) <= 1)


def find_optimum(
    curve: LossCurve, fit: Draws, draws: Draws, misses_G: np.ndarray, epsilon: float = EPSILON
) -> Optimum:
    """Optimum of a curve, with its interval from the draws.

    The interval reaches to the points beside the best one if one of them is lost, or the fit misses a point
    near the optimum by more than 3 standard errors, or the fit has no minimum, as at the edge of a plateau.
    Without a minimum the optimum is the best point.
    """
    if not np.isfinite(curve.mean_G).any():
        return Optimum(curve.scale, Status.NO_RUN, epsilon=epsilon)
    best = int(np.argmin(curve.mean_G))
    best_x, lowest = float(curve.x_G[best]), float(curve.mean_G[best])
    if len(curve.x_G) == 1:
        return Optimum(curve.scale, Status.ONE_VALUE, best_x, loss=lowest, best_x=best_x, epsilon=epsilon)
    is_inside = math.isfinite(fit.x_R[0])
    x, loss = (float(fit.x_R[0]), float(fit.loss_R[0])) if is_inside else (best_x, lowest)
    low, high = (float(q) for q in np.quantile(draws.x_R, [0.025, 0.975], method="nearest"))
    band = _band(curve, fit, x, loss + epsilon)
    at_edge = Optimum(curve.scale, Status.LOWER, best_x, low, high, lowest, best_x, *band, epsilon=epsilon)
    if best == 0:
        return replace(at_edge, low=-math.inf, high=max(high, best_x))
    if best == len(curve.x_G) - 1:
        return replace(at_edge, status=Status.UPPER, low=min(low, best_x), high=math.inf)
    inside_R = draws.x_R[np.isfinite(draws.x_R)]
    se = float(inside_R.std()) if len(inside_R) > 1 else curve.step
    found = replace(
        at_edge, status=Status.BRACKETED, x=x, loss=loss, low=min(low, x), high=max(high, x), se=se
    )
    lost = [i for i in (best - 1, best + 1) if not np.isfinite(curve.mean_G[i])]
    missed = _missed(curve, fit, misses_G, loss, is_inside)
    if lost or missed:
        found = replace(
            found,
            low=min(found.low, float(curve.x_G[best - 1])),
            high=max(found.high, float(curve.x_G[best + 1])),
            se=max(se, curve.step / 2),
            **missed,
        )
    elif found.high - found.low > 4 * curve.step:
        found = replace(found, status=Status.FLAT)
    if lost:
        is_diverged = curve.diverged_G[lost].any()
        found = replace(found, status=Status.BY_DIVERGENCE if is_diverged else Status.BY_STOPPED)
    return found


def _missed(
    curve: LossCurve, fit: Draws, misses_G: np.ndarray, loss: float, is_inside: bool
) -> dict[str, Any]:
    """Disagreement of the fit with the runs near the optimum, as fields of `Optimum`."""
    best = int(np.argmin(curve.mean_G))
    worst = int(np.argmax(np.where(_beside_best(curve), np.abs(misses_G), 0.0))) if is_inside else best
    missed = {}
    if abs(misses_G[worst]) > MISS or not is_inside:
        missed_by = float(curve.mean_G[worst] - fit.fitted(curve.x_G[[worst]])[0])
        missed = {"missed_x": float(curve.x_G[worst]), "missed_by": missed_by}
    if curve.mean_G[best] - loss > STEEP:
        missed["below"] = float(curve.mean_G[best] - loss)
    return missed


def _band(curve: LossCurve, fit: Draws, x: float, most: float) -> tuple[float, float]:
    """Range around x in which the loss stays below `most`, by the fit near the best point, else the means."""
    finite_x = curve.x_G[np.isfinite(curve.mean_G)]
    ends = []
    for end in (finite_x[0], finite_x[-1]):
        fine = np.linspace(x, end, 201)
        is_near = np.abs(fine - fit.centre_R[0]) <= 1.5 * curve.step
        with np.errstate(invalid="ignore"):
            loss = np.where(is_near, fit.fitted(fine), np.interp(fine, curve.x_G, curve.mean_G))
        within = np.flatnonzero(np.maximum.accumulate(loss) <= most)
        ends.append(float(fine[within[-1]]) if len(within) else x)
    return min(ends[0], x), max(ends[1], x)
