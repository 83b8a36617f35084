"""Successive halving inside a pack: a member whose loss is hopeless at a rung is trained no further.

After Jamieson & Talwalkar 2016 (arXiv:1502.07943), but by how far a member is behind instead of by its rank:
the curve around the optimum is what a sweep is for, so that no member near the best may go.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

RUNGS = ((0.5, 0.15), (0.75, 0.10))
"""Share of the steps, and nat per token behind the best from which a member stops there. Not earlier: in its
first quarter a run's order of learning rates is that of the warm-up (benchmarks/halving.py)."""

RECENT = 0.1
"""Share of the steps, up to a rung, whose mean training loss is compared; members see the same batches."""


def rungs(steps: int) -> dict[int, float]:
    """Step of each rung -> nat per token behind the best from which a member stops there."""
    return {max(1, round(share * steps)): gap for share, gap in RUNGS}


def behind_best(recent_SK: np.ndarray, groups: Sequence[Hashable]) -> np.ndarray:
    """How far each member's mean loss is behind the best of its group, nat per token.

    Args:
        recent_SK: training losses of S steps of K members; nan for those that have ended.
        groups: what each member is compared within.

    Returns:
        One number a member; nan for those that have ended.
    """
    means_K = recent_SK.mean(axis=0)
    gaps_K = np.full(len(groups), np.nan)
    for group in set(groups):
        inside = np.array([g == group for g in groups]) & np.isfinite(means_K)
        if inside.any():
            gaps_K[inside] = means_K[inside] - means_K[inside].min()
    return gaps_K
