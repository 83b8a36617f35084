"""Several sweeps beside each other: the effect of each change on transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pandas as pd

from mup_tpu.analysis.transfer import TransferAnalysis


def compare(
    analyses: Mapping[str, TransferAnalysis],
    name_of: Callable[[str, str], str] = lambda compared, _: compared,
) -> pd.DataFrame:
    """One row a sweep and parametrization, the worst regret first: an unknown one before all.

    Args:
        analyses: by the name of the sweep.
        name_of: name of a compared value and its column, in the rows of a sweep that compares several.

    Returns:
        name, alpha (drift exponent) with low and high, regret (nat per token, from the smallest scale to the
        largest) with regret_low, regret_high and regret_status, best_loss (at the largest scale, nat per
        token), verdict; nan where something is not known.
    """
    rows = []
    for name, analysis in analyses.items():
        for result in analysis.results:
            regret, drift, last = result.headline_regret, result.drift, result.optima[-1]
            cost = (regret.value, regret.low, regret.high) if regret else (math.nan,) * 3
            named = f"{name}: {name_of(result.compared, analysis.compares)}"
            rows.append(
                {
                    "name": name if len(analysis.results) == 1 else named,
                    "alpha": drift.alpha,
                    "low": drift.low,
                    "high": drift.high,
                    **dict(zip(("regret", "regret_low", "regret_high"), cost, strict=True)),
                    "regret_status": regret.status if regret else "not known",
                    "best_loss": last.loss,
                    "verdict": result.verdict.decision,
                }
            )
    return pd.DataFrame(rows).sort_values(
        ["regret", "name"], ascending=[False, True], ignore_index=True, na_position="first"
    )
