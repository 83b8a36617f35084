"""Outlook: errors and valleys that a plan assumes of runs, before they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mup_tpu.analysis.design import REACH, Cell
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.analysis.trend import Priors, claims, fit_trend, kind_of, priors_of
from mup_tpu.errors import TableError

_PER_RUN = 0.1  # Squared standard error of an optimum times runs within reach, octaves²: median of 162 sweeps
_FLOOR = 0.04**2  # Squared standard error that no seed takes away, octaves²: the valley's unknown shape
_CURVATURES = {"width": 0.065, "depth": 0.14, "batch size": 0.047, "tokens": 0.026, "size": 0.036}
_USUAL_CURVATURE = 0.05  # Mean curvatures of valleys in the stored and public sweeps, nat per octave²


def runs_within_reach(cells: Sequence[Cell]) -> float:
    """Mean number of runs within reach of an optimum up to half an octave from the cells' middle."""
    middle = (cells[0].x + cells[-1].x) / 2
    return sum(c.runs * min(1.0, max(0.0, REACH + 0.5 - abs(c.x - middle))) for c in cells)


@dataclass(frozen=True)
class Assumed:
    """Drift and valleys of one rule along one scale, before it is run."""

    priors: Priors
    curvature: float  # Curvature of the valley at the target, nat per octave²
    per_run: float  # Squared standard error of an optimum from one run, octaves²
    source: Reason  # Origin of the numbers

    @classmethod
    def usual(cls, scale: str, rule: str) -> Assumed:
        """Return numbers of stored and public sweeps of a kind of scale, by its column."""
        kind = kind_of(scale)
        claimed = claims(rule, kind)
        source = Reason.of("usual sweeps", kind=kind, keeps=rule if claimed else "")
        return cls(priors_of(scale, claimed), _CURVATURES.get(kind, _USUAL_CURVATURE), _PER_RUN, source)

    @classmethod
    def measured(cls, analysis: TransferAnalysis, rule: str) -> Assumed:
        """Return numbers of a table of one's own.

        Raises:
            TableError: the table has no trend of that rule.
        """
        result = next((r for r in analysis.results if r.compared == rule), analysis.results[0])
        priors = priors_of(analysis.scale, claims(rule, kind_of(analysis.scale)))
        trend = fit_trend(result.optima, priors, result.valleys)
        if trend is None:
            raise TableError(
                f"from {analysis.name!r}: a plan needs two {analysis.scale}s with a known optimum of "
                f"{result.compared}"
            )
        known = [
            (o, c, v)
            for o, c, v in zip(result.optima, result.curves, result.valleys, strict=True)
            if o.is_bracketed and v is not None
        ]
        per_runs = [o.se**2 * float(c.count_G[np.abs(c.x_G - o.x) <= REACH].sum()) for o, c, _ in known]
        source = Reason.of("this sweep", name=analysis.name, compared=result.compared)
        after = replace(priors, steady=trend.steady, mean=trend.slope().mean)
        return cls(after, float(known[-1][2].curvature_R.mean()), float(np.median(per_runs)), source)

    def error(self, runs: float) -> float:
        # Squared standard error of an optimum from some runs within reach of it, octaves²
        return max(self.per_run / runs, _FLOOR)

    def regret(self, variance: float) -> float:
        # Expected regret of a value of some variance, nat
        return self.curvature / 2 * variance
