"""Several hyperparameters that are tuned together: the analysis of their surface, and the next runs.

Each hyperparameter has optima, drift, regret and verdict with the others at their best, as a loss curve has.
The verdict on all values together rests on the regret of the smallest scale's values at the largest.

A next run is worth the drop of ½ Σ_s tr(Q·Cov(u_s)), the expected regret of taking each scale's estimated
best values u_s. In a rule's draws these values and the losses at candidates have a joint covariance. A run's
loss, with its noise and what the surface misses there, lowers it as in Kalman's filter.

Shapes: R draws, S scales, H hyperparameters, C candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from mup_tpu.analysis.design import Batch, Cell
from mup_tpu.analysis.drift import fit_drift
from mup_tpu.analysis.optimum import Noise, Optimum, Status
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.run_table import Cost, each_of
from mup_tpu.analysis.surface import Interaction, Surface, fit_surface
from mup_tpu.analysis.trend import Trend
from mup_tpu.analysis.valley import PARABOLA, Valley
from mup_tpu.analysis.verdict import Question, Regret, decide, regret_interval
from mup_tpu.config.grid import MOST_TUNED, design_points
from mup_tpu.errors import TableError

REACH = 2  # Octaves of a design on either side of its centre
_MISSED = 0.2  # Standard error of the surface at a point, as a share of its rise
_SHARE = 0.3  # A batch's cost, as a share of what was spent
_MOST = 12  # Runs of a batch
_FAR = 3.0  # Draws of an optimum count up to this far outside the values that were run, octaves


def analyze_together(
    compared: str, runs: pd.DataFrame, question: Question, costs: Cost, whole: bool = True
) -> TransferResult:
    """Return the analysis of one rule's runs, with a part for each hyperparameter."""
    tuned = question.columns.tuned
    if len(tuned) > MOST_TUNED:
        raise TableError(f"tune {','.join(tuned)}: give at most {MOST_TUNED} columns")
    # Other columns are dropped, as a hyperparameter may be called like one of them, such as cost.
    x = each_of("x", runs)
    values = runs[[*each_of("scale", runs), *x, "loss"]].rename(columns=dict(zip(x, tuned, strict=True)))
    surface = fit_surface(values, tuned, np.random.default_rng(question.seed))
    parts = [_alone(compared, surface, h, question) for h in range(len(tuned))]
    ends = (surface.scales[0], surface.scales[-1])
    gain = parts[0].optima[0].loss - parts[0].optima[-1].loss
    moved_RH = surface.optimum_RSH[:, 0] - surface.optimum_RSH[:, -1]
    regret = _as_regret(ends, surface.regret_R(0, len(surface.scales) - 1), moved_RH, gain)
    is_flat = [high < question.epsilon for _, high in surface.octave_cost]
    # Where a hyperparameter is flat, its optimum need not be known: the regret says the cost.
    matter, flat = ([p for p, one in zip(parts, is_flat, strict=True) if one is of] for of in (False, True))
    has_ends = len(surface.scales) > 1 and not question.columns.scales_beside
    verdict = decide(
        [o for part in matter for o in part.optima],
        [part.drift for part in matter],
        regret if has_ends else None,
        question.epsilon,
        question.delta,
        flat=[part.drift for part in flat],
    )
    is_open = whole and not verdict.is_settled
    return TransferResult(
        compared=compared,
        noise=Noise(surface.noise, 1, "lack of fit"),
        optima=(),
        valleys=(),
        drift=fit_drift(()),
        verdict=verdict,
        regrets=(regret,) if has_ends else (),
        next_batch=next_points(compared, surface, parts, costs) if is_open else None,
        surface=surface,
        pairs=tuple(_interactions(surface, tuned)),
        parts=tuple(parts),
    )


