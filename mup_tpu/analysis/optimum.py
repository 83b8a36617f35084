"""The optimum of a loss curve over log2 of a hyperparameter, with an interval.

A local cubic around the best grid point (quadratic where there are few points); Akima interpolation says how
much the answer depends on that choice. The interval is a parametric bootstrap of the cell means, bracketing
and fit re-run in each draw, because resampling three seeds covers far less than it claims.

Shapes: R draws, G grid points, C points of several curves.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from scipy.interpolate import Akima1DInterpolator

DRAWS = 2000
WINDOW_STEPS = 3
_PRIOR_DF = 4
_COARSENESS = 0.12
_FINE = np.linspace(-1.0, 1.0, 201)


@dataclass(frozen=True)
class LossCurve:
    """Mean loss of each grid point at one scale; +inf where half of its runs diverged or were stopped."""

    scale: float
    x_G: np.ndarray
    """log2 of the hyperparameter, ascending."""
    mean_G: np.ndarray
    count_G: np.ndarray
    diverged_G: np.ndarray
    """Diverged runs of each point."""
    stopped_G: np.ndarray
    """Runs of each point that were stopped early, for being far behind the best."""
    error_G: np.ndarray
    """Standard error of each mean where the table gives one, else nan."""
    squares_G: np.ndarray
    """Sum of squared deviations of each point's finite runs from their mean."""
    df_G: np.ndarray
    """Degrees of freedom of those squares: finite runs less one."""

    @property
    def step(self) -> float:
        """Usual distance of grid points, octaves."""
        return float(np.median(np.diff(self.x_G))) if len(self.x_G) > 1 else 1.0

    @property
    def near_G(self) -> np.ndarray:
        """Whether each point is within an octave (or a grid step) of the best one."""
        return np.abs(self.x_G - self.x_G[int(np.argmin(self.mean_G))]) <= max(1.0, self.step) + 1e-9

    @functools.cached_property
    def fit(self) -> Draws:
        """The local fit of the means as they are: one "draw"."""
        return fit_curves(self.x_G, self.mean_G[None], self.step)


@dataclass(frozen=True)
class Optimum:
    """Where a loss curve is lowest. All x are log2 of the hyperparameter."""

    scale: float
    status: str
    """"bracketed", "bracketed by divergence", "bracketed by stopped runs", "flat", "at lower edge", "at upper
    edge", "one value" (nothing was tuned) or "no finite run"."""
    x: float
    low: float
    high: float
    """95 % interval of x."""
    loss: float
    """Fitted loss at the optimum, nat per token."""
    akima_x: float
    """The optimum of the Akima interpolation."""
    best_x: float
    """The best grid point."""
    band_low: float
    band_high: float
    """Grid range whose mean loss is within 0.01 of the optimum's."""
    se: float
    """Standard error of x, octaves: spread of the draws and disagreement of the two estimators."""

    @property
    def is_bracketed(self) -> bool:
        """Whether the grid holds the optimum inside."""
        return self.status.startswith("bracketed") or self.status == "flat"

    @property
    def is_known(self) -> bool:
        """Whether `loss` is that of a tuned model: the optimum is bracketed, or nothing was to be tuned."""
        return self.is_bracketed or self.status == "one value"

    def sentence(self) -> str:
        """What to say of it."""
        if self.status == "at lower edge":
            return f"not bracketed: optimum ≤ 2^{self.best_x:.4g}; extend the grid downwards"
        if self.status == "at upper edge":
            return f"not bracketed: optimum ≥ 2^{self.best_x:.4g}; extend the grid upwards"
        if self.status == "no finite run":
            return "every run diverged; extend the grid downwards"
        if self.status == "flat":
            return f"flat: within 0.01 of the best from 2^{self.band_low:.4g} to 2^{self.band_high:.4g}"
        return self.status

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"sentence": self.sentence()}


