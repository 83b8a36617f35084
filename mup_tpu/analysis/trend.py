"""The trend of optima over scales: one regression for exponents, verdicts, predictions, and the worth of
runs.

x*(r) = β₀ + m·r + ∫ s(r) dr + scatter, with x* the log2 of the optimum, r octaves of the scale and β₀ flat.
The slope's mean m is N(mean, slope²); s is a slope that wanders by `wander` octaves per octave and reverts to
m within `memory` octaves (an Ornstein-Uhlenbeck process), so that far ahead its variance grows as r and not
as r³. Scatter is N(0, τ²) at each scale, τ half-t with three degrees of freedom. A rule is steady, or it
drifts: two sets of scales, with a probability that may rest on what the rule claims. Beyond the scales that
were run a slope may also break, as often per octave as stored and public rules did.

For each τ and set everything is normal, so that the posterior is a mixture of normals and nothing is drawn.

Shapes: S scales, C sets, K sets times scatters, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import scipy

from mup_tpu.analysis.ingest.table_columns import means, plain_name
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.valley import Valley
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

LEAST = 2
"""Scales with a known optimum that a prediction needs."""
FLAT = 1e4
"""Variance of β₀, octaves²."""
LEAST_ERROR = 0.01
"""Least standard error of an optimum, octaves."""


def half_t_T(count: int) -> np.ndarray:
    """Return evenly likely quantiles of the half-t distribution with three degrees of freedom."""
    return np.asarray(-scipy.special.stdtrit(3, 0.5 * (1 - (np.arange(count) + 0.5) / count)))


_QUANTILES_T = half_t_T(16)


@dataclass(frozen=True)
class Pace:
    """How a trend may move: standard deviations, octaves per octave of the scale."""

    slope: float
    """Of the mean slope around the prior's mean."""
    wander: float
    """Of the slope around its mean."""
    memory: float = 2.0
    """Octaves over which the slope reverts to its mean."""

    def covariance(self, r_N: np.ndarray, t_M: np.ndarray) -> np.ndarray:
        """Return the covariance of the trend, anchored at 0, between distances, octaves²."""
        straight = self.slope**2 * r_N[:, None] * t_M
        away = self._variogram(r_N[:, None]) + self._variogram(t_M) - self._variogram(r_N[:, None] - t_M)
        return straight + away / 2

    def _variogram(self, d: np.ndarray) -> np.ndarray:
        d = np.abs(d) / self.memory
        return 2 * (self.wander * self.memory) ** 2 * (d + np.expm1(-d))


@dataclass(frozen=True)
class Priors:
    """Priors of a trend along a kind of scale."""

    steady: float
    """Probability that the rule is steady."""
    scatter: float
    """Scale of τ, octaves."""
    mean: float = 0.0
    """Mean slope of a rule that drifts, octaves per octave."""
    quiet: Pace = Pace(0.05, 0.05)
    moving: Pace = Pace(0.5, 0.3)
    breaks: float = 0.05
    """Chance per octave beyond the largest scale that the slope changes for good."""
    broken: float = 0.3
    """Standard deviation of that change, octaves per octave."""

    @property
    def paces(self) -> tuple[tuple[float, float, Pace], ...]:
        sets = ((self.steady, 0.0, self.quiet), (1 - self.steady, self.mean, self.moving))
        return tuple(one for one in sets if one[0] > 0)

    def breaking(self, beyond: float) -> tuple[float, float]:
        """Return the chance that a slope breaks within octaves beyond the scales, and the variance if so."""
        # A break somewhere on the way, evenly likely: its octaves beyond are squared d²/3 on average.
        return -math.expm1(-self.breaks * beyond), (self.broken * beyond) ** 2 / 3

    def scaled(self, factor: float) -> Priors:
        return replace(self, scatter=factor * self.scatter)


