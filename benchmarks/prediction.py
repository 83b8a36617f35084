"""Optima predicted from smaller scales: calibration by distance, and priors by empirical Bayes.

    python benchmarks/prediction.py             # the package's priors, beside three other methods
    python benchmarks/prediction.py --choose    # also priors of which the scored source has no part; half an hour

Sweeps: those of the atlas (results/public/sweeps.csv) with three known optima or more. Each prefix of two
optima or more predicts every later one; intervals are widened by the later optimum's own error. A repository
is one source, and so are our sweeps of one name.

Shapes: S optima, Q quantiles.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from scipy import optimize, stats

from mup_tpu.analysis.trend import BY_KIND, KEPT, Mixture, Pace, Priors, Trend

RANGES = (0.0, 1.25, 2.4, 3.6, 99.0)
"""Bounds of the distances, octaves, by which calibration is counted."""
_QUANTILES = np.arange(0.0125, 1.0, 0.025)


@dataclass(frozen=True)
class Case:
    """A later optimum and those before it."""

    source: str
    sweep: str
    kind: str
    claimed: bool
    scale_S: np.ndarray
    x_S: np.ndarray
    error_S: np.ndarray
    target: float
    x: float
    error: float

    @property
    def octaves(self) -> float:
        """Distance of the target from the largest scale of the prefix."""
        return math.log2(self.target / self.scale_S[-1])

    def predicted(self, priors: Priors) -> Mixture:
        """Prediction, with the target's own error."""
        made = Trend(self.scale_S, self.x_S, self.error_S, (priors,)).optimum(self.target)
        return replace(made, deviation_K=np.hypot(made.deviation_K, self.error))


def cases_of(sweeps: pd.DataFrame) -> list[Case]:
    """Every prefix and later optimum of the atlas."""
    cases = []
    for row in sweeps.fillna("").to_dict("records"):
        known = np.array([one.split() for one in row["optima"].split("; ") if one], float).reshape(-1, 3)
        if len(known) < 3 or len(set(known[:, 1])) == 1:
            continue
        source = row["source"] if row["source"] != "ours" else f"ours: {row['sweep'].split('_')[0]}"
        name = f"{row['source']}, {row['sweep']}, {row['rule']}"
        cases += [
            Case(source, name, row["kind"], bool(row["claimed"]), *known[:first].T, *later)
            for first in range(2, len(known))
            for later in known[first:]
        ]
    return cases
