"""Looks: what one parametrization's runs say, once or after each purchase of a sequence.

A run table tells by itself which looks were taken at it: each row holds the number of the purchase that it
came with. So the rows are all that a sequence needs to be judged, and to go on after a kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.drift import Drift, fit_drift
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.loss_curve import LossCurve, loss_curve
from mup_tpu.analysis.noise import Noise, pooled_noise
from mup_tpu.analysis.optimum import EPSILON, Estimate, estimate
from mup_tpu.analysis.regret import Regret, regret
from mup_tpu.analysis.run_table import RunTable, require_above_zero
from mup_tpu.analysis.verdict import DELTA, Look, decide


@dataclass(frozen=True)
class Question:
    """What is asked of a run table."""

    columns: Columns = Columns()
    epsilon: float = EPSILON
    """Regret that does not matter, nat per token."""
    delta: float = DELTA
    """Drift exponent that does not matter."""
    planned: tuple[float, ...] = ()
    """Scales of a sequence; none where the table is looked at once."""
    rounding: float = 0.0
    """What losses are rounded to, nat per token."""
    seed: int = 0
    """Of the bootstrap."""

    @classmethod
    def of(cls, table: RunTable, epsilon: float = EPSILON, delta: float = DELTA, seed: int = 0) -> Question:
        """What a checked table asks by its columns, its rounding and what it plans.

        Raises:
            TableError: epsilon or delta is not a finite number above 0.
        """
        require_above_zero("epsilon", epsilon)
        require_above_zero("delta", delta)
        losses = table.runs["loss"].to_numpy()
        rounding = _rounding(losses[np.isfinite(losses)])
        return cls(table.columns, epsilon, delta, table.planned, rounding, seed)


@dataclass(frozen=True)
class Evidence:
    """What one parametrization's runs tell of its optima."""

    curves: tuple[LossCurve, ...]
    noise: Noise
    estimates: tuple[Estimate, ...]
    drift: Drift
    headline: Regret | None
    """From the smallest bracketed scale to the largest that was run; None where they are the same."""

    @property
    def is_enough(self) -> bool:
        """Whether a verdict can be asked for: drift and regret are known."""
        return self.drift.is_known and self.headline is not None


def weigh(runs: pd.DataFrame, question: Question) -> Evidence:
    """Optima, drift and headline regret of one parametrization's runs."""
    curves = [loss_curve(group) for _, group in runs.groupby("scale")]
    noise = pooled_noise(curves, question.rounding)
    generator = np.random.default_rng(question.seed)
    estimates = [estimate(curve, noise, generator, question.epsilon) for curve in curves]
    drift = fit_drift([e.optimum for e in estimates])
    bracketed = [e for e in estimates if e.optimum.is_bracketed]
    headline = (
        regret(bracketed[0], estimates[-1]) if bracketed and bracketed[0] is not estimates[-1] else None
    )
    return Evidence(tuple(curves), noise, tuple(estimates), drift, headline)


@dataclass(frozen=True)
class LookTaken:
    """What was known after a purchase."""

    number: int
    """Of the look; 0 while too little was known to ask for a verdict."""
    purchase: int
    """That it came after; 0 for runs that belong to none."""
    runs: int
    evidence: Evidence
    decision: str
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the evidence."""
        drift, headline = self.evidence.drift, self.evidence.headline
        numbers = {"alpha": drift.alpha, "low": drift.low, "high": drift.high}
        if headline is not None:
            numbers |= {"regret": headline.value, "regret_low": headline.low, "regret_high": headline.high}
        return {"look": self.number, "runs": self.runs, "verdict": self.decision} | numbers


def take_look(
    parametrization: str, runs: pd.DataFrame, question: Question, before: LookTaken | None = None
) -> LookTaken:
    """Look at one parametrization's runs.

    Args:
        parametrization: name to say.
        runs: of a checked table.
        question: what is asked; where it plans scales, this is one look of a sequence.
        before: the look before.
    """
    evidence = weigh(runs, question)
    number = (before.number if before else 0) + evidence.is_enough
    rule = Look(max(number, 1)) if question.planned else None
    decision, sentence = decide(
        parametrization,
        [e.optimum for e in evidence.estimates],
        evidence.drift,
        evidence.headline,
        question.columns,
        question.epsilon,
        question.delta,
        rule,
        to_come=len(set(question.planned) - {c.scale for c in evidence.curves}),
    )
    return LookTaken(number, int(runs["purchase"].max()), len(runs), evidence, decision, sentence)


def take_looks(parametrization: str, runs: pd.DataFrame, question: Question) -> Iterator[LookTaken]:
    """The looks that a table of one parametrization's runs tells of: after each purchase, or one at all."""
    purchases = sorted(runs["purchase"].unique()) if question.planned else [np.inf]
    taken = None
    for purchase in purchases:
        taken = take_look(parametrization, runs[runs["purchase"] <= purchase], question, taken)
        yield taken


def _rounding(losses: np.ndarray) -> float:
    """Power of ten that all losses are multiples of, or 0."""
    for digits in range(1, 6):
        if len(losses) and np.allclose(losses, np.round(losses, digits), atol=1e-9):
            return 10.0**-digits
    return 0.0