def loss_curve(runs: pd.DataFrame) -> LossCurve:
    """The curve of one scale (and parametrization) from checked runs.

    A cell counts as lost if at least half its runs are; else its mean is over the finite ones. Where
    cells have unequal seeds, an effect of each seed is taken out first, so that none is better for its seeds.
    """
    runs = runs.assign(loss=runs["loss"] - _seed_effects(runs))
    x, mean, count, diverged, stopped, error, squares, df = [], [], [], [], [], [], [], []
    for value, cell in runs.groupby("x"):
        losses = cell["loss"].to_numpy()
        finite = losses[np.isfinite(losses)]
        lost = len(losses) - len(finite)
        alive = 2 * lost < len(losses)
        x.append(value)
        mean.append(finite.mean() if alive else np.inf)
        count.append(len(finite) if alive else len(losses))
        stopped.append(int(cell["stopped"].sum()))
        diverged.append(lost - stopped[-1])
        error.append(float(cell["loss_error"].mean()) / np.sqrt(len(cell)))
        squares.append(float(((finite - finite.mean()) ** 2).sum()) if alive else 0.0)
        df.append(len(finite) - 1 if alive else 0)
    return LossCurve(
        scale=float(runs["scale"].iloc[0]),
        x_G=np.array(x, float),
        mean_G=np.array(mean, float),
        count_G=np.array(count),
        diverged_G=np.array(diverged),
        stopped_G=np.array(stopped),
        error_G=np.array(error),
        squares_G=np.array(squares),
        df_G=np.array(df),
    )


def _seed_effects(runs: pd.DataFrame) -> np.ndarray:
    """Each run's seed effect, nat: 0 where cells have equal seeds, for means then compare like with like.

    Loss = cell + seed + noise by ridge regression with a penalty of 1 on the seeds, which is the mixed model
    of a seed variance equal to the noise's; over the cells within 0.3 nat of the best, where training is
    stable.
    """
    losses = runs["loss"].to_numpy()
    finite = np.isfinite(losses)
    cells, seeds = runs["x"].to_numpy(), runs["seed"].to_numpy()
    counts = runs[finite].groupby("x")["seed"].count()
    if counts.nunique() < 2 or len(np.unique(seeds[finite])) < 2:
        return np.zeros(len(runs))
    means = runs[finite].groupby("x")["loss"].mean()
    used = finite & np.isin(cells, means.index[means <= means.min() + 0.3])
    levels = np.unique(seeds)
    cell_design = (cells[used, None] == np.unique(cells[used])).astype(float)
    seed_design = (seeds[used, None] == levels).astype(float)
    penalty = np.hstack([np.zeros((len(levels), cell_design.shape[1])), np.eye(len(levels))])
    design = np.vstack([np.hstack([cell_design, seed_design]), penalty])
    target = np.concatenate([losses[used], np.zeros(len(levels))])
    effects = np.linalg.lstsq(design, target, rcond=None)[0][cell_design.shape[1] :]
    return np.where(finite, effects[np.searchsorted(levels, seeds)], 0.0)


@dataclass(frozen=True)
class Noise:
    """How much a single run's loss scatters near the optimum, pooled over curves."""

    sigma: float
    """Standard deviation of one run, nat per token."""
    df: int
    source: str
    """"seeds", "given errors", or "lack of fit" (no replicates: the fits' residuals stand in)."""

    def draw_factors(self, generator: np.random.Generator, draws: int) -> np.ndarray:
        """Factor on sigma in each draw, as uncertain as few degrees of freedom leave it: √(df/χ²).

        Given errors are taken as they are; lack of fit holds model error already, and would cover too much.
        """
        if self.source != "seeds":
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
        return np.sqrt(variance_G / np.maximum(curve.count_G, 1))


def pooled_noise(curves: list[LossCurve], rounding: float = 0.0) -> Noise:
    """Noise of single runs from replicates, else from given errors, else from what the fits leave over.

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
    squares, left = 0.0, 0
    for curve in curves:
        best = int(np.argmin(curve.mean_G))
        window = _window(curve.x_G, np.isfinite(curve.mean_G), best, curve.step)
        degree = _degree(len(window))
        if len(window) > degree + 1:
            u = curve.x_G[window] - curve.x_G[best]
            fit = np.polynomial.polynomial.polyfit(u, curve.mean_G[window], degree)
            squares += float(((curve.mean_G[window] - np.polynomial.polynomial.polyval(u, fit)) ** 2).sum())
            left += len(window) - degree - 1
    sigma = np.sqrt(squares / left) if left else 0.005
    return Noise(max(float(sigma), floor, 1e-6), max(left, 1), "lack of fit")


@dataclass(frozen=True)
class Draws:
    """Bootstrap draws of a curve: its optimum and local fit in each."""

    x_R: np.ndarray
    """Optimum of each draw; -inf or +inf where it fell on the lower or upper edge of the grid."""
    akima_x_R: np.ndarray
    """The optimum of each draw's Akima interpolation; likewise."""
    loss_R: np.ndarray
    means_RG: np.ndarray
    coefficients_R4: np.ndarray
    centre_R: np.ndarray


