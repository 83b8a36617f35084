"""Loss curves over log2 of a hyperparameter, the scatter of runs, and the optimum with its interval.

Optimum and interval are those of draws of the curve's valley (valley.py). An optimum that nothing bounds has
draws beyond the grid: its interval is open and its standard error is octaves.
benchmarks/interval_coverage.py measures the coverage.

Shapes: G grid points, N runs, S seeds, C points of several curves, W points of a fit's window, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import chdtr, chdtri

from mup_tpu.analysis.valley import MISS, Fit, Valley, draw, fit_valley, share

_STABLE = 2.0  # octaves, or grid steps, from the best cell within which cells say the effects of seeds
# Seeds times squared cells beyond which no effects are taken out: their solution is of matrices
_MOST_PRODUCTS = 1e9
# Usual deviations of a run from its cell and seed, beyond which it counts less for its seed's effect
_CLIPPED = 2.5


@dataclass(frozen=True)
class LossCurve:
    """Mean loss of each grid point at one scale; +inf where half of its runs diverged or were stopped."""

    scale: float
    x_G: np.ndarray  # log2 of the hyperparameter, ascending
    mean_G: np.ndarray
    count_G: np.ndarray
    diverged_G: np.ndarray  # Diverged runs of each point
    stopped_G: np.ndarray
    """Runs of each point that were stopped early, for being far behind the best, or refused."""
    refused_G: np.ndarray  # Runs of each point that a condition on an optimum refuses
    error_G: np.ndarray  # Standard error of each mean where the table gives one, else nan
    squares_G: np.ndarray
    """Sum of squared deviations of each point's finite runs from their mean, effects of seeds aside."""
    df_G: np.ndarray  # Degrees of freedom of those squares: finite runs less one, less the seeds' share
    weight_G: np.ndarray
    """Runs that count of each point beside the others: fewer where its seeds are not theirs."""
    beside: tuple[float, ...] = ()  # Values of the scales that vary beside the first

    @property
    def is_bracketed(self) -> bool:
        return 0 < int(np.argmin(self.mean_G)) < len(self.x_G) - 1

    @property
    def step(self) -> float:
        # Median distance of grid points, octaves
        return float(np.median(np.diff(self.x_G))) if len(self.x_G) > 1 else 1.0

    @property
    def runs(self) -> int:
        lost_G = np.where(np.isfinite(self.mean_G), self.diverged_G + self.stopped_G, 0)
        return int((self.count_G + lost_G).sum())

    def fate(self, points: Sequence[int] | np.ndarray) -> str:
        """Return what became of the lost runs of some points: diverged, stopped early or refused."""
        if self.diverged_G[points].any():
            return "diverged"
        is_refused = self.refused_G[points].any() and (self.stopped_G == self.refused_G)[points].all()
        return "refused" if is_refused else "stopped early"

    @property
    def near_G(self) -> np.ndarray:
        # Within an octave, or a grid step, of the best point
        return np.abs(self.x_G - self.x_G[int(np.argmin(self.mean_G))]) <= max(1.0, self.step) + 1e-9


# Columns of checked runs that `loss_curve` reads
CURVE_COLUMNS = ("scale", "x", "seed", "loss", "loss_error", "stopped", "refused")


def loss_curve(runs: Mapping[str, Any] | pd.DataFrame) -> LossCurve:
    """Average checked runs of one scale (and parametrization), by columns, to a curve.

    A cell counts as lost if at least half its runs are; else its mean is over the finite ones. Runs of one
    seed share initial weights and data, and so an effect on the loss that moves no optimum: it is taken out.
    """
    columns = {name: np.asarray(runs[name]) for name in CURVE_COLUMNS}
    cell_N, x_G = pd.factorize(columns["x"], sort=True)  # by hashes: np.unique sorts
    effect_N, share_G, left = _seed_effects(columns["loss"], columns["seed"], x_G, cell_N)
    loss_N = columns["loss"] - effect_N

    def sums(values_N: np.ndarray, used_N: np.ndarray) -> np.ndarray:
        return np.bincount(cell_N[used_N], values_N[used_N], len(x_G))

    finite_N, error_N = np.isfinite(loss_N), columns["loss_error"]
    known_N, one_N = ~np.isnan(error_N), np.ones(len(loss_N))
    finite_G, all_G = sums(one_N, finite_N), sums(one_N, one_N > 0)
    stopped_G = sums(columns["stopped"].astype(float), one_N > 0)
    alive_G = 2 * finite_G > all_G
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_G = sums(loss_N, finite_N) / finite_G
        error_G = sums(error_N, known_N) / sums(one_N, known_N) / np.sqrt(all_G)
    squares_G = sums((loss_N - mean_G[cell_N]) ** 2, finite_N)
    count_G = np.where(alive_G, finite_G, all_G).astype(int)
    return LossCurve(
        scale=float(columns["scale"][0]),
        x_G=x_G,
        mean_G=np.where(alive_G, mean_G, np.inf),
        count_G=count_G,
        diverged_G=(all_G - finite_G - stopped_G).astype(int),
        stopped_G=stopped_G.astype(int),
        refused_G=sums(columns["refused"].astype(float), one_N > 0).astype(int),
        error_G=error_G,
        squares_G=np.where(alive_G, squares_G, 0.0),
        df_G=np.where(alive_G, left * (finite_G - 1), 0.0),
        weight_G=np.maximum(count_G, 1) * share_G,
    )


