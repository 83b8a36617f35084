"""Posterior of a valley of loss over log2 of a hyperparameter, from the points of one loss curve.

A valley is loss(x) = c + A·g(x − x*), with g one of a fixed set of shapes that fall to 0 at x* and rise on
both sides: powers |u|^p from 1.1 to 4 and pairs of exponentials, with sides of different steepness. A single
form, such as a cubic, misses the others between the points of an octave grid, and its error has no place in
the interval. For each shape and each x* on a grid, c and A are a weighted linear regression, so that the
posterior over shapes and x* is a table, and draws from it are exact. All priors are free of the loss's unit.

Each point's variance is its noise and a share of its rise above the best (MODEL_ERROR): what all shapes miss.

Shapes: G grid points, W points of a window, K shapes of valleys, X values of x*, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri, stdtrit

MODEL_ERROR = 0.1  # Standard error of a shape at a point, as a share of the point's rise above the best
_PLAINLY = 1e-3  # Chance of noise alone by which a point counts as plainly worse than the best
_STEEP = 5.0  # Median rises of a window's points at which a point's model error has doubled
_WALL_ERROR = 0.5  # The same for the first point that all shapes miss, where a wall may stand before it
MISS = 3.0  # Residual, in standard errors, from which a point ends the valley on its side, as a wall does
CURVATURE_SCATTER = 0.37
"""Standard deviation of the logarithm of curvature between widths of one stored sweep."""
BEYOND = 6.0
"""Octaves beyond the grid in which an optimum is sought: one that nothing bounds gets an error of octaves."""
_OUTSIDE = 1.0
"""Octaves beyond the grid over which an optimum becomes e times less likely: grids are chosen to hold it."""
_POOLED = (0.0, 0.3, 0.6)
"""Shares of the other scales' evidence on the valley's shape that may count at a scale; the table says
which one. All of it would be too sure beside walls; some of 70 stored and public rules have no common shape.
"""
_HEIGHT_SCATTER = 0.5
"""Standard deviation of a height around that of other scales, as a share: more than between stored widths."""
_REACH = 3.0  # Octaves and grid steps from the best point, whichever is more, within which points count
_COARSE, _FINE = 0.2, 81  # Step of the first grid of x*, octaves, and values of the second one
_POWERS = (1.1, 1.5, 2.0, 2.5, 3.0, 4.0)
_ROUNDED = (0.5, 1.0, 2.0)  # Half-widths, octaves, of the round bottoms of valleys with straight sides
_RATES = (0.15, 0.4, 0.8, 1.4)  # Geometric means of the exponents of the two sides, per octave
_LOG_RATIOS = (-3.0, -1.8, -1.0, -0.45, 0.0, 0.45, 1.0, 1.8, 3.0)
"""Logarithm of the right side's steepness over the left side's."""
PARABOLA = _POWERS.index(2.0) * len(_LOG_RATIOS) + _LOG_RATIOS.index(0.0)  # Number of the shape u²
_RATIO_SPREAD = 0.8  # Mean size of that logarithm in the prior; of 66 fitted public curves the median is 0.9.
_POWER_SPREAD = 0.6  # Standard deviation of the prior of p around 2
_LEAST_LOG_PRIOR = -3.0  # Least logarithm of that prior: valleys as flat as |u|⁴ are rare, but not excluded


@cache
def _shapes() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return kind (0 power, 1 rounded, 2 exponentials), two parameters and log prior of each shape, (K,)."""
    rows = []
    for kind, sizes in enumerate((_POWERS, _ROUNDED, _RATES)):
        for size in sizes:
            for ratio in _LOG_RATIOS:
                log_prior = -abs(ratio) / _RATIO_SPREAD - math.log(len(sizes))
                if kind == 0:
                    log_prior += max(-0.5 * ((size - 2) / _POWER_SPREAD) ** 2, _LEAST_LOG_PRIOR)
                rows.append((kind, size, ratio, log_prior))
    kind_K, size_K, ratio_K, log_K = np.array(rows).T
    return kind_K, size_K, ratio_K, log_K


