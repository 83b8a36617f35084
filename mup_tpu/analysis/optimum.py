"""The optimum of a loss curve over log2 of a hyperparameter, with an interval.

A cubic, fitted to the points around the best one by weighted least squares. Each point's error is its noise
and a share of its rise above the best (MODEL_ERROR): that is what a cubic leaves out of a valley, and it
keeps runs far up, which blow up, level off or lie behind a wall, from bending the fit where it is read. The
asymmetry is held to what valleys have by a prior. The interval is a parametric bootstrap of both errors,
bracketing and fit re-run in each draw, because resampling three seeds covers far less than it claims. How
these were chosen, and what they cover: benchmarks/interval_coverage.py.

Shapes: R draws, G grid points, W points of a fit's window, C points of several curves.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy
from scipy.sparse.linalg import LinearOperator, cg

EPSILON = 0.01
"""Regret that does not matter, nat per token."""
DRAWS = 2000
MODEL_ERROR = 0.2
"""Standard error of a cubic at a point, as a share of the point's rise above the best."""
_WINDOW_STEPS = 3
_WINDOW_OCTAVES = 3.0
_ASYMMETRY = 0.3
"""Standard deviation of a valley's third coefficient over its second, per octave: 0.13 at most in the
valleys of the benchmark, 0.3 in those called asymmetric."""
_LEAST_ERROR = 1e-4
"""Least error of a mean in a fit, nat: below, weights differ by more than double precision carries."""
_REMAINDER, _MOST_REMAINDER = 0.035, 0.3
"""Standard error of a point's rise u octaves from the optimum in the bootstrap, as a share of the rise:
0.035·u² and at most 0.3. A cubic leaves u²/16 out of a valley with straight sides, a²·u²/12 out of one that
rises as exp(a·u)."""
_USUAL_MISS = 1.25
"""Standard errors by which a fit may miss a point near its optimum before the bootstrap's noise grows."""
_MISS = 3.0
"""Standard errors by which a fit may miss a point near its optimum before it is said."""
_LEAST_CURVATURE = 1e-3
"""Least second coefficient of a valley, nat per squared octave: a fifth of the flattest that is stored."""
_NEAR, _FAR, _ENOUGH = 0.15, 0.5, 7
"""Rise over the best, nat, up to which single runs tell of the noise, since further up a cubic's error is
larger; rise where fewer points than enough are that near."""
_STEEP = 0.1
"""Rise of a neighbour over the best, nat, from which no optimum lies nearer to that neighbour."""
_PRIOR_DF = 4
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
    best_x: float
    """The best grid point."""
    band_low: float
    band_high: float
    """Range around the optimum in which the valley lies within epsilon of it, on the grid."""
    se: float
    """Standard error of x, octaves."""
    missed_x: float = math.nan
    """The point near the optimum that the fit misses by more than 3 standard errors, the worst if several."""
    missed_by: float = math.nan
    """Its mean loss less the fit's, nat per token."""
    below: float = math.nan
    """Loss of the best run less the fit's at the optimum, nat per token, where that is much."""
    epsilon: float = EPSILON
    """Loss over the optimum's that does not matter, nat per token."""

    @property
    def is_bracketed(self) -> bool:
        """Whether the grid holds the optimum inside."""
        return self.status.startswith("bracketed") or self.status == "flat"

    @property
    def is_known(self) -> bool:
        """Whether `loss` is that of a tuned model: the optimum is bracketed, or nothing was to be tuned."""
        return self.is_bracketed or self.status == "one value"

    @property
    def is_fitted(self) -> bool:
        """Whether the fit agrees with the runs near the optimum, and does not lie far below all of them."""
        return not (math.isfinite(self.missed_by) or math.isfinite(self.below))

    def sentence(self) -> str:
        """What to say of it."""
        if self.status == "at lower edge":
            return f"not bracketed: optimum ≤ 2^{self.best_x:.4g}; extend the grid downwards"
        if self.status == "at upper edge":
            return f"not bracketed: optimum ≥ 2^{self.best_x:.4g}; extend the grid upwards"
        if self.status == "no finite run":
            return "every run diverged; extend the grid downwards"
        if self.status == "flat":
            near = f"2^{self.band_low:.4g} to 2^{self.band_high:.4g}"
            return f"flat: a wide interval; within {self.epsilon:g} nat of the best from {near}"
        if math.isfinite(self.below):
            return (
                f"{self.status}; the fit's lowest point lies {self.below:.2g} nat below every run: "
                "the interval reaches to the next points"
            )
        if not self.is_fitted:
            side = "below" if self.missed_by > 0 else "above"
            return (
                f"{self.status}; the fit lies {abs(self.missed_by):.2g} nat {side} the runs at 2^"
                f"{self.missed_x:.4g}, more than their errors allow: the interval reaches to the next points"
            )
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
    level, _ = pd.factorize(seeds)
    cell, _ = pd.factorize(cells[used])
    effects = _ridge_effects(losses[used], cell, level[used], level.max() + 1)
    return np.where(finite, effects[level], 0.0)