def _seed_effects(
    losses: np.ndarray, seeds: np.ndarray, values: np.ndarray, number_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Estimate the effects of one scale's seeds from the cells near the best, where training is stable.

    Runs far from their cell and seed count less (Huber's weights): one that nearly diverged is no sign of a
    bad seed.

    Returns the effect of each run's seed, nat; the share of each cell's runs that counts beside other cells;
    the share of the degrees of freedom within cells that the seeds leave.
    """
    seed_N, names = pd.factorize(seeds)
    finite = np.isfinite(losses)
    finite_G = np.bincount(number_N[finite], minlength=len(values))
    with np.errstate(invalid="ignore"):
        mean_G = np.bincount(number_N[finite], losses[finite], len(values)) / finite_G
    step = float(np.median(np.diff(values))) if len(values) > 1 else 1.0
    best = values[int(np.argmin(np.where(finite_G > 0, mean_G, np.inf)))]
    stable_G = (finite_G > 0) & (np.abs(values - best) <= _STABLE * max(1.0, step) + 1e-9)
    used = finite & stable_G[number_N]
    y_N, cell_N, own_N = losses[used], (np.cumsum(stable_G) - 1)[number_N[used]], seed_N[used]
    share_G, cells = np.ones(len(values)), int(stable_G.sum())
    if len(names) < 2 or len(y_N) == cells or len(names) * cells**2 > _MOST_PRODUCTS:
        return np.zeros(len(losses)), share_G, 1.0
    weight_N = np.ones(len(y_N))
    effect_S, share_G[stable_G], left = _ridge_effects(y_N, cell_N, own_N, len(names), weight_N)
    for _ in range(5):
        left_N = _centred(y_N - effect_S[own_N], cell_N, weight_N)
        deviation = 1.48 * float(np.median(np.abs(left_N)))
        weight_N = 1 / np.maximum(1.0, np.abs(left_N) / max(_CLIPPED * deviation, 1e-12))
        effect_S, *_ = _ridge_effects(y_N, cell_N, own_N, len(names), weight_N)
    return effect_S[seed_N], share_G, left


def _centred(y_N: np.ndarray, cell_N: np.ndarray, weight_N: np.ndarray) -> np.ndarray:
    return y_N - (np.bincount(cell_N, weight_N * y_N) / np.bincount(cell_N, weight_N))[cell_N]


def _ridge_effects(
    y_N: np.ndarray, cell_N: np.ndarray, seed_N: np.ndarray, seeds: int, weight_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return effects of loss = cell + seed + noise with a penalty of 1 on the seeds, nat; one per seed.

    That is the mixed model of a seed variance equal to the noise's. Cells are eliminated, which leaves (D − L
    Lᵀ + 1) s = v, D the weight of each seed; Woodbury's identity solves it with matrices of cells × cells,
    however many seeds there are.

    Also returns the share of each cell's runs that counts beside the other cells, 1 where all have the same
    seeds, and the share of the squares within cells that the effects leave.
    """
    total_C = np.bincount(cell_N, weight_N)
    inverse_S = 1 / (1 + np.bincount(seed_N, weight_N, seeds))
    shape = seeds, len(total_C)
    number_N = np.ravel_multi_index((seed_N, cell_N), shape)
    joint_SC = np.bincount(number_N, weight_N, math.prod(shape)).reshape(shape) / np.sqrt(total_C)
    shrunk_SC = joint_SC * inverse_S[:, None]
    inner_CC = np.linalg.inv(np.eye(len(total_C)) - joint_SC.T @ shrunk_SC)
    v_S = inverse_S * np.bincount(seed_N, weight_N * _centred(y_N, cell_N, weight_N), seeds)
    effect_S = v_S + shrunk_SC @ (inner_CC @ (joint_SC.T @ v_S))
    covariance_CC = inner_CC / np.sqrt(np.outer(total_C, total_C))
    own_C = np.diag(covariance_CC)
    common_C = (covariance_CC.sum(axis=1) - own_C) / max(len(total_C) - 1, 1)
    share_C = np.minimum(1 / ((own_C - common_C) * np.bincount(cell_N)), 1.0)
    shrinkage = float(inverse_S.sum() + ((shrunk_SC.T @ shrunk_SC) * inner_CC).sum())
    within = len(y_N) - len(total_C)
    return effect_S, share_C, (within - seeds + shrinkage) / within


_PRIOR_DF = 4
_TYPICAL_NOISE, _NOISE_SPREAD = 0.15, 0.8
"""Noise of a run over the rise an octave from the optimum, and the standard deviation of its
logarithm: 200 sweeps of the atlas, 22 sources (results/public/sweeps.csv)."""
_NOISES = np.geomspace(0.01, 2.5, 9)  # Noises that are weighed, in units of that rise
_QUANTILES = (1 / 6, 1 / 2, 5 / 6)  # Quantiles of a noise without replicates that stand for its posterior
_CLIP = 0.8  # Squared residuals of a point are clipped at this quantile


@dataclass(frozen=True)
class Noise:
    """Scatter of a single run's loss near the optimum, pooled over curves."""

    sigma: float  # Standard deviation of one run beside others of its seed, nat per token
    df: int
    source: str  # "seeds", "given errors", or "lack of fit" (no replicates: the fits' residuals stand in)
    likely: tuple[float, ...] = ()  # Equally likely values of sigma where no replicate says it

    @property
    def freedom(self) -> float:
        # Degrees of freedom; infinite where the value is given, or stands for one of several likely ones
        return float(self.df) if self.source == "seeds" else math.inf

    @property
    def cases(self) -> tuple[Noise, ...]:
        return tuple(replace(self, sigma=sigma, likely=()) for sigma in self.likely) or (self,)

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


def pooled_noise(curves: Sequence[LossCurve], rounding: float = 0.0) -> Noise:
    """Return the noise of single runs: from replicates, else from given errors, else from residuals.

    `rounding` is the smallest difference of losses in the table; its uniform error is a floor.
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
    sigmas = tuple(max(sigma, floor) for sigma in _lack_of_fit(curves))
    return Noise(sigmas[len(sigmas) // 2], 0, "lack of fit", sigmas)


def _clipped_variance(squares_C: np.ndarray, df_C: np.ndarray) -> float:
    """Return the variance from points' sums of squares, each held to a quantile of what it may be.

    One unstable point must not widen all others' intervals, and a median would waste most of what they tell.
    """
    most_C = chdtri(df_C, 1 - _CLIP)
    expected_C = df_C * chdtr(df_C + 2, most_C) + most_C * (1 - _CLIP)
    variance = float(np.median(squares_C / chdtri(df_C, 0.5)))
    for _ in range(30):
        variance = float(np.minimum(squares_C, variance * most_C).sum() / expected_C.sum())
    return variance


def _lack_of_fit(curves: Sequence[LossCurve]) -> list[float]:
    """Return equally likely noises by what the valleys' shapes leave, nat.

    The prior is that of the atlas, relative to the depth of the table's own valleys. All shapes are weighed
    for each noise, and a point's rise has its model error, so that walls say little.
    """
    rises = []
    for curve in curves:
        finite_G = np.isfinite(curve.mean_G)
        x_G, mean_G = curve.x_G[finite_G], curve.mean_G[finite_G]
        if len(x_G) > 1:
            best = int(np.argmin(mean_G))
            ends = [x for x in (x_G[best] - 1, x_G[best] + 1) if x_G[0] - 0.5 <= x <= x_G[-1] + 0.5]
            rises += (np.interp(ends, x_G, mean_G) - mean_G[best]).tolist()
    octave = float(np.median(rises)) if rises else 0.0
    if octave <= 0:
        return [0.0]
    sigma_N = octave * _NOISES
    log_N = -0.5 * (np.log(_NOISES / _TYPICAL_NOISE) / _NOISE_SPREAD) ** 2
    for curve in curves:
        typical_G = np.full(len(curve.x_G), octave * _TYPICAL_NOISE)
        first = fit_valley(curve.x_G, curve.mean_G, typical_G, curve.step)
        if first is None:
            continue
        # What lies behind a wall says nothing of the noise.
        kept = first.window[~first.is_missed_G[first.window]]
        for n, sigma in enumerate(sigma_N if len(kept) > 3 else ()):
            error_W = np.full(len(kept), sigma)
            fit = fit_valley(curve.x_G[kept], curve.mean_G[kept], error_W, curve.step, may_miss=False)
            assert fit is not None, "it has finite points"
            log_N[n] += fit.log_evidence
    weight_N = np.exp(log_N - log_N.max())
    # The middle of each noise's share of the probability is its quantile.
    below_N = (np.cumsum(weight_N) - weight_N / 2) / weight_N.sum()
    return [float(sigma) for sigma in np.exp(np.interp(_QUANTILES, below_N, np.log(sigma_N)))]


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
    status: str  # A `Status`
    x: float = math.nan
    low: float = math.nan
    high: float = math.nan  # 95 % interval of x
    loss: float = math.nan  # Fitted loss at the optimum, nat per token
    best_x: float = math.nan  # Best grid point
    band_low: float = math.nan
    band_high: float = math.nan
    """Range, within the grid, in which the expected loss is at most epsilon above that of the best choice."""
    se: float = math.nan  # Standard error of x, octaves
    mean: float = math.nan  # Mean of the draws, which lies beyond the grid where the optimum does
    missed_x: float = math.nan
    """Worst of the points near the optimum that the fit misses by more than 3 standard errors."""
    missed_by: float = math.nan  # Mean loss at missed_x less the fit's, nat per token
    epsilon: float = EPSILON  # Largest regret that does not matter, nat per token
    beside: tuple[float, ...] = ()  # Values of the scales that vary beside the first

    @property
    def sizes(self) -> tuple[float, ...]:
        return self.scale, *self.beside

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
        values = asdict(self) | {"status": str(self.status)}
        return values if self.beside else {name: v for name, v in values.items() if name != "beside"}


@dataclass(frozen=True)
class Estimate:
    """Curve of one scale, draws of its valley, and its optimum."""

    curve: LossCurve
    fit: Fit | None  # None without a finite run
    valley: Valley | None
    optimum: Optimum
    error_G: np.ndarray  # Standard error of each mean, nat


def estimates(
    curves: Sequence[LossCurve],
    noise: Noise,
    generator: np.random.Generator,
    epsilon: float = EPSILON,
) -> list[Estimate]:
    """Draw the valleys of one rule's curves, by scale, and find their optima.

    A valley's shape and height are weighed by its own points and, less, by those of the other scales.
    """
    cases, together_R = noise.cases, generator.uniform(size=DRAWS)
    fits, drawn = list[list[Fit | None]](), list[list[Valley | None]]()
    for number_R, case in zip(np.array_split(np.arange(DRAWS), len(cases)), cases, strict=True):
        fits.append([fit_valley(c.x_G, c.mean_G, case.errors_G(c), c.step, noise.freedom) for c in curves])
        shared = iter(share([fit for fit in fits[-1] if fit is not None]))
        valleys = list[Valley | None]()
        for fit in fits[-1]:
            alone_R = generator.uniform(size=len(number_R))
            chance_R = np.where(number_R % _EVERY, together_R[number_R], alone_R)
            valleys.append(
                None if fit is None else draw(fit, generator, len(number_R), next(shared), chance_R)
            )
        drawn.append(valleys)
    made = []
    for curve, fit, parts in zip(curves, fits[len(cases) // 2], zip(*drawn, strict=True), strict=True):
        valley = Valley.of(parts)
        optimum = replace(find_optimum(curve, fit, valley, epsilon), beside=curve.beside)
        made.append(Estimate(curve, fit, valley, optimum, noise.errors_G(curve)))
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
    low, high, band = min(low, x), max(high, x), _band(curve, valley, epsilon)
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
    part = valley.part(slice(None, None, len(valley.x_R) // _BAND_DRAWS))
    fine = np.linspace(finite_x[0], finite_x[-1], _BAND_POINTS)
    mean = part.rise(fine - part.x_R[:, None]).mean(axis=0)
    best = int(np.argmin(mean))
    sides = (slice(best, None, -1), slice(best, None))
    low, high = (
        float(np.interp(epsilon, np.maximum.accumulate(mean[side] - mean[best]), fine[side]))
        for side in sides
    )
    return low, high
