"""Weighted cubics through the points of loss curves around the best one.

Each point's error is its noise and a share of its rise above the best (MODEL_ERROR). The share stands for the
part of a valley that a cubic misses, and keeps runs far up, which blow up, level off or lie behind a wall,
from bending the fit near the optimum. A prior holds the asymmetry to that of usual valleys.

Shapes: R draws, G grid points, W points of a fit's window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MODEL_ERROR = 0.2
"""Standard error of a cubic at a point, as a share of the point's rise above the best."""
_WINDOW_STEPS = 3
_WINDOW_OCTAVES = 3.0
_ASYMMETRY = 0.2
"""Standard deviation of a valley's third coefficient over its second, per octave: 0.09 in 52 stored rules,
0.27 at most."""
LEAST_ERROR = 1e-4
"""Least error of a mean in a fit, nat: below, weights differ by more than double precision carries."""
MISS = 3.0
"""Standard errors by which a fit may miss a point near its optimum before it is said."""
_LEAST_CURVATURE = 1e-3
"""Least second coefficient of a valley, nat per squared octave: a fifth of the flattest that is stored."""
STEEP = 0.1
"""Rise of a neighbour over the best, nat, from which the optimum lies nearer to the best."""
_FINE = np.linspace(-1.0, 1.0, 201)


@dataclass(frozen=True)
class Draws:
    """Bootstrap draws of a curve: its optimum and local fit in each."""

    x_R: np.ndarray
    """Optimum of each draw; -inf or +inf if it fell on the lower or upper edge of the grid."""
    loss_R: np.ndarray
    means_RG: np.ndarray
    coefficients_R4: np.ndarray
    centre_R: np.ndarray

    def fitted(self, x: np.ndarray) -> np.ndarray:
        """Loss of each draw's local fit at its own x (R,); of one draw, at as many x as are given."""
        u = x - self.centre_R
        return sum((self.coefficients_R4[:, k] * u**k for k in range(4)), start=np.zeros(1))


def fit_curves(x_G: np.ndarray, means_RG: np.ndarray, error_G: np.ndarray, step: float) -> Draws:
    """Bracket and fit many curves over one grid at once.

    Args:
        x_G: the grid, log2, ascending.
        means_RG: the curves' losses, nat; +inf at the same points in all.
        error_G: noise of the losses, nat.
        step: usual distance of grid points, octaves.
    """
    rows = len(means_RG)
    finite_G = np.isfinite(means_RG[0])
    x_R, loss_R = np.empty(rows), np.empty(rows)
    coefficients_R4, centre_R = np.zeros((rows, 4)), np.zeros(rows)
    best_R = np.argmin(means_RG, axis=1)
    for best in np.unique(best_R):
        chosen = best_R == best
        window = points_near(x_G, finite_G, int(best), step)
        means_RW = means_RG[chosen][:, window]
        fit = fit_window(x_G[window] - x_G[best], means_RW, means_RG[chosen, best], error_G[window])
        lower, upper = _bounds(x_G, finite_G, int(best))
        fine = np.where(_FINE < 0, -_FINE * (lower - x_G[best]), _FINE * (upper - x_G[best]))
        values = fit.coefficients_R4 @ np.vander(fine, 4, increasing=True).T
        # The valley ends somewhere before a point that the fit misses: halfway is least wrong.
        low_R1, high_R1 = _steep_beside(x_G[window] - x_G[best], means_RW, error_G[window])
        low_R1, high_R1 = np.maximum(fit.low_R1, low_R1), np.minimum(fit.high_R1, high_R1)
        values[(fine < low_R1 / 2) | (fine > high_R1 / 2)] = np.inf
        at = np.argmin(values, axis=1)
        loss_R[chosen] = values[np.arange(len(at)), at]
        coefficients_R4[chosen], centre_R[chosen] = fit.coefficients_R4, x_G[best]
        found = x_G[best] + fine[at]
        found = np.where((lower == x_G[0]) & (at == 0), -np.inf, found)
        x_R[chosen] = np.where((upper == x_G[-1]) & (at == len(fine) - 1), np.inf, found)
    return Draws(x_R, loss_R, means_RG, coefficients_R4, centre_R)


@dataclass(frozen=True)
class WindowFit:
    """Weighted cubics through one window."""

    coefficients_R4: np.ndarray
    variance_RW: np.ndarray
    """Variance of each point, noise and model error together, nat²."""
    leverage_RW: np.ndarray
    low_R1: np.ndarray
    high_R1: np.ndarray
    """The nearest points on either side that the fit misses, octaves from the best; infinite where it misses
    none."""


