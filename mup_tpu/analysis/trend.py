"""The trend of optima over one scale or several: exponents, verdicts, predictions, and the worth of runs.

x*(r) = β₀ + Σ_a (m_a·r_a + ∫ s_a dr_a) + scatter, with x* the log2 of the optimum, r_a octaves of scale a and
β₀ flat. A slope's mean m is N(mean, slope²); s is a slope that wanders by `wander` octaves per octave and
reverts to m within `memory` octaves (an Ornstein-Uhlenbeck process): far ahead its variance grows as r
and not as r³. Scatter is N(0, τ²) at each optimum, τ half-t. Along each scale a rule is steady, or it drifts:
two sets, with a probability that may rest on what the rule claims, and so 2^A sets of A scales; as many
again where all scales may follow one power law. Where many cells have the same value of a scale, as in a
power law of several, they may also share a scatter. Beyond the scales that were run a slope may also break,
as often per octave as stored and public rules did.

For each τ and set everything is normal, so that the posterior is a mixture of normals and nothing is drawn.

Shapes: S optima, A scales, K sets times scatters, R draws, N and M places.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr, stdtrit

from mup_tpu.analysis.ingest.table_columns import means, plain_name
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.valley import Valley
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

LEAST = 2  # Scales with a known optimum that a prediction needs
FLAT = 1e4  # Variance of β₀, octaves²
LEAST_ERROR = 0.01  # Least standard error of an optimum, octaves
NORMAL_95 = 1.96  # Standard deviations on either side that hold 95 % of a normal distribution


_SCATTERS, _FEW_SCATTERS = 16, 4
"""Quantiles of the half-t distribution that stand for it, along one scale and along several."""

LAWFUL = 0.25
"""Probability that an optimum of several sizes is one power law, as published ones are; by
benchmarks/plan_literature.py and plan.py, choosing halves."""
_LAW_SLOPE, _KNOWN = 0.5, 0.1  # standard deviation of a law's exponent, and that below which it is known


@dataclass(frozen=True)
class Pace:
    """How a trend may move: standard deviations, octaves per octave of the scale."""

    slope: float  # Standard deviation of the mean slope
    wander: float  # Standard deviation of the slope around its mean
    memory: float = 2.0  # Octaves over which the slope reverts to its mean
    shared: float = 0.0  # Scatter that all optima at one value of the scale have in common, octaves

    @property
    def straight(self) -> Pace:
        # The same in a power law; exponents of published laws differ more than those of the atlas
        return replace(self, slope=_LAW_SLOPE if self.slope > _KNOWN else self.slope, wander=0.0)

    def covariance(self, r_N: np.ndarray, t_M: np.ndarray) -> np.ndarray:
        """Return the covariance of the trend, anchored at 0, between distances, octaves²."""
        straight = self.slope**2 * r_N[:, None] * t_M
        return (
            straight
            + self.wandered(r_N, t_M)
            + (self.shared and self.shared**2 * np.isclose(r_N[:, None], t_M))
        )

    def wandered(self, r_N: np.ndarray, t_M: np.ndarray) -> np.ndarray:
        away = self._variogram(r_N[:, None]) + self._variogram(t_M) - self._variogram(r_N[:, None] - t_M)
        return away / 2

    def _variogram(self, d: np.ndarray) -> np.ndarray:
        d = np.abs(d) / self.memory
        return 2 * (self.wander * self.memory) ** 2 * (d + np.expm1(-d))


_UNIT = Pace(0.0, 1.0, 3.0)  # In which interactions of scales wander


@dataclass(frozen=True)
class Priors:
    """Priors of a trend along a kind of scale."""

    steady: float  # Probability that the rule is steady
    scatter: float  # Scale of τ, octaves
    mean: float = 0.0  # Mean slope of a rule that drifts, octaves per octave
    quiet: Pace = Pace(0.05, 0.05)
    moving: Pace = Pace(0.5, 0.3)
    breaks: float = 0.05  # Chance per octave beyond the largest scale that the slope changes for good
    broken: float = 0.3  # Standard deviation of a break in the slope, octaves per octave
    shared: tuple[float, ...] = (0.0,)
    """Scatters, equally likely, that optima at one value of the scale may have in common, octaves."""
    mixed: float = 0.0
    """Standard deviation by which an octave of one scale changes another's slope: √(a·b) of both."""
    sweeps: int = 0  # Sweeps of the atlas (results/public) that the priors rest on
    claiming: int = 0  # Those of rules that claim to keep the optimum
    tails: float = 3.0  # Degrees of freedom of τ's half-t distribution

    @cached_property
    def paces(self) -> tuple[tuple[float, float, Pace], ...]:
        sets = ((self.steady, 0.0, self.quiet), (1 - self.steady, self.mean, self.moving))
        return tuple(
            (chance / len(self.shared), mean, replace(pace, shared=shared))
            for chance, mean, pace in sets if chance > 0 for shared in self.shared
        )  # fmt: skip

    def moves(self, octaves: float) -> tuple[float, float]:
        """Return the mean, and the mean square, of how far the optimum moves over octaves of the scale."""
        at = np.array([octaves])
        mean = sum(chance * slope * octaves for chance, slope, _ in self.paces)
        square = sum(c * (float(p.covariance(at, at)[0, 0]) + (m * octaves) ** 2) for c, m, p in self.paces)
        return mean, square