def _alone(compared: str, surface: Surface, h: int, question: Question) -> TransferResult:
    """Return the analysis of one hyperparameter, with the others at their best."""
    shape_R = np.full(len(surface.loss_RS), PARABOLA)
    valleys, optima = [], []
    for s, (scale, *beside) in enumerate(surface.sizes):
        height_R = surface.profile_RH[:, h] / 2 * surface.height_RS[:, s]
        valley = Valley(surface.optimum_RSH[:, s, h], surface.loss_RS[:, s], height_R, shape_R)
        valleys.append(valley)
        low, high = surface.points.low_SH[s, h], surface.points.high_SH[s, h]
        optimum = _optimum(scale, valley, low, high, question.epsilon)
        is_flat = not optimum.is_bracketed and surface.octave_cost[h][1] < question.epsilon
        optimum = replace(optimum, beside=tuple(beside))
        optima.append(replace(optimum, status=Status.FLAT) if is_flat else optimum)
    along = () if question.columns.scales_beside else optima
    drift = fit_drift(along, question.columns.scale, question.delta, valleys)
    bracketed = [s for s, optimum in enumerate(along) if optimum.is_bracketed]
    regrets = [_regret(surface, optima, h, *e, drift.trend) for e in itertools.combinations(bracketed, 2)]
    ends = (optima[bracketed[0]].scale, optima[-1].scale) if bracketed else None
    headline = next((r for r in regrets if (r.source, r.target) == ends), None)
    return TransferResult(
        compared=compared,
        noise=Noise(surface.noise, 1, "lack of fit"),
        optima=tuple(optima),
        valleys=tuple(valleys),
        drift=drift,
        verdict=decide(optima, [drift], headline, question.epsilon, question.delta),
        regrets=tuple(regrets),
        curves=surface.curves(h),
    )


def _optimum(scale: float, valley: Valley, least: float, most: float, epsilon: float) -> Optimum:
    low, x, high = (float(q) for q in np.quantile(valley.x_R, [0.025, 0.5, 0.975]))
    status = Status.LOWER if x <= least else Status.UPPER if x >= most else Status.BRACKETED
    away = math.sqrt(epsilon / float(np.median(valley.height_R)))
    x = float(np.clip(x, least, most))
    return Optimum(
        scale, status, x, low if low >= least else -math.inf, high if high <= most else math.inf,
        float(np.median(valley.loss_R)), x, max(x - away, least), min(x + away, most),
        se=float(valley.x_R.std()), mean=float(valley.x_R.mean()), epsilon=epsilon,
    )  # fmt: skip


def _regret(
    surface: Surface, optima: Sequence[Optimum], h: int, source: int, target: int, trend: Trend | None
) -> Regret:
    ends = (optima[source].scale, optima[target].scale)
    height_R = surface.profile_RH[:, h] * surface.height_RS[:, target]
    regret_R = 0.5 * height_R * surface.away_RH(source, target)[:, h] ** 2
    moved_R1 = surface.optimum_RSH[:, source, [h]] - surface.optimum_RSH[:, target, [h]]
    if trend is not None and {*ends} <= {*trend.sizes}:
        number_R = trend.together(*ends, surface.optimum_RSH[:, [source, target], h].T)
        regret_R, moved_R1 = regret_R[number_R], moved_R1[number_R]
    return _as_regret(ends, regret_R, moved_R1, optima[source].loss - optima[target].loss)


def _as_regret(ends: tuple[float, float], regret_R: np.ndarray, moved_RH: np.ndarray, gain: float) -> Regret:
    low, value, high = regret_interval(regret_R, moved_RH)
    mean, relative = float(regret_R.mean()), value / gain if gain > 0 else math.nan
    return Regret(*ends, value, low, high, mean, "estimated", relative)


def _interactions(surface: Surface, tuned: Sequence[str]) -> list[Interaction]:
    size_RHH, pairs = surface.curvature_RHH, []
    diagonal_RH = np.diagonal(size_RHH, axis1=1, axis2=2)
    for a, b in itertools.combinations(range(len(tuned)), 2):
        correlation_R = size_RHH[:, a, b] / np.sqrt(diagonal_RH[:, a] * diagonal_RH[:, b])
        low, value, high = (float(q) for q in np.quantile(correlation_R, [0.025, 0.5, 0.975]))
        shift = float(np.median(-size_RHH[:, a, b] / diagonal_RH[:, a]))
        pairs.append(Interaction(tuned[a], tuned[b], value, low, high, shift))
    return pairs


