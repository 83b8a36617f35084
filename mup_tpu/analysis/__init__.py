"""Run tables to verdicts: optimum, transfer, scaling law, coordinate check. Needs no torch and no ray."""

from mup_tpu.analysis.run_table import Columns, RunTable, check_table, load_table
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult, analyze

__all__ = [
    "Columns",
    "RunTable",
    "TransferAnalysis",
    "TransferResult",
    "analyze",
    "check_table",
    "load_table",
]