VAGUE = {
    "width": Priors(0.4, 0.10),
    "depth": Priors(0.4, 0.12),
    "batch size": Priors(0.1, 0.09, moving=Pace(0.5, 0.35)),
    "tokens": Priors(0.3, 0.12, moving=Pace(0.5, 0.2)),
    "size": Priors(0.3, 0.10, moving=Pace(0.5, 0.15)),
    "": Priors(0.3, 0.12),
}
"""Priors of verdicts by kind of scale: wide, so that a verdict rests on its own runs."""
BY_KIND = {
    "width": Priors(0.24, 0.085, -0.17, moving=Pace(0.47, 0.13), mixed=0.05, sweeps=48, claiming=21),
    "depth": Priors(0.25, 0.09, -0.04, Pace(0.07, 0.07), Pace(0.32, 0.12), mixed=0.025, sweeps=6, claiming=2),
    "batch size": Priors(0.17, 0.065, -0.13, Pace(0.06, 0.06), Pace(0.18, 0.4, 1.9), mixed=0.025, sweeps=40),
    "tokens": Priors(0.2, 0.085, -0.12, moving=Pace(0.21, 0.21, 1.7), mixed=0.025, sweeps=70),
    "size": Priors(0.25, 0.09, 0.11, moving=Pace(0.22, 0.12), mixed=0.025, sweeps=24),
    "": Priors(0.31, 0.095, moving=Pace(0.39, 0.14), sweeps=1),
}
"""Priors of predictions and plans, where nothing is claimed: those of the atlas's sweeps along a kind of
scale, by benchmarks/prediction.py; interactions by benchmarks/plan.py."""
KEPT = 0.75
"""Probability that a rule is steady along a scale over which its source says that the optimum stays."""


def fixed(exponent: float) -> Priors:
    return Priors(0.0, 0.1, exponent, moving=Pace(1e-4, 1e-4), breaks=0.0)


@dataclass(frozen=True)
class Mixture:
    """A mixture of normals."""

    mean_K: np.ndarray
    deviation_K: np.ndarray
    weight_K: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.weight_K @ self.mean_K)

    @property
    def variance(self) -> float:
        return float(self.weight_K @ (self.deviation_K**2 + self.mean_K**2)) - self.mean**2

    def broken(self, chance_K: np.ndarray, variance: float) -> Mixture:
        """Return the mixture with a chance that a variance comes on top."""
        deviation_K = np.sqrt(self.deviation_K**2 + variance)
        return Mixture(
            np.concatenate([self.mean_K, self.mean_K]),
            np.concatenate([self.deviation_K, deviation_K]),
            np.concatenate([(1 - chance_K) * self.weight_K, chance_K * self.weight_K]),
        )

    def below(self, x: float) -> float:
        return float(self.weight_K @ ndtr((x - self.mean_K) / self.deviation_K))

    def quantile(self, q: float) -> float:
        """Return the quantile, by bisection."""
        low = float((self.mean_K - 8 * self.deviation_K).min())
        high = float((self.mean_K + 8 * self.deviation_K).max())
        for _ in range(40):
            middle = (low + high) / 2
            if self.below(middle) < q:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def draws_R(self, generator: np.random.Generator, draws: int) -> np.ndarray:
        chosen_R = generator.choice(len(self.weight_K), draws, p=self.weight_K)
        return self.mean_K[chosen_R] + self.deviation_K[chosen_R] * generator.standard_normal(draws)