def draw_curve(curve: LossCurve, noise: Noise, generator: np.random.Generator, draws: int = DRAWS) -> Draws:
    """Bootstrap a curve: cell means redrawn around what was seen, bracketing and fit re-run in each."""
    error_G = noise.errors_G(curve)
    factor_R1 = noise.draw_factors(generator, draws)[:, None]
    shocks_RG = generator.standard_normal((draws, len(curve.x_G))) * factor_R1 * error_G
    return fit_curves(curve.x_G, curve.mean_G + shocks_RG, curve.step)


def fit_curves(x_G: np.ndarray, means_RG: np.ndarray, step: float) -> Draws:
    """Bracket and fit many curves over one grid at once (those with one best point share a projection)."""
    rows = len(means_RG)
    finite_G = np.isfinite(means_RG[0])
    x_R, akima_x_R, loss_R = np.empty(rows), np.empty(rows), np.empty(rows)
    coefficients_R4, centre_R = np.zeros((rows, 4)), np.zeros(rows)
    best_R = np.argmin(means_RG, axis=1)
    for best in np.unique(best_R):
        chosen = best_R == best
        window = _window(x_G, finite_G, int(best), step)
        u = x_G[window] - x_G[best]
        degree = _degree(len(window))
        projection = np.linalg.pinv(np.vander(u, degree + 1, increasing=True))
        c_R = means_RG[chosen][:, window] @ projection.T
        c_R4 = np.pad(c_R, ((0, 0), (0, 3 - degree)))
        lower, upper = _neighbours(x_G, finite_G, int(best))
        fine = np.where(_FINE < 0, -_FINE * (lower - x_G[best]), _FINE * (upper - x_G[best]))
        values = c_R4 @ np.vander(fine, 4, increasing=True).T
        at = np.argmin(values, axis=1)
        loss_R[chosen] = values[np.arange(len(at)), at]
        coefficients_R4[chosen], centre_R[chosen] = c_R4, x_G[best]
        if best in (0, len(x_G) - 1):
            x_R[chosen] = akima_x_R[chosen] = -np.inf if best == 0 else np.inf
            continue
        x_R[chosen] = x_G[best] + fine[at]
        if lower < x_G[best] < upper:
            akima = Akima1DInterpolator(x_G[finite_G], means_RG[np.ix_(chosen, finite_G)].T)
            akima_x_R[chosen] = x_G[best] + fine[np.argmin(akima(x_G[best] + fine), axis=0)]
        else:
            akima_x_R[chosen] = x_R[chosen]
    return Draws(x_R, akima_x_R, loss_R, means_RG, coefficients_R4, centre_R)


@dataclass(frozen=True)
class Estimate:
    """What is known of one scale: its curve, the bootstrap of it, and its optimum."""

    curve: LossCurve
    draws: Draws
    optimum: Optimum


def estimate(curve: LossCurve, noise: Noise, generator: np.random.Generator) -> Estimate:
    """Bootstrap a curve and find its optimum."""
    draws = draw_curve(curve, noise, generator)
    return Estimate(curve, draws, find_optimum(curve, draws))


