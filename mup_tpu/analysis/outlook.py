"""Outlook: interval and regret at a target that runs at proxy scales would leave, before they are made.

Shapes: S proxy scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mup_tpu.analysis.batch import REACH, Cell
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.analysis.trend import Priors, Trend, claims, fit_trend, kind_of, priors_of
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
    weight_K: np.ndarray | None
    """Weights of the priors' sets and scatters after a table of one's own; None for the priors' own."""
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
        """Return numbers of stored and public sweeps of a kind of scale, by its column."""
        kind = kind_of(scale)
        claimed = claims(rule, kind)
        source = Reason.of("usual sweeps", kind=kind, keeps=rule if claimed else "")
        curvature = _CURVATURES.get(kind, _USUAL_CURVATURE)
        return cls(priors_of(scale, claimed), None, 0.0, curvature, _PER_RUN, source)

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
        curvature, per_run = float(known[-1][2].curvature_R.mean()), float(np.median(per_runs))
        source = Reason.of("this sweep", name=analysis.name, compared=result.compared)
        return cls(priors, trend.weight_K, trend.slope().mean, curvature, per_run, source)

    def error(self, runs: float) -> float:
        """Return the squared standard error of an optimum from some runs within reach of it, octaves²."""
        return max(self.per_run / runs, _FLOOR)

    def variance(self, octaves_S: Sequence[float], runs_S: Sequence[float]) -> float:
        """Return the variance of a prediction at the target, octaves².

        Args:
            octaves_S: distances of the proxies from the target, below 0, ascending.
            runs_S: runs within reach of the optimum of each.
        """
        error_S = np.sqrt([self.error(runs) for runs in runs_S])
        at_S = tuple(2.0**octaves for octaves in octaves_S)
        trend = Trend(at_S, np.zeros(len(at_S)), error_S, self.priors)
        weight_K = trend.prior_weight_K if self.weight_K is None else self.weight_K
        return replace(trend, given_weight_K=weight_K).optimum(1.0).noise

    def regret(self, variance: float) -> float:
        """Return the expected regret of a value of some variance, nat."""
        return self.curvature / 2 * variance

    def copied(self, octaves: float, runs: float) -> float:
        """Return the expected regret of one proxy's optimum at the target, copied, nat."""
        away = np.array([abs(octaves)])
        trend = Trend((1.0,), np.zeros(1), np.zeros(1), self.priors)
        weight_K = trend.prior_weight_K if self.weight_K is None else self.weight_K
        moved_C = [float(pace.covariance(away, away)[0, 0]) for *_, pace in self.priors.paces]
        moved_K = np.repeat(moved_C, len(trend.tau_K) // len(moved_C))
        drifted = (self.drift * away[0]) ** 2
        return self.regret(drifted + float(weight_K @ (moved_K + 2 * trend.tau_K**2)) + self.error(runs))