def _ridge_effects(y_N: np.ndarray, cell_N: np.ndarray, seed_N: np.ndarray, seeds: int) -> np.ndarray:
    """Seed effects of loss = cell + seed + noise with a penalty of 1 on the seeds, nat; one a seed.

    Cells are eliminated (their means are taken out), which leaves (Zᵀ M Z + I) s = Zᵀ M y. Conjugate
    gradients solve it in memory and time of the rows, where a design matrix of a million seeds is 73 GiB: its
    eigenvalues lie between 1 and 1 + the runs of a seed.
    """
    count = np.bincount(cell_N)

    def centred(v_N: np.ndarray) -> np.ndarray:
        return v_N - (np.bincount(cell_N, v_N) / count)[cell_N]

    def normal(s_S: np.ndarray) -> np.ndarray:
        return np.bincount(seed_N, centred(s_S[seed_N]), seeds) + s_S

    operator = LinearOperator((seeds, seeds), matvec=normal, dtype=float)
    return cg(operator, np.bincount(seed_N, centred(y_N), seeds), rtol=1e-13)[0]


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

        Given errors are taken as they are. Lack of fit, pooled over curves that are alike, has 4 or more.
        """
        if self.source == "given errors":
            return np.ones(draws)
        df = self.df if self.source == "seeds" else max(self.df, 4)
        return np.sqrt(df / generator.chisquare(df, draws))

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
        sigma = np.sqrt(np.median(squares_C[known] / scipy.stats.chi2.median(df_C[known])))
        return Noise(max(float(sigma), floor), int(df_C.sum()), "seeds")
    if any(np.isfinite(c.error_G).any() for c in curves):
        return Noise(float(np.nanmean(np.concatenate([c.error_G for c in curves]))), 10**6, "given errors")
    sigma, left = _lack_of_fit(curves)
    return Noise(max(sigma, floor, 1e-6), left, "lack of fit")


def _lack_of_fit(curves: list[LossCurve]) -> tuple[float, int]:
    """Noise that would leave what the fits leave, nat, and its degrees of freedom.

    The noise's share of each squared residual, by turns with the fits that it weights; points that a fit
    misses outright (a wall) say nothing of it.
    """
    sigma, left = 0.01, 0.0
    for _ in range(20):
        squares = left = 0.0
        for curve in curves:
            best = int(np.argmin(curve.mean_G))
            window = _window(curve.x_G, np.isfinite(curve.mean_G), best, curve.step)
            rise_W = curve.mean_G[window] - curve.mean_G[best]
            is_near_W = rise_W <= _NEAR
            window = window[is_near_W if is_near_W.sum() >= _ENOUGH else rise_W <= _FAR]
            if len(window) < 4:
                continue
            u_W, mean_W = curve.x_G[window] - curve.x_G[best], curve.mean_G[window]
            fit = _fit(u_W, mean_W[None], curve.mean_G[[best]], np.full(len(window), sigma))
            residual_W = mean_W - np.vander(u_W, 4, increasing=True) @ fit.coefficients_R4[0]
            variance_W = fit.variance_RW[0]
            used = residual_W**2 <= _MISS**2 * variance_W
            share_W = np.where(used, sigma**2 / variance_W, 0.0)
            squares += float((share_W * residual_W**2).sum())
            left += float((share_W * (1 - fit.leverage_RW[0])).sum())
        if left < 1e-3:  # too few points, or so exact that all that is left is model error
            return (sigma, 1) if sigma < 0.01 else (0.005, 1)
        sigma = max(math.sqrt(squares / left), _LEAST_ERROR)
    return sigma, max(round(left), 1)


@dataclass(frozen=True)
class Draws:
    """Bootstrap draws of a curve: its optimum and local fit in each."""

    x_R: np.ndarray
    """Optimum of each draw; -inf or +inf where it fell on the lower or upper edge of the grid."""
    loss_R: np.ndarray
    means_RG: np.ndarray
    coefficients_R4: np.ndarray
    centre_R: np.ndarray

    def fitted(self, x: np.ndarray) -> np.ndarray:
        """Loss of each draw's local fit at its own x (R,); of one draw, at as many x as are given."""
        u = x - self.centre_R
        return sum((self.coefficients_R4[:, k] * u**k for k in range(4)), start=np.zeros(1))


