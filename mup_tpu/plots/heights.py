"""Vertical axis of loss curves: its range, and the runs that have no place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.transfer import TransferResult


@dataclass(frozen=True)
class Heights:
    """Losses that a panel shows; runs without a place among them lie on a rail above."""

    bottom: float
    top: float

    @property
    def rail(self) -> float:
        """Height of runs without a place."""
        return self.top + 0.06 * (self.top - self.bottom)

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of the axis."""
        return self.bottom - 0.08 * (self.top - self.bottom), self.rail + 0.05 * (self.top - self.bottom)

    def shows(self, curve: LossCurve) -> np.ndarray:
        """Whether each point of a curve has a place."""
        shown_G: np.ndarray = np.isfinite(curve.mean_G) & (curve.mean_G <= self.top)
        return shown_G

    def lost_points(self, curve: LossCurve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points without a place: diverged, stopped early, above the axis."""
        diverged, stopped = curve.diverged_G > 0, (curve.stopped_G > 0) & (curve.diverged_G == 0)
        above = np.isfinite(curve.mean_G) & (curve.mean_G > self.top)
        return diverged, stopped, above & (curve.diverged_G + curve.stopped_G == 0)

    def needs_rail(self, result: TransferResult) -> bool:
        """Whether some runs have no place."""
        lost = (points for curve in result.curves for points in self.lost_points(curve))
        return any(points.any() for points in lost) or any(zero.loss > self.top for zero in result.at_zero)


def heights_of(results: Sequence[TransferResult]) -> tuple[list[Heights], bool]:
    """Losses that each panel shows, and whether all panels share one range.

    They share one unless some range would be less than a third of it.
    """
    own = [_own_heights(result) for result in results]
    bottom, top = min(h.bottom for h in own), max(h.top for h in own)
    is_shared = top == bottom or all(h.top - h.bottom > (top - bottom) / 3 for h in own)
    return [Heights(bottom, top)] * len(own) if is_shared else own, is_shared


def _own_heights(result: TransferResult) -> Heights:
    """Range of one panel; losses at high learning rates would flatten the valley.

    0.6 nat above the best and 0.35 above the worst scale's best, or a fifth and an eighth of the loss itself
    where that is more.
    """
    finite = [c.mean_G[np.isfinite(c.mean_G)] for c in result.curves if np.isfinite(c.mean_G).any()]
    if not finite:
        return Heights(0.0, 1.0)
    best, worst = min(f.min() for f in finite), max(f.min() for f in finite)
    losses = [*(o.loss for o in result.optima), *(z.loss for z in result.at_zero)]
    known = [loss for loss in losses if np.isfinite(loss)]
    bottom = float(min([best, *known]))
    wanted = max(best + max(0.6, 0.2 * abs(best)), worst + max(0.35, 0.12 * abs(worst)))
    top = float(max(min(max(f.max() for f in finite), wanted), *known, worst))
    return Heights(bottom, max(top, bottom + (1e-9 * abs(top) or 0.05)))


def zero_place(results: Sequence[TransferResult]) -> float | None:
    """Place of 0, left of the smallest value above it by more than a step of the grid; None without 0."""
    if not any(result.at_zero for result in results):
        return None
    curves = [curve for result in results for curve in result.curves]
    return float(min(c.x_G[0] for c in curves) - max(1.0, *(c.step for c in curves)) - 0.5)
