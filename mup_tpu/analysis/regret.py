"""Regret: loss at one scale with the optimum of a smaller one, over the loss at its own.

Shapes: R bootstrap draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.curve_fit import Draws
from mup_tpu.analysis.optimum import Estimate

_BESIDE_LOST = 0.05
"""Distance from a lost point within which a value counts as lost, as a share of a grid step."""
_HELD = 2.0
"""Standard errors by which a fit may leave the range of the two points beside a value."""
AT_LEAST = "at least"
"""Status of a lower bound, by the best run: the larger scale's optimum lies beyond its grid."""


@dataclass(frozen=True)
class Regret:
    """Loss at one scale with the optimum of a smaller one, over the loss at its own."""

    source: float
    target: float
    value: float
    """nat per token; +inf if the smaller scale's optimum diverges or was stopped early, nan outside the
    grid."""
    low: float
    high: float
    status: str
    """"estimated", "at least", "diverged", "stopped early", "outside the grid" or "not bracketed"."""
    relative: float
    """Regret as a share of the larger scale's gain at its own optimum; nan without a gain."""
    low_99: float = math.nan
    high_99: float = math.nan
    """99 % bounds of the value, for a sequence of looks."""
    compute_share: float = math.nan
    """Share of the compute with which a tuned model reaches the same loss; nan without a scaling law."""
    compute_low: float = math.nan
    compute_high: float = math.nan
    """95 % interval of compute_share."""


def regret(source: Estimate, target: Estimate) -> Regret:
    """Regret at the target scale of the source's optimum."""
    ends = (source.curve.scale, target.curve.scale)
    nothing = {"value": math.nan, "low": math.nan, "high": math.nan, "relative": math.nan}
    is_open = target.optimum.status in ("at lower edge", "at upper edge")
    if not source.optimum.is_bracketed or not (is_open or target.optimum.is_bracketed):
        return Regret(*ends, status="not bracketed", **nothing)
    x = source.optimum.x
    if not target.curve.x_G[0] <= x <= target.curve.x_G[-1]:
        return Regret(*ends, status="outside the grid", **nothing)
    value = float(_loss_at(np.array([x]), target, target.fit)[0] - target.optimum.loss)
    between = _edge_beside(x, target)
    if between is not None and not math.isfinite(value):
        value = float(np.clip(target.fit.fitted(np.array([x]))[0] - target.optimum.loss, between, np.inf))
        return Regret(*ends, value, 0.0, math.inf, "estimated", math.nan)
    if not math.isfinite(value):
        right = int(np.clip(np.searchsorted(target.curve.x_G, x, side="right"), 1, len(target.curve.x_G) - 1))
        diverged = target.curve.diverged_G[right - 1 : right + 1].any()
        status = "diverged" if diverged else "stopped early"
        return Regret(*ends, math.inf, math.inf, math.inf, status, math.inf, math.inf)
    inside = np.isfinite(source.draws.x_R) & (np.isfinite(target.draws.x_R) | is_open)
    # The draws scatter by noise alone; the source's optimum is also uncertain by its fit's model error.
    by_noise = float(source.draws.x_R[inside].var()) if inside.any() else 0.0
    own = math.sqrt(max(0.0, source.optimum.se**2 - by_noise))
    generator = np.random.default_rng(0)
    shift_R = own * generator.standard_normal(len(inside))
    best_R = target.draws.means_RG.min(axis=1) if is_open else target.draws.loss_R
    losses_R = _loss_at(source.draws.x_R + shift_R, target, target.draws, generator) - best_R
    drawn = losses_R[inside] if inside.any() else np.array([value])
    quantiles = np.quantile(drawn, [0.01, 0.025, 0.975, 0.99], method="nearest")
    low_99, low, high, high_99 = (float(q) for q in quantiles)
    low, low_99 = (max(min(bound, value), 0.0) for bound in (low, low_99))
    gain = source.optimum.loss - target.optimum.loss
    relative = value / gain if gain > 0 else math.nan
    if is_open:
        return Regret(*ends, max(value, 0.0), low, math.inf, AT_LEAST, math.nan, low_99, math.inf)
    return Regret(
        *ends,
        value=max(value, 0.0),
        low=low,
        high=max(high, value),
        status="estimated",
        relative=relative,
        low_99=low_99,
        high_99=max(high_99, value),
    )


