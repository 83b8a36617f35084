"""Loss at one scale with the optimum of another, over the loss at its own.

Read from draws of both curves that go together. Near the target's optimum its valley is read; further away,
where valleys differ most, its runs.

Shapes: R draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.optimum import Estimate, Status

AT_LEAST = "at least"
"""Status of a regret at a scale whose optimum lies beyond its grid: its best run bounds it from below."""
_NEAR = 1.5
"""Octaves (or grid steps) from an optimum within which its valley is read."""
_JUMPS = 0.15
"""Probability that the loss jumps between two points that are read."""


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
    """95 % interval."""
    status: str
    """"estimated", "at least", "diverged", "stopped early", "outside the grid" or "not bracketed"."""
    relative: float
    """Regret over what the larger scale gains at its optimum; nan where it gains nothing."""
    low_99: float = math.nan
    high_99: float = math.nan
    """Bounds that a sequence of looks asks for: each is passed with a probability of 1 %."""
    compute_share: float = math.nan
    """Share of compute with which a tuned model would do as well; nan where no scaling law tells."""
    compute_low: float = math.nan
    compute_high: float = math.nan
    """95 % interval of that share."""


def regret(source: Estimate, target: Estimate) -> Regret:
    """Regret of the source's optimum at the target."""
    ends = (source.curve.scale, target.curve.scale)
    nothing = {"value": math.nan, "low": math.nan, "high": math.nan, "relative": math.nan}
    is_open = target.optimum.status in (Status.LOWER, Status.UPPER)
    if not source.optimum.is_bracketed or not (is_open or target.optimum.is_bracketed):
        return Regret(*ends, status="not bracketed", **nothing)
    assert source.draws is not None and target.draws is not None
    source_R, target_R = source.draws.optimum_P, target.draws.optimum_P
    x = float(np.median(source_R))
    if not target.curve.x_G[0] - 1e-6 <= x <= target.curve.x_G[-1] + 1e-6:
        return Regret(*ends, status="outside the grid", **nothing)
    lost_R = np.maximum(_loss_at(source_R, target) - target.draws.loss_P, 0.0)
    low, low_99, high, high_99 = (
        float(q) for q in np.quantile(lost_R, (0.025, 0.01, 0.975, 0.99), method="nearest")
    )
    # A mean of squares is larger than the square of a mean: so each draw is read as far off as the medians.
    apart = x - float(np.median(target_R))
    value = float(np.median(_loss_at(target_R + apart, target) - target.draws.loss_P))
    if not math.isfinite(value) or np.isinf(lost_R).mean() > 0.5:
        return Regret(*ends, math.inf, low, math.inf, _why_lost(x, target), math.inf, low_99, math.inf)
    value = max(value, 0.0)
    low, low_99 = min(low, value), min(low_99, value)
    if is_open:
        return Regret(*ends, value, low, math.inf, AT_LEAST, math.nan, low_99, math.inf)
    gain = source.optimum.loss - target.optimum.loss
    relative = value / gain if gain > 0 else math.nan
    return Regret(*ends, value, low, max(high, value), "estimated", relative, low_99, max(high_99, value))


def _why_lost(x: float, target: Estimate) -> str:
    """Whether runs at x diverge or were stopped early."""
    curve = target.curve
    right = int(np.clip(np.searchsorted(curve.x_G, x, side="right"), 1, len(curve.x_G) - 1))
    return "diverged" if curve.diverged_G[right - 1 : right + 1].any() else "stopped early"


def _loss_at(x_R: np.ndarray, target: Estimate) -> np.ndarray:
    """Loss of each draw of the target at an x of its own."""
    assert target.draws is not None
    curve, draws = target.curve, target.draws
    right_R = np.clip(np.searchsorted(curve.x_G, x_R), 1, len(curve.x_G) - 1)
    left_x, right_x = curve.x_G[right_R - 1], curve.x_G[right_R]
    left_y, right_y = curve.mean_G[right_R - 1], curve.mean_G[right_R]
    share_R = np.clip((x_R - left_x) / (right_x - left_x), 0.0, 1.0)
    generator = np.random.default_rng(0)
    noise_RG = generator.standard_normal((len(x_R), len(curve.x_G))) * np.nan_to_num(target.error_G)
    rows = np.arange(len(x_R))
    # A straight line between two points, or a jump anywhere between them.
    is_line_R = generator.uniform(size=len(x_R)) > _JUMPS
    share_R = np.where(is_line_R, share_R, generator.uniform(size=len(x_R)) < share_R)
    with np.errstate(invalid="ignore"):
        measured_R = np.where(
            share_R == 0, left_y, np.where(share_R == 1, right_y, (1 - share_R) * left_y + share_R * right_y)
        )
    measured_R += (1 - share_R) * noise_RG[rows, right_R - 1] + share_R * noise_RG[rows, right_R]
    # Where a valley ends inside this step, the loss beyond is the next point's.
    ends_R = ((x_R > draws.high_P) & (draws.high_P > left_x)) | ((x_R < draws.low_P) & (draws.low_P < right_x))
    outer_R = np.where(x_R > draws.high_P, right_y, left_y)
    inside_R = (x_R >= draws.low_P) & (x_R <= draws.high_P)
    near_R = inside_R & (np.abs(x_R - draws.optimum_P) <= _NEAR * max(1.0, curve.step))
    modelled_R = draws.at(x_R)
    # Beside a lost point the valley goes on to the edge.
    near_R |= inside_R & np.isinf(measured_R)
    return np.where(ends_R, np.maximum(outer_R, modelled_R), np.where(near_R, modelled_R, measured_R))