@dataclass(frozen=True)
class Valley:
    """Draws of a valley."""

    x_R: np.ndarray  # Optimum, log2 of the hyperparameter
    loss_R: np.ndarray  # Loss at the optimum, nat
    height_R: np.ndarray
    shape_R: np.ndarray  # Number of the shape

    def rise(self, u: np.ndarray) -> np.ndarray:
        """Return the rise above the optimum, nat, at u octaves from it, (R,) or (R, N)."""
        kind_R, size_R, ratio_R, _ = (v[self.shape_R] for v in _shapes())
        rise = np.empty(u.shape)
        for kind in range(3):
            of = kind_R == kind
            some = (v[of] if u.ndim == 1 else v[of, None] for v in (size_R, ratio_R, self.height_R))
            (size, ratio, height), away = some, u[of]
            if kind == 2:
                a, b = size * np.exp(ratio / 2), size * np.exp(-ratio / 2)
                g = np.expm1(np.minimum(a * away, 60.0)) / a + np.expm1(np.minimum(-b * away, 60.0)) / b
            else:
                g = np.abs(away) ** size if kind == 0 else np.sqrt(1 + (away / size) ** 2) - 1
                g *= np.exp(ratio * np.sign(away) / 2)
            rise[of] = height * g
        return rise

    @classmethod
    def of(cls, parts: Sequence[Valley | None]) -> Valley | None:
        """Join draws; None if any part has none."""
        if any(part is None for part in parts):
            return None
        return cls(*(np.concatenate(v) for v in zip(*(vars(p).values() for p in parts), strict=True)))

    def part(self, number_R: np.ndarray | slice) -> Valley:
        return Valley(*(v[number_R] for v in (self.x_R, self.loss_R, self.height_R, self.shape_R)))

    @property
    def curvature_R(self) -> np.ndarray:
        # Rises an octave above and below the optimum together, a parabola's curvature, nat
        ones = np.ones(len(self.x_R))
        return self.rise(ones) + self.rise(-ones)

    def loss(self, x: np.ndarray) -> np.ndarray:
        # Loss in each draw at x (N,), nat, R × N
        return self.loss_R[:, None] + self.rise(np.asarray(x)[None, :] - self.x_R[:, None])


@dataclass(frozen=True)
class Fit:
    """Table of the posterior over shapes and x*, and the best entry's residuals."""

    window: np.ndarray  # Indices of the points used
    residual_W: np.ndarray  # Points above the best entry of the table, nat
    variance_W: np.ndarray
    low: float
    high: float  # Bounds of x*: the nearest lost or missed points, infinite without
    is_missed_G: np.ndarray  # Points that all shapes miss
    at_X: np.ndarray
    log_KX: np.ndarray
    height_KX: np.ndarray
    spread_KX: np.ndarray  # Standard error of the height
    centre_KX: np.ndarray  # Weighted mean of g over the points
    chi2_KX: np.ndarray
    mean: float  # Weighted mean of the losses
    total_weight: float
    df: float
    log_evidence: float  # Log of the points' probability, up to a constant; of normal errors


def fit_valley(
    x_G: np.ndarray,
    mean_G: np.ndarray,
    error_G: np.ndarray,
    step: float,
    df: float = math.inf,
    may_miss: bool = True,
) -> Fit | None:
    """Fit all shapes to a curve; None without a finite point.

    The grid ascends; `step` is its usual distance in octaves, `df` the errors' degrees of freedom. A point
    that all shapes miss ends the valley on its side, unless `may_miss` is False: all points are kept then, so
    that evidences of several errors can be compared.
    """
    finite_G = np.isfinite(mean_G)
    if not finite_G.any():
        return None
    best = int(np.argmin(mean_G))
    window = points_near(x_G, finite_G, best, step)
    # Unimodal: the optimum lies before any point that is lost, or plainly worse than the best.
    plain = -stdtrit(df, _PLAINLY)
    is_worse_G = mean_G - mean_G[best] > plain * np.hypot(error_G, error_G[best])
    low = max(x_G[:best][is_worse_G[:best]], default=-math.inf)
    high = min(x_G[best:][is_worse_G[best:]], default=math.inf)
    share_G = np.full(len(x_G), MODEL_ERROR)
    while True:
        fit = _fit_window(x_G, mean_G, error_G, window, (low, high), share_G, df)
        missed = np.abs(fit.residual_W) > MISS * np.sqrt(fit.variance_W)
        missed &= (window != best) & (share_G[window] == MODEL_ERROR)
        if not may_miss or not missed.any() or len(window) <= 3:
            return replace(fit, is_missed_G=share_G != MODEL_ERROR)
        worst = window[np.argmax(np.where(missed, np.abs(fit.residual_W) / np.sqrt(fit.variance_W), 0.0))]
        side = window[missed & ((window > best) == (worst > best))]
        nearest = int(min(side, key=lambda i: abs(int(i) - best)))
        share_G[nearest] = _WALL_ERROR
        if nearest > best:
            high, window = min(high, float(x_G[nearest])), window[window <= nearest]
        else:
            low, window = max(low, float(x_G[nearest])), window[window >= nearest]


