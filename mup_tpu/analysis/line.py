"""The line of optima over scales, and how far it can be trusted beyond the largest.

x*(r) = β₀ + α·r + q·r² + scatter, with x* the log2 of the optimum, r octaves from the largest scale whose
optimum is known, scatter ~ N(0, τ²) at each scale. Priors: α ~ N(0, 0.5²), q ~ N(0, 0.1²), τ half-normal of
scale 0.15, β₀ flat. The interval of a straight line covers too few optima two octaves ahead; a prior on q
mends that (benchmarks/prediction.md).

For each τ of a grid all else is normal, so draws are exact and independent. An optimum beyond its grid's edge
bounds the line: its normal is truncated there (Geweke, Hajivassiliou and Keane's simulator, then resampling).

Shapes: S scales (C of them beyond their grid), K scatters, R draws, B = 3 coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

from mup_tpu.analysis.optimum import Optimum

DRAWS = 20_000
LEAST = 2
"""Scales with a known optimum that a line needs."""
_LEAST_ERROR = 0.01
_TAUS = (np.arange(60) + 0.5) / 12
"""Scatters that are weighed, over the prior's scale."""


@dataclass(frozen=True)
class Priors:
    """Scales of the priors of a line."""

    slope: float = 0.5
    """Standard deviation of α, octaves per octave."""
    curvature: float = 0.1
    """Standard deviation of q, octaves per octave²."""
    scatter: float = 0.15
    """Scale of τ, octaves."""

    @property
    def tau_K(self) -> np.ndarray:
        """Scatters that are weighed."""
        return self.scatter * _TAUS

    @property
    def precision(self) -> np.ndarray:
        """Prior precision of β₀, α and q."""
        return np.diag([0.0, self.slope**-2, self.curvature**-2])


@dataclass(frozen=True)
class Line:
    """Draws of a line of optima."""

    origin: float
    """Largest scale whose optimum is known."""
    coefficients_RB: np.ndarray
    tau_R: np.ndarray
    known: tuple[Optimum, ...]
    """Bracketed optima."""

    def octaves(self, scale: float) -> float:
        """Octaves of a scale beyond the origin."""
        return math.log2(scale / self.origin)

    def trend_R(self, scale: float, generator: np.random.Generator) -> np.ndarray:
        """Draws of log2 of the optimum at a scale, as if none was measured there."""
        mean_R = self.coefficients_RB @ _design(np.array([self.octaves(scale)]))[0]
        return mean_R + self.tau_R * generator.standard_normal(len(self.tau_R))

    def optima_R(self, scale: float, generator: np.random.Generator) -> np.ndarray:
        """Draws of log2 of the optimum at a scale; where it was measured, by the measurement too."""
        measured = next((o for o in self.known if o.scale == scale), None)
        if measured is None:
            return self.trend_R(scale, generator)
        mean_R = self.coefficients_RB @ _design(np.array([self.octaves(scale)]))[0]
        error = max(measured.se, _LEAST_ERROR)
        share_R = self.tau_R**2 / (self.tau_R**2 + error**2)
        mean_R += share_R * (measured.x - mean_R)
        return mean_R + error * np.sqrt(share_R) * generator.standard_normal(len(mean_R))

    def variance(self, octaves: float) -> float:
        """Variance of the optimum so many octaves beyond the origin, octaves²."""
        (row,) = _design(np.array([octaves]))
        return float(row @ np.cov(self.coefficients_RB.T) @ row + (self.tau_R**2).mean())


def fit_line(
    optima: Sequence[Optimum], generator: np.random.Generator, priors: Priors = Priors(), draws: int = DRAWS
) -> Line | None:
    """The line through the optima of one rule; None with fewer than two that are known."""
    known = tuple(o for o in optima if o.is_bracketed)
    if len(known) < LEAST:
        return None
    beyond = [o for o in optima if not o.is_bracketed and math.isfinite(_bound(o))]
    origin = known[-1].scale
    design_SB = _design(np.log2([o.scale / origin for o in known]))
    x_S = np.array([o.x for o in known])
    error_S = np.maximum([o.se for o in known], _LEAST_ERROR)
    posterior = [_posterior(design_SB, error_S**2 + tau**2, priors) for tau in priors.tau_K]
    log_K = np.array([p.log_evidence(x_S) for p in posterior]) - 0.5 * _TAUS**2
    if beyond:
        coefficients_RB, tau_R = _bounded(known, beyond, log_K, priors, generator, draws)
        return Line(origin, coefficients_RB, tau_R, known)
    weight_K = np.exp(log_K - log_K.max())
    count_K = generator.multinomial(draws, weight_K / weight_K.sum())
    coefficients = [
        p.mean(x_S) + generator.standard_normal((count, 3)) @ p.root.T
        for p, count in zip(posterior, count_K, strict=True)
    ]
    return Line(origin, np.concatenate(coefficients), np.repeat(priors.tau_K, count_K), known)


