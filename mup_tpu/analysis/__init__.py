"""Run tables to verdicts: optimum, transfer, scaling law, coordinate check. Needs no torch and no ray.

Each name is imported when it is first used: scipy takes half a second, and commands that train need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mup_tpu.analysis.drift import Drift, WiderIsBetter
    from mup_tpu.analysis.ingest.table_columns import Columns
    from mup_tpu.analysis.load import check_table, load_table
    from mup_tpu.analysis.optimum import LossCurve, Noise, Optimum
    from mup_tpu.analysis.prediction import Predictions, RulePrediction, predict
    from mup_tpu.analysis.run_table import RunTable
    from mup_tpu.analysis.scaling_law import Prediction, ScalingLaw, fit_scaling_law
    from mup_tpu.analysis.surface import JointAnalysis, JointPredictions, analyze_jointly, predict_jointly
    from mup_tpu.analysis.transfer import (
        AtZero,
        FittedLaw,
        LearningCurve,
        TransferAnalysis,
        TransferResult,
        analyze,
    )
    from mup_tpu.analysis.verdict import Regret, Verdict
    from mup_tpu.analysis.worth import Worth

__all__ = [
    "AtZero", "Columns", "Drift", "FittedLaw", "JointAnalysis", "JointPredictions", "LearningCurve",
    "LossCurve", "Noise", "Optimum", "Prediction", "Predictions", "Regret", "RulePrediction", "RunTable",
    "ScalingLaw", "TransferAnalysis", "TransferResult", "Verdict", "WiderIsBetter", "Worth", "analyze",
    "analyze_jointly", "check_table", "fit_scaling_law", "load_table", "predict", "predict_jointly",
]  # fmt: skip

_FROM = {
    "drift": ("Drift", "WiderIsBetter"),
    "ingest.table_columns": ("Columns",),
    "load": ("check_table", "load_table"),
    "optimum": ("LossCurve", "Noise", "Optimum"),
    "prediction": ("Predictions", "RulePrediction", "predict"),
    "regret": ("Regret",),
    "run_table": ("RunTable",),
    "scaling_law": ("Prediction", "ScalingLaw", "fit_scaling_law"),
    "surface": ("JointAnalysis", "JointPredictions", "analyze_jointly", "predict_jointly"),
    "transfer": ("AtZero", "FittedLaw", "LearningCurve", "TransferAnalysis", "TransferResult", "analyze"),
    "verdict": ("Verdict",),
    "worth": ("Worth",),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    for module, names in _FROM.items():
        if name in names:
            return getattr(importlib.import_module(f"mup_tpu.analysis.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