def _fit_window(
    x_G: np.ndarray,
    mean_G: np.ndarray,
    error_G: np.ndarray,
    window: np.ndarray,
    bounds: tuple[float, float],
    share_G: np.ndarray,
    df: float,
) -> Fit:
    x_W, y_W = x_G[window], mean_G[window]
    rise_W = y_W - y_W.min()
    others_W = rise_W[rise_W > 0]
    typical = float(np.median(others_W)) if len(others_W) else 1.0
    variance_W = error_G[window] ** 2 + (share_G[window] * rise_W * (1 + rise_W / (_STEEP * typical))) ** 2
    variance_W = np.maximum(variance_W, 1e-12 * max(float(np.abs(y_W).max()), 1e-300) ** 2)
    ends = max(bounds[0], x_G[0] - BEYOND), min(bounds[1], x_G[-1] + BEYOND)
    at_X = np.linspace(*ends, max(3, round((ends[1] - ends[0]) / _COARSE) + 1))
    *_, log_KX, _ = _table(x_W, y_W, variance_W, at_X, (x_G[0], x_G[-1]), df)
    mass_X = np.exp(log_KX - log_KX.max()).sum(axis=0)
    inside = np.flatnonzero(mass_X > 1e-6 * mass_X.max())
    least, most = at_X[max(inside[0] - 1, 0)], at_X[min(inside[-1] + 1, len(at_X) - 1)]
    at_X = np.linspace(least, most, _FINE)
    height_KX, spread_KX, centre_KX, chi2_KX, log_KX, g_KXW = _table(
        x_W, y_W, variance_W, at_X, (x_G[0], x_G[-1]), df
    )
    k, x = np.unravel_index(int(np.argmax(log_KX)), log_KX.shape)
    weight_W = 1 / variance_W
    mean = float(weight_W @ y_W / weight_W.sum())
    # Heights over the window have a flat prior: their own errors are part of the evidence.
    joint_KX = log_KX + np.log(spread_KX * g_KXW.std(axis=2) + 1e-300)
    evidence = joint_KX.max() + np.log(np.exp(joint_KX - joint_KX.max()).sum() * (at_X[1] - at_X[0]))
    evidence += 0.5 * (np.log(weight_W).sum() - np.log(weight_W.sum()))
    residual_W = y_W - mean - height_KX[k, x] * (g_KXW[k, x] - centre_KX[k, x])
    return Fit(
        window, residual_W, variance_W, *bounds, np.zeros(len(x_G), bool), at_X, log_KX, height_KX, spread_KX,
        centre_KX, chi2_KX, mean, float(weight_W.sum()), df, float(evidence),
    )  # fmt: skip


