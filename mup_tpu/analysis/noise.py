"""Scatter of single runs near an optimum.

Shapes: R draws, G grid points, W points of a fit's window, C points of several curves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from mup_tpu.analysis.curve_fit import LEAST_ERROR, MISS, fit_window, points_near
from mup_tpu.analysis.loss_curve import LossCurve

_NEAR, _FAR, _ENOUGH = 0.15, 0.5, 7
"""Rise over the best, nat, up to which single runs tell the noise (a cubic's error grows further up); rise if
fewer than enough points are that near; enough points."""
_USUAL_NOISE, _USUAL_DF = 0.008, 2
"""Standard deviation of a run before the table tells it, nat, and its degrees of freedom: its median over
stored sweeps is 0.008, the standard deviation of its logarithm 0.6."""
_PRIOR_DF = 4
_CLIP = 0.8
"""Quantile of a point's squares to which they are held."""


@dataclass(frozen=True)
class Noise:
    """Scatter of a single run's loss near the optimum, pooled over curves."""

    sigma: float
    """Standard deviation of one run beside others of its seed, nat per token."""
    df: int
    source: str
    """"seeds", "given errors", or "lack of fit" (no replicates: the fits' residuals stand in)."""

    def draw_factors(self, generator: np.random.Generator, draws: int) -> np.ndarray:
        """Factor on sigma in each draw, as uncertain as few degrees of freedom leave it: √(df/χ²).

        Given errors are taken as they are.
        """
        if self.source == "given errors":
            return np.ones(draws)
        return np.sqrt(self.df / generator.chisquare(self.df, draws))

    def errors_G(self, curve: LossCurve) -> np.ndarray:
        """Standard error of each mean of a curve.

        Runs scatter more where training is unstable, and one sigma for all would drown the optimum in the
        noise of far too high learning rates. So each point's own variance counts, shrunk towards sigma's (as
        in Smyth 2004, with _PRIOR_DF degrees of freedom for sigma).
        """
        if self.source == "given errors":
            return np.where(np.isfinite(curve.error_G), curve.error_G, self.sigma)
        variance_G = (_PRIOR_DF * self.sigma**2 + curve.squares_G) / (_PRIOR_DF + curve.df_G)
        return np.sqrt(variance_G / curve.weight_G)


def pooled_noise(curves: list[LossCurve], rounding: float = 0.0) -> Noise:
    """Noise of single runs from replicates, else from given errors, else from the fits' residuals.

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
        return _with_usual(sigma, max(round(df_C.sum()), 1), "seeds", floor)
    if any(np.isfinite(c.error_G).any() for c in curves):
        return Noise(float(np.nanmean(np.concatenate([c.error_G for c in curves]))), 10**6, "given errors")
    sigma, left = _lack_of_fit(curves)
    return _with_usual(sigma, left, "lack of fit", floor)


def _clipped_variance(squares_C: np.ndarray, df_C: np.ndarray) -> float:
    """Variance from points' sums of squares, each held to a quantile of what it may be.

    One unstable point must not widen all others' intervals, and a median would waste most of what they tell.
    """
    most_C = scipy.stats.chi2.ppf(_CLIP, df_C)
    expected_C = df_C * scipy.stats.chi2.cdf(most_C, df_C + 2) + most_C * (1 - _CLIP)
    variance = float(np.median(squares_C / scipy.stats.chi2.median(df_C)))
    for _ in range(30):
        variance = float(np.minimum(squares_C, variance * most_C).sum() / expected_C.sum())
    return variance


def _with_usual(sigma: float, df: int, source: str, floor: float) -> Noise:
    """Noise that a table tells, with the usual one's logarithm as a few degrees of freedom more."""
    total = df + _USUAL_DF
    share = df / total
    return Noise(max(max(sigma, 1e-6) ** share * _USUAL_NOISE ** (1 - share), floor), total, source)


def _lack_of_fit(curves: list[LossCurve]) -> tuple[float, int]:
    """Noise by the fits' residuals, nat, and its degrees of freedom.

    Noise and fits, which it weights, are found in turns: the noise from its share of each squared residual.
    Points that a fit misses outright (a wall) do not count.
    """
    sigma, left = _USUAL_NOISE, 0.0
    for _ in range(20):
        squares = left = 0.0
        for curve in curves:
            best = int(np.argmin(curve.mean_G))
            window = points_near(curve.x_G, np.isfinite(curve.mean_G), best, curve.step)
            rise_W = curve.mean_G[window] - curve.mean_G[best]
            is_near_W = rise_W <= _NEAR
            window = window[is_near_W if is_near_W.sum() >= _ENOUGH else rise_W <= _FAR]
            if len(window) < 4:
                continue
            u_W, mean_W = curve.x_G[window] - curve.x_G[best], curve.mean_G[window]
            fit = fit_window(u_W, mean_W[None], curve.mean_G[[best]], np.full(len(window), sigma))
            residual_W = mean_W - np.vander(u_W, 4, increasing=True) @ fit.coefficients_R4[0]
            variance_W = fit.variance_RW[0]
            used = residual_W**2 <= MISS**2 * variance_W
            share_W = np.where(used, sigma**2 / variance_W, 0.0)
            squares += float((share_W * residual_W**2).sum())
            left += float((share_W * (1 - fit.leverage_RW[0])).sum())
        if left < 1e-3:  # too few points, or so exact that all that is left is model error
            return min(sigma, _USUAL_NOISE), 1
        sigma = max(math.sqrt(squares / left), LEAST_ERROR)
    return sigma, max(round(left), 1)