def _edge_beside(x: float, target: Estimate) -> float | None:
    """Rise above the optimum, nat, of the finite point beside x if the point on x's other side is lost.

    Runs begin to diverge somewhere between the two points: the loss at x lies above the finite one's, or is
    infinite. None if both points are finite or lost, or x lies close to the lost one.
    """
    curve = target.curve
    right = int(np.clip(np.searchsorted(curve.x_G, x, side="right"), 1, len(curve.x_G) - 1))
    finite = np.isfinite(curve.mean_G[[right - 1, right]])
    if finite.all() or not finite.any():
        return None
    inner, outer = (right - 1, right) if finite[0] else (right, right - 1)
    if abs(x - curve.x_G[outer]) < _BESIDE_LOST * abs(curve.x_G[outer] - curve.x_G[inner]):
        return None
    return float(curve.mean_G[inner] - target.optimum.loss)


def _loss_at(
    x_R: np.ndarray, target: Estimate, draws: Draws, generator: np.random.Generator | None = None
) -> np.ndarray:
    """Loss of each draw at x: the local fit near the best point, straight lines between points elsewhere.

    Loss rises away from the optimum, so the fit is held between the points on either side of x, give or take
    two standard errors. If the fit misses the outer point, as behind a wall, the loss jumps to that point's
    at a random place in between.

    Args:
        x_R: log2 of the hyperparameter, one a draw.
        target: estimate of the scale.
        draws: fits and means of the scale to read the losses from.
        generator: for the places of jumps; None for no jumps.
    """
    curve = target.curve
    rows = np.arange(len(x_R))
    clipped_R = np.clip(x_R, curve.x_G[0], curve.x_G[-1])
    u_R = clipped_R - draws.centre_R
    right_R = np.clip(np.searchsorted(curve.x_G, clipped_R, side="right"), 1, len(curve.x_G) - 1)
    left_R = right_R - 1
    left_y, right_y = draws.means_RG[rows, left_R], draws.means_RG[rows, right_R]
    share_R = (clipped_R - curve.x_G[left_R]) / (curve.x_G[right_R] - curve.x_G[left_R])
    with np.errstate(invalid="ignore"):
        straight_R = np.where(
            share_R == 0, left_y, np.where(share_R == 1, right_y, left_y * (1 - share_R) + right_y * share_R)
        )
    # Farther than 1.5 grid steps from its centre the local fit is only a trend; the points are better.
    reaches_R = (np.abs(u_R) <= 1.5 * curve.step) & np.isfinite(straight_R)
    above_R = clipped_R >= draws.centre_R
    outer_R, inner_R = np.where(above_R, right_R, left_R), np.where(above_R, left_R, right_R)
    outer_y, inner_y = draws.means_RG[rows, outer_R], draws.means_RG[rows, inner_R]
    noise_R = _HELD * np.maximum(target.error_G[inner_R], target.error_G[outer_R])
    floor_R = np.where(curve.x_G[inner_R] == draws.centre_R, -np.inf, np.minimum(inner_y, outer_y) - noise_R)
    held_R = np.clip(draws.fitted(clipped_R), floor_R, np.maximum(inner_y, outer_y) + noise_R)
    loss_R = np.where(reaches_R, held_R, straight_R)
    if generator is not None:
        to_outer_R = np.where(above_R, share_R, 1 - share_R)
        is_beyond_R = target.missed_G[outer_R] & (generator.uniform(size=len(x_R)) < to_outer_R)
        loss_R = np.where(is_beyond_R, outer_y, loss_R)
    return loss_R
