"""Next runs of several hyperparameters: where the expected regret of their best values falls most per cost.

Of a rule's draws the best values of all scales and the losses at candidate values have a joint covariance. A
run's loss, with its noise and what the surface misses there, lowers it as in Kalman's filter. A run is worth
the drop of ½ Σ_s tr(Q·Cov(u_s)), the expected regret of taking each scale's estimated best values.

Shapes: R draws, S scales, H hyperparameters, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mup_tpu.analysis.optimum import Optimum, Status
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost, run_cost
from mup_tpu.analysis.surface import JointAnalysis
from mup_tpu.config.sweep import design_points

REACH = 2  # Octaves of a design on either side of its centre
_MISSED = 0.2  # Standard error of the surface at a point, as a share of its rise
_SHARE = 0.3  # A batch's cost, as a share of what was spent
_MOST = 12  # Runs of a batch
_FAR = 3.0  # Draws of an optimum count up to this far outside the values that were run, octaves


@dataclass(frozen=True)
class Point:
    """Runs at one point of several hyperparameters."""

    scale: float
    x: tuple[float, ...]  # log2 of each hyperparameter
    runs: int  # Number of runs to add
    seeds: int  # Number of seeds after them


@dataclass(frozen=True)
class NextPoints:
    """Next runs of one rule."""

    compared: str
    points: tuple[Point, ...]
    reason: Reason
    regrets: tuple[float, ...]  # Expected regret of each scale's estimated best values
    cost: float
    spent: float
    costs: Cost

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def design_around(centre: Sequence[float]) -> list[tuple[float, ...]]:
    """Return a composite design of log2 values, two octaves about a centre."""
    reach = range(-REACH, REACH + 1)
    if len(centre) == 1:
        return [(centre[0] + k,) for k in reach]
    points = design_points(
        {str(h): [2.0 ** (x + k) for k in reach] for h, x in enumerate(centre)}, "composite"
    )
    return [tuple(float(np.log2(value)) for value in point.values()) for point in points]


def moved_centre(optima: Sequence[Optimum]) -> list[float]:
    """Return the centre of a design for a scale: its optimum, or an octave beyond an edge where it lies."""
    beyond = {Status.LOWER: -1, Status.UPPER: 1}
    return [float(round(o.x) + beyond.get(Status(o.status), 0)) for o in optima]


def next_points(joint: JointAnalysis, number_of_rule: int) -> NextPoints | None:
    """Return the next runs of a rule; None if its verdict is settled."""
    result, costs = joint.results[number_of_rule], run_cost(joint.table)
    if result.verdict.is_settled:
        return None
    surface, points = result.surface, result.surface.points
    scales, h = len(surface.scales), len(joint.tuned)
    spent = float(
        sum(n * costs.of(surface.scales[s]) for n, s in zip(points.count_N, points.number_N, strict=True))
    )
    curvature_HH = np.median(surface.curvature_RHH, axis=0)
    inside = points.low_SH - _FAR, points.high_SH + _FAR
    optimum_RU = np.clip(surface.optimum_RSH, *inside).reshape(len(surface.loss_RS), scales * h)

    def regrets(covariance: np.ndarray) -> list[float]:
        parts = (covariance[s * h : s * h + h, s * h : s * h + h] for s in range(scales))
        return [0.5 * float((curvature_HH * part).sum()) for part in parts]

    def batch(chosen: Sequence[Point], reason: Reason) -> NextPoints:
        cost = sum(point.runs * costs.of(point.scale) for point in chosen)
        of_scale = tuple(regrets(np.cov(optimum_RU, rowvar=False)))
        return NextPoints(result.compared, tuple(chosen), reason, of_scale, cost, spent, costs)

    outside = list[Point]()
    at_edge = list[float]()
    for s, scale in enumerate(surface.scales):
        optima = [part.results[number_of_rule].optima[s] for part in joint.parts]
        if not all(o.is_bracketed for o in optima):
            at_edge.append(scale)
            around = design_around(moved_centre(optima))
            outside += [Point(scale, x, 1, 1) for x in around if not points.count_at(s, x)]
    if outside:
        return batch(outside, Reason.of("extend grids", scales=at_edge))
    # Candidates: designs of one and of two octaves about each optimum
    middle_SH = np.median(surface.optimum_RSH, axis=0)
    number_C, u_CH = list[int](), list[np.ndarray]()
    for s in range(scales):
        centre = np.round(2 * middle_SH[s]) / 2
        around = np.array(design_around(centre.tolist())) - centre
        both = np.unique(np.concatenate([around, around / 2]), axis=0) + centre
        number_C += [s] * len(both)
        u_CH += [*both]
    of_C, at_CH = np.array(number_C), np.array(u_CH)
    rise_RC = surface.rise_RN(at_CH, of_C)
    error_C = surface.noise**2 + (_MISSED * np.median(rise_RC, axis=0)) ** 2
    price_C = np.array([costs.of(surface.scales[s]) for s in of_C])
    covariance = np.cov(np.column_stack([optimum_RU, surface.loss_RS[:, of_C] + rise_RC]), rowvar=False)
    first, bought = scales * h, dict[int, int]()
    while sum(bought.values()) <= h or (
        sum(bought.values()) < _MOST and sum(price_C[c] * n for c, n in bought.items()) < _SHARE * spent
    ):
        gain_C = np.zeros(len(of_C))
        for s in range(scales):
            across_HC = covariance[s * h : s * h + h, first:]
            gain_C += 0.5 * np.einsum("hc,hk,kc->c", across_HC, curvature_HH, across_HC)
        c = int(np.argmax(gain_C / (np.diag(covariance)[first:] + error_C) / price_C))
        with_c = covariance[first + c]
        covariance = covariance - np.outer(with_c, with_c) / (with_c[first + c] + error_C[c])
        bought[c] = bought.get(c, 0) + 1
    chosen = [
        Point(surface.scales[of_C[c]], (*at_CH[c].tolist(),), n, n + points.count_at(of_C[c], at_CH[c]))
        for c, n in sorted(bought.items())
    ]
    widest = surface.scales[int(np.argmax(regrets(np.cov(optimum_RU, rowvar=False))))]
    return batch(chosen, Reason.of("wide regret", scales=sorted({p.scale for p in chosen}), at=widest))
