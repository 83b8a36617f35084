"""Regret, and the verdict on transfer, after each look at one parametrization's runs.

The verdict answers two questions. *May I copy?* is the regret's, *does it move?* that of the optima's slope.
Both answers have to be shown (by equivalence), else the verdict is OPEN. A table
has one look, a sequence one after each purchase. Each row holds the number of its purchase. So the rows alone
tell which looks were taken, and a killed sequence goes on from them.

Regret is the loss at one scale with the optimum of a smaller one, over the loss at its own. Loss rises away
from the optimum on either side. So a draw's loss at x is at least that of the runs between its optimum and x,
and at most that of the runs beyond x; between, the draw's valley says it. At the grid's edge and beside lost
runs the first bound is what is left.

Shapes: G grid points, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import chdtrc, chdtri, ndtr

from mup_tpu.analysis.drift import NEEDED, Drift, fit_drift
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.optimum import (
    CURVE_COLUMNS,
    EPSILON,
    Estimate,
    LossCurve,
    Noise,
    Optimum,
    estimates,
    loss_curve,
    pooled_noise,
)
from mup_tpu.analysis.run_table import RunTable, each_of
from mup_tpu.analysis.trend import Trend
from mup_tpu.config import require_above_zero

_SLACK = 2.0  # Standard errors by which a valley may leave the range of the runs on either side of a value
AT_LEAST = "at least"
"""Status of a lower bound: the larger scale's optimum or the smaller one's value lies beyond the larger's
grid."""


@dataclass(frozen=True)
class Regret:
    """What it costs to train a scale with a smaller scale's optimum instead of its own."""

    source: float
    target: float
    value: float  # nat per token, median of the draws; +inf if the smaller scale's optimum is lost there
    low: float
    high: float  # 95 % interval of the same draws, from 0 where the optimum may have stayed
    expected: float  # Mean of the draws, what copying is expected to cost; +inf if some draws are lost
    status: str  # "estimated", "at least", "diverged", "stopped early", "refused" or "not bracketed"
    relative: float  # Regret as a share of the larger scale's gain at its own optimum; nan without a gain
    is_run: bool = True  # Whether the smaller scale's optimum lies inside the larger one's grid


def regret(source: Estimate, target: Estimate, trend: Trend | None = None) -> Regret:
    """Return the regret at the target scale of the source's optimum.

    The trend of all scales weighs the draws of both optima by the other scales' optima.
    """
    ends = (source.curve.scale, target.curve.scale)
    is_open = target.optimum.status in ("at lower edge", "at upper edge")
    if not source.optimum.is_bracketed or not (is_open or target.optimum.is_bracketed):
        nan = math.nan
        return Regret(*ends, nan, nan, nan, nan, "not bracketed", nan)
    assert source.valley is not None and target.valley is not None, "both have finite runs"
    source_x_R = source.valley.x_R
    if trend is not None and {source.optimum.scale, target.optimum.scale} <= {*trend.sizes}:
        number_R = trend.together(*ends, np.stack([source_x_R, target.valley.x_R]))
        source_x_R = source_x_R[number_R]
        target = replace(target, valley=target.valley.part(number_R))
    assert target.valley is not None, "it has finite runs"
    losses_R = _losses(source_x_R, target)
    best_R = target.valley.loss_R
    if is_open:  # the loss of the best run: how much less it falls beyond the grid is not measured
        edge = np.full(len(best_R), target.optimum.best_x)
        best_R = best_R + target.valley.rise(edge - target.valley.x_R)
    regret_R = np.maximum(losses_R - best_R, 0.0)
    moved_R1 = (source_x_R - target.valley.x_R)[:, None]
    low, value, high = regret_interval(regret_R, moved_R1)
    x, x_G = source.optimum.x, target.curve.x_G
    is_run = bool(x_G[0] <= x <= x_G[-1])
    gain = source.optimum.loss - target.optimum.loss
    relative = value / gain if gain > 0 else math.nan
    status = "estimated"
    if not math.isfinite(value):
        beyond = x_G >= x if x > target.optimum.x else x_G <= x
        beside = np.flatnonzero(
            ~np.isfinite(target.curve.mean_G) & (beyond | (np.abs(x_G - x) <= target.curve.step))
        )
        status = target.curve.fate(beside)
    elif is_open or not is_run:
        status, high = AT_LEAST, math.inf
    return Regret(*ends, value, low, high, float(regret_R.mean()), status, relative, is_run)


