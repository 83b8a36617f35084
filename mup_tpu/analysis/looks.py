"""Looks at one parametrization's runs: one at all of them, or one after each purchase of a sequence.

Each row of a run table holds the number of its purchase. So the rows alone tell which looks were taken, and a
killed sequence goes on from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.drift import Drift, fit_drift
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.loss_curve import LossCurve, Noise, loss_curve, pooled_noise
from mup_tpu.analysis.optimum import EPSILON, Estimate, estimates
from mup_tpu.analysis.regret import Regret, regret
from mup_tpu.analysis.run_table import RunTable, require_above_zero
from mup_tpu.analysis.verdict import DELTA, Verdict, decide


@dataclass(frozen=True)
class Question:
    """Columns, tolerances and plan by which a run table is judged."""

    columns: Columns = Columns()
    epsilon: float = EPSILON  # Regret that does not matter, nat per token
    delta: float = DELTA  # Drift exponent that does not matter
    planned: tuple[float, ...] = ()  # Scales of a sequence; empty for a single look
    rounding: float = 0.0  # Step to which losses are rounded, nat per token; 0 for none
    seed: int = 0  # Seed of the draws

    @classmethod
    def of(cls, table: RunTable, epsilon: float = EPSILON, delta: float = DELTA, seed: int = 0) -> Question:
        """Return the question of a checked table: its columns, rounding and planned scales.

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
    """Curves, noise, optima, drift and regret of one parametrization's runs."""

    curves: tuple[LossCurve, ...]
    noise: Noise
    estimates: tuple[Estimate, ...]
    drift: Drift
    headline: Regret | None
    """Regret from the smallest bracketed scale to the largest that was run; None if they are the same."""

    @property
    def is_enough(self) -> bool:
        return self.drift.is_known and self.headline is not None


def weigh(runs: pd.DataFrame, question: Question, before: Evidence | None = None) -> Evidence:
    """Return the optima, drift and headline regret of one parametrization's runs.

    Curves that have no more runs than `before`, the evidence of some of the runs, are taken from there.
    """
    old = {} if before is None else {(curve.scale, curve.runs): curve for curve in before.curves}
    groups = [(float(group["scale"].iloc[0]), group) for _, group in runs.groupby("scale")]
    curves = [old.get((scale, len(group))) or loss_curve(group) for scale, group in groups]
    noise = pooled_noise(curves, question.rounding)
    generator = np.random.default_rng(question.seed)
    made = estimates(curves, noise, generator, question.epsilon)
    optima, valleys = [e.optimum for e in made], [e.valley for e in made]
    drift = fit_drift(optima, question.columns.scale, question.delta, valleys)
    bracketed = [e for e in made if e.optimum.is_bracketed]
    headline = (
        regret(bracketed[0], made[-1], drift.trend) if bracketed and bracketed[0] is not made[-1] else None
    )
    return Evidence(tuple(curves), noise, tuple(made), drift, headline)


@dataclass(frozen=True)
class LookTaken:
    """Evidence and verdict after a purchase."""

    number: int  # Number of the look; 0 while drift or regret was unknown
    purchase: int  # Purchase that this look followed; 0 for none
    runs: int
    evidence: Evidence
    verdict: Verdict

    @property
    def decision(self) -> str:
        return self.verdict.decision

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without the evidence."""
        drift, headline = self.evidence.drift, self.evidence.headline
        numbers = {"alpha": drift.alpha, "low": drift.low, "high": drift.high}
        if headline is not None:
            numbers |= {"regret": headline.value, "regret_low": headline.low, "regret_high": headline.high}
        return {"look": self.number, "runs": self.runs, "verdict": self.decision} | numbers


def take_look(runs: pd.DataFrame, question: Question, before: LookTaken | None = None) -> LookTaken:
    """Look at one parametrization's runs.

    Args:
        runs: rows of a checked table.
        question: with planned scales, this is one look of a sequence.
        before: previous look; None for the first.
    """
    evidence = weigh(runs, question, None if before is None else before.evidence)
    number = (before.number if before else 0) + evidence.is_enough
    verdict = decide(
        [e.optimum for e in evidence.estimates],
        evidence.drift,
        evidence.headline,
        question.epsilon,
        question.delta,
        max(number, 1) if question.planned else None,
        to_come=len(set(question.planned) - {c.scale for c in evidence.curves}),
    )
    return LookTaken(number, int(runs["purchase"].max()), len(runs), evidence, verdict)


def take_looks(runs: pd.DataFrame, question: Question) -> Iterator[LookTaken]:
    """Return looks at one parametrization's runs: one after each purchase of a sequence, else one at all."""
    purchases = sorted(runs["purchase"].unique()) if question.planned else [np.inf]
    taken = None
    for purchase in purchases:
        taken = take_look(runs[runs["purchase"] <= purchase], question, taken)
        yield taken


def _rounding(losses: np.ndarray) -> float:
    """Return the power of ten that all losses are multiples of, or 0."""
    for digits in range(1, 6):
        if len(losses) and np.allclose(losses, np.round(losses, digits), atol=1e-9):
            return 10.0**-digits
    return 0.0