def design_around(centre: Sequence[float]) -> list[tuple[float, ...]]:
    """Return a composite design of log2 values, two octaves about a centre."""
    reach = range(-REACH, REACH + 1)
    if len(centre) == 1:
        return [(centre[0] + k,) for k in reach]
    values = {str(h): [2.0 ** (x + k) for k in reach] for h, x in enumerate(centre)}
    points = design_points(values, "composite")
    return [tuple(float(np.log2(value)) for value in point.values()) for point in points]


def moved_centre(optima: Sequence[Optimum]) -> list[float]:
    """Return the centre of a design for a scale: its optimum, or an octave beyond an edge where it lies."""
    beyond = {Status.LOWER: -1, Status.UPPER: 1}
    return [float(round(o.x) + beyond.get(Status(o.status), 0)) for o in optima]


def next_points(compared: str, surface: Surface, parts: Sequence[TransferResult], costs: Cost) -> Batch:
    """Return the next runs of a rule whose verdict is open."""
    points, scales, h = surface.points, len(surface.scales), len(parts)
    counts = zip(points.count_N, points.number_N, strict=True)
    spent = float(sum(n * costs.of(surface.scales[s]) for n, s in counts))
    curvature_HH = np.median(surface.curvature_RHH, axis=0)
    inside = points.low_SH - _FAR, points.high_SH + _FAR
    optimum_RU = np.clip(surface.optimum_RSH, *inside).reshape(len(surface.loss_RS), scales * h)
    batch = partial(Batch.of, compared, costs=costs, spent=spent)
    outside = list[Cell]()
    at_edge = list[float]()
    for s, scale in enumerate(surface.scales):
        optima = [part.optima[s] for part in parts]
        if not all(o.is_bracketed for o in optima):
            at_edge.append(scale)
            around = design_around(moved_centre(optima))
            outside += [Cell(scale, x[0], 1, 1, x[1:]) for x in around if not points.count_at(s, x)]
    if outside:
        return batch(outside, Reason.of("extend grids", scales=at_edge))
    # Candidates: designs of one and of two octaves about each optimum
    middle_SH = np.median(surface.optimum_RSH, axis=0)
    number_C, u_CH = list[int](), list[np.ndarray]()
    for s in range(scales):
        centre = np.round(2 * middle_SH[s]) / 2
        around_H = np.array(design_around(centre.tolist())) - centre
        both = np.unique(np.concatenate([around_H, around_H / 2]), axis=0) + centre
        number_C += [s] * len(both)
        u_CH += [*both]
    of_C, at_CH = np.array(number_C), np.array(u_CH)
    rise_RC = surface.rise_RN(at_CH, of_C)
    error_C = surface.noise**2 + (_MISSED * np.median(rise_RC, axis=0)) ** 2
    price_C = np.array([costs.of(surface.scales[s]) for s in of_C])
    covariance = np.cov(np.column_stack([optimum_RU, surface.loss_RS[:, of_C] + rise_RC]), rowvar=False)
    of_scales = (covariance[s * h : s * h + h, s * h : s * h + h] for s in range(scales))
    widest = surface.scales[int(np.argmax([(curvature_HH * part).sum() for part in of_scales]))]
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
    chosen = []
    for c, n in sorted(bought.items()):
        x, *beside = at_CH[c].tolist()
        seeds = n + points.count_at(of_C[c], at_CH[c])
        chosen.append(Cell(surface.scales[of_C[c]], x, n, seeds, tuple(beside)))
    return batch(chosen, Reason.of("wide regret", scales=sorted({cell.scale for cell in chosen}), at=widest))
