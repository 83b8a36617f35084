"""Scores of predictions: a prediction made before its scale was run, beside the scale's rows now."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mup_tpu.analysis.prediction import Predictions
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.errors import TableError
from mup_tpu.store.predictions import KeptPrediction, fingerprint


@dataclass(frozen=True)
class Score:
    """Prediction and outcome; nan if the rows do not tell."""

    prediction: KeptPrediction
    x: float
    """log2 of the optimum by the rows."""
    error: float
    """Standard error of x, octaves."""
    loss: float
    """Least loss at the scale: at the optimum if it is known, else of the value that was run."""

    @property
    def is_inside(self) -> bool | None:
        """Whether the 95 % interval, widened by the optimum's own error, holds x; None if x is unknown."""
        if not math.isfinite(self.x):
            return None
        low, high = self.prediction.interval
        half = math.hypot((high - low) / 2, 1.96 * self.error)
        return abs(self.x - (low + high) / 2) <= half

    @property
    def is_loss_inside(self) -> bool | None:
        """Whether the loss lies in its 95 % interval; None if it was not predicted."""
        if self.prediction.loss is None or not math.isfinite(self.loss):
            return None
        return self.prediction.loss[1] <= self.loss <= self.prediction.loss[2]

    def sentence(self) -> str:
        """Prediction and outcome in words."""
        p = self.prediction
        low, high = p.interval
        at = f"{columns.label(p.scale_column)} {columns.write_scale(p.scale_column, p.scale)}"
        said = (
            f"{p.compared}: at {at}, predicted on {p.made_at[:10]} from {p.rows} runs: "
            f"{columns.label(p.hyperparameter)} 2^{p.x:.2f} (95 % 2^{low:.2f} to 2^{high:.2f})"
        )
        if math.isfinite(self.x):
            said += f"; came out: 2^{self.x:.2f}, {_inside(self.is_inside)}"
        else:
            said += "; its optimum is not known"
        if p.loss is not None and math.isfinite(self.loss):
            loss, least, most = p.loss
            said += (
                f"; loss predicted {loss:.3f} ({least:.3f} to {most:.3f}), came out {self.loss:.3f}, "
                f"{_inside(self.is_loss_inside)}"
            )
        elif math.isfinite(self.loss):
            said += f"; loss came out {self.loss:.3f}, none was predicted"
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {
            "is_inside": self.is_inside,
            "is_loss_inside": self.is_loss_inside,
            "sentence": self.sentence(),
        }


def _inside(is_inside: bool | None) -> str:
    return "inside" if is_inside else "outside"


def to_keep(predictions: Predictions, table: RunTable) -> list[KeptPrediction]:
    """Predictions as they are kept beside the rows of their table.

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
            compared=found.compared,
            scale_column=predictions.scale,
            hyperparameter=predictions.hyperparameter,
            scale=found.scale,
            x=found.x,
            half=found.half,
            interval=found.interval,
            expected_cost=found.taking.expected if math.isfinite(found.taking.expected) else None,
            loss=(found.loss.loss, found.loss.low, found.loss.high) if found.loss else None,
        )
        for found in predictions.predictions
    ]


def answered(analysis: TransferAnalysis, scores: Iterable[Score]) -> TransferAnalysis:
    """Analysis with scores in place of the verdicts' sentences, for rules with one, predicted, scale.

    A transfer's folder holds its target alone, so no other scales are asked for: runs are added only to find
    the optimum there.
    """
    by_rule = {one.prediction.compared: one for one in scores}
    results = []
    for result in analysis.results:
        found = by_rule.get(result.compared)
        if found is not None and len(result.optima) == 1:
            verdict = replace(result.verdict, sentence=f"{found.sentence()}.")
            if found.is_inside is not None:
                result = replace(result, next_batch=None)
                verdict = replace(verdict, settle="")
            result = replace(result, verdict=verdict)
        results.append(result)
    return replace(analysis, results=tuple(results))


def score(kept: Iterable[KeptPrediction], analysis: TransferAnalysis) -> list[Score]:
    """Scores of predictions for scales that were run since."""
    scores = []
    results = {result.compared: result for result in analysis.results}
    for p in kept:
        if p.hyperparameter != analysis.hyperparameter or p.scale_column != analysis.scale:
            continue
        optima = results[p.compared].optima if p.compared in results else ()
        found = next((o for o in optima if math.isclose(o.scale, p.scale, rel_tol=1e-6)), None)
        if found is None or p.scale in p.scales or not math.isfinite(found.loss):
            continue
        known = (found.x, found.se) if found.is_bracketed else (math.nan, math.nan)
        scores.append(Score(p, *known, loss=found.loss))
    return scores