def regret_interval(regret_R: np.ndarray, moved_RH: np.ndarray) -> tuple[float, float, float]:
    """Return the lower end of a regret's 95 % interval, its median, and the upper end.

    No draw of a regret is 0. So the lower end is set to 0 where the optimum may have stayed: where 0 lies in
    the 95 % region of `moved_RH`, its movement in octaves along each hyperparameter.
    """
    low, value, high = np.quantile(regret_R, [0.025, 0.5, 0.975], method="nearest").tolist()
    precision_HH = np.linalg.pinv(np.atleast_2d(np.cov(moved_RH, rowvar=False)))
    backwards = (moved_RH @ (precision_HH @ moved_RH.mean(axis=0)) <= 0).mean()
    may_have_stayed = backwards > ndtr(-math.sqrt(chdtri(moved_RH.shape[1], 0.05)))
    return (0.0 if may_have_stayed else low), value, high


def _losses(x_R: np.ndarray, target: Estimate) -> np.ndarray:
    """Return the loss at the target of each draw's x, nat."""
    curve, valley, fit = target.curve, target.valley, target.fit
    assert valley is not None and fit is not None
    generator = np.random.default_rng(0)
    x_G, mean_G, error_G = curve.x_G, curve.mean_G, target.error_G
    above_R = x_R >= valley.x_R
    right_R = np.searchsorted(x_G, x_R, side="left")
    inner_R = np.where(above_R, np.searchsorted(x_G, x_R, side="right") - 1, right_R)
    outer_R = np.where(above_R, right_R, np.searchsorted(x_G, x_R, side="right") - 1)
    has_inner_R, has_outer_R = (((i >= 0) & (i < len(x_G))) for i in (inner_R, outer_R))
    inner_R, outer_R = (np.clip(i, 0, len(x_G) - 1) for i in (inner_R, outer_R))
    # A run between the optimum and x counts as inner only if it does not lie beyond the optimum.
    has_inner_R &= np.where(above_R, x_G[inner_R] > valley.x_R, x_G[inner_R] < valley.x_R)
    loss_R = valley.loss_R + valley.rise(x_R - valley.x_R)
    span_R = x_G[outer_R] - x_G[inner_R]
    with np.errstate(invalid="ignore", divide="ignore"):
        share_R = np.where(span_R != 0, (x_R - x_G[inner_R]) / span_R, 0.0)
    # Far from the optimum the valley is only a trend: straight lines between the runs.
    first, last = x_G[fit.window[0]], x_G[fit.window[-1]]
    far_R = ((x_R < first) | (x_R > last)) & has_inner_R & has_outer_R
    with np.errstate(invalid="ignore"):
        straight_R = mean_G[inner_R] + share_R * (mean_G[outer_R] - mean_G[inner_R])
    loss_R = np.where(far_R & np.isfinite(straight_R), straight_R, loss_R)
    # Behind a wall that the valley misses, and behind lost runs, losses jump at a random place between two
    # runs.
    jumps_R = generator.uniform(size=len(x_R)) < share_R
    is_wall_R = (
        has_outer_R & ((x_G[outer_R] == fit.high) | (x_G[outer_R] == fit.low)) & (fit.is_missed_G[outer_R])
    )
    loss_R = np.where(is_wall_R & jumps_R & np.isfinite(mean_G[outer_R]), mean_G[outer_R], loss_R)
    top_R = np.where(has_outer_R, mean_G[outer_R] + _SLACK * error_G[outer_R], np.inf)
    # The nearest finite run on the way to x.
    floor_G = np.where(np.isfinite(mean_G), mean_G - _SLACK * error_G, -np.inf)
    best = int(np.argmin(mean_G))
    up_G = np.maximum.accumulate(np.where(np.arange(len(x_G)) >= best, floor_G, -np.inf))
    down_G = np.maximum.accumulate(np.where(np.arange(len(x_G)) <= best, floor_G, -np.inf)[::-1])[::-1]
    floor_R = np.where(has_inner_R, np.where(above_R, up_G[inner_R], down_G[inner_R]), -np.inf)
    loss_R = np.clip(loss_R, floor_R, np.maximum(top_R, floor_R))
    return np.where(_is_lost(x_R, above_R, target, generator), np.inf, loss_R)