def _table(
    x_W: np.ndarray,
    y_W: np.ndarray,
    variance_W: np.ndarray,
    at_X: np.ndarray,
    grid: tuple[float, float],
    df: float,
) -> tuple[np.ndarray, ...]:
    """Return the height, standard error, mean of g, χ², log posterior (K, X), and g (K, X, W)."""
    log_prior = _shapes()[3]
    u_XW = x_W - at_X[:, None]
    # Each size once on either side; ratios only weigh the sides, or choose the exponents.
    up_XW, size_XW = u_XW > 0, np.abs(u_XW)
    sides = [np.where(up_XW, math.exp(ratio / 2), math.exp(-ratio / 2)) for ratio in _LOG_RATIOS]
    bases = [size_XW**p for p in _POWERS] + [np.sqrt(1 + (u_XW / s) ** 2) - 1 for s in _ROUNDED]
    g_KXW = np.empty((len(log_prior), *u_XW.shape))
    for i, base_XW in enumerate(bases):
        for j, side_XW in enumerate(sides):
            np.multiply(base_XW, side_XW, out=g_KXW[i * len(sides) + j])
    _, rate, ratio, _ = (v[len(bases) * len(sides) :, None, None] for v in _shapes())
    a, b = rate * np.exp(ratio / 2), rate * np.exp(-ratio / 2)
    exponential_KXW = np.expm1(np.minimum(a * u_XW, 60.0)) / a + np.expm1(np.minimum(-b * u_XW, 60.0)) / b
    g_KXW[len(bases) * len(sides) :] = exponential_KXW
    weight_W = 1 / variance_W
    total = weight_W.sum()
    centre_KX = g_KXW @ (weight_W / total)
    square_KX = (g_KXW**2) @ weight_W
    spread_KX = np.maximum(square_KX - total * centre_KX**2, 1e-9 * square_KX + 1e-200)
    mean = float(weight_W @ y_W) / total
    shared_KX = g_KXW @ (weight_W * (y_W - mean))
    height_KX = shared_KX / spread_KX
    chi2_KX = np.maximum(float(weight_W @ (y_W - mean) ** 2) - shared_KX * height_KX, 0.0)
    error_KX = spread_KX**-0.5
    # The height over the window's spread of g has a flat prior above 0.
    outside_X = np.maximum(0.0, np.maximum(grid[0] - at_X, at_X - grid[1]))
    log_KX = log_prior[:, None] + log_ndtr(height_KX / error_KX) - outside_X / _OUTSIDE
    if math.isfinite(df):
        log_KX = log_KX - (df + len(x_W) - 2) / 2 * np.log1p(chi2_KX / df)
    else:
        log_KX = log_KX - chi2_KX / 2
    return height_KX, error_KX, centre_KX, chi2_KX, log_KX, g_KXW


@dataclass(frozen=True)
class Shared:
    """What the other curves of a rule say of a curve's valley."""

    log_shape_K: np.ndarray  # Log of their evidence for each shape
    height_K: np.ndarray  # Mean of the prior of the height, nat, if a shape is right
    variance_K: np.ndarray


def share(fits: Sequence[Fit]) -> list[Shared | None]:
    """Return what each curve learns from the others; None where there are none.

    The others' evidence for a shape counts as much as it predicts each curve of the table; heights differ by
    a factor with a standard deviation of CURVATURE_SCATTER in its logarithm.
    """
    evidence, heights, variances = [], [], []
    for fit in fits:
        weight_KX = np.exp(fit.log_KX - fit.log_KX.max(axis=1, keepdims=True))
        total_K = weight_KX.sum(axis=1)
        evidence.append(np.log(total_K) + fit.log_KX.max(axis=1) - _shapes()[3])
        mean_K = (weight_KX * fit.height_KX).sum(axis=1) / total_K
        square_KX = (fit.height_KX - mean_K[:, None]) ** 2 + fit.spread_KX**2
        heights.append(np.maximum(mean_K, 1e-300))
        variances.append((weight_KX * square_KX).sum(axis=1) / total_K)
    shared: list[Shared | None] = []
    pooled = _pooled(np.array(evidence)) if len(fits) > 1 else 0.0
    for i in range(len(fits)):
        others = [k for k in range(len(fits)) if k != i]
        if not others:
            shared.append(None)
            continue
        log_K = pooled * np.sum([evidence[k] - evidence[k].max() for k in others], axis=0)
        weight_OK = np.array([1 / (variances[k] + (CURVATURE_SCATTER * heights[k]) ** 2) for k in others])
        height_K = (weight_OK * np.array([heights[k] for k in others])).sum(axis=0) / weight_OK.sum(axis=0)
        variance_K = 1 / weight_OK.sum(axis=0) + (_HEIGHT_SCATTER * height_K) ** 2
        shared.append(Shared(log_K, height_K, variance_K))
    return shared


def _pooled(evidence_SK: np.ndarray) -> float:
    """Return the share of the others' evidence that counts, weighed by how well it predicts each curve."""
    evidence_SK = evidence_SK - evidence_SK.max(axis=1, keepdims=True)
    others_SK = evidence_SK.sum(axis=0) - evidence_SK
    score_P = []
    for share_of_others in _POOLED:
        log_SK = _shapes()[3] + share_of_others * others_SK
        weight_SK = np.exp(log_SK - log_SK.max(axis=1, keepdims=True))
        predicted_S = (weight_SK * np.exp(evidence_SK)).sum(axis=1) / weight_SK.sum(axis=1)
        score_P.append(np.log(predicted_S).sum())
    weight_P = np.exp(np.array(score_P) - max(score_P))
    return float(weight_P @ _POOLED / weight_P.sum())


