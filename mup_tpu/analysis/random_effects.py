"""Regression of optima on several scales, with random effects of cells and of the values of each scale.

x = β₀ + Σ_a α_a·(size_a − mean) + Σ_a u_a(value of a) + e + N(0, error²): cells that share a value of a
scale, such as one model or one batch size, miss the law together by u_a ~ N(0, τ_a²), and each by itself by
e ~ N(0, τ₀²). Without u, many cells at few values would make exponents look surer than they are. β₀ is flat,
α ~ N(0, 1), every τ half-normal of scale 0.3 octave. Given all τ everything is normal; the τ are drawn from
their marginal posterior by Metropolis' algorithm.

Shapes: S cells, A scales, C variance components (the cells' own, then the scales'), R draws of the τ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy

_SCATTER = 0.3
"""Scale of the half-normal τ, octaves."""
_FLAT = 100.0
"""Variance of β₀, octaves²."""
_LEAST_ERROR = 0.01
_LEAST_VALUES = 4
"""Values of a scale from which their scatter is told from its exponent."""
_DRAWS, _THIN = 100, 10


@dataclass(frozen=True, repr=False)
class Regression:
    """Optima of cells and the sizes that explain them; fitted on first use."""

    x_S: np.ndarray
    """log2 of optima."""
    error_S: np.ndarray
    """Standard errors of the optima."""
    sizes_SA: np.ndarray
    """log2 of sizes."""

    @cached_property
    def scattered(self) -> tuple[int, ...]:
        """Scales with an effect of each value: they have several values, each in several cells on average."""
        counts = [len(np.unique(column)) for column in self.sizes_SA.T]
        return tuple(a for a, n in enumerate(counts) if _LEAST_VALUES <= n <= len(self.x_S) / 2)

    def _shared(self, sizes_NA: np.ndarray) -> list[np.ndarray]:
        """Whether sizes have a cell's value, N × S for each scale that is scattered."""
        return [sizes_NA[:, a, None] == self.sizes_SA[:, a] for a in self.scattered]

    @cached_property
    def _fixed_SS(self) -> np.ndarray:
        design_SA = self._centred(self.sizes_SA)
        error_S = np.maximum(self.error_S, _LEAST_ERROR)
        return np.asarray(_FLAT + design_SA @ design_SA.T + np.diag(error_S**2))

    @cached_property
    def _same(self) -> list[np.ndarray]:
        return [np.eye(len(self.x_S)), *self._shared(self.sizes_SA)]

    def _centred(self, sizes_NA: np.ndarray) -> np.ndarray:
        return np.asarray(sizes_NA - self.sizes_SA.mean(axis=0))

    @cached_property
    def _away_S(self) -> np.ndarray:
        return np.asarray(self.x_S - self.x_S.mean())

    def _covariance(self, tau_C: np.ndarray) -> np.ndarray:
        return self._fixed_SS + sum(t**2 * same for t, same in zip(tau_C, self._same, strict=True))

    def _log_density(self, log_tau_C: np.ndarray) -> float:
        """Log posterior density of the logs of all τ."""
        tau_C = np.exp(np.clip(log_tau_C, -10, 3))
        root_SS = np.linalg.cholesky(self._covariance(tau_C))
        whitened_S = np.linalg.solve(root_SS, self._away_S)
        fit = -0.5 * whitened_S @ whitened_S - np.log(np.diag(root_SS)).sum()
        return float(fit - 0.5 * ((tau_C / _SCATTER) ** 2).sum() + log_tau_C.sum())

    @cached_property
    def tau_RC(self) -> np.ndarray:
        """Draws of the scatters, octaves."""
        generator = np.random.default_rng(0)
        start_C = np.full(len(self._same), np.log(_SCATTER / 2))
        at_C = scipy.optimize.minimize(lambda log_tau_C: -self._log_density(log_tau_C), start_C, tol=0.01).x
        density, step, draws = self._log_density(at_C), 1.5 / len(at_C) ** 0.5, []
        for _ in range(_DRAWS * _THIN):
            proposed_C = at_C + step * generator.standard_normal(len(at_C))
            other = self._log_density(proposed_C)
            if np.log(generator.uniform()) < other - density:
                at_C, density = proposed_C, other
            draws.append(at_C)
        return np.exp(draws[::_THIN])

    @cached_property
    def _inverse_RSS(self) -> np.ndarray:
        return np.stack([np.linalg.inv(self._covariance(tau_C)) for tau_C in self.tau_RC])

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """Exponents in each draw, normal: means (R, A) and standard deviations (R, A)."""
        gain_RAS = self._centred(self.sizes_SA).T @ self._inverse_RSS
        variance_RA = 1 - np.einsum("ras,sa->ra", gain_RAS, self._centred(self.sizes_SA))
        return gain_RAS @ self._away_S, np.sqrt(variance_RA)

    def predicted(self, size_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A cell's optimum in each draw, normal: means (R) and standard deviations (R)."""
        design_A = self._centred(size_A)
        shared_CS = np.array([np.zeros(len(self.x_S)), *(s[0] for s in self._shared(size_A[None]))])
        across_RS = _FLAT + self._centred(self.sizes_SA) @ design_A + self.tau_RC**2 @ shared_CS
        gain_RS = np.einsum("rs,rst->rt", across_RS, self._inverse_RSS)
        whole_R = _FLAT + design_A @ design_A + (self.tau_RC**2).sum(axis=1)
        variance_R = whole_R - (gain_RS * across_RS).sum(axis=1)
        return self.x_S.mean() + gain_RS @ self._away_S, np.sqrt(variance_R)

    def left_out(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each measured optimum by the others, normal in each draw: means, deviations and weights, R × S.

        The weights turn draws of the τ from all cells into draws from the others.
        """
        precision_RS = np.diagonal(self._inverse_RSS, axis1=1, axis2=2)
        miss_RS = self._inverse_RSS @ self._away_S / precision_RS
        log_RS = 0.5 * (precision_RS * miss_RS**2 - np.log(precision_RS))
        weight_RS = np.exp(log_RS - log_RS.max(axis=0))
        return self.x_S - miss_RS, precision_RS**-0.5, weight_RS / weight_RS.sum(axis=0)