def draw_curve(
    curve: LossCurve,
    noise: Noise,
    fit: Draws,
    misses_G: np.ndarray,
    generator: np.random.Generator,
    draws: int = DRAWS,
) -> Draws:
    """Bootstrap a curve: cell means redrawn around what was seen, bracketing and fit re-run in each.

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
    """How far each point lies above a fit, in standard errors of noise and model; 0 where runs are lost."""
    finite_G = np.isfinite(curve.mean_G)
    mean_G = np.where(finite_G, curve.mean_G, curve.mean_G.min() if finite_G.any() else 0.0)
    error_G = np.hypot(np.maximum(noise.errors_G(curve), _LEAST_ERROR), MODEL_ERROR * (mean_G - mean_G.min()))
    return np.where(finite_G, (mean_G - fit.fitted(curve.x_G)) / error_G, 0.0)


def _beside_best(curve: LossCurve) -> np.ndarray:
    """The best point, its neighbours, and what is as near as they usually are (G,)."""
    return curve.near_G | (np.abs(np.arange(len(curve.x_G)) - int(np.argmin(curve.mean_G))) <= 1)


def fit_curves(x_G: np.ndarray, means_RG: np.ndarray, error_G: np.ndarray, step: float) -> Draws:
    """Bracket and fit many curves over one grid at once.

    Args:
        x_G: the grid, log2, ascending.
        means_RG: the curves' losses, nat; +inf at the same points in all.
        error_G: noise of the losses, nat.
        step: usual distance of grid points, octaves.
    """
    rows = len(means_RG)
    finite_G = np.isfinite(means_RG[0])
    x_R, loss_R = np.empty(rows), np.empty(rows)
    coefficients_R4, centre_R = np.zeros((rows, 4)), np.zeros(rows)
    best_R = np.argmin(means_RG, axis=1)
    for best in np.unique(best_R):
        chosen = best_R == best
        window = _window(x_G, finite_G, int(best), step)
        means_RW = means_RG[chosen][:, window]
        fit = _fit(x_G[window] - x_G[best], means_RW, means_RG[chosen, best], error_G[window])
        lower, upper = _bounds(x_G, finite_G, int(best))
        fine = np.where(_FINE < 0, -_FINE * (lower - x_G[best]), _FINE * (upper - x_G[best]))
        values = fit.coefficients_R4 @ np.vander(fine, 4, increasing=True).T
        # Before a point that the fit misses the valley ends, nobody knows where: halfway is least wrong.
        low_R1, high_R1 = _steep_beside(x_G[window] - x_G[best], means_RW, error_G[window])
        low_R1, high_R1 = np.maximum(fit.low_R1, low_R1), np.minimum(fit.high_R1, high_R1)
        values[(fine < low_R1 / 2) | (fine > high_R1 / 2)] = np.inf
        at = np.argmin(values, axis=1)
        loss_R[chosen] = values[np.arange(len(at)), at]
        coefficients_R4[chosen], centre_R[chosen] = fit.coefficients_R4, x_G[best]
        found = x_G[best] + fine[at]
        found = np.where((lower == x_G[0]) & (at == 0), -np.inf, found)
        x_R[chosen] = np.where((upper == x_G[-1]) & (at == len(fine) - 1), np.inf, found)
    return Draws(x_R, loss_R, means_RG, coefficients_R4, centre_R)


@dataclass(frozen=True)
class _Fit:
    """Weighted cubics through one window."""

    coefficients_R4: np.ndarray
    variance_RW: np.ndarray
    """Of each point: noise and model error, nat²."""
    leverage_RW: np.ndarray
    low_R1: np.ndarray
    high_R1: np.ndarray
    """The nearest points on either side that the fit misses, octaves from the best; infinite where it misses
    none."""


def _fit(u_W: np.ndarray, means_RW: np.ndarray, best_R: np.ndarray, error_W: np.ndarray) -> _Fit:
    """Cubics in u, octaves from the best point, whose loss is best_R.

    Fitted twice: a point that the first fit misses ends the valley on its side, as a wall does.
    """
    rise_RW = means_RW - best_R[:, None]
    variance_RW = np.maximum(error_W, _LEAST_ERROR) ** 2 + (MODEL_ERROR * rise_RW) ** 2
    coefficients_R4, _ = _weighted(u_W, rise_RW, 1 / variance_RW)
    left_RW = rise_RW - coefficients_R4 @ np.vander(u_W, 4, increasing=True).T
    missed_RW = left_RW**2 > _MISS**2 * variance_RW
    low_R1 = np.where(missed_RW & (u_W < 0), u_W, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    high_R1 = np.where(missed_RW & (u_W > 0), u_W, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    inside_RW = (u_W > low_R1) & (u_W < high_R1)
    coefficients_R4, leverage_RW = _weighted(u_W, rise_RW, inside_RW / variance_RW)
    coefficients_R4[:, 0] += best_R
    return _Fit(coefficients_R4, variance_RW, leverage_RW, low_R1, high_R1)


def _steep_beside(
    u_W: np.ndarray, means_RW: np.ndarray, error_W: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of the best point that are plainly worse, octaves from it (R × 1); infinite for none."""
    best = int(np.searchsorted(u_W, 0.0))
    ends = []
    for beside, none in ((best - 1, -np.inf), (best + 1, np.inf)):
        if not 0 <= beside < len(u_W):
            ends.append(np.full((len(means_RW), 1), none))
            continue
        rise_R = means_RW[:, beside] - means_RW[:, best]
        is_steep_R = rise_R > max(_STEEP, 2 * float(error_W[beside]))
        ends.append(np.where(is_steep_R, u_W[beside], none)[:, None])
    return ends[0], ends[1]


