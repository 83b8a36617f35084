"""The line of optima over scales, and how far it can be trusted beyond the largest.

x*(r) = β₀ + α·r + W(r) + scatter, with x* the log2 of the optimum, r octaves from the largest scale whose
optimum is known, scatter ~ N(0, τ²) at each scale. β₀ is flat, α ~ N(0, slope²), τ half-normal. W lets the
slope wander on either side of r = 0: it changes by N(0, bend²) an octave (an integrated Wiener process, as in
smoothing splines). Scales far behind then say little of the slope ahead; a line or a parabola through all of
them covers too few optima two octaves ahead (benchmarks/prediction.md). A share of lines is steady, with much
smaller slope and bend.

For each τ of a grid, steady or not, all else is normal, so draws are exact and independent. An optimum beyond
its grid's edge bounds the line: its normal is truncated there (Geweke, Hajivassiliou and Keane's simulator,
then resampling).

Shapes: S scales (C of them beyond their grid), K scatters and factors, R draws, B = 2 + S coefficients: β₀,
α, and W at the scales over the root of its covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import log_ndtr, ndtri_exp

from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.priors import USUAL, Priors

DRAWS = 20_000
LEAST = 2
"""Scales with a known optimum that a line needs."""
_LEAST_ERROR = 0.01
_JITTER = 1e-10


@dataclass(frozen=True)
class _Path:
    """Coefficients of a line at any distance."""

    octaves_S: np.ndarray
    bend: float

    @cached_property
    def _root_SS(self) -> np.ndarray:
        """Root of W's covariance at the scales."""
        covariance_SS = self.bend**2 * wander_covariance(self.octaves_S, self.octaves_S)
        return np.linalg.cholesky(covariance_SS + _JITTER * np.eye(len(self.octaves_S)))

    def design(self, octaves_N: np.ndarray) -> np.ndarray:
        """Factors of the coefficients at distances, N × B."""
        across_NS = self.bend**2 * wander_covariance(octaves_N, self.octaves_S)
        wander_NS = solve_triangular(self._root_SS, across_NS.T, lower=True).T
        return np.column_stack([np.ones(len(octaves_N)), octaves_N, wander_NS])

    def left(self, octaves: float) -> float:
        """Variance of W at a distance that the scales leave open."""
        at = np.array([octaves])
        wander_S = self.design(at)[0, 2:]
        return max(0.0, self.bend**2 * float(wander_covariance(at, at)[0, 0]) - float(wander_S @ wander_S))


def wander_covariance(at_N: np.ndarray, to_S: np.ndarray) -> np.ndarray:
    """Covariance of W, for a bend of 1, between distances: processes integrated from 0 to either side."""
    near = np.minimum(np.abs(at_N)[:, None], np.abs(to_S))
    far = np.maximum(np.abs(at_N)[:, None], np.abs(to_S))
    is_same_side = np.sign(at_N)[:, None] * np.sign(to_S) > 0
    return np.where(is_same_side, near**2 * (3 * far - near) / 6, 0.0)


@dataclass(frozen=True)
class Line:
    """Draws of a line of optima."""

    origin: float
    """Largest scale whose optimum is known."""
    path: _Path
    coefficients_RB: np.ndarray
    tau_R: np.ndarray
    factor_R: np.ndarray
    """Factors on slope and bend."""
    known: tuple[Optimum, ...]
    """Bracketed optima."""

    def octaves(self, scale: float) -> float:
        """Octaves of a scale beyond the origin."""
        return math.log2(scale / self.origin)

    def trend_R(self, scale: float, generator: np.random.Generator) -> np.ndarray:
        """Draws of log2 of the optimum at a scale, as if none was measured there."""
        spread_R = np.sqrt(self.tau_R**2 + self.factor_R**2 * self.path.left(self.octaves(scale)))
        return self._mean_R(self.octaves(scale)) + spread_R * generator.standard_normal(len(self.tau_R))

    def optima_R(self, scale: float, generator: np.random.Generator) -> np.ndarray:
        """Draws of log2 of the optimum at a scale; where it was measured, by the measurement too."""
        measured = next((o for o in self.known if o.scale == scale), None)
        if measured is None:
            return self.trend_R(scale, generator)
        mean_R = self._mean_R(self.octaves(scale))
        error = max(measured.se, _LEAST_ERROR)
        share_R = self.tau_R**2 / (self.tau_R**2 + error**2)
        mean_R += share_R * (measured.x - mean_R)
        return mean_R + error * np.sqrt(share_R) * generator.standard_normal(len(mean_R))

    def variance(self, octaves: float) -> float:
        """Variance of the optimum at a distance beyond the origin, octaves²."""
        left = float((self.factor_R**2).mean()) * self.path.left(octaves)
        return float(self._mean_R(octaves).var() + (self.tau_R**2).mean()) + left

    def _mean_R(self, octaves: float) -> np.ndarray:
        return self.coefficients_RB @ self.path.design(np.array([octaves]))[0]