def find_optimum(curve: LossCurve, draws: Draws) -> Optimum:
    """The optimum of a curve, with its interval from the draws."""
    x_G, finite_G = curve.x_G, np.isfinite(curve.mean_G)
    nothing = dict.fromkeys(
        ("x", "low", "high", "loss", "akima_x", "best_x", "band_low", "band_high", "se"), np.nan
    )
    if not finite_G.any():
        return Optimum(curve.scale, "no finite run", **nothing)
    best = int(np.argmin(curve.mean_G))
    fit = curve.fit
    if len(x_G) == 1:
        value = {"x": x_G[0], "best_x": x_G[0], "loss": curve.mean_G[0]}
        return Optimum(curve.scale, "one value", **(nothing | {k: float(v) for k, v in value.items()}))
    near_best = x_G[finite_G & (curve.mean_G <= fit.loss_R[0] + 0.01)]
    band = (float(near_best.min()), float(near_best.max())) if len(near_best) else (float(x_G[best]),) * 2
    known = {"best_x": float(x_G[best]), "band_low": band[0], "band_high": band[1]}
    low, high = (float(q) for q in np.quantile(draws.x_R, [0.025, 0.975], method="nearest"))
    if best in (0, len(x_G) - 1):
        status = "at lower edge" if best == 0 else "at upper edge"
        bounds = (
            {"low": -np.inf, "high": max(high, x_G[best])}
            if best == 0
            else {"low": min(low, x_G[best]), "high": np.inf}
        )
        return Optimum(
            curve.scale,
            status,
            **(nothing | known | bounds | {"x": float(x_G[best]), "loss": float(curve.mean_G[best])}),
        )
    x = float(fit.x_R[0])
    lost = [i for i in (best - 1, best + 1) if not finite_G[i]]
    bracketed = "bracketed"
    if lost:
        bracketed += " by divergence" if curve.diverged_G[lost].any() else " by stopped runs"
    akima_x = float(fit.akima_x_R[0])
    if lost:
        low, high = min(low, float(x_G[best - 1])), max(high, float(x_G[best + 1]))
    bias = _model_error(x - akima_x, draws, curve.step)
    low, high = x - math.hypot(x - min(low, x), bias), x + math.hypot(max(high, x) - x, bias)
    inside = draws.x_R[np.isfinite(draws.x_R)]
    spread = float(inside.std()) if len(inside) > 1 else curve.step
    status = "flat" if high - low > 4 * curve.step and not lost else bracketed
    se = math.hypot(spread, bias / 2) if not lost else max(spread, curve.step / 2)
    return Optimum(
        curve.scale,
        status,
        x=x,
        low=low,
        high=high,
        loss=float(fit.loss_R[0]),
        akima_x=akima_x,
        se=se,
        **known,
    )


def _model_error(disagreement: float, draws: Draws, step: float) -> float:
    """How far the fit's own bias may reach, octaves, as half of a 95 % interval.

    The disagreement of cubic and Akima beyond what noise alone makes of it, and what both have in common
    where curvature changes between points: _COARSENESS·min(step, 1)², set so that the intervals of
    benchmarks/interval_coverage.py hold what they claim.
    """
    both = np.isfinite(draws.x_R) & np.isfinite(draws.akima_x_R)
    by_noise = float((draws.x_R[both] - draws.akima_x_R[both]).var()) if both.any() else 0.0
    return math.hypot(math.sqrt(max(0.0, disagreement**2 - by_noise)), _COARSENESS * min(step, 1.0) ** 2)


def _degree(points: int) -> int:
    return 3 if points >= 5 else max(0, min(2, points - 1))


def _window(x_G: np.ndarray, finite_G: np.ndarray, best: int, step: float) -> np.ndarray:
    """Finite points within WINDOW_STEPS of the best, not across a diverged one."""
    inside = finite_G & (np.abs(x_G - x_G[best]) <= WINDOW_STEPS * step + 1e-9)
    for direction in (-1, 1):
        k = best
        while 0 <= k < len(x_G):
            if not finite_G[k]:
                inside[k::direction] = False
                break
            k += direction
    return np.flatnonzero(inside)


def _neighbours(x_G: np.ndarray, finite_G: np.ndarray, best: int) -> tuple[float, float]:
    """Where the optimum may lie: up to the next finite points (the best itself where there is none)."""
    lower = x_G[best - 1] if best > 0 and finite_G[best - 1] else x_G[best]
    upper = x_G[best + 1] if best + 1 < len(x_G) and finite_G[best + 1] else x_G[best]
    return float(lower), float(upper)
