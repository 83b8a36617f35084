"""Curvature of a valley of loss, and so the cost of a value beside the optimum.

Shapes: G grid points, W points near the optimum, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.noise import Noise
from mup_tpu.analysis.optimum import Optimum

_NEAR = 2.0
"""Octaves on either side of an optimum that tell its curvature."""
_MODEL_ERROR = 0.2
"""Standard error of a parabola at a point, as a share of the point's rise."""
SCATTER = 0.37
"""Standard deviation of the logarithm of curvature between widths of one stored sweep."""
_LEAST_ERROR = 1e-4
"""Least error of a mean, nat."""


@dataclass(frozen=True)
class Valley:
    """Curvature of a loss curve at its optimum, nat per octave²: loss rises by c/2·u² at u octaves."""

    curvature: float
    log_error: float
    """Standard error of log c, for its fit and for how much c differs between scales."""

    def draws_R(self, generator: np.random.Generator, draws: int) -> np.ndarray:
        """Curvatures that it may be."""
        shocks_R = self.log_error * generator.standard_normal(draws)
        return self.curvature * np.exp(shocks_R - self.log_error**2 / 2)


def valley_at(curves: Sequence[LossCurve], noise: Noise, optimum: Optimum) -> Valley | None:
    """Curvature of a rule's curve at the scale of an optimum."""
    return valley_of(next(c for c in curves if c.scale == optimum.scale), noise, optimum)


def valley_of(curve: LossCurve, noise: Noise, optimum: Optimum) -> Valley | None:
    """Curvature of a curve at its optimum; None if too few points of it are finite."""
    u_G = curve.x_G - optimum.x
    reach = max(_NEAR, 1.5 * curve.step)
    used = np.isfinite(curve.mean_G) & (np.abs(u_G) <= reach)
    if used.sum() < 3:
        return None
    u_W, rise_W = u_G[used], curve.mean_G[used] - optimum.loss
    error_W = np.maximum(noise.errors_G(curve)[used], _LEAST_ERROR)
    variance_W = error_W**2 + (_MODEL_ERROR * np.maximum(rise_W, 0)) ** 2
    design_W3 = np.column_stack([np.ones_like(u_W), u_W**2 / 2, u_W**3 / 6])
    usual = max(float((rise_W * u_W**2).sum() / (u_W**4 / 2).sum()), 1e-4)
    # Offset within the optimum's own error; asymmetry of a third of the curvature an octave.
    prior = np.diag([1 / error_W.mean() ** 2, 0.0, 1 / usual**2])
    covariance = np.linalg.inv((design_W3.T / variance_W) @ design_W3 + prior)
    curvature = float((covariance @ (design_W3.T / variance_W) @ rise_W)[1])
    if not curvature > 0:
        return None
    fit_error = min(math.sqrt(covariance[1, 1]) / curvature, 1.0)
    return Valley(curvature, math.hypot(fit_error, SCATTER))


@dataclass(frozen=True)
class Cost:
    """Loss over the target's own optimum, nat per token; nan if no curvature is known."""

    expected: float
    high: float
    """97.5 % quantile."""
