"""Run tables to verdicts: optimum, transfer, scaling law, coordinate check. Needs no torch and no ray."""

from mup_tpu.analysis.drift import Drift, WiderIsBetter
from mup_tpu.analysis.ingest.table import check_table
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.optimum import LossCurve, Noise, Optimum
from mup_tpu.analysis.prediction import Predictions, RulePrediction, predict
from mup_tpu.analysis.regret import Regret
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.scaling_law import Prediction, ScalingLaw, fit_scaling_law
from mup_tpu.analysis.transfer import (
    AtZero,
    FittedLaw,
    LearningCurve,
    TransferAnalysis,
    TransferResult,
    analyze,
)
from mup_tpu.analysis.verdict import Verdict
from mup_tpu.analysis.worth import Worth

__all__ = [
    "AtZero",
    "Columns",
    "Drift",
    "FittedLaw",
    "LearningCurve",
    "LossCurve",
    "Noise",
    "Optimum",
    "Prediction",
    "Predictions",
    "Regret",
    "RulePrediction",
    "RunTable",
    "ScalingLaw",
    "TransferAnalysis",
    "TransferResult",
    "Verdict",
    "WiderIsBetter",
    "Worth",
    "analyze",
    "check_table",
    "fit_scaling_law",
    "load_table",
    "predict",
]