def _is_lost(
    x_R: np.ndarray, above_R: np.ndarray, target: Estimate, generator: np.random.Generator
) -> np.ndarray:
    """Return whether at least half of the runs at x are lost, in each draw.

    Runs begin to be lost somewhere between the last finite point and the first lost one; the share lost there
    and beyond has the posterior of the lost and other runs on the way to x (Jeffreys' prior).
    """
    curve = target.curve
    lost_G = ~np.isfinite(curve.mean_G)
    is_lost_R = np.zeros(len(x_R), bool)
    best = int(np.argmin(curve.mean_G))
    for side, cells in ((True, range(best + 1, len(lost_G))), (False, range(best - 1, -1, -1))):
        lost = [i for i in cells if lost_G[i]]
        if not lost:
            continue
        first, before = lost[0], lost[0] + (-1 if side else 1)
        edge_R = curve.x_G[before] + (curve.x_G[first] - curve.x_G[before]) * generator.uniform(size=len(x_R))
        beyond_R = (above_R == side) & ((x_R > edge_R) if side else (x_R < edge_R))
        for k in range(1, len(lost) + 1):
            passed = lost[:k]
            number = int((curve.diverged_G[passed] + curve.stopped_G[passed]).sum())
            runs = int(curve.count_G[passed].sum())
            share_R = generator.beta(number + 0.5, max(runs - number, 0) + 0.5, len(x_R))
            at = curve.x_G[lost[k]] if k < len(lost) else (math.inf if side else -math.inf)
            here_R = beyond_R & ((x_R < at) if side else (x_R > at))
            is_lost_R |= here_R & (share_R >= 0.5)
            beyond_R &= ~here_R
    return is_lost_R


DELTA = 0.2  # Largest drift exponent that does not matter, up or down
PLAIN = 2.0  # Multiple of epsilon above which a regret alone shows drift, without a power law
_LUCKY = 2.0  # Standard deviations by which a single run may be lucky
_DIFFERS = 0.01  # Chance of a scatter of noises along the grid below which they differ
MOST_LOOKS = 8
"""Looks in a sequence. Each could end it; benchmarks/settle_families.py measures how often it ends wrong."""


class Decision(StrEnum):
    """Answer to both questions, or that one of them is open."""

    TRANSFERS = "TRANSFERS"
    MOVES = "MOVES AT NO COST"  # Copying is safe over the scales that were run, and not beyond
    DRIFTS = "DRIFTS"
    OPEN = "OPEN"


@dataclass(frozen=True)
class Verdict:
    """Decision on one parametrization."""

    decision: Decision
    look: int | None = None  # Number of the look in a sequence; None for a single analysis
    may_copy: bool = False  # Whether copying is shown to be safe over the scales that were run

    @property
    def is_settled(self) -> bool:
        return self.decision != Decision.OPEN


