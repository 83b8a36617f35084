"""The optimum in several scales at once: width, depth, tokens, batch size.

x*(r) = β₀ + Σ_a (m_a·r_a + ∫ s_a dr_a) + scatter: the trend of `trend.py` along each scale a, independent of
the others', with r_a octaves of that scale from the target. Each scale has its own priors, and its rule is
steady there or drifts, so that A scales have 2^A sets of paces. One scale gives the same as `Trend`.

Shapes: S cells (sizes that were run), A scales, K sets times scatters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.trend import FLAT, LEAST_ERROR, Mixture, Pace, Priors, half_t_T

_SCATTERS = 4  # quantiles of the half-t distribution of the scatter


def fixed(exponent: float) -> Priors:
    """Return priors of a scale whose exponent is known."""
    return Priors(0.0, 0.1, exponent, moving=Pace(1e-4, 1e-4), breaks=0.0)


@dataclass(frozen=True, eq=False)
class JointTrend:
    """Posterior of the optimum in several scales, given optima of cells and their errors."""

    priors: tuple[Priors, ...]
    """Of each scale."""
    octaves_SA: np.ndarray
    """log2 of each cell's sizes over the target's."""
    x_S: np.ndarray
    """log2 of the optima."""
    error_S: np.ndarray

    @cached_property
    def _sets(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return probability (K), mean slopes (K × A), scatter (K), and covariances, K × (S + 1) × (S + 1).

        The last row and column are the target's.
        """
        r = np.vstack([self.octaves_SA, np.zeros(len(self.priors))])
        # Cells scatter for causes that scales share, so that the widest prior holds for all.
        tau_T = max(p.scatter for p in self.priors) * half_t_T(_SCATTERS)
        along = [
            [pace.covariance(r[:, a], r[:, a]) for *_, pace in p.paces] for a, p in enumerate(self.priors)
        ]
        weights, means, covariances = [], [], []
        for chosen in itertools.product(*(range(len(p.paces)) for p in self.priors)):
            picked = [p.paces[i] for p, i in zip(self.priors, chosen, strict=True)]
            weights.append(math.prod(probability for probability, *_ in picked))
            means.append([mean for _, mean, _ in picked])
            covariances.append(sum(along[a][i] for a, i in enumerate(chosen)))
        repeated = (np.repeat(np.array(v), _SCATTERS, axis=0) for v in (weights, means, covariances))
        weight_K, mean_KA, covariance_K = repeated
        return weight_K / weight_K.sum(), mean_KA, np.tile(tau_T, len(weights)), covariance_K

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the inverse covariance of the optima (K × S × S), and their distance from the prior (K × S).

        Distances are from the last cell's optimum, so that the flat β₀ costs no digits.
        """
        _, mean_KA, tau_K, whole_K = self._sets
        error2_S = np.maximum(self.error_S, LEAST_ERROR) ** 2
        noise_KSS = (error2_S + tau_K[:, None] ** 2)[:, :, None] * np.eye(len(error2_S))
        away_KS = self.x_S - self.x_S[-1] - mean_KA @ self.octaves_SA.T
        return np.linalg.inv(FLAT + whole_K[:, :-1, :-1] + noise_KSS), away_KS

    @cached_property
    def _posterior(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return weight, mean and variance of the optimum at the target in each set."""
        weight_K, _, tau_K, whole_K = self._sets
        inverse_KSS, away_KS = self._known
        across_KS = FLAT + whole_K[:, -1, :-1]
        mean_K = self.x_S[-1] + np.einsum("ks,kst,kt->k", across_KS, inverse_KSS, away_KS)
        gained_K = np.einsum("ks,kst,kt->k", across_KS, inverse_KSS, across_KS)
        variance_K = np.maximum(FLAT + whole_K[:, -1, -1] + tau_K**2 - gained_K, 1e-8)
        chi2_K = np.einsum("ks,kst,kt->k", away_KS, inverse_KSS, away_KS)
        log_K = 0.5 * (np.linalg.slogdet(inverse_KSS)[1] - chi2_K) + np.log(weight_K)
        posterior_K = np.exp(log_K - log_K.max())
        return posterior_K / posterior_K.sum(), mean_K, variance_K

    @property
    def _broken(self) -> tuple[float, float]:
        """Return the chance that a slope breaks on the way to the target, and the variance if one does."""
        beyond_A = np.maximum(-self.octaves_SA.max(axis=0), 0.0)
        each = [p.breaking(d) for p, d in zip(self.priors, beyond_A, strict=True)]
        chance_A, variance_A = np.array(each).T
        any_break = 1 - float(np.prod(1 - chance_A))
        if any_break <= 0:
            return 0.0, 0.0
        return any_break, float(chance_A @ variance_A) / any_break

    def optimum(self) -> Mixture:
        """Return the optimum at the target, log2 of the hyperparameter."""
        weight_K, mean_K, variance_K = self._posterior
        return Mixture(mean_K, np.sqrt(variance_K), weight_K).broken(*self._broken)

    def expected_variance(self) -> float:
        """Return the variance at the target that optima at these cells would leave, octaves²."""
        chance, broken = self._broken
        return float(self._sets[0] @ self._posterior[2]) + chance * broken

    def exponents(self) -> list[tuple[float, float]]:
        """Return mean and standard deviation of each scale's mean slope between its cells and the target."""
        mean_KA, (weight_K, *_), (inverse_KSS, away_KS) = self._sets[1], self._posterior, self._known
        slopes = []
        for a in range(len(self.priors)):
            far = float(self.octaves_SA[:, a].min())
            if not far:
                slopes.append((0.0, 0.0))
                continue
            # Slope over the way: (trend at the target - trend at the smallest cell) over its octaves.
            r_S, end = self.octaves_SA[:, a], np.array([far])
            pace_K = [set_[a] for set_ in itertools.product(*(p.paces for p in self.priors))]
            rise = np.stack([-pace.covariance(end, r_S)[0] for *_, pace in pace_K]) / -far
            whole_way = np.array([pace.covariance(end, end)[0, 0] for *_, pace in pace_K]) / far**2
            rise_KS, whole_way_K = np.repeat(rise, _SCATTERS, axis=0), np.repeat(whole_way, _SCATTERS)
            mean_K = mean_KA[:, a] + np.einsum("ks,kst,kt->k", rise_KS, inverse_KSS, away_KS)
            variance_K = whole_way_K - np.einsum("ks,kst,kt->k", rise_KS, inverse_KSS, rise_KS)
            slope = Mixture(mean_K, np.sqrt(np.maximum(variance_K, 1e-12)), weight_K)
            slopes.append((slope.mean, math.sqrt(max(slope.variance, 0.0))))
        return slopes


def joint_trend(
    estimates: Sequence[Estimate], octaves_SA: Sequence[Sequence[float]], priors: Sequence[Priors]
) -> JointTrend:
    """Return the trend of known optima; those at an edge of their grid are left out."""
    known = [(e.optimum, at) for e, at in zip(estimates, octaves_SA, strict=True) if e.optimum.is_bracketed]
    x_S = np.array([o.mean if math.isfinite(o.mean) else o.x for o, _ in known])
    error_S = np.array([o.se if math.isfinite(o.se) and o.se > 0 else 1.0 for o, _ in known])
    octaves = np.array([at for _, at in known]).reshape(len(known), len(priors))
    return JointTrend(tuple(priors), octaves, x_S, error_S)