def fit_line(
    optima: Sequence[Optimum], generator: np.random.Generator, priors: Priors = USUAL, draws: int = DRAWS
) -> Line | None:
    """The line through the optima of one rule; None with fewer than two that are known."""
    known = tuple(o for o in optima if o.is_bracketed)
    if len(known) < LEAST:
        return None
    beyond = tuple(o for o in optima if not o.is_bracketed and math.isfinite(_bound(o)))
    origin = known[-1].scale
    path = _Path(np.log2([o.scale / origin for o in (*known, *beyond)]), priors.bend)
    design_SB = path.design(path.octaves_S)
    coefficients_RB, chosen_R = LineRegression(known, beyond, design_SB, priors).draw(generator, draws)
    return Line(origin, path, coefficients_RB, priors.tau_K[chosen_R], priors.factor_K[chosen_R], known)


def expected_variance(octaves_S: np.ndarray, variance_S: np.ndarray, ahead: float, priors: Priors) -> float:
    """Variance of the optimum at a distance that optima at some scales would leave, before they are measured.

    Args:
        octaves_S: distances from the largest scale, 0 or less.
        variance_S: squared standard errors of the optima, octaves².
        ahead: distance of the target from the largest scale, octaves.
        priors: of the line.
    """
    path = _Path(octaves_S, priors.bend)
    design_SB, (at_B,) = path.design(octaves_S), path.design(np.array([ahead]))
    weight_KS = 1 / (variance_S + priors.tau_K[:, None] ** 2)
    precision_KB = priors.factor_K[:, None] ** -2 * np.r_[0.0, priors.slope**-2, np.ones(len(octaves_S))]
    precision_KBB = np.einsum("sb,ks,sc->kbc", design_SB, weight_KS, design_SB)
    precision_KBB += precision_KB[:, :, None] * np.eye(len(at_B))
    known_K = np.linalg.solve(
        precision_KBB, np.broadcast_to(at_B[:, None], (len(precision_KB), len(at_B), 1))
    )
    variance_K = known_K[:, :, 0] @ at_B + priors.tau_K**2 + priors.factor_K**2 * path.left(ahead)
    return float(np.average(variance_K, weights=priors.weight_K))


def _bound(optimum: Optimum) -> float:
    """Most that an optimum at the lower edge of its grid may be, or least of one at the upper edge."""
    return optimum.high if math.isinf(optimum.low) else optimum.low


@dataclass(frozen=True)
class _Posterior:
    """Coefficients for one τ: normal with a mean linear in the optima."""

    gain_BS: np.ndarray
    root: np.ndarray
    """Root of the covariance, B × B."""
    precision_S: np.ndarray
    log_constant: float

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Mean for optima (..., S)."""
        return x @ self.gain_BS.T

    def log_evidence(self, x_S: np.ndarray) -> float:
        """Log of the optima's density, up to a constant."""
        mean_B = self.mean(x_S)
        explained = mean_B @ np.linalg.solve(self.root @ self.root.T, mean_B)
        return self.log_constant - 0.5 * float((self.precision_S * x_S**2).sum() - explained)


def _posterior(design_SB: np.ndarray, variance_S: np.ndarray, priors: Priors, factor: float) -> _Posterior:
    weighted_BS = design_SB.T / variance_S
    deviation_B = factor * np.r_[priors.slope, np.ones(design_SB.shape[1] - 2)]
    precision_B = np.r_[0.0, deviation_B**-2]
    covariance = np.linalg.inv(weighted_BS @ design_SB + np.diag(precision_B))
    root = np.linalg.cholesky(covariance)
    constant = float(np.log(np.diag(root)).sum() - np.log(deviation_B).sum() - 0.5 * np.log(variance_S).sum())
    return _Posterior(covariance @ weighted_BS, root, 1 / variance_S, constant)


