"""Whether a hyperparameter's optimum transfers across a scale: from a run table to numbers and a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.design import next_batch, why_stop
from mup_tpu.analysis.drift import fit_drift, wider_is_better
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import Runs, run_table
from mup_tpu.analysis.optimum import EPSILON, Noise, Optimum, Status
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import FittedLaw, LearningCurve, PowerLaw, Sequenced, Shown, TransferResult
from mup_tpu.analysis.run_table import Cost, RunTable, run_cost
from mup_tpu.analysis.verdict import DELTA, Decision, Question, Verdict, regret, take_looks, weigh
from mup_tpu.errors import TableError

# Share of the scales' range of best values that is ε of a metric in no nat: 0.01 nat has about such a share
_SHARE = 0.02


@dataclass(frozen=True, repr=False)
class TransferAnalysis(Shown):
    """The analysis of a run table, one result a parametrization."""

    table: RunTable
    notes: tuple[Reason, ...]
    results: tuple[TransferResult, ...]
    epsilon: float  # Largest regret that does not matter, in the unit of the loss
    delta: float  # Largest drift exponent that does not matter

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def columns(self) -> Columns:
        return self.table.columns

    @property
    def parts(self) -> tuple[TransferAnalysis, ...]:
        """Return an analysis for each hyperparameter, with the others at their best."""
        if not self.columns.tuned_beside:
            return (self,)
        return tuple(
            replace(self, table=self.table.alone(h), results=tuple(r.parts[h] for r in self.results))
            for h in range(len(self.columns.tuned))
        )

    @property
    def scale(self) -> str:
        return self.columns.scale

    @property
    def hyperparameter(self) -> str:
        return self.columns.hyperparameter

    @property
    def compares(self) -> str:
        return self.columns.parametrization

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each rule and scale: the optimum (log2), with the rule's exponent and verdict."""
        return pd.DataFrame(
            [
                {
                    self.compares: result.compared,
                    **dict(zip(self.columns.scales, optimum.sizes, strict=True)),
                    **({"hyperparameter": part.hyperparameter} if self.columns.tuned_beside else {}),
                    "x": optimum.x,
                    "low": optimum.low, "high": optimum.high, "loss": optimum.loss, "status": optimum.status,
                    "exponent": result.drift.alpha, "exponent_low": result.drift.low,
                    "exponent_high": result.drift.high, "verdict": result.verdict.decision,
                }
                for part in self.parts
                for result in part.results
                for optimum in result.optima
            ]
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scale": ", ".join(self.columns.scales),
            "hyperparameter": ", ".join(self.columns.tuned),
            "results": [r.to_dict() for r in self.results],
        }


def analyze(
    table: Runs, epsilon: float | None = None, delta: float = DELTA, seed: int = 0, whole: bool = True
) -> TransferAnalysis:
    """Estimate optima, drift, regret and verdict of every parametrization in a table.

    Examples:
        >>> for result in analyze("results/lr_transfer").results:
        ...     print(result.parametrization, f"{result.drift.alpha:.2f}", result.verdict.decision)
        mup 0.09 TRANSFERS
        sp -0.97 DRIFTS

    Args:
        table: checked runs; or runs of the usual columns, as `check_table` takes them; or where they are: a
            results folder or a file, as `load_table` reads it.
        epsilon: regret that does not matter, in the unit of the loss; by default 0.01 nat per token, and for
            other metrics 2 % of the difference between the scales' best values.
        delta: drift exponent that does not matter.
        seed: of the draws; the same table and seed give the same numbers.
        whole: also give regrets between all scales, learning curves and next runs, in half of the time;
            a prediction and a comparison of sweeps need the verdict alone.

    Raises:
        ConfigError: epsilon or delta is not above 0.
        TableError: no run is at a planned scale, or the input is no table of runs.
        StoreError: the results folder holds no runs.
    """
    table = run_table(table)
    if table.runs.empty:
        raise TableError(f"no run is at a {table.columns.scale} that the sequence plans: run it first")
    if table.columns.scales_beside and table.columns.tuned_beside:
        raise TableError("several scales and several hyperparameters: give one scale, or tune one")
    notes = list(table.notes)
    epsilon = tolerance(table, notes) if epsilon is None else epsilon
    question = Question.of(table, epsilon, delta, seed)
    if (rounding := question.rounding) > 1e-5 and not table.columns.tuned_beside:
        notes.append(Reason.of("rounded losses", step=rounding))
    results, costs = [], run_cost(table)
    for name in sorted(table.runs["compared"].unique()):
        rows = table.runs[table.runs["compared"] == name]
        if table.columns.loss == "":
            results.append(_analyze_optima(name, rows, question))
        elif table.columns.scales_beside:
            results.append(_analyze_sizes(name, rows, question))
        elif table.columns.tuned_beside:
            from mup_tpu.analysis.together import analyze_together  # most tables tune one hyperparameter

            results.append(analyze_together(name, rows, question, costs, whole))
        else:
            results.append(_analyze_one(name, table, question, costs, whole))
            if results[-1].noise.source == "lack of fit":
                notes.append(Reason.of("no replicates", compared=name))
    return TransferAnalysis(table, tuple(notes), tuple(results), epsilon, delta)