@dataclass(frozen=True, eq=False)
class Trend:
    """Posterior of a trend, given optima and their errors."""

    sizes: Sequence[float] | np.ndarray  # Of each optimum: its scale (S,), or its value of each scale (S, A)
    x_S: np.ndarray
    error_S: np.ndarray
    priors: tuple[Priors, ...]  # Of each scale
    correlation_SS: np.ndarray | None = None  # Correlation of the errors; None for independent ones
    lawful: float = 0.0
    """Probability that the optimum is one power law of all scales: no slope wanders, mixes or breaks."""

    def _octaves(self, sizes: Any) -> np.ndarray:
        # Octaves beyond the last optimum's sizes, N × A
        sizes_NA, last_A = (np.reshape(v, (-1, len(self.priors))) for v in (sizes, self.sizes[-1]))
        return np.asarray(np.log2(sizes_NA / last_A))

    @cached_property
    def _r_SA(self) -> np.ndarray:
        return self._octaves(self.sizes)

    @cached_property
    def _sets(self) -> list[tuple[tuple[float, float, Pace], ...]]:
        sets = [*itertools.product(*(p.paces for p in self.priors))]
        straight = [tuple((c, mean, pace.straight) for c, mean, pace in one) for one in sets]
        return sets + straight if self.lawful else sets

    @cached_property
    def _lawless_K(self) -> np.ndarray:
        # 0 in sets that are a power law, else 1
        return np.asarray(np.arange(len(self._tau_K)) < len(self._tau_K) / (2 if self.lawful else 1), float)

    @cached_property
    def _tau_T(self) -> np.ndarray:
        count = _SCATTERS if len(self.priors) == 1 else _FEW_SCATTERS
        above_T = 1 - (np.arange(count) + 0.5) / count
        # Optima scatter for causes that scales share, so that the widest prior holds for all.
        widest = max(self.priors, key=lambda p: p.scatter)
        return np.asarray(-widest.scatter * stdtrit(widest.tails, above_T / 2))

    def _each(self, of_sets: Sequence[Any]) -> np.ndarray:
        # Repeat what belongs to a set for each of its scatters
        return np.repeat(np.array(of_sets), len(self._tau_T), axis=0)

    @cached_property
    def _tau_K(self) -> np.ndarray:
        return np.tile(self._tau_T, len(self._sets))

    @cached_property
    def _mean_KA(self) -> np.ndarray:
        return self._each([[mean for _, mean, _ in one] for one in self._sets])

    @cached_property
    def _prior_K(self) -> np.ndarray:
        prior_K = self._each([math.prod(p for p, *_ in one) for one in self._sets]) / len(self._tau_T)
        return prior_K * np.where(self._lawless_K > 0, 1 - self.lawful, self.lawful)

    def _trend(self, r_NA: np.ndarray, t_MA: np.ndarray, along: int | None = None) -> np.ndarray:
        """Return the covariance of the trend between places (K, N, M), of one scale's part or of all."""
        each: Any = 0.0
        for a in range(len(self.priors)) if along is None else (along,):
            paces = [one[a][2] for one in self._sets]
            of_pace = {pace: pace.covariance(r_NA[:, a], t_MA[:, a]) for pace in {*paces}}
            each = each + self._each([of_pace[pace] for pace in paces])
        if along is not None:
            return np.asarray(each)
        # Scales change each other's slopes: products of wandering slopes
        mixed = (
            p.mixed * _UNIT.wandered(r_NA[:, a], t_MA[:, a]) for a, p in enumerate(self.priors) if p.mixed
        )
        both = sum(a * b for a, b in itertools.combinations(mixed, 2))
        return np.asarray(each + self._lawless_K[:, None, None] * both)

    @cached_property
    def _truth_KSS(self) -> np.ndarray:
        # Prior covariance of the optima
        scatter_KSS = self._tau_K[:, None, None] ** 2 * np.eye(len(self.x_S))
        return FLAT + self._trend(self._r_SA, self._r_SA) + scatter_KSS

    @cached_property
    def _error_SS(self) -> np.ndarray:
        error_S = np.maximum(self.error_S, LEAST_ERROR)
        correlation_SS = np.eye(len(error_S)) if self.correlation_SS is None else self.correlation_SS
        return np.asarray(correlation_SS * np.outer(error_S, error_S))

    @cached_property
    def _inverse_KSS(self) -> np.ndarray:
        return np.linalg.inv(self._truth_KSS + self._error_SS)

    @cached_property
    def _away_KS(self) -> np.ndarray:
        # Optima less their prior means, from the last one: the flat β₀ costs no digits
        return self.x_S - self.x_S[-1] - self._mean_KA @ self._r_SA.T

    @cached_property
    def weight_K(self) -> np.ndarray:
        """Return the probability of each set and scatter."""
        chi2_K = np.einsum("ks,kst,kt->k", self._away_KS, self._inverse_KSS, self._away_KS)
        log_K = 0.5 * (np.linalg.slogdet(self._inverse_KSS)[1] - chi2_K) + np.log(self._prior_K)
        weight_K = np.exp(log_K - log_K.max())
        return np.asarray(weight_K / weight_K.sum())

    @property
    def steady(self) -> float:
        # Probability that the rule is steady along its one scale
        (priors,) = self.priors
        return float(self.weight_K @ self._each([pace == priors.quiet for ((*_, pace),) in self._sets]))

    @cached_property
    def tau(self) -> float:
        # Median of the scatter, octaves
        order = np.argsort(self._tau_K)
        return float(np.interp(0.5, np.cumsum(self.weight_K[order]), self._tau_K[order]))

    def _given(self, mean_K: np.ndarray, prior_K: np.ndarray, across_KS: np.ndarray) -> Mixture:
        """Return a quantity given the optima, by its prior mean and variance and its covariance with them."""
        moved_K = np.einsum("ks,kst,kt->k", across_KS, self._inverse_KSS, self._away_KS)
        variance_K = prior_K - np.einsum("ks,kst,kt->k", across_KS, self._inverse_KSS, across_KS)
        return Mixture(mean_K + moved_K, np.sqrt(np.maximum(variance_K, 1e-8)), self.weight_K)

    def slope(self) -> Mixture:
        """Return a law's exponent, octaves per octave: the least-squares slope of the trend along one scale.

        The scatter of the optima about the trend is part of its error, as in any regression.
        """
        return self._least_squares(self._trend(self._r_SA, self._r_SA))

    def movement(self) -> Mixture:
        """Return the least-squares slope of the true optima, octaves per octave.

        It says how the optimum moved over the scales that were run: their scatter is part of it and no error.
        """
        return self._least_squares(self._truth_KSS - FLAT)

    def _least_squares(self, covariance_KSS: np.ndarray) -> Mixture:
        away_S = self._r_SA[:, 0] - self._r_SA[:, 0].mean()
        share_S = away_S / (away_S @ away_S)
        across_KS = share_S @ covariance_KSS
        return self._given(self._mean_KA[:, 0], across_KS @ share_S, across_KS)

    def exponents(self, target: Sequence[float]) -> list[tuple[float, float]]:
        """Return mean and standard deviation of each scale's slope from its smallest value to a target's."""
        slopes = []
        for a, end in enumerate(self._octaves(target)[0]):
            ends_2A = np.zeros((2, len(self.priors)))
            ends_2A[:, a] = self._r_SA[:, a].min(), end
            if ends_2A[0, a] == end:
                slopes.append((0.0, 0.0))
                continue
            share_2 = np.array([-1.0, 1.0]) / (end - ends_2A[0, a])
            across_KS = share_2 @ self._trend(ends_2A, self._r_SA, a)
            whole_K = share_2 @ self._trend(ends_2A, ends_2A, a) @ share_2
            slope = self._given(self._mean_KA[:, a], whole_K, across_KS)
            slopes.append((slope.mean, math.sqrt(max(slope.variance, 0.0))))
        return slopes

    def mean_slopes(self) -> list[Mixture]:
        """Return the slope to which each scale's reverts, octaves per octave."""
        variance_KA = self._each([[pace.slope**2 for *_, pace in one] for one in self._sets])
        return [
            self._given(self._mean_KA[:, a], variance_K, variance_K[:, None] * self._r_SA[:, a])
            for a, variance_K in enumerate(variance_KA.T)
        ]

    def left_out(self) -> list[Mixture]:
        """Return what the others predict of each optimum, its own error included."""
        precision_KS = np.diagonal(self._inverse_KSS, axis1=1, axis2=2)
        miss_KS = np.einsum("kst,kt->ks", self._inverse_KSS, self._away_KS) / precision_KS
        # Weights without the optimum's own density.
        log_K = np.log(np.maximum(self.weight_K, 1e-300))
        log_KS = log_K[:, None] + 0.5 * (precision_KS * miss_KS**2 - np.log(precision_KS))
        weight_KS = np.exp(log_KS - log_KS.max(axis=0))
        parts = (self.x_S - miss_KS, precision_KS**-0.5, weight_KS / weight_KS.sum(axis=0))
        return [Mixture(*of_one) for of_one in zip(*(part.T for part in parts), strict=True)]

    def together(self, source: float, target: float, x_2R: np.ndarray) -> np.ndarray:
        """Return numbers (R,) of draws that follow the joint posterior of two scales' optima.

        `x_2R` are draws by each scale's own runs, which the other scales' optima and the priors weigh.
        """
        scales = [*self.sizes]
        pair = [scales.index(source), scales.index(target)]
        rest = [i for i in range(len(scales)) if i not in pair]
        rest_KOO = self._truth_KSS[:, rest][:, :, rest] + np.diag(np.diag(self._error_SS)[rest])
        inverse_KOO = np.linalg.inv(rest_KOO)
        gain_K2O = self._truth_KSS[:, pair][:, :, rest] @ inverse_KOO
        away_KO = self._away_KS[:, rest]
        chi2_K = np.einsum("ko,kop,kp->k", away_KO, inverse_KOO, away_KO)
        log_K = np.log(self._prior_K) - 0.5 * (np.linalg.slogdet(rest_KOO)[1] + chi2_K)
        left_K22 = self._truth_KSS[:, pair][:, :, pair] - gain_K2O @ self._truth_KSS[:, rest][:, :, pair]
        mean_K2 = self.x_S[-1] + self._mean_KA @ self._r_SA[pair].T + (gain_K2O @ away_KO[:, :, None])[..., 0]
        inverse_K22 = np.linalg.inv(left_K22)
        inverse_K22 = (inverse_K22 + inverse_K22.swapaxes(1, 2)) / 2
        # The log density is a polynomial in both draws, about a centre near them: one product of matrices.
        centre_2 = x_2R.mean(axis=1)
        (x_R, y_R), mean_K2 = x_2R - centre_2[:, None], mean_K2 - centre_2
        pull_K2 = np.einsum("kij,kj->ki", inverse_K22, mean_K2)
        log_K += 0.5 * (np.linalg.slogdet(inverse_K22)[1] - (pull_K2 * mean_K2).sum(axis=1))
        squares_K3 = -0.5 * inverse_K22[:, [0, 0, 1], [0, 1, 1]] * (1, 2, 1)
        of_terms_K6 = np.column_stack([squares_K3, pull_K2, log_K])
        log_KR = of_terms_K6 @ np.stack([x_R**2, x_R * y_R, y_R**2, x_R, y_R, np.ones_like(x_R)])
        log_KR -= log_KR.max()
        weight_R = np.exp(log_KR, out=log_KR).sum(axis=0)  # in place: fresh pages cost more than the products
        draws = len(weight_R)
        # Truncated (Ionides 2008): else a single draw from a tail may count as much as all others.
        weight_R = np.minimum(weight_R, weight_R.mean() * math.sqrt(draws))
        below_R = np.cumsum(weight_R) / weight_R.sum()
        return np.minimum(np.searchsorted(below_R, (np.arange(draws) + 0.5) / draws), draws - 1)

    def optimum(self, sizes: float | Sequence[float], measured: bool = True) -> Mixture:
        """Return the optimum at a scale, or at a value of each, log2 of the hyperparameter.

        A measurement there counts for its own scatter; with `measured` False it is the trend there.
        """
        return self._unbroken(sizes, measured).broken(*self._breaking(sizes))

    def _unbroken(self, sizes: float | Sequence[float], measured: bool = True) -> Mixture:
        r_1A = self._octaves(sizes)
        across_KS = FLAT + self._trend(r_1A, self._r_SA)[:, 0]
        if measured:
            across_KS += self._tau_K[:, None] ** 2 * (np.abs(self._r_SA - r_1A) < 1e-9).all(axis=1)
        prior_K = FLAT + self._trend(r_1A, r_1A)[:, 0, 0] + self._tau_K**2
        return self._given(self.x_S[-1] + self._mean_KA @ r_1A[0], prior_K, across_KS)

    def _breaking(self, sizes: float | Sequence[float]) -> tuple[np.ndarray, float]:
        """Return the chance that a slope breaks on the way to some sizes, and the variance if one does."""
        beyond_A = np.maximum(self._octaves(sizes)[0] - self._r_SA.max(axis=0), 0.0)
        breaks_A, broken_A = np.array([(p.breaks, p.broken) for p in self.priors]).T
        chance_A = -np.expm1(-breaks_A * beyond_A)
        # A break somewhere on the way, evenly likely: its octaves beyond are squared d²/3 on average.
        variance_A = (broken_A * beyond_A) ** 2 / 3
        chance = 1 - float(np.prod(1 - chance_A))
        return chance * self._lawless_K, float(chance_A @ variance_A) / max(chance, 1e-12)

    def expected_variance(self, sizes: Sequence[float]) -> float:
        """Return the variance at some sizes before the optima are known, octaves²."""
        chance_K, variance = self._breaking(sizes)
        return float(self._prior_K @ (self._unbroken(sizes).deviation_K ** 2 + chance_K * variance))