@dataclass(frozen=True)
class LineRegression:
    """Regression of a rule's optima."""

    known: tuple[Optimum, ...]
    beyond: tuple[Optimum, ...]
    """Optima at an edge of their grid."""
    design_SB: np.ndarray
    """Factors of the coefficients, for known optima and then the others: 1, the slope's, and factors of
    coefficients whose priors are N(0, 1)."""
    priors: Priors

    def draw(self, generator: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws of the coefficients, and of the numbers of τ and factor."""
        return self._bounded(generator, draws) if self.beyond else self._known(generator, draws)

    @cached_property
    def _x_S(self) -> np.ndarray:
        return np.array([o.x for o in self.known])

    @cached_property
    def _error_S(self) -> np.ndarray:
        return np.asarray(np.maximum([o.se for o in self.known], _LEAST_ERROR))

    @cached_property
    def _weighed(self) -> list[tuple[float, float]]:
        """Scatters and factors that are weighed."""
        return list(zip(self.priors.tau_K.tolist(), self.priors.factor_K.tolist(), strict=True))

    @cached_property
    def _posteriors(self) -> list[_Posterior]:
        design_SB, variance_S = self.design_SB[: len(self.known)], self._error_S**2
        return [_posterior(design_SB, variance_S + tau**2, self.priors, f) for tau, f in self._weighed]

    @cached_property
    def _log_K(self) -> np.ndarray:
        """Log weight of each τ and factor by the known optima."""
        evidence_K = np.array([p.log_evidence(self._x_S) for p in self._posteriors])
        return np.asarray(evidence_K + np.log(self.priors.weight_K))

    def _known(self, generator: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
        weight_K = np.exp(self._log_K - self._log_K.max())
        count_K = generator.multinomial(draws, weight_K / weight_K.sum())
        coefficients = [
            p.mean(self._x_S) + generator.standard_normal((count, len(p.root))) @ p.root.T
            for p, count in zip(self._posteriors, count_K, strict=True)
        ]
        return np.concatenate(coefficients), np.repeat(np.arange(len(count_K)), count_K)

    def _bounded(self, generator: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws where some optima are only bounded."""
        at_CB, count = self.design_SB[len(self.known) :], len(self.beyond)
        side_C = np.array([1.0 if math.isinf(o.low) else -1.0 for o in self.beyond])  # 1: at most the bound
        bound_C = np.array([_bound(o) for o in self.beyond])
        each = -(-draws // len(self._log_K))
        coefficients, logs = [], []
        for (tau, factor), before, log_weight in zip(
            self._weighed, self._posteriors, self._log_K, strict=True
        ):
            spread = at_CB @ before.root
            root_CC = np.linalg.cholesky(spread @ spread.T + tau**2 * np.eye(count))
            mean_C = at_CB @ before.mean(self._x_S)
            shock_RC, log_R = np.zeros((each, count)), np.full(each, log_weight)
            for c in range(count):
                expected_R = mean_C[c] + shock_RC[:, :c] @ root_CC[c, :c]
                log_inside_R = log_ndtr(side_C[c] * (bound_C[c] - expected_R) / root_CC[c, c])
                log_uniform_R = np.log(generator.uniform(1e-12, 1.0, each))
                shock_RC[:, c] = side_C[c] * ndtri_exp(log_inside_R + log_uniform_R)
                log_R = log_R + log_inside_R
            x_RC = mean_C + shock_RC @ root_CC.T
            variance = np.concatenate([self._error_S**2 + tau**2, np.full(count, tau**2)])
            after = _posterior(self.design_SB, variance, self.priors, factor)
            x_RS = np.concatenate([np.tile(self._x_S, (each, 1)), x_RC], axis=1)
            shocks = generator.standard_normal((each, len(after.root)))
            coefficients.append(after.mean(x_RS) + shocks @ after.root.T)
            logs.append(log_R)
        weight = np.exp(np.concatenate(logs) - np.max(logs))
        chosen = generator.choice(len(weight), draws, p=weight / weight.sum())
        return np.concatenate(coefficients)[chosen], chosen // each
