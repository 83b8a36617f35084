"""Power laws of an optimum in several scales at once: lr* ∝ N^a · D^b · B^c.

A **cell** is one size: one value of each scale. Optima are estimated cell by cell, as along one scale, and
their trend (trend.py) is straight along each scale. Cells that share a value of a scale, such as one model or
one batch size, miss the law together, and each by itself too: without the former, many cells at few values
would make exponents look surer than they are. Each cell is then predicted from the others.

Shapes: S cells with a known optimum, A scales, N sizes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy

from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.trend import Pace, Priors, Trend

_SCATTER = 0.2  # scale of τ, octaves
_SHARED = (0.03, 0.1, 0.2, 0.45)  # scatters that cells of one value may share, octaves
_LEAST_VALUES = 4  # values of a scale from which what they share is separate from its exponent


@dataclass(frozen=True)
class ScaleExponent:
    """Exponent of one scale, with its 95 % interval."""

    scale: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Cells predicted from the others."""

    cells: int
    rmse: float  # Octaves
    regret: float  # Mean loss over the cell's best, nat
    inside: float  # Share inside the 95 % interval, widened by the optimum's own error


@dataclass(frozen=True, repr=False)
class PowerLaw:
    """A rule's optimum as a power law of several scales."""

    scales: tuple[str, ...]
    estimates: tuple[Estimate, ...]  # Known cells' optima

    @cached_property
    def sizes_SA(self) -> np.ndarray:
        # log2 of each known cell's sizes
        return np.log2([e.optimum.sizes for e in self.estimates])

    @cached_property
    def trend(self) -> Trend:
        x_S, error_S = np.array([(e.optimum.x, e.optimum.se) for e in self.estimates]).T
        straight = Priors(0.0, _SCATTER, moving=Pace(1.0, 0.0))
        shared = replace(straight, shared=_SHARED)
        # With few values, what they share cannot be separated from the exponent.
        counts = [len(np.unique(column)) for column in self.sizes_SA.T]
        priors = tuple(shared if _LEAST_VALUES <= n <= len(x_S) / 2 else straight for n in counts)
        return Trend(2**self.sizes_SA, x_S, error_S, priors)

    @cached_property
    def exponents(self) -> tuple[ScaleExponent, ...]:
        slopes = zip(self.scales, self.trend.mean_slopes(), strict=True)
        return tuple(ScaleExponent(name, m.mean, m.quantile(0.025), m.quantile(0.975)) for name, m in slopes)

    @property
    def tau(self) -> float:
        # Scatter of each cell by itself about the law, octaves
        return self.trend.tau

    def optima(self, sizes_NA: np.ndarray) -> np.ndarray:
        # log2 of the law's optimum at plain sizes, without what cells of one value share
        away_NA = np.log2(sizes_NA) - self.sizes_SA.mean(axis=0)
        return np.asarray(self.trend.x_S.mean() + away_NA @ [e.value for e in self.exponents])

    @cached_property
    def held_out(self) -> HeldOut:
        """Predict each cell from the others."""
        predicted, truth_S = self.trend.left_out(), self.trend.x_S
        x_S = np.array([one.mean for one in predicted])
        below_S = np.array([one.below(x) for one, x in zip(predicted, truth_S, strict=True)])
        inside = float(((below_S > 0.025) & (below_S < 0.975)).mean())
        regrets = [curve_regret(e, x) for e, x in zip(self.estimates, x_S.tolist(), strict=True)]
        rmse = math.sqrt(float(np.square(x_S - truth_S).mean()))
        return HeldOut(len(x_S), rmse, float(np.mean(regrets)), inside)

    def to_dict(self) -> dict[str, Any]:
        return {
            "exponents": [asdict(e) for e in self.exponents],
            "known": len(self.estimates),
            "tau": self.tau,
            "held_out": asdict(self.held_out),
        }


def curve_regret(estimate: Estimate, x: float) -> float:
    """Read off a cell's curve what a value costs over the optimum; beyond the grid, what its end costs."""
    curve, optimum = estimate.curve, estimate.optimum
    used = np.isfinite(curve.mean_G) & (np.abs(curve.x_G - optimum.x) > 0.05)
    at = np.append(curve.x_G[used], optimum.x)
    rise = np.append(np.maximum(curve.mean_G[used] - optimum.loss, 0.0), 0.0)
    order = np.argsort(at)
    inside = float(np.clip(x, at.min(), at.max()))
    return float(scipy.interpolate.PchipInterpolator(at[order], rise[order])(inside))