def draw(
    fit: Fit,
    generator: np.random.Generator,
    draws: int,
    shared: Shared | None = None,
    chance_R: np.ndarray | None = None,
) -> Valley:
    """Return draws from the posterior of one curve, with what other curves say.

    The uniform numbers `chance_R` choose the shapes. Curves of one rule share them in most draws, so that the
    error of form that they have in common does not count as drift.
    """
    log_KX, height_KX, error_KX = fit.log_KX, fit.height_KX, fit.spread_KX
    freedom = fit.df + len(fit.window) - 2
    if math.isfinite(fit.df):
        error_KX = error_KX * np.sqrt((fit.df + fit.chi2_KX) / max(freedom, 0.5))
    if shared is not None:
        prior_K1, variance_K1 = shared.height_K[:, None], shared.variance_K[:, None]
        both_KX = error_KX**2 + variance_K1
        log_KX = log_KX - log_ndtr(fit.height_KX / fit.spread_KX) + shared.log_shape_K[:, None]
        log_KX = log_KX + np.log(error_KX) - 0.5 * (np.log(both_KX) + (height_KX - prior_K1) ** 2 / both_KX)
        height_KX = height_KX * (variance_K1 / both_KX) + prior_K1 * (error_KX**2 / both_KX)
        error_KX = error_KX * np.sqrt(variance_K1 / both_KX)
    probability_KX = np.exp(log_KX - log_KX.max())
    total_K1 = probability_KX.sum(axis=1, keepdims=True)
    ends_K = np.cumsum(total_K1)
    chance_R = generator.uniform(size=draws) if chance_R is None else chance_R
    shape_R = np.minimum(np.searchsorted(ends_K, chance_R * ends_K[-1]), len(ends_K) - 1)
    # One search for all shapes: shape k has the numbers from k to k + 1.
    shares_KX = np.cumsum(probability_KX, axis=1) / np.maximum(total_K1, 1e-300)
    number_R = np.searchsorted(
        (shares_KX + np.arange(len(ends_K))[:, None]).ravel(), shape_R + generator.uniform(size=draws)
    )
    at_R = np.clip(number_R - shape_R * log_KX.shape[1], 0, log_KX.shape[1] - 1)
    cell = fit.at_X[1] - fit.at_X[0]
    x_R = np.clip(fit.at_X[at_R] + cell * generator.uniform(-0.5, 0.5, draws), fit.low, fit.high)
    factor_R = np.ones(draws)
    if math.isfinite(fit.df):
        factor_R = np.sqrt(max(freedom, 0.5) / generator.chisquare(max(freedom, 0.5), draws))
    mean_R, error_R = height_KX[shape_R, at_R], factor_R * error_KX[shape_R, at_R]
    # Normal above 0, by its quantile from the upper end: precise where the mean is far above 0.
    above_R = ndtr(mean_R / error_R) * generator.uniform(1e-9, 1.0, draws)
    height_R = np.maximum(mean_R - error_R * ndtri(np.clip(above_R, 1e-300, 1 - 1e-12)), 0.0)
    level_R = fit.mean + factor_R * generator.standard_normal(draws) / math.sqrt(fit.total_weight)
    return Valley(x_R, level_R - height_R * fit.centre_KX[shape_R, at_R], height_R, shape_R)


def points_near(x_G: np.ndarray, finite_G: np.ndarray, best: int, step: float) -> np.ndarray:
    """Return finite points within three steps or octaves of the best, its neighbours, up to lost ones."""
    reach = _REACH * max(step, 1.0)
    near_G = np.abs(np.arange(len(x_G)) - best) <= 1
    inside = finite_G & (near_G | (np.abs(x_G - x_G[best]) <= reach + 1e-9))
    lost = np.flatnonzero(~finite_G)
    inside[: max(lost[lost < best], default=-1) + 1] = False
    inside[min(lost[lost > best], default=len(x_G)) :] = False
    return np.flatnonzero(inside)
