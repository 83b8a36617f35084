"""Run tables to verdicts: optimum, transfer, scaling law, coordinate check. Needs no torch and no ray."""

from mup_tpu.analysis.curves import LossCurve, Noise
from mup_tpu.analysis.drift import Drift, WiderIsBetter
from mup_tpu.analysis.ingest.table import check_table
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.optimum import Optimum, Status
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
    "Status",
    "TransferAnalysis",
    "TransferResult",
    "Verdict",
    "WiderIsBetter",
    "analyze",
    "check_table",
    "fit_scaling_law",
    "load_table",
    "predict",
]
