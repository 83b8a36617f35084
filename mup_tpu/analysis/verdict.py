"""Verdict on transfer, by equivalence: TRANSFERS and DRIFTS both have to be shown, else INCONCLUSIVE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mup_tpu.analysis.drift import NEEDED, Drift, exponent
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.optimum import EPSILON, Optimum
from mup_tpu.analysis.regret import AT_LEAST, Regret
from mup_tpu.config.columns import label, write_scale

DELTA = 0.2
"""Largest drift exponent that does not matter, up or down."""
PLAIN = 2.0
"""Multiple of epsilon above which a regret alone shows drift, without a power law."""
MOST_LOOKS = 8
"""Looks in a sequence. Each could end it, so the regret's bounds are 99 % ones; benchmarks/settle.py measures
the error rates."""


@dataclass(frozen=True)
class Verdict:
    """TRANSFERS, DRIFTS or INCONCLUSIVE, the reason, and the next runs."""

    decision: str
    sentence: str
    settle: str
    """Runs that would settle it, as a command line where the experiment is ours; "" if it is settled."""

    def to_dict(self) -> dict[str, str]:
        """Plain values."""
        return {"verdict": self.decision, "sentence": self.sentence, "settle": self.settle}


def decide(
    parametrization: str,
    optima: Sequence[Optimum],
    drift: Drift,
    regret: Regret | None,
    columns: Columns,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    look: int | None = None,
    to_come: int = 0,
) -> tuple[str, str]:
    """Verdict and its sentence.

    - TRANSFERS: the regret's upper bound is below epsilon, and α's interval lies within ±delta.
    - DRIFTS: α's interval excludes 0, and the regret's lower bound exceeds epsilon or the source's optimum
      diverges or lies outside the grid. The regret's estimate would not do: noise biases a squared distance
      upwards.
    - DRIFTS without a power law, as when an optimum moves once and then stays: the regret's lower bound
      exceeds twice epsilon.

    Args:
        parametrization: name in the sentence.
        optima: one a scale.
        drift: fitted to the bracketed optima.
        regret: from the smallest bracketed scale to the largest that was run; None if they are the same.
        columns: names of the hyperparameter and the scale.
        epsilon: largest regret that does not matter, nat per token.
        delta: largest |α| that does not matter.
        look: number of the look in a sequence, which asks for 99 % bounds on the regret; None for a single
            analysis.
        to_come: number of planned scales without a run: above 0, TRANSFERS is never said.
    """
    if not drift.is_known or regret is None:
        why = (
            f"{len(drift.scales)} of {len(optima)} {label(columns.scale)}s have a bracketed optimum, "
            f"and {NEEDED} are needed"
        )
        return "INCONCLUSIVE", f"{parametrization}: INCONCLUSIVE: {why}."
    source, target = (write_scale(columns.scale, s) for s in (regret.source, regret.target))
    cost = {
        "diverged": f"diverges at {target}",
        "stopped early": f"was stopped early at {target}, far behind the best",
        "outside the grid": f"lies outside the grid of {target}",
    }.get(
        regret.status,
        f"costs {'at least ' if regret.status == AT_LEAST else ''}{regret.value:.3f} nat at {target} "
        f"(95 % {regret.low:.3f} to {_nat(regret.high)})",
    )
    verdict = "INCONCLUSIVE"
    all_known = all(o.is_bracketed for o in optima)
    if to_come <= 0 and all_known and _transfers(drift, regret, epsilon, delta, look):
        verdict = "TRANSFERS"
    elif _drifts(drift, regret, epsilon, look):
        verdict = "DRIFTS"
    alpha = exponent(drift.alpha, drift.low, drift.high).replace("(", "(95 % ")
    law = f"{columns.hyperparameter}* ∝ {columns.scale}^{alpha if drift.is_told else 'α, α not known'}"
    is_bent = verdict == "DRIFTS" and drift.is_told and not drift.excludes_0
    no_power = ", which is no power law" if is_bent else ""
    numbers = f"{law}{no_power}; the optimum of {source} {cost}"
    rule = "one look" if look is None else f"look {look} of at most {MOST_LOOKS}"
    return verdict, f"{parametrization}: {verdict} ({rule}): {numbers}."


def _drifts(drift: Drift, regret: Regret, epsilon: float, look: int | None) -> bool:
    low = regret.low if look is None else regret.low_99
    if not drift.excludes_0:
        return low > PLAIN * epsilon
    return low > epsilon or regret.status == "outside the grid"


def _transfers(drift: Drift, regret: Regret, epsilon: float, delta: float, look: int | None) -> bool:
    high = regret.high if look is None else regret.high_99
    reach = (drift.high - drift.low) / 2
    return high < epsilon and abs(drift.alpha) + reach < delta


def _nat(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "∞"