def _weighted(u_W: np.ndarray, rise_RW: np.ndarray, weight_RW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and leverages of cubics by weighted least squares, with weak priors and one of asymmetry.

    The latter is in units of the second coefficient of a parabola through the same points.
    """
    design_W4 = np.vander(u_W, 4, increasing=True)
    weighted_R4W = (design_W4 * weight_RW[..., None]).transpose(0, 2, 1)
    normal_R44 = weighted_R4W @ design_W4
    target_R4 = (weighted_R4W @ rise_RW[..., None])[..., 0]
    weak = 1e-3 * np.eye(3)  # where points are too few for a cubic
    parabola_R3 = np.linalg.solve(normal_R44[:, :3, :3] + weak, target_R4[:, :3, None])[..., 0]
    curvature_R = np.maximum(parabola_R3[:, 2], _LEAST_CURVATURE)
    normal_R44[:, :3, :3] += weak
    normal_R44[:, 3, 3] += 1 / (_ASYMMETRY * curvature_R) ** 2
    gain_R4W = np.linalg.solve(normal_R44, weighted_R4W)
    return (gain_R4W @ rise_RW[..., None])[..., 0], np.einsum("wk,rkw->rw", design_W4, gain_R4W)


@dataclass(frozen=True)
class Estimate:
    """What is known of one scale: its curve, the fit and the bootstrap of it, and its optimum."""

    curve: LossCurve
    fit: Draws
    """The fit of the means as they are: one "draw"."""
    draws: Draws
    optimum: Optimum
    missed_G: np.ndarray
    """Whether the fit misses each point, by more than 3 standard errors."""


def estimate(
    curve: LossCurve, noise: Noise, generator: np.random.Generator, epsilon: float = EPSILON
) -> Estimate:
    """Bootstrap a curve and find its optimum."""
    fit = fit_curves(curve.x_G, curve.mean_G[None], noise.errors_G(curve), curve.step)
    misses_G = misses(curve, noise, fit)
    draws = draw_curve(curve, noise, fit, misses_G, generator)
    optimum = find_optimum(curve, fit, draws, misses_G, epsilon)
    return Estimate(curve, fit, draws, optimum, np.abs(misses_G) > _MISS)


def find_optimum(
    curve: LossCurve, fit: Draws, draws: Draws, misses_G: np.ndarray, epsilon: float = EPSILON
) -> Optimum:
    """The optimum of a curve, with its interval from the draws.

    Where the fit misses a point near the optimum by more than 3 standard errors (so also where it lies below
    the best measured mean by more than noise allows), the interval reaches to the next points, as it does
    beside diverged ones. So it does where the fit has no minimum at all, as at the edge of a plateau: the
    optimum is then the best point.
    """
    x_G, finite_G = curve.x_G, np.isfinite(curve.mean_G)
    nothing = dict.fromkeys(("x", "low", "high", "loss", "best_x", "band_low", "band_high", "se"), np.nan)
    if not finite_G.any():
        return Optimum(curve.scale, "no finite run", **nothing, epsilon=epsilon)
    best = int(np.argmin(curve.mean_G))
    if len(x_G) == 1:
        value = {"x": x_G[0], "best_x": x_G[0], "loss": curve.mean_G[0]}
        found = nothing | {k: float(v) for k, v in value.items()}
        return Optimum(curve.scale, "one value", **found, epsilon=epsilon)
    is_inside = math.isfinite(fit.x_R[0])
    x, loss = float(fit.x_R[0]) if is_inside else float(x_G[best]), float(fit.loss_R[0])
    band = _band(curve, fit, x, (loss if is_inside else float(curve.mean_G[best])) + epsilon)
    known = {"best_x": float(x_G[best]), "band_low": band[0], "band_high": band[1], "epsilon": epsilon}
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
    lost = [i for i in (best - 1, best + 1) if not finite_G[i]]
    worst = int(np.argmax(np.where(_beside_best(curve), np.abs(misses_G), 0.0)))
    missed = {}
    if not is_inside:
        loss, worst = float(curve.mean_G[best]), best
    if abs(misses_G[worst]) > _MISS or not is_inside:
        missed_by = float(curve.mean_G[worst] - fit.fitted(x_G[[worst]])[0])
        missed = {"missed_x": float(x_G[worst]), "missed_by": missed_by}
    if curve.mean_G[best] - loss > _STEEP:
        missed["below"] = float(curve.mean_G[best] - loss)
    status = "bracketed"
    if lost:
        status += " by divergence" if curve.diverged_G[lost].any() else " by stopped runs"
    low, high = min(low, x), max(high, x)
    if lost or missed:
        low, high = min(low, float(x_G[best - 1])), max(high, float(x_G[best + 1]))
    inside = draws.x_R[np.isfinite(draws.x_R)]
    se = float(inside.std()) if len(inside) > 1 else curve.step
    if lost or missed:
        se = max(se, curve.step / 2)
    elif high - low > 4 * curve.step:
        status = "flat"
    return Optimum(
        curve.scale,
        status,
        x=x,
        low=low,
        high=high,
        loss=loss,
        se=se,
        **known,
        **missed,
    )


def _band(curve: LossCurve, fit: Draws, x: float, most: float) -> tuple[float, float]:
    """Range around x where the valley stays below a loss: the fit near the best point, else the means."""
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


def _window(x_G: np.ndarray, finite_G: np.ndarray, best: int, step: float) -> np.ndarray:
    """Finite points within three steps or octaves of the best, whichever is more, and its neighbours.

    None across a diverged point.
    """
    reach = max(_WINDOW_STEPS * step, _WINDOW_OCTAVES)
    near_G = np.abs(np.arange(len(x_G)) - best) <= 1
    inside = finite_G & (near_G | (np.abs(x_G - x_G[best]) <= reach + 1e-9))
    for direction in (-1, 1):
        k = best
        while 0 <= k < len(x_G):
            if not finite_G[k]:
                inside[k::direction] = False
                break
            k += direction
    return np.flatnonzero(inside)


def _bounds(x_G: np.ndarray, finite_G: np.ndarray, best: int) -> tuple[float, float]:
    """Where the optimum may lie: to the next points, or an octave if they are closer; not past a lost one."""
    ends = []
    for direction in (-1, 1):
        k = best
        while 0 <= k + direction < len(x_G) and finite_G[k + direction]:
            k += direction
            if abs(x_G[k] - x_G[best]) >= 1.0:
                break
        reach = max(1.0, abs(x_G[best + direction] - x_G[best])) if k != best else 0.0
        ends.append(float(x_G[best] + direction * min(reach, abs(x_G[k] - x_G[best]))))
    return ends[0], ends[1]
