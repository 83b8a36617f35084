"""Scatter of single runs near an optimum.

Shapes: R draws, G grid points, W points of a fit's window, C points of several curves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.valley import fit_valley

_PRIOR_DF = 4
_PARAMETERS = 4  # Numbers that a valley's fit takes from a window's points
_NOISES = np.geomspace(0.003, 2.0, 14)
"""Noises that are weighed, as shares of the fourth lowest point's rise; squared step of their logarithm over
12."""
_BETWEEN = math.log(2.0 / 0.003) ** 2 / 13**2 / 12
_CLIP = 0.8  # Squared residuals of a point are clipped at this quantile


@dataclass(frozen=True)
class Noise:
    """Scatter of a single run's loss near the optimum, pooled over curves."""

    sigma: float
    """Standard deviation of one run beside others of its seed, nat per token."""
    df: int
    source: str
    """"seeds", "given errors", or "lack of fit" (no replicates: the fits' residuals stand in)."""

    @property
    def freedom(self) -> float:
        # Degrees of freedom; infinite for given errors, which are taken as they are
        return math.inf if self.source == "given errors" else float(self.df)

    def errors_G(self, curve: LossCurve) -> np.ndarray:
        """Return the standard error of each mean of a curve.

        Runs scatter more where training is unstable, and one sigma for all would drown the optimum in the
        noise of far too high learning rates. So each point's own variance counts, shrunk towards sigma's (as
        in Smyth 2004, with _PRIOR_DF degrees of freedom for sigma).
        """
        if self.source == "given errors":
            return np.where(np.isfinite(curve.error_G), curve.error_G, self.sigma)
        variance_G = (_PRIOR_DF * self.sigma**2 + curve.squares_G) / (_PRIOR_DF + curve.df_G)
        return np.sqrt(variance_G / curve.weight_G)


def pooled_noise(curves: list[LossCurve], rounding: float = 0.0) -> Noise:
    """Return the noise of single runs from replicates, else from given errors, else from the fits' residuals.

    Args:
        curves: curves of one parametrization.
        rounding: smallest difference of losses in the table; its uniform error is a floor.
    """
    floor = rounding / np.sqrt(12)
    df_C = np.concatenate([c.df_G[c.near_G] for c in curves])
    squares_C = np.concatenate([c.squares_G[c.near_G] for c in curves])
    others_C = np.concatenate([c.count_G[c.near_G] for c in curves]) - 1
    known = df_C > 0
    if known.any():
        scaled_C = squares_C[known] * others_C[known] / df_C[known]
        sigma = math.sqrt(_clipped_variance(scaled_C, others_C[known]))
        return Noise(max(sigma, floor), max(round(df_C.sum()), 1), "seeds")
    if any(np.isfinite(c.error_G).any() for c in curves):
        return Noise(float(np.nanmean(np.concatenate([c.error_G for c in curves]))), 10**6, "given errors")
    sigma, left = _lack_of_fit(curves)
    return Noise(max(sigma, floor), left, "lack of fit")


def _clipped_variance(squares_C: np.ndarray, df_C: np.ndarray) -> float:
    """Return the variance from points' sums of squares, each held to a quantile of what it may be.

    One unstable point must not widen all others' intervals, and a median would waste most of what they tell.
    """
    most_C = scipy.special.chdtri(df_C, 1 - _CLIP)
    expected_C = df_C * scipy.special.chdtr(df_C + 2, most_C) + most_C * (1 - _CLIP)
    variance = float(np.median(squares_C / scipy.special.chdtri(df_C, 0.5)))
    for _ in range(30):
        variance = float(np.minimum(squares_C, variance * most_C).sum() / expected_C.sum())
    return variance


def _lack_of_fit(curves: list[LossCurve]) -> tuple[float, int]:
    """Return the noise by what the valleys' shapes leave, nat, and its degrees of freedom.

    The posterior over a grid of noises, log-uniform at first: all shapes are weighed for each, and a point's
    rise has its model error, so that walls say little.
    """
    finite = [c for c in curves if np.isfinite(c.mean_G).sum() >= _PARAMETERS]
    rises = [np.sort(c.mean_G[np.isfinite(c.mean_G)] - c.mean_G.min())[_PARAMETERS - 1] for c in finite]
    typical = float(np.median(rises)) if rises else 0.0
    if typical <= 0:
        return 0.0, 1
    sigma_N = typical * _NOISES
    log_N = np.zeros(len(sigma_N))
    for curve in finite:
        for n, sigma in enumerate(sigma_N):
            fit = fit_valley(
                curve.x_G, curve.mean_G, np.full(len(curve.x_G), sigma), curve.step, may_miss=False
            )
            assert fit is not None, "it has finite points"
            log_N[n] += fit.log_evidence
    weight_N = np.exp(log_N - log_N.max())
    weight_N /= weight_N.sum()
    mean = float(weight_N @ np.log(sigma_N))
    variance = float(weight_N @ (np.log(sigma_N) - mean) ** 2) + _BETWEEN
    return math.exp(mean), max(round(0.5 / variance), 1)
