"""Verdict on transfer, by equivalence: TRANSFERS and DRIFTS both have to be shown, else INCONCLUSIVE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.optimum import EPSILON, Optimum
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.regret import Regret

DELTA = 0.2  # Largest drift exponent that does not matter, up or down
PLAIN = 2.0  # Multiple of epsilon above which a regret alone shows drift, without a power law
MOST_LOOKS = 8
"""Looks in a sequence. Each could end it; benchmarks/settle_families.py measures how often it ends wrong."""


@dataclass(frozen=True)
class Verdict:
    """TRANSFERS, DRIFTS or INCONCLUSIVE."""

    decision: str
    look: int | None = None
    """Number of the look in a sequence; None for a single analysis."""
    why_never: Reason | None = None
    """Reason why no further run would show either verdict."""


def decide(
    optima: Sequence[Optimum],
    drift: Drift,
    regret: Regret | None,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    look: int | None = None,
    to_come: int = 0,
) -> Verdict:
    """Decide by equivalence whether an optimum transfers.

    - TRANSFERS: the regret's upper bound is below epsilon, and α's interval lies within ±delta.
    - DRIFTS: α's interval excludes 0, and the regret's lower bound exceeds epsilon. The regret's estimate
    would not do: noise biases a squared distance upwards. That the source's optimum lies outside the target's
    grid proves nothing: the grid was placed by the drift that is to be shown.
    - DRIFTS without a power law, as when an optimum moves once and then stays: the regret's lower bound
      exceeds twice epsilon.

    Args:
        optima: one a scale.
        drift: fitted to the bracketed optima.
        regret: from the smallest bracketed scale to the largest that was run; None if they are the same.
        epsilon: largest regret that does not matter, nat per token.
        delta: largest |α| that does not matter.
        look: number of the look in a sequence; None for a single analysis.
        to_come: number of planned scales without a run: above 0, TRANSFERS is never said.
    """
    if not drift.is_known or regret is None:
        return Verdict("INCONCLUSIVE", look)
    all_known = all(o.is_bracketed for o in optima)
    is_small = regret.high < epsilon and -delta < drift.low and drift.high < delta
    if to_come <= 0 and all_known and is_small:
        return Verdict("TRANSFERS", look)
    is_large = regret.low > (epsilon if drift.excludes_0 else PLAIN * epsilon)
    if is_large:
        return Verdict("DRIFTS", look)
    moves = drift.low > delta or drift.high < -delta
    is_cheap = regret.status == "estimated" and regret.high < epsilon
    is_never = to_come <= 0 and all_known and moves and is_cheap
    return Verdict("INCONCLUSIVE", look, Reason.of("moves at no cost") if is_never else None)
