"""How the optima of a rule lie about a power of the scale: the second half of the model of all curves.

optimum(scale) = β + α · log2 scale + scatter, with scatter of standard deviation τ between scales. The curves
come in as draws ("particles") of what each may be: so an optimum beyond its grid or beside an edge counts
for what it tells. α, β and τ are weighed on a grid; the draws that come out go together over all scales.

Shapes: S scales, P particles of one, B bins of them, M positions of a trend, T scatters, A slopes, I
intercepts, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.valleys import Particles

DRAWS = 2000
_SCATTERS = np.array([0.02, 0.04, 0.06, 0.09, 0.13, 0.18, 0.25, 0.35, 0.5, 0.8, 1.3, 2.2])
"""Scatters that are weighed, octaves."""
_USUAL_SCATTER, _WILD = 0.15, 0.1
"""Scatter of optima about a power, octaves (half-normal; 0.10 in ten sweeps that transfer), and the share of
rules that scatter by anything up to 2 octaves, as where one optimum moves by itself."""
_USUAL_SLOPE = 1.5
"""Standard deviation of exponents over rules."""
_BINS = 96
_POSITION_STEP = 0.03
_SLOPES, _INTERCEPTS = 81, 41


@dataclass(frozen=True)
class Trend:
    """Draws of a trend, and with each the valleys of all scales."""

    alpha_R: np.ndarray
    intercept_R: np.ndarray
    """log2 of the optimum at scale 1."""
    tau_R: np.ndarray
    valleys: tuple[Particles, ...]


def fit_trend(
    scales: Sequence[float], particles: Sequence[Particles], generator: np.random.Generator
) -> Trend:
    """Weigh trends by the particles of two scales or more."""
    octaves_S = np.log2(scales)
    bins = [_Bins.of(p) for p in particles]
    middle_S = np.array([b.middle for b in bins])
    weight_S = 1 / (np.array([max(b.spread, 0.03) for b in bins]) ** 2 + _USUAL_SCATTER**2)
    centre = float(np.average(octaves_S, weights=weight_S))
    away_S = octaves_S - centre
    slope = float((weight_S * away_S * middle_S).sum() / (weight_S * away_S**2).sum())
    middle = float(np.average(middle_S, weights=weight_S))
    apart = np.sinh(np.linspace(-3.7, 3.7, _SLOPES)) * 0.1
    alpha_A = slope + apart
    beta_I = middle + np.sinh(np.linspace(-3.7, 3.7, _INTERCEPTS)) * 0.1
    log_TAI = _log_prior_scatter()[:, None, None] - 0.5 * (alpha_A[:, None] / _USUAL_SLOPE) ** 2
    log_TAI = log_TAI + np.log(np.gradient(alpha_A))[:, None] + np.log(np.gradient(beta_I))
    for b, away in zip(bins, away_S, strict=True):
        log_TAI = log_TAI + b.log_density(beta_I + alpha_A[:, None] * away)
    weight = np.exp(log_TAI - log_TAI.max()).ravel()
    total = np.cumsum(weight)
    at = np.searchsorted(total, (generator.uniform() + np.arange(DRAWS)) / DRAWS * total[-1])
    t, a, i = np.unravel_index(np.minimum(at, len(weight) - 1), log_TAI.shape)
    tau_R = _SCATTERS[t]
    alpha_R = alpha_A[a] + np.gradient(alpha_A)[a] * generator.uniform(-0.5, 0.5, DRAWS)
    beta_R = beta_I[i] + np.gradient(beta_I)[i] * generator.uniform(-0.5, 0.5, DRAWS)
    valleys = tuple(
        p.take(b.draw(beta_R + alpha_R * away, tau_R, generator))
        for p, b, away in zip(particles, bins, away_S, strict=True)
    )
    return Trend(alpha_R, beta_R - alpha_R * centre, tau_R, valleys)


def _log_prior_scatter() -> np.ndarray:
    """Log prior of each scatter, its share of the grid included."""
    usual = np.exp(-0.5 * (_SCATTERS / _USUAL_SCATTER) ** 2) * 2 / (_USUAL_SCATTER * math.sqrt(2 * math.pi))
    wild = 1 / (_SCATTERS * math.log(_SCATTERS[-1] / _SCATTERS[0]))
    density = (1 - _WILD) * usual + _WILD * wild
    return np.log(density * np.gradient(_SCATTERS))


@dataclass(frozen=True)
class _Bins:
    """Particles by their optimum, in bins of like weight."""

    order_P: np.ndarray
    start_B: np.ndarray
    total_P: np.ndarray
    """Summed weights in that order."""
    weight_B: np.ndarray
    x_B: np.ndarray

    @classmethod
    def of(cls, particles: Particles) -> _Bins:
        order_P = np.argsort(particles.optimum_P)
        weight_P, x_P = particles.weight_P[order_P], particles.optimum_P[order_P]
        # By number rather than weight: so bins in the tails are narrow too.
        start_B = np.unique(np.linspace(0, len(order_P), _BINS + 1).astype(int))[:-1]
        weight_B = np.add.reduceat(weight_P, start_B)
        x_B = np.add.reduceat(weight_P * x_P, start_B) / weight_B
        return cls(order_P, start_B, np.cumsum(weight_P), weight_B, x_B)

    @property
    def middle(self) -> float:
        """Mean optimum."""
        return float(self.weight_B @ self.x_B / self.weight_B.sum())

    @property
    def spread(self) -> float:
        """Standard deviation of the optimum."""
        return math.sqrt(float(self.weight_B @ (self.x_B - self.middle) ** 2 / self.weight_B.sum()))

    def log_density(self, position: np.ndarray) -> np.ndarray:
        """Log likelihood of a trend that passes at each position, T × its shape."""
        low, high = self.x_B[0] - 1.5, self.x_B[-1] + 1.5
        at_M = np.linspace(low, high, max(40, math.ceil((high - low) / _POSITION_STEP)))
        log_TM = np.empty((len(_SCATTERS), len(at_M)))
        far_MB = (at_M[:, None] - self.x_B) ** 2
        for t, tau in enumerate(_SCATTERS):
            least_M = far_MB.min(axis=1)
            sum_M = np.exp((least_M[:, None] - far_MB) / (2 * tau**2)) @ self.weight_B
            log_TM[t] = np.log(sum_M) - least_M / (2 * tau**2) - math.log(tau)
        outside = np.abs(position - np.clip(position, low, high))
        inside = np.clip((position - low) / (at_M[1] - at_M[0]), 0, len(at_M) - 1.001)
        k = inside.astype(int)
        share = inside - k
        found = log_TM[:, k] * (1 - share) + log_TM[:, k + 1] * share
        steep_T = (1.5 / _SCATTERS**2).reshape(-1, *[1] * position.ndim)
        return found - outside * steep_T - outside**2 / (2 * (_SCATTERS**2).reshape(steep_T.shape))

    def draw(self, position_R: np.ndarray, tau_R: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Numbers of particles, one for each trend and scatter."""
        far_RB = (position_R[:, None] - self.x_B) ** 2
        log_RB = (far_RB.min(axis=1, keepdims=True) - far_RB) / (2 * tau_R[:, None] ** 2)
        total_RB = np.cumsum(np.exp(log_RB) * self.weight_B, axis=1)
        at_R1 = generator.uniform(size=(len(position_R), 1)) * total_RB[:, -1:]
        bin_R = np.minimum((total_RB < at_R1).sum(axis=1), len(self.x_B) - 1)
        before_B = np.concatenate([[0.0], self.total_P])[self.start_B]
        inside_R = before_B[bin_R] + generator.uniform(size=len(bin_R)) * self.weight_B[bin_R]
        return self.order_P[np.minimum(np.searchsorted(self.total_P, inside_R), len(self.order_P) - 1)]