@lru_cache(maxsize=64)
def _covariance(paces: tuple[tuple[float, float, Pace], ...], octaves: tuple[float, ...]) -> np.ndarray:
    """Return the covariance of the trend between scales for each set, C × S × S."""
    r_S = np.array(octaves)
    return np.stack([pace.covariance(r_S, r_S) for *_, pace in paces])


BY_KIND = {
    "width": Priors(0.4, 0.10),
    "depth": Priors(0.4, 0.12),
    "batch size": Priors(0.1, 0.09, 0.2, moving=Pace(0.2, 0.35)),
    "tokens": Priors(0.3, 0.12, -0.1, moving=Pace(0.25, 0.2)),
    "size": Priors(0.3, 0.10, -0.2, moving=Pace(0.25, 0.15)),
    "": Priors(0.3, 0.12),
}
"""Priors by kind of scale where nothing is claimed."""
KEPT = 0.75
"""Probability that a rule is steady along a scale over which its source says that the optimum stays."""


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

    @property
    def noise(self) -> float:
        return float(self.weight_K @ self.deviation_K**2)

    def broken(self, chance: float, variance: float) -> Mixture:
        """Return the mixture with a chance that a variance comes on top."""
        deviation_K = np.sqrt(self.deviation_K**2 + variance)
        return Mixture(
            np.concatenate([self.mean_K, self.mean_K]),
            np.concatenate([self.deviation_K, deviation_K]),
            np.concatenate([(1 - chance) * self.weight_K, chance * self.weight_K]),
        )

    def quantile(self, q: float) -> float:
        """Return the quantile, by bisection."""
        low = float((self.mean_K - 8 * self.deviation_K).min())
        high = float((self.mean_K + 8 * self.deviation_K).max())
        for _ in range(40):
            middle = (low + high) / 2
            if self.weight_K @ scipy.special.ndtr((middle - self.mean_K) / self.deviation_K) < q:
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

    scales: tuple[float, ...]
    x_S: np.ndarray
    error_S: np.ndarray
    priors: Priors
    correlation_SS: np.ndarray | None = None
    """Correlation of the errors; None for independent ones."""
    given_weight_K: np.ndarray | None = None
    """Weights of the sets and scatters where no optimum was measured."""

    @property
    def origin(self) -> float:
        return self.scales[-1]

    def octaves(self, scale: float) -> float:
        return math.log2(scale / self.origin)

    @cached_property
    def _r_S(self) -> np.ndarray:
        return np.log2(np.array(self.scales) / self.origin)

    @cached_property
    def _tau_T(self) -> np.ndarray:
        return self.priors.scatter * _QUANTILES_T

    @cached_property
    def tau_K(self) -> np.ndarray:
        return np.tile(self._tau_T, len(self.priors.paces))

    @cached_property
    def _mean_K(self) -> np.ndarray:
        return np.repeat([mean for _, mean, _ in self.priors.paces], len(self._tau_T))

    def _trend(self, r_N: np.ndarray, t_M: np.ndarray) -> np.ndarray:
        of_CNM = np.stack([pace.covariance(r_N, t_M) for *_, pace in self.priors.paces])
        return np.repeat(FLAT + of_CNM, len(self._tau_T), axis=0)

    @cached_property
    def _own_KSS(self) -> np.ndarray:
        own_CSS = _covariance(self.priors.paces, tuple(self._r_S))
        return np.repeat(own_CSS, len(self._tau_T), axis=0)

    @cached_property
    def _inverse(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the inverse covariance of the optima (K, S, S), and its log determinant (K,)."""
        covariance_KSS = self._own_KSS + FLAT
        error_S = np.maximum(self.error_S, LEAST_ERROR)
        correlation_SS = np.eye(len(error_S)) if self.correlation_SS is None else self.correlation_SS
        covariance_KSS = covariance_KSS + correlation_SS * np.outer(error_S, error_S)
        covariance_KSS = covariance_KSS + self.tau_K[:, None, None] ** 2 * np.eye(len(error_S))
        return np.linalg.inv(covariance_KSS), -np.linalg.slogdet(covariance_KSS)[1]

    @cached_property
    def _away_KS(self) -> np.ndarray:
        return self.x_S - self.x_S[-1] - self._mean_K[:, None] * self._r_S

    @property
    def prior_weight_K(self) -> np.ndarray:
        counts = len(self._tau_T)
        return np.repeat([probability for probability, *_ in self.priors.paces], counts) / counts

    @cached_property
    def weight_K(self) -> np.ndarray:
        """Return the probability of each set and scatter."""
        if self.given_weight_K is not None:
            return self.given_weight_K
        inverse_KSS, log_K = self._inverse
        chi2_K = np.einsum("ks,kst,kt->k", self._away_KS, inverse_KSS, self._away_KS)
        log_K = 0.5 * (log_K - chi2_K) + np.log(self.prior_weight_K)
        weight_K = np.exp(log_K - log_K.max())
        return np.asarray(weight_K / weight_K.sum())

    @property
    def steady(self) -> float:
        if len(self.priors.paces) == 1:
            return float(self.priors.steady > 0)
        return float(self.weight_K[: len(self._tau_T)].sum())

    @cached_property
    def tau(self) -> float:
        """Return the median of the scatter, octaves."""
        order = np.argsort(self.tau_K)
        return float(np.interp(0.5, np.cumsum(self.weight_K[order]), self.tau_K[order]))

    def slope(self) -> Mixture:
        """Return the least-squares slope of the scales' true optima, their scatter included, octaves per
        octave.

        A verdict is about the scales that were run, so their scatter is part of what moved and no error.
        """
        away_S = self._r_S - self._r_S.mean()
        share_S = away_S / (away_S @ away_S)
        inverse_KSS = self._inverse[0]
        across_KS = share_S @ self._own_KSS + self.tau_K[:, None] ** 2 * share_S
        variance_K = across_KS @ share_S - np.einsum("ks,kst,kt->k", across_KS, inverse_KSS, across_KS)
        mean_K = self._mean_K + np.einsum("ks,kst,kt->k", across_KS, inverse_KSS, self._away_KS)
        return Mixture(mean_K, np.sqrt(np.maximum(variance_K, 1e-12)), self.weight_K)

    def together(self, source: float, target: float, x_2R: np.ndarray) -> np.ndarray:
        """Return numbers (R,) of draws that follow the joint posterior of two scales' optima.

        Args:
            source: one scale.
            target: the other one.
            x_2R: draws by each scale's own runs, which the other scales' optima and the priors weigh.
        """
        pair = [self.scales.index(source), self.scales.index(target)]
        rest = [i for i in range(len(self.scales)) if i not in pair]
        truth_KSS = self._own_KSS + FLAT + self.tau_K[:, None, None] ** 2 * np.eye(len(self.scales))
        noise_SS = np.diag(np.maximum(self.error_S, LEAST_ERROR) ** 2)
        rest_KOO = truth_KSS[:, rest][:, :, rest] + noise_SS[rest][:, rest]
        gain_K2O = truth_KSS[:, pair][:, :, rest] @ np.linalg.inv(rest_KOO)
        away_KO = self._away_KS[:, rest]
        chi2_K = np.einsum("ko,kop,kp->k", away_KO, np.linalg.inv(rest_KOO), away_KO)
        log_K = np.log(self.prior_weight_K) - 0.5 * (np.linalg.slogdet(rest_KOO)[1] + chi2_K)
        left_K22 = truth_KSS[:, pair][:, :, pair] - gain_K2O @ truth_KSS[:, rest][:, :, pair]
        mean_K2 = (
            self.x_S[-1] + self._mean_K[:, None] * self._r_S[pair] + (gain_K2O @ away_KO[:, :, None])[..., 0]
        )
        left_K2R = x_2R - mean_K2[:, :, None]
        chi2_KR = np.einsum("kir,kij,kjr->kr", left_K2R, np.linalg.inv(left_K22), left_K2R)
        log_KR = (log_K - 0.5 * np.linalg.slogdet(left_K22)[1])[:, None] - 0.5 * chi2_KR
        weight_R = np.exp(log_KR - log_KR.max()).sum(axis=0)
        draws = len(weight_R)
        # Truncated (Ionides 2008): else a single draw from a tail may count as much as all others.
        weight_R = np.minimum(weight_R, weight_R.mean() * math.sqrt(draws))
        below_R = np.cumsum(weight_R) / weight_R.sum()
        return np.minimum(np.searchsorted(below_R, (np.arange(draws) + 0.5) / draws), draws - 1)

    def optimum(self, scale: float, measured: bool = True) -> Mixture:
        """Return the optimum at a scale, log2 of the hyperparameter.

        Args:
            scale: the one to predict.
            measured: whether a measurement at that scale counts for its own scatter; False for the trend
                there.
        """
        r = self.octaves(scale)
        inverse_KSS = self._inverse[0]
        across_KS = self._trend(np.array([r]), self._r_S)[:, 0]
        if measured:
            across_KS = across_KS + self.tau_K[:, None] ** 2 * (np.abs(self._r_S - r) < 1e-9)
        prior_K = self._trend(np.array([r]), np.array([r]))[:, 0, 0] + self.tau_K**2
        variance_K = prior_K - np.einsum("ks,kst,kt->k", across_KS, inverse_KSS, across_KS)
        moved_K = np.einsum("ks,kst,kt->k", across_KS, inverse_KSS, self._away_KS)
        mean_K = self.x_S[-1] + self._mean_K * r + moved_K
        variance_K = np.maximum(variance_K, 1e-8)
        beyond = max(r, 0.0)
        return Mixture(mean_K, np.sqrt(variance_K), self.weight_K).broken(*self.priors.breaking(beyond))


def fit_trend(
    optima: Sequence[Optimum],
    priors: Priors,
    valleys: Sequence[Valley | None] = (),
    bracketed: bool = False,
) -> Trend | None:
    """Return the trend of the optima of one rule; None with fewer than two that are known.

    Args:
        optima: one a scale, ascending.
        priors: of the trend.
        valleys: draws of each scale, whose errors are correlated; independent without them.
        bracketed: leave out optima at an edge of their grid, which otherwise count by their draws.
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
    return Trend(scales, x_S, np.array([o.se for o in used]), priors, correlation_SS)


_NAMES = {
    "batch size": ("batch_size", "batch", "bs", "global_batch_size"),
    "tokens": ("tokens", "tokens_planned", "steps", "steps_planned", "d", "training_tokens"),
    "size": ("params_non_embedding", "flops", "n", "na"),
}


def kind_of(scale: str) -> str:
    """Return the kind of a scale by its column: width, depth, batch size, tokens, size (parameters, FLOPs),
    or "".
    """
    meaning = means(scale)
    if meaning in ("width", "depth", "size"):
        return meaning
    name = plain_name(scale)
    return next((kind for kind, names in _NAMES.items() if name in names), "")


def rule_named(name: str) -> str:
    """Return the entry of the table of parametrizations that a name spells: muP, μP, mu-P and mup are one; ""
    for
    none.
    """
    plain = name.lower().replace("μ", "mu").replace("µ", "mu")
    letters = "".join(c for c in plain if c.isalnum())
    return next((rule for rule in PARAMETRIZATIONS if rule.replace("_", "") == letters), "")


def claims(rule: str, kind: str) -> bool:
    name = rule_named(rule)
    return name != "" and kind in PARAMETRIZATIONS[name].transfers


def priors_of(scale: str, claimed: bool = False) -> Priors:
    """Return the priors along a scale, by its column.

    Args:
        scale: column of the scale.
        claimed: whether the rule claims to keep the optimum along it.
    """
    priors = BY_KIND[kind_of(scale)]
    return replace(priors, steady=max(KEPT, priors.steady)) if claimed else priors