def tolerance(table: RunTable, notes: list[Reason]) -> float:
    """Return the regret that does not matter by default; where it is a share, with a note."""
    if table.columns.unit == "nat" or table.runs["scale"].nunique() < 2:
        return EPSILON
    best = table.runs[np.isfinite(table.runs["loss"])].groupby("scale")["loss"].min()
    epsilon = max(_SHARE * float(np.ptp(best)), 1e-12)
    notes.append(Reason.of("epsilon by share", epsilon=epsilon, unit=table.columns.unit, share=_SHARE))
    return epsilon


def _analyze_one(
    parametrization: str, table: RunTable, question: Question, costs: Cost, whole: bool
) -> TransferResult:
    table = table.part(lambda frame: frame["compared"] == parametrization)
    looks = tuple(take_looks(table.runs, question))
    last, evidence = looks[-1], looks[-1].evidence
    optima = evidence.optima
    pairs = itertools.combinations(evidence.estimates, 2) if whole else ()
    regrets = [regret(source, target, evidence.drift.trend) for source, target in pairs]
    if not whole and evidence.headline is not None:
        regrets = [evidence.headline]
    costs = run_cost(table) if question.planned else costs
    batch, stops = None, None
    if whole and not last.verdict.is_settled:
        batch = next_batch(parametrization, evidence, costs, question)
        stops = why_stop(last, batch) if question.planned else None
    return TransferResult.of(
        parametrization,
        evidence,
        last.verdict,
        regrets=tuple(regrets),
        wider_is_better=wider_is_better(evidence.curves, optima),
        law=_law(table.runs, optima),
        learning_curves=learning_curves(optima, table.history) if whole else (),
        next_batch=batch,
        sequence=Sequenced(looks, costs, stops) if question.planned else None,
        guessing=table.guessing,
    )


def _analyze_optima(compared: str, rows: pd.DataFrame, question: Question) -> TransferResult:
    numbers = rows.sort_values("scale")[["scale", "x", "low", "high", "error"]].to_numpy(float).tolist()
    optima = tuple(
        Optimum(scale, Status.BRACKETED, x, low, high, best_x=x, se=error, mean=x)
        for scale, x, low, high, error in numbers
    )
    drift, noise = fit_drift(optima, question.columns.scale, question.delta), Noise(math.nan, 0, "optima")
    return TransferResult(compared, noise, optima, (None,) * len(optima), drift, Verdict(Decision.OPEN))


def _analyze_sizes(compared: str, runs: pd.DataFrame, question: Question) -> TransferResult:
    """Return the analysis of one rule's runs in which several scales vary together.

    Raises:
        TableError: fewer cells have a known optimum than the law has parameters.
    """
    scales, evidence = question.columns.scales, weigh(runs, question)
    known = tuple(e for e in evidence.estimates if e.optimum.is_bracketed)
    if len(known) < len(scales) + 2:
        raise TableError(
            f"{compared}: a power law in {', '.join(scales)} needs {len(scales) + 2} cells with an "
            f"optimum inside their grid, and {len(known)} of {len(evidence.estimates)} have one"
        )
    power_law = PowerLaw(scales, known)
    return TransferResult.of(compared, evidence, Verdict(Decision.OPEN), power_law=power_law)


def _law(runs: pd.DataFrame, optima: Sequence[Optimum]) -> FittedLaw:
    known = [o for o in optima if o.is_known]
    sizes = runs.groupby("scale")["params"].nunique().max()
    table = runs.groupby("scale")[["params", "tokens"]].max().reindex([o.scale for o in known])
    refused = Reason.of("parameters differ") if sizes > 1 else None
    if not np.isfinite(table["params"]).all():
        refused = Reason.of("parameters unknown")
    params, tokens = (tuple(table[name].tolist()) for name in ("params", "tokens"))
    return FittedLaw(params, tokens, tuple(o.loss for o in known), refused)


def learning_curves(optima: Sequence[Optimum], history: pd.DataFrame | None) -> tuple[LearningCurve, ...]:
    """Return learning curves at the grid points nearest to the optima."""
    if history is None or history.empty:
        return ()
    curves = []
    for optimum in (o for o in optima if o.is_known):
        runs = history[history["scale"] == optimum.scale]
        if runs.empty:  # no run of this scale has reported a step
            continue
        nearest = runs["x"].iloc[(runs["x"] - optimum.x).abs().argmin()]
        means = runs[runs["x"] == nearest].groupby("step")["loss"].mean()
        if len(means):  # a run may have reported no step
            steps, losses = tuple(means.index.tolist()), tuple(means.tolist())
            curves.append(LearningCurve(optimum.scale, float(nearest), steps, losses))
    return tuple(curves)