def fit_trend(
    optima: Sequence[Optimum],
    priors: Priors,
    valleys: Sequence[Valley | None] = (),
    bracketed: bool = False,
) -> Trend | None:
    """Return the trend of one rule's optima, by ascending scale; None with fewer than two that are known.

    Errors are correlated as the draws of the valleys are; without valleys they are independent. Optima at an
    edge of their grid count by their draws, unless `bracketed` leaves them out.
    """
    if sum(o.is_bracketed for o in optima) < LEAST:
        return None
    chosen = [
        i for i, o in enumerate(optima) if (o.is_bracketed if bracketed else math.isfinite(o.se) and o.se > 0)
    ]
    used = [optima[i] for i in chosen]
    drawn = [v.x_R for v in (valleys[i] for i in chosen if valleys) if v is not None]
    correlation_SS = np.corrcoef(drawn) if len(drawn) == len(used) else None
    scales = tuple(o.scale for o in used)
    x_S = np.array([o.mean if math.isfinite(o.mean) else o.x for o in used])
    return Trend(scales, x_S, np.array([o.se for o in used]), (priors,), correlation_SS)


_NAMES = {
    "batch size": ("batch_size", "batch", "bs", "global_batch_size"),
    "tokens": ("tokens", "tokens_planned", "steps", "steps_planned", "d", "training_tokens"),
    "size": ("params_non_embedding", "flops", "n", "na"),
}


