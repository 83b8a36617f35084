"""What is lost at one scale by taking the optimum of another.

Shapes: R bootstrap draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.curve_fit import Draws
from mup_tpu.analysis.optimum import Estimate

_BESIDE_LOST = 0.05
"""Share of a grid step beside a lost point within which a value counts as lost."""
_HELD = 2.0
"""Standard errors that a fit may lie outside the points beside a value."""
AT_LEAST = "at least"
"""Status of a regret at a scale whose optimum lies beyond its grid: its best run bounds it from below."""


@dataclass(frozen=True)
class Regret:
    """Loss at one scale with the optimum of a smaller one, over the loss at its own."""

    source: float
    target: float
    value: float
    """nat per token; +inf where that learning rate diverges or was stopped early, nan where the grid does
    not reach."""
    low: float
    high: float
    status: str
    """"estimated", "at least", "diverged", "stopped early", "outside the grid" or "not bracketed"."""
    relative: float
    """Regret over what the larger scale gains at its optimum; nan where it gains nothing."""
    low_99: float = math.nan
    high_99: float = math.nan
    """Its 99 % bounds, which a sequence of looks asks for."""
    compute_share: float = math.nan
    """Share of compute with which a tuned model would do as well; nan where no scaling law tells."""
    compute_low: float = math.nan
    compute_high: float = math.nan
    """95 % interval of that share."""


def regret(source: Estimate, target: Estimate) -> Regret:
    """Loss at the target scale of the source's optimum, over the target's own best."""
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
    """Rise of the last finite point before x, nat, where runs are lost at the next one; None elsewhere.

    Where in between runs begin to diverge nobody knows: the loss at x lies above that point's, or is
    infinite.
    Beside the lost point itself it is lost too.
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
    """Loss of each draw at x: its local fit where that reaches, elsewhere straight lines between points.

    Away from the optimum loss rises, so the fit is held between the points beside it, give or take two
    standard errors. Where the outer one is missed by the fit, as behind a wall, the loss jumps to that
    point's anywhere in between, at random.

    Args:
        x_R: log2 of the hyperparameter, one a draw.
        target: the scale, of which `draws` are.
        draws: what to read.
        generator: of where losses jump; None for straight lines alone.
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
    # Beyond one grid step of its centre the local fit is only a trend: there the measured points are better.
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
