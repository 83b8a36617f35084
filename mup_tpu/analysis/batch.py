"""Batches of runs to add, and the cells of a grid where further runs say most: beside an optimum, beyond an
edge, in a hole, at a new scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mup_tpu.analysis.drift import NEEDED, Drift
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost
from mup_tpu.analysis.valley import MODEL_ERROR

_FIRST_LOOK = (-2, -1, 0, 1, 2)  # Octaves from a new scale's predicted optimum, a seed each: a pack
PACK = len(_FIRST_LOOK)  # Runs of a first look
_EXPECTED = 0.6
"""Standard deviation of an expected optimum, octaves, from which a first look has all of its runs."""
REACH = 2.3  # Runs further than this from an optimum (octaves) are uninformative
_APART = 0.2  # Least distance of an added value from all that were run, octaves
_EDGE_STEP = 0.3  # No value is bought between an optimum and lost runs that are nearer than this, octaves


@dataclass(frozen=True)
class Cell:
    """Runs to add at one point of the grid."""

    scale: float
    x: float  # log2 of the hyperparameter
    runs: int  # Number of runs to add
    seeds: int  # Number of seeds after the batch


@dataclass(frozen=True)
class Batch:
    """Next runs of one parametrization."""

    parametrization: str
    cells: tuple[Cell, ...]
    reason: Reason  # Purpose
    cost: float
    to_verdict: float
    """Expected cost until the verdict, this batch included; inf if it is out of reach, nan if too
    little is known to tell."""
    spent: float
    costs: Cost

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def values_beside(estimate: Estimate) -> np.ndarray:
    """Return values within reach of an optimum, log2: those of the grid, and half-octaves up to lost runs."""
    optimum, curve = estimate.optimum, estimate.curve
    reach = max(REACH, curve.step)
    lost_x = curve.x_G[~np.isfinite(curve.mean_G)]
    low = max(lost_x[lost_x < optimum.best_x], default=-math.inf)
    high = min(lost_x[lost_x > optimum.best_x], default=math.inf)
    halves = optimum.best_x + np.arange(-2 * math.ceil(reach), 2 * math.ceil(reach) + 1) / 2
    new = halves[(np.abs(halves[:, None] - curve.x_G) > _APART).all(axis=1)]
    if _are_whole(curve.x_G).all():  # such as batch sizes
        new = new[_are_whole(new)]
    x_C = np.sort(np.concatenate([curve.x_G, new]))
    return x_C[(np.abs(x_C - optimum.x) <= reach) & (low < x_C) & (x_C < high)]


def _are_whole(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(2**x - np.round(2**x)) < 1e-6 * 2**x) & (x >= 0)


def to_come(estimates: Sequence[Estimate], planned: Sequence[float]) -> list[float]:
    # Those between others too: any may be added at any time.
    return sorted(set(planned) - {e.optimum.scale for e in estimates})


def new_scale(estimates: Sequence[Estimate], drift: Drift, planned: Sequence[float] = ()) -> list[Cell]:
    """Return a first look at the next planned scale, or twice the largest, around its expected optimum.

    Where that is known well, three of the five runs do: the other scales say the valley's shape. A drift is
    settled by its regret, so the smallest scale's optimum is run too where it lies beyond these runs.
    """
    last = estimates[-1].optimum
    scale = min(to_come(estimates, planned), default=2 * last.scale)
    x = drift.intercept + drift.alpha * math.log2(scale) if drift.is_known else last.x
    if not drift.is_known and len(estimates) == 2:
        first = estimates[0].optimum
        slope = (last.x - first.x) / math.log2(last.scale / first.scale)
        x = last.x + slope * math.log2(scale / last.scale)
    cells = first_look(estimates[-1], scale, x)
    if planned and drift.trend is not None and drift.trend.optimum(scale).variance < _EXPECTED**2:
        cells = cells[::2] if _is_wide(estimates[-1]) else cells[1:4]
    if planned and len(estimates) + 1 >= NEEDED:
        cells += source_rate(estimates, scale, [cell.x for cell in cells])
    return cells


def source_rate(estimates: Sequence[Estimate], scale: float, values: Sequence[float]) -> list[Cell]:
    """Return a run at the first step of a grid beyond the smallest scale's optimum, if that is outside."""
    x = next((e.optimum.x for e in estimates if e.optimum.is_bracketed), values[0])
    step = max(1.0, estimates[-1].curve.step)
    beyond = max(x - max(values), 0.0) or min(x - min(values), 0.0)
    edge = max(values) if beyond > 0 else min(values)
    x = edge + math.copysign(math.ceil(abs(beyond) / step) * step, beyond)
    return [Cell(scale, float(x), 1, 1)] * bool(beyond)


def _is_wide(estimate: Estimate) -> bool:
    """Return whether runs two octaves from an optimum say more about its place than nearer ones."""
    curve, valley, best_x = estimate.curve, estimate.valley, estimate.optimum.best_x
    lost_x = curve.x_G[~np.isfinite(curve.mean_G)]
    if valley is None or curve.step > 1 or (np.abs(lost_x - best_x) <= _FIRST_LOOK[-1]).any():
        return False
    noise = float(np.median(estimate.error_G * np.sqrt(curve.weight_G)))

    def information(u: float) -> float:
        rise, further = (np.median(valley.rise(np.full(len(valley.x_R), v))) for v in (u, 1.1 * u))
        return float(((further - rise) / (0.1 * u)) ** 2 / (noise**2 + (MODEL_ERROR * rise) ** 2))

    return sum(information(u) for u in (-2.0, 2.0)) > sum(information(u) for u in (-1.0, 1.0))


def first_look(beside: Estimate, scale: float, x: float) -> list[Cell]:
    """Return a first look at a new scale around an expected optimum, on the grid of another scale."""
    step = max(1.0, beside.curve.step)
    origin = beside.optimum.best_x
    centre = origin + round((x - origin) / step) * step
    return look_around(scale, centre, step)


def look_around(scale: float, centre: float, step: float = 1.0) -> list[Cell]:
    return [Cell(scale, centre + k * step, 1, 1) for k in _FIRST_LOOK]


def between(estimate: Estimate) -> list[Cell]:
    """Return values beside the best one: halfway to a lost one, or in a hole of the grid."""
    curve = estimate.curve
    best, step, values = int(np.argmin(curve.mean_G)), max(1.0, curve.step), []
    for beside in (best - 1, best + 1):
        if not 0 <= beside < len(curve.x_G):
            continue
        gap = float(curve.x_G[beside] - curve.x_G[best])
        if np.isinf(curve.mean_G[beside]) and abs(gap) > _EDGE_STEP:
            values.append(float(curve.x_G[best]) + gap / 2)
        elif round(abs(gap) / step) >= 2:
            values.append(float(curve.x_G[best]) + math.copysign(step, gap))
    seeds = int(np.median(curve.count_G))
    return [Cell(estimate.optimum.scale, x, seeds, seeds) for x in values]


def beyond(estimate: Estimate) -> list[Cell]:
    """Return two more values beyond the edge of an optimum, with the curve's usual number of seeds."""
    optimum, curve = estimate.optimum, estimate.curve
    seeds = int(np.median(curve.count_G))
    if optimum.status == "one value":
        grid = [optimum.x + k for k in (-2, -1, 1, 2)]
    else:
        upwards = optimum.status == "at upper edge"
        edge = float(curve.x_G[-1] if upwards else curve.x_G[0])
        grid = [edge + (1 if upwards else -1) * k * curve.step for k in (1, 2)]
    return [Cell(optimum.scale, x, seeds, seeds) for x in sorted(grid)]