def fit_window(u_W: np.ndarray, means_RW: np.ndarray, best_R: np.ndarray, error_W: np.ndarray) -> WindowFit:
    """Cubics in u, octaves from the best point (loss best_R).

    The fit is made twice: a point that the first one misses ends the valley on its side, as a wall does.
    """
    rise_RW = means_RW - best_R[:, None]
    variance_RW = np.maximum(error_W, LEAST_ERROR) ** 2 + (MODEL_ERROR * rise_RW) ** 2
    coefficients_R4, _ = _weighted(u_W, rise_RW, 1 / variance_RW)
    left_RW = rise_RW - coefficients_R4 @ np.vander(u_W, 4, increasing=True).T
    missed_RW = left_RW**2 > MISS**2 * variance_RW
    low_R1 = np.where(missed_RW & (u_W < 0), u_W, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    high_R1 = np.where(missed_RW & (u_W > 0), u_W, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    inside_RW = (u_W > low_R1) & (u_W < high_R1)
    coefficients_R4, leverage_RW = _weighted(u_W, rise_RW, inside_RW / variance_RW)
    coefficients_R4[:, 0] += best_R
    return WindowFit(coefficients_R4, variance_RW, leverage_RW, low_R1, high_R1)


def _steep_beside(
    u_W: np.ndarray, means_RW: np.ndarray, error_W: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of the best point that are plainly worse, octaves from it (R × 1); infinite for none."""
    best = int(np.searchsorted(u_W, 0.0))
    ends = []
    for beside, none in ((best - 1, -np.inf), (best + 1, np.inf)):
        if not 0 <= beside < len(u_W):
            ends.append(np.full((len(means_RW), 1), none))
            continue
        rise_R = means_RW[:, beside] - means_RW[:, best]
        is_steep_R = rise_R > max(STEEP, 2 * float(error_W[beside]))
        ends.append(np.where(is_steep_R, u_W[beside], none)[:, None])
    return ends[0], ends[1]


def _weighted(u_W: np.ndarray, rise_RW: np.ndarray, weight_RW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and leverages of cubics by weighted least squares, with weak priors and one of asymmetry.

    The latter is in units of the second coefficient of a parabola through the same points.
    """
    design_W4 = np.vander(u_W, 4, increasing=True)
    weighted_R4W = (design_W4 * weight_RW[..., None]).transpose(0, 2, 1)
    normal_R44 = weighted_R4W @ design_W4
    target_R4 = (weighted_R4W @ rise_RW[..., None])[..., 0]
    weak = 1e-3 * np.eye(3)  # where points are too few for a cubic
    parabola_R3 = np.linalg.solve(normal_R44[:, :3, :3] + weak, target_R4[:, :3, None])[..., 0]
    curvature_R = np.maximum(parabola_R3[:, 2], _LEAST_CURVATURE)
    normal_R44[:, :3, :3] += weak
    normal_R44[:, 3, 3] += 1 / (_ASYMMETRY * curvature_R) ** 2
    gain_R4W = np.linalg.solve(normal_R44, weighted_R4W)
    return (gain_R4W @ rise_RW[..., None])[..., 0], np.einsum("wk,rkw->rw", design_W4, gain_R4W)


def points_near(x_G: np.ndarray, finite_G: np.ndarray, best: int, step: float) -> np.ndarray:
    """Finite points within three steps or octaves of the best, whichever is more, and its neighbours.

    None across a diverged point.
    """
    reach = max(_WINDOW_STEPS * step, _WINDOW_OCTAVES)
    near_G = np.abs(np.arange(len(x_G)) - best) <= 1
    inside = finite_G & (near_G | (np.abs(x_G - x_G[best]) <= reach + 1e-9))
    for direction in (-1, 1):
        k = best
        while 0 <= k < len(x_G):
            if not finite_G[k]:
                inside[k::direction] = False
                break
            k += direction
    return np.flatnonzero(inside)


def _bounds(x_G: np.ndarray, finite_G: np.ndarray, best: int) -> tuple[float, float]:
    """Bounds of the optimum: the next points, or an octave if they are closer; not past a lost one."""
    ends = []
    for direction in (-1, 1):
        k = best
        while 0 <= k + direction < len(x_G) and finite_G[k + direction]:
            k += direction
            if abs(x_G[k] - x_G[best]) >= 1.0:
                break
        reach = max(1.0, abs(x_G[best + direction] - x_G[best])) if k != best else 0.0
        ends.append(float(x_G[best] + direction * min(reach, abs(x_G[k] - x_G[best]))))
    return ends[0], ends[1]