def decide(
    optima: Sequence[Optimum],
    drifts: Sequence[Drift],
    regret: Regret | None,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    look: int | None = None,
    to_come: int = 0,
    luck: float = 0.0,
    flat: Sequence[Drift] = (),
) -> Verdict:
    """Decide by equivalence whether an optimum may be copied, and whether it moves.

    - TRANSFERS: the regret's upper bound is below epsilon, and the slope's interval lies within ±delta.
    - MOVES AT NO COST: the same regret, and the slope's interval lies beyond half of delta.
    - DRIFTS: the slope's interval excludes 0, and the regret's lower bound exceeds epsilon. The regret's
      estimate would not do: noise biases a squared distance upwards. That the source's optimum lies outside
      the target's grid proves nothing: the grid was placed by the drift that is to be shown.
    - DRIFTS without a power law, as when an optimum moves once and then stays: the regret's lower bound
      exceeds twice epsilon.

    The regret is from the smallest bracketed scale to the largest that was run; None if they are the same.
    While planned scales are `to_come`, only DRIFTS is said. For DRIFTS the regret has to exceed its limit by
    the `luck` that a single run may have had (`Evidence.luck`).

    Of several hyperparameters all have to stay, or one to move. Drifts of those whose cost is below epsilon
    are in `flat`: they need not be known to stay, and known to move they stop TRANSFERS too.
    """
    every = (*drifts, *flat)
    if not any(drift.is_known for drift in every) or regret is None:
        return Verdict(Decision.OPEN, look)
    decision = Decision.OPEN
    may_copy = regret.high < epsilon and to_come <= 0 and all(o.is_bracketed for o in optima)
    stay = all(d.has_stayed(delta) for d in drifts)
    if may_copy and stay and not any(d.has_moved and not d.has_stayed(delta) for d in flat):
        decision = Decision.TRANSFERS
    elif may_copy and any(d.has_moved_by(delta / 2) for d in every):
        decision = Decision.MOVES
    elif regret.low - luck > epsilon * (1 if any(d.has_moved for d in every) else PLAIN):
        decision = Decision.DRIFTS
    return Verdict(decision, look, may_copy)


@dataclass(frozen=True)
class Question:
    """Columns, tolerances and plan by which a run table is judged."""

    columns: Columns = Columns()
    epsilon: float = EPSILON  # Regret that does not matter, nat per token
    delta: float = DELTA  # Drift exponent that does not matter
    planned: tuple[float, ...] = ()  # Scales of a sequence; empty for a single look
    rounding: float = 0.0  # Step to which losses are rounded, nat per token; 0 for none
    seed: int = 0  # Seed of the draws

    @classmethod
    def of(cls, table: RunTable, epsilon: float = EPSILON, delta: float = DELTA, seed: int = 0) -> Question:
        """Return the question of a checked table: its columns, rounding and planned scales."""
        require_above_zero("epsilon", epsilon)
        require_above_zero("delta", delta)
        losses = table.runs["loss"].to_numpy()
        losses = losses[np.isfinite(losses)]
        powers = (10.0**-n for n in range(1, 6) if np.allclose(losses, np.round(losses, n), atol=1e-9))
        rounding = next(powers, 0.0) if len(losses) else 0.0
        return cls(table.columns, epsilon, delta, table.planned, rounding, seed)


@dataclass(frozen=True)
class Evidence:
    """Curves, noise, optima, drift and regret of one parametrization's runs."""

    curves: tuple[LossCurve, ...]
    noise: Noise
    estimates: tuple[Estimate, ...]
    drift: Drift
    headline: Regret | None
    """Regret from the smallest bracketed scale to the largest that was run; None if they are the same."""

    @property
    def optima(self) -> tuple[Optimum, ...]:
        return tuple(e.optimum for e in self.estimates)

    @cached_property
    def luck(self) -> float:
        """Return how much too low the largest scale's best loss may be, where it is that of one run, nat.

        Without replicates the noise is a guess. With them it counts where it differs along the grid
        (Bartlett's test of the points' scatter): it may then be that of the noisiest point near an optimum.
        """
        last = self.curves[-1]
        if last.count_G[np.argmin(last.mean_G)] > 1:
            return 0.0
        if self.noise.source == "lack of fit":
            return _LUCKY * self.noise.sigma
        seen = [c.near_G & (c.df_G > 0) & (c.squares_G > 0) for c in self.curves]
        df_C, squares_C = (
            np.concatenate([getattr(c, f)[seen_G] for c, seen_G in zip(self.curves, seen, strict=True)])
            for f in ("df_G", "squares_G")
        )
        if len(df_C) < 2:
            return 0.0
        spread = df_C.sum() * math.log(squares_C.sum() / df_C.sum()) - float(df_C @ np.log(squares_C / df_C))
        narrow = 1 + ((1 / df_C).sum() - 1 / df_C.sum()) / (3 * (len(df_C) - 1))
        if chdtrc(len(df_C) - 1, spread / narrow) > _DIFFERS:
            return 0.0
        return _LUCKY * math.sqrt(float((squares_C / df_C).max()))