def kind_of(scale: str) -> str:
    """Return the kind of a scale by its column: width, depth, batch size, tokens, size, or ""."""
    meaning = means(scale)
    if meaning in ("width", "depth", "size"):
        return meaning
    name = plain_name(scale)
    return next((kind for kind, names in _NAMES.items() if name in names), "")


def rule_named(name: str) -> str:
    """Return the parametrization that a name spells, muP, μP, mu-P and mup alike; "" for none."""
    plain = name.lower().replace("μ", "mu").replace("µ", "mu")
    letters = "".join(c for c in plain if c.isalnum())
    return next((rule for rule in PARAMETRIZATIONS if rule.replace("_", "") == letters), "")


_UNCLAIMED = re.compile(r"(^|_)(wd|weight_?decay|dropout|bs|batch(_size)?)$")


def claims(rule: str, kind: str, tuned: str = "learning_rate") -> bool:
    """Return whether a rule claims to keep the optimum of a hyperparameter along a kind of scale.

    No rule claims it of regularisation, such as weight decay (Yang et al. 2022, Tensor Programs V, Table 1),
    or of the batch size.
    """
    name = rule_named(rule)
    return (
        name != "" and kind in PARAMETRIZATIONS[name].transfers and not _UNCLAIMED.search(plain_name(tuned))
    )


def priors_of(scale: str, claimed: bool = False) -> Priors:
    """Return the priors along a scale, by its column; `claimed` if the rule claims to keep the optimum."""
    priors = BY_KIND[kind_of(scale)]
    return replace(priors, steady=max(KEPT, priors.steady), sweeps=priors.claiming) if claimed else priors
