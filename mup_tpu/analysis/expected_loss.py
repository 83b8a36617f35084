"""The loss of a tuned model at a scale that was not run.

With r octaves from the largest scale and L(0) the loss there,

L(r) / L(0) = β₀ + β·h(r) + W(r) + scatter,  h(r) = (1 − e^−αr) / α.

A power law E + A·scale^−a is a straight line in h. W is its model error: its slope changes by N(0, bend²) an
octave. α, bend and scatter are weighed on a grid; all else is normal. A law without W is too sure; along a
batch size none holds (benchmarks/prediction.md).

Shapes: S scales, K combinations of the grid, R draws.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.scaling_law import Prediction

LEAST = 3  # Scales that are needed
_WIDEST = 0.5  # A 95 % interval wider than this share of the loss is not reported
_LEVEL, _SLOPE = 1.0, 0.3  # Prior standard deviations of β₀, and of β per octave
_ALPHA = np.linspace(-0.377, 0.873, 51)
"""Values of α, none of them 0: the rate at which the loss's slope falls, an octave: a·log 2."""
_BEND = np.geomspace(1e-3, 0.25, 8)
_SCATTER = np.geomspace(5e-4, 0.02, 6)
_GRID_K3 = np.array(list(itertools.product(_ALPHA, _BEND, _SCATTER)))
_LOG_PRIOR_K = -0.5 * (
    ((_GRID_K3[:, 0] - 0.2) / 0.28) ** 2
    + (np.log(_GRID_K3[:, 1] / 0.015) / 0.8) ** 2
    + np.log(_GRID_K3[:, 2] / 0.0015) ** 2
)
"""Chosen by the coverage of losses one and two octaves ahead, with all sweeps in view."""


def expected_loss(losses_S: np.ndarray, scales_S: np.ndarray, scale: float) -> Prediction | Reason:
    """Predict the loss of a tuned model at a scale, with its 95 % interval, or return why that is impossible.

    Args:
        losses_S: losses of tuned models, in any unit, above 0.
        scales_S: their scales, ascending.
        scale: the one to predict.
    """
    if len(losses_S) < LEAST:
        return Reason.of("few optima", known=len(losses_S), needed=LEAST)
    if not (losses_S > 0).all():
        return Reason.of("loss not above 0", loss=float(losses_S.min()))
    octaves_S = np.log2(np.append(scales_S, scale) / scales_S[-1])
    mean_K, deviation_K, weight_K = _at_the_last(losses_S / losses_S[-1] - 1, octaves_S)
    generator = np.random.default_rng(0)
    chosen_R = generator.choice(len(weight_K), 20_000, p=weight_K)
    draws_R = mean_K[chosen_R] + deviation_K[chosen_R] * generator.standard_normal(len(chosen_R))
    low, loss, high = (float(losses_S[-1] * (1 + q)) for q in np.quantile(draws_R, [0.025, 0.5, 0.975]))
    if low <= 0 or high - low > _WIDEST * loss:
        return Reason.of("loss interval too wide", low=low, high=high)
    return Prediction(loss, low, high)


def wander_covariance(at_N: np.ndarray, to_S: np.ndarray) -> np.ndarray:
    """Return the covariance of W between distances, for a bend of 1: integrals from 0 both ways."""
    near = np.minimum(np.abs(at_N)[:, None], np.abs(to_S))
    far = np.maximum(np.abs(at_N)[:, None], np.abs(to_S))
    is_same_side = np.sign(at_N)[:, None] * np.sign(to_S) > 0
    return np.where(is_same_side, near**2 * (3 * far - near) / 6, 0.0)


def _at_the_last(y_S: np.ndarray, octaves_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard deviation and probability, K each, at the last distance, given values at the others."""
    alpha_K, bend_K, scatter_K = _GRID_K3.T
    h_KS = -np.expm1(-alpha_K[:, None] * octaves_S) / alpha_K[:, None]
    covariance_KSS = _LEVEL**2 + _SLOPE**2 * h_KS[:, :, None] * h_KS[:, None, :]
    covariance_KSS += bend_K[:, None, None] ** 2 * wander_covariance(octaves_S, octaves_S)
    covariance_KSS += scatter_K[:, None, None] ** 2 * np.eye(len(octaves_S))
    # The root's last row holds the regression on the others, and the residual's deviation.
    root_KSS = np.linalg.cholesky(covariance_KSS)
    known = slice(len(y_S))
    whitened_KS = np.linalg.solve(
        root_KSS[:, known, known], np.broadcast_to(y_S[:, None], (len(root_KSS), len(y_S), 1))
    )[..., 0]
    diagonal_KS = np.diagonal(root_KSS, axis1=1, axis2=2)
    log_K = _LOG_PRIOR_K - 0.5 * (whitened_KS**2).sum(axis=1) - np.log(diagonal_KS[:, known]).sum(axis=1)
    weight_K = np.exp(log_K - log_K.max())
    mean_K = (root_KSS[:, -1, known] * whitened_KS).sum(axis=1)
    return mean_K, diagonal_KS[:, -1], weight_K / math.fsum(weight_K)