def loss_curves(runs: pd.DataFrame, known: Sequence[LossCurve] = ()) -> list[LossCurve]:
    """Return the curve of each size; those with no more runs than a known one are taken from there."""
    old = {((curve.scale, *curve.beside), curve.runs): curve for curve in known}
    columns, curves = {name: np.asarray(runs[name]) for name in CURVE_COLUMNS}, []
    size_N, sizes = pd.factorize(columns["scale"], sort=True)
    if len(names := each_of("scale", runs)) > 1:
        sizes, size_N = np.unique(runs[names].to_numpy(float), axis=0, return_inverse=True)
    for i, values_A in enumerate(sizes):
        at, size = np.flatnonzero(size_N.ravel() == i), tuple(np.atleast_1d(values_A).tolist())
        curve = old.get((size, len(at))) or loss_curve({name: values[at] for name, values in columns.items()})
        curves.append(replace(curve, beside=size[1:]) if size[1:] else curve)
    return curves


def weigh(runs: pd.DataFrame, question: Question, curves: Sequence[LossCurve] | None = None) -> Evidence:
    """Return the optima, drift and headline regret of one parametrization's runs, or of their curves."""
    curves = loss_curves(runs) if curves is None else curves
    noise = pooled_noise(curves, question.rounding)
    generator = np.random.default_rng(question.seed)
    made = estimates(curves, noise, generator, question.epsilon)
    # Of several scales a power law is fitted, and there is no smallest or largest size.
    along = [] if question.columns.scales_beside else made
    optima, valleys = [e.optimum for e in along], [e.valley for e in along]
    drift = fit_drift(optima, question.columns.scale, question.delta, valleys)
    bracketed = [e for e in along if e.optimum.is_bracketed]
    headline = (
        regret(bracketed[0], made[-1], drift.trend) if bracketed and bracketed[0] is not made[-1] else None
    )
    return Evidence(tuple(curves), noise, tuple(made), drift, headline)


@dataclass(frozen=True, eq=False)
class LookTaken:
    """A look at one parametrization's runs, after a purchase of a sequence.

    Evidence and verdict are weighed when they are asked for: earlier looks mostly give their number alone.
    """

    rows: pd.DataFrame  # Of a checked table
    question: Question  # With planned scales, this is one look of a sequence
    before: LookTaken | None = None

    @property
    def runs(self) -> int:
        return len(self.rows)

    @cached_property
    def purchase(self) -> int:
        # 0 for none
        return int(self.rows["purchase"].max())

    @cached_property
    def curves(self) -> list[LossCurve]:
        return loss_curves(self.rows, self.before.curves if self.before else ())

    @cached_property
    def number(self) -> int:
        # 0 while drift or regret was unknown
        is_enough = sum(curve.is_bracketed for curve in self.curves) >= NEEDED
        return (self.before.number if self.before else 0) + is_enough

    @cached_property
    def evidence(self) -> Evidence:
        return weigh(self.rows, self.question, self.curves)

    @cached_property
    def verdict(self) -> Verdict:
        return decide(
            self.evidence.optima,
            [self.evidence.drift],
            self.evidence.headline,
            self.question.epsilon,
            self.question.delta,
            max(self.number, 1) if self.question.planned else None,
            to_come=len({*self.question.planned} - {c.scale for c in self.curves}),
            luck=self.evidence.luck,
        )

    @property
    def decision(self) -> Decision:
        return self.verdict.decision

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without the evidence."""
        drift, headline = self.evidence.drift, self.evidence.headline
        numbers = {"alpha": drift.alpha, "low": drift.low, "high": drift.high}
        if headline is not None:
            numbers |= {"regret": headline.value, "regret_low": headline.low, "regret_high": headline.high}
        return {"look": self.number, "runs": self.runs, "verdict": self.decision} | numbers


def take_looks(runs: pd.DataFrame, question: Question) -> Iterator[LookTaken]:
    """Return looks at one parametrization's runs: one after each purchase of a sequence, else one at all."""
    purchases = sorted(runs["purchase"].unique()) if question.planned else [np.inf]
    taken = None
    for purchase in purchases:
        taken = LookTaken(runs[runs["purchase"] <= purchase], question, taken)
        yield taken