def _design(octaves_S: np.ndarray) -> np.ndarray:
    return np.vander(octaves_S, 3, increasing=True)


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
        """Log of the optima's density, up to a constant that all τ share."""
        mean_B = self.mean(x_S)
        explained = mean_B @ np.linalg.solve(self.root @ self.root.T, mean_B)
        return self.log_constant - 0.5 * float((self.precision_S * x_S**2).sum() - explained)


def _posterior(design_SB: np.ndarray, variance_S: np.ndarray, priors: Priors) -> _Posterior:
    weighted_BS = design_SB.T / variance_S
    covariance = np.linalg.inv(weighted_BS @ design_SB + priors.precision)
    root = np.linalg.cholesky(covariance)
    constant = float(np.log(np.diag(root)).sum() - 0.5 * np.log(variance_S).sum())
    return _Posterior(covariance @ weighted_BS, root, 1 / variance_S, constant)


def _bounded(
    known: tuple[Optimum, ...],
    beyond: Sequence[Optimum],
    log_K: np.ndarray,
    priors: Priors,
    generator: np.random.Generator,
    draws: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the coefficients and of τ where some optima are only bounded.

    Args:
        known: bracketed optima.
        beyond: optima at an edge of their grid.
        log_K: log weight of each τ by the known optima.
        priors: of the line.
        generator: of the draws.
        draws: number of them.
    """
    octaves_S = np.log2([o.scale / known[-1].scale for o in (*known, *beyond)])
    design_SB, at_CB = np.split(_design(octaves_S), [len(known)])
    x_S, error_S = np.array([o.x for o in known]), np.maximum([o.se for o in known], _LEAST_ERROR)
    side_C = np.array([1.0 if math.isinf(o.low) else -1.0 for o in beyond])  # 1: at most the bound
    bound_C = np.array([_bound(o) for o in beyond])
    each = -(-draws // len(_TAUS))
    coefficients, logs = [], []
    for tau, log_weight in zip(priors.tau_K, log_K, strict=True):
        before = _posterior(design_SB, error_S**2 + tau**2, priors)
        spread = at_CB @ before.root
        root_CC = np.linalg.cholesky(spread @ spread.T + tau**2 * np.eye(len(beyond)))
        mean_C = at_CB @ before.mean(x_S)
        shock_RC, log_R = np.zeros((each, len(beyond))), np.full(each, log_weight)
        for c in range(len(beyond)):
            expected_R = mean_C[c] + shock_RC[:, :c] @ root_CC[c, :c]
            log_inside_R = log_ndtr(side_C[c] * (bound_C[c] - expected_R) / root_CC[c, c])
            log_uniform_R = np.log(generator.uniform(1e-12, 1.0, each))
            shock_RC[:, c] = side_C[c] * ndtri_exp(log_inside_R + log_uniform_R)
            log_R = log_R + log_inside_R
        x_RC = mean_C + shock_RC @ root_CC.T
        variance = np.concatenate([error_S**2 + tau**2, np.full(len(beyond), tau**2)])
        after = _posterior(_design(octaves_S), variance, priors)
        x_RS = np.concatenate([np.tile(x_S, (each, 1)), x_RC], axis=1)
        coefficients.append(after.mean(x_RS) + generator.standard_normal((each, 3)) @ after.root.T)
        logs.append(log_R)
    weight = np.exp(np.concatenate(logs) - np.max(logs))
    chosen = generator.choice(len(weight), draws, p=weight / weight.sum())
    return np.concatenate(coefficients)[chosen], np.repeat(priors.tau_K, each)[chosen]
