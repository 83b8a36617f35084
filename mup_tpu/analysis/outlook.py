"""Outlook: interval and regret at a target that runs at proxy scales would leave, before they are made.

Shapes: S proxy scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.batch import Cell
from mup_tpu.analysis.cells import REACH
from mup_tpu.analysis.curvature import valley_at
from mup_tpu.analysis.line import expected_variance, fit_line
from mup_tpu.analysis.priors import Priors, keeps, kind_of, priors_of
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.errors import TableError

_PER_RUN = 0.1
"""Squared standard error of an optimum times runs within reach, octaves²: median of 162 sweeps."""
_FLOOR = 0.04**2
"""Squared standard error that no seed takes away, octaves²: the valley's unknown shape."""
_CURVATURES = {"width": 0.065, "depth": 0.14, "batch size": 0.047, "tokens": 0.026, "size": 0.036}
_USUAL_CURVATURE = 0.05
"""Mean curvatures of valleys in the stored and public sweeps, nat per octave²."""


def runs_within_reach(cells: Sequence[Cell]) -> float:
    """Mean number of runs within reach of an optimum up to half an octave from the cells' middle."""
    middle = (cells[0].x + cells[-1].x) / 2
    return sum(c.runs * min(1.0, max(0.0, REACH + 0.5 - abs(c.x - middle))) for c in cells)


@dataclass(frozen=True)
class Assumed:
    """Drift, scatter and valleys of one rule along one scale, before it is run."""

    priors: Priors
    drift: float
    """Mean slope of the optimum, octaves per octave."""
    curvature: float
    """Curvature of the valley at the target, nat per octave²."""
    per_run: float
    """Squared standard error of an optimum from one run, octaves²."""
    source: Reason
    """Origin of the numbers."""

    @classmethod
    def usual(cls, scale: str, rule: str) -> Assumed:
        """Numbers of stored and public sweeps of a kind of scale, by its column."""
        kind = kind_of(scale)
        source = Reason.of("usual sweeps", kind=kind, keeps=rule if keeps(rule, kind) else "")
        return cls(priors_of(scale, rule), 0.0, _CURVATURES.get(kind, _USUAL_CURVATURE), _PER_RUN, source)

    @classmethod
    def measured(cls, analysis: TransferAnalysis, rule: str) -> Assumed:
        """Numbers of a table of one's own.

        Raises:
            TableError: the table has no line of that rule.
        """
        result = next((r for r in analysis.results if r.compared == rule), analysis.results[0])
        usual = priors_of(analysis.scale, rule)
        line = fit_line(result.optima, np.random.default_rng(0), usual)
        valley = valley_at(result.curves, result.noise, line.known[-1]) if line else None
        if line is None or valley is None:
            raise TableError(
                f"from {analysis.name!r}: a plan needs two {analysis.scale}s with a known optimum of "
                f"{result.compared}, and finite runs beside it"
            )
        slope_R = line.coefficients_RB[:, 1]
        bend = usual.bend * math.sqrt(float((line.factor_R**2).mean()))
        scatter = math.sqrt(float((line.tau_R**2).mean()))
        told = [
            o.se**2 * float(c.count_G[np.abs(c.x_G - o.x) <= REACH].sum())
            for o in line.known
            for c in result.curves
            if c.scale == o.scale
        ]
        priors = Priors(max(float(slope_R.std()), 1e-3), bend, scatter)
        source = Reason.of("this sweep", name=analysis.name, compared=result.compared)
        return cls(priors, float(slope_R.mean()), valley.curvature, float(np.median(told)), source)

    def error(self, runs: float) -> float:
        """Squared standard error of an optimum from some runs within reach of it, octaves²."""
        return max(self.per_run / runs, _FLOOR)

    def variance(self, octaves_S: Sequence[float], runs_S: Sequence[float]) -> float:
        """Variance of a prediction at the target, octaves².

        Args:
            octaves_S: distances of the proxies from the target, below 0, ascending.
            runs_S: runs within reach of the optimum of each.
        """
        at_S, variance_S = np.array(octaves_S), np.array([self.error(runs) for runs in runs_S])
        return expected_variance(at_S - at_S[-1], variance_S, -float(at_S[-1]), self.priors)

    def regret(self, variance: float) -> float:
        """Expected regret of a value of some variance, nat."""
        return self.curvature / 2 * variance

    def copied(self, octaves: float, runs: float) -> float:
        """Expected regret of one proxy's optimum at the target, copied, nat."""
        p, away = self.priors, abs(octaves)
        drifted = (self.drift * away) ** 2
        drawn_K = (p.factor_K * p.slope * away) ** 2 + (p.factor_K * p.bend) ** 2 * away**3 / 3
        variance_K = drifted + drawn_K + 2 * p.tau_K**2 + self.error(runs)
        return self.regret(float(np.average(variance_K, weights=p.weight_K)))
