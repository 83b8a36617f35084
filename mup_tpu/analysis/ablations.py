"""Several sweeps beside each other: what each change does to transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from mup_tpu.analysis.transfer import TransferAnalysis


def compare(analyses: Mapping[str, TransferAnalysis]) -> pd.DataFrame:
    """One row a sweep and parametrization, the worst regret first: an unknown one before all.

    Args:
        analyses: by the name of the sweep.

    Returns:
        name, alpha (drift exponent) with low and high, regret (nat per token, from the smallest scale to the
        largest) with regret_low and regret_high, best_loss (at the largest scale, nat per token), verdict;
        nan where something is not known.
    """
    rows = []
    for name, analysis in analyses.items():
        for result in analysis.results:
            regret, drift, last = result.headline_regret, result.drift, result.optima[-1]
            cost = (regret.value, regret.low, regret.high) if regret else (math.nan,) * 3
            rows.append(
                {
                    "name": name if len(analysis.results) == 1 else f"{name} {result.compared}",
                    "alpha": drift.alpha,
                    "low": drift.low,
                    "high": drift.high,
                    **dict(zip(("regret", "regret_low", "regret_high"), cost, strict=True)),
                    "best_loss": last.loss,
                    "verdict": result.verdict.decision,
                }
            )
    return pd.DataFrame(rows).sort_values(
        ["regret", "name"], ascending=[False, True], ignore_index=True, na_position="first"
    )
