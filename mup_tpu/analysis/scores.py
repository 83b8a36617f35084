"""Scores of predictions: a prediction made before its scale was run, beside the scale's rows now."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.errors import TableError
from mup_tpu.store.header import KeptPrediction, fingerprint

if TYPE_CHECKING:
    from mup_tpu.analysis.prediction import Predictions


@dataclass(frozen=True)
class Score:
    """Prediction and outcome; nan if the rows do not tell."""

    prediction: KeptPrediction
    x: float  # log2 of the optimum by the rows
    error: float  # Standard error of x, octaves
    loss: float  # Least loss at the scale: at the optimum if it is known, else of the value that was run

    @property
    def is_inside(self) -> bool | None:
        """Return whether x lies in the 95 % interval, widened by its own error; None if x is unknown."""
        if not math.isfinite(self.x):
            return None
        low, high = self.prediction.interval
        half = math.hypot((high - low) / 2, 1.96 * self.error)
        return abs(self.x - (low + high) / 2) <= half

    @property
    def is_loss_inside(self) -> bool | None:
        # Whether the loss lies in its 95 % interval; None if it was not predicted
        if self.prediction.loss is None or not math.isfinite(self.loss):
            return None
        return self.prediction.loss[1] <= self.loss <= self.prediction.loss[2]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {
            "is_inside": self.is_inside,
            "is_loss_inside": self.is_loss_inside,
        }


def to_keep(predictions: Predictions, table: RunTable) -> list[KeptPrediction]:
    """Return predictions as they are kept beside the rows of their table.

    Raises:
        TableError: the table is no results folder.
    """
    if table.stored is None:
        raise TableError("predictions are kept in a results folder, and this table is none")
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    ids = table.stored["trial_id"].tolist()
    return [
        KeptPrediction(
            made_at=made_at,
            rows=len(ids),
            fingerprint=fingerprint(ids),
            scales=tuple(sorted(table.runs["scale"].unique().tolist())),
            compared=rule.compared,
            scale_column=predictions.scale,
            hyperparameter=predictions.hyperparameter,
            scale=rule.scale,
            x=rule.x,
            half=rule.half,
            interval=rule.interval,
            expected_cost=rule.taking.expected if math.isfinite(rule.taking.expected) else None,
            loss=(rule.loss.loss, rule.loss.low, rule.loss.high) if rule.loss else None,
        )
        for rule in predictions.predictions
    ]


def answered(analysis: TransferAnalysis, scores: Iterable[Score]) -> TransferAnalysis:
    """Drop the next runs of rules with one scale whose prediction is scored.

    A transfer's folder holds its target alone. Its question is the prediction, so no other scale is needed.
    """
    scored = {one.prediction.compared for one in scores if one.is_inside is not None}
    results = (
        replace(result, next_batch=None) if result.compared in scored and len(result.optima) == 1 else result
        for result in analysis.results
    )
    return replace(analysis, results=tuple(results))


def score(kept: Iterable[KeptPrediction], analysis: TransferAnalysis) -> list[Score]:
    """Return scores of predictions for scales that were run since."""
    scores = []
    results = {result.compared: result for result in analysis.results}
    for p in kept:
        if p.hyperparameter != analysis.hyperparameter or p.scale_column != analysis.scale:
            continue
        optima = results[p.compared].optima if p.compared in results else ()
        optimum = next((o for o in optima if math.isclose(o.scale, p.scale, rel_tol=1e-6)), None)
        if optimum is None or p.scale in p.scales or not math.isfinite(optimum.loss):
            continue
        known = (optimum.x, optimum.se) if optimum.is_bracketed else (math.nan, math.nan)
        scores.append(Score(p, *known, loss=optimum.loss))
    return scores
