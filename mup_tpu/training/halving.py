"""Successive halving inside a pack: a member whose loss is hopeless at a rung is trained no further.

After Jamieson & Talwalkar 2016 (arXiv:1502.07943), with a member's distance from the best in place of its
rank: a sweep needs the curve around the optimum, so members near the best stay.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

RUNGS = ((0.5, 0.15), (0.75, 0.10))
"""Share of the steps, and nat per token behind the best above which a member stops. None in the first
quarter: the warm-up decides the order of learning rates there (benchmarks/halving.py)."""

RECENT = 0.1
"""Share of the steps, before a rung, in the compared mean of training losses; batches are the same."""


def rungs(steps: int) -> dict[int, float]:
    """Step of each rung -> nat per token behind the best above which a member stops."""
    return {max(1, round(share * steps)): gap for share, gap in RUNGS}


def behind_best(recent_SK: np.ndarray, groups: Sequence[Hashable]) -> np.ndarray:
    """Distance of each member's mean loss from the best of its group, nat per token.

    Ended members have nan in `recent_SK`, the losses of S steps of K members, and in the result.
    """
    means_K = recent_SK.mean(axis=0)
    gaps_K = np.full(len(groups), np.nan)
    for group in set(groups):
        inside = np.array([g == group for g in groups]) & np.isfinite(means_K)
        if inside.any():
            gaps_K[inside] = means_K[inside] - means_K[inside].min()
    return gaps_K
