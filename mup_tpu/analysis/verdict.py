"""The verdict on transfer, by equivalence: TRANSFERS and DRIFTS both have to be shown, else INCONCLUSIVE."""

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
"""Drift exponent that does not matter."""
PLAIN = 2.0
"""Times epsilon from which a regret is plain: no power law is needed."""
MOST_LOOKS = 8
"""Looks in a sequence."""


@dataclass(frozen=True)
class Look:
    """An analysis in a sequence of them, each of which could end it: its bounds on the regret are 99 % ones.

    benchmarks/settle.py measures the error rates.
    """

    number: int


@dataclass(frozen=True)
class Verdict:
    """TRANSFERS, DRIFTS or INCONCLUSIVE, why, and what would settle it."""

    decision: str
    sentence: str
    settle: str
    """What to run to settle it, a command line where the experiment is ours; "" where it is settled."""

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
    look: Look | None = None,
    to_come: int = 0,
) -> tuple[str, str]:
    """The verdict and its sentence.

    TRANSFERS if the regret's upper bound is below epsilon and drift's interval lies within ±delta; DRIFTS if
    drift's interval excludes 0 and the regret's lower bound exceeds epsilon (or that optimum lies outside the
    grid, or diverges): its point estimate would not do, for noise biases a squared distance upwards. DRIFTS
    too where no power shows, as of an optimum that moves once and then stays, but that lower bound exceeds
    twice epsilon.

    Args:
        parametrization: name to say.
        optima: of each scale.
        drift: fitted over the bracketed ones.
        regret: from the smallest bracketed scale to the largest that was run; None where there is none.
        columns: what is tuned and what scales.
        epsilon: regret that does not matter, nat per token.
        delta: drift exponent that does not matter.
        look: where it is one of a sequence.
        to_come: scales that are planned and have not been run: until then only DRIFTS may be said.
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
    rule = "one look" if look is None else f"look {look.number} of at most {MOST_LOOKS}"
    return verdict, f"{parametrization}: {verdict} ({rule}): {numbers}."


def _drifts(drift: Drift, regret: Regret, epsilon: float, look: Look | None) -> bool:
    low = regret.low if look is None else regret.low_99
    if not drift.excludes_0:
        return low > PLAIN * epsilon
    return low > epsilon or regret.status == "outside the grid"


def _transfers(drift: Drift, regret: Regret, epsilon: float, delta: float, look: Look | None) -> bool:
    high = regret.high if look is None else regret.high_99
    reach = (drift.high - drift.low) / 2
    return high < epsilon and abs(drift.alpha) + reach < delta


def _nat(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "∞"
