"""Run tables to verdicts: optimum, transfer, scaling law, coordinate check. Needs no torch and no ray.

Each name is imported when it is first used: scipy takes half a second, and commands that train need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mup_tpu.analysis.ingest.table_columns import Columns
    from mup_tpu.analysis.ingest.table_values import Reading
    from mup_tpu.analysis.load import check_table, load_table
    from mup_tpu.analysis.loss_law import LossLaws, loss_laws
    from mup_tpu.analysis.prediction import Predictions, predict
    from mup_tpu.analysis.run_table import RunTable
    from mup_tpu.analysis.scaling_law import fit_scaling_law
    from mup_tpu.analysis.transfer import TransferAnalysis, analyze

__all__ = [
    "Columns", "LossLaws", "Predictions", "Reading", "RunTable", "TransferAnalysis", "analyze", "check_table",
    "fit_scaling_law", "load_table", "loss_laws", "predict",
]  # fmt: skip

_FROM = {
    "ingest.table_columns": ("Columns",),
    "ingest.table_values": ("Reading",),
    "load": ("check_table", "load_table"),
    "loss_law": ("LossLaws", "loss_laws"),
    "prediction": ("Predictions", "predict"),
    "run_table": ("RunTable",),
    "scaling_law": ("fit_scaling_law",),
    "transfer": ("TransferAnalysis", "analyze"),
}


def __getattr__(name: str) -> Any:
    for module, names in _FROM.items():
        if name in names:
            return getattr(importlib.import_module(f"mup_tpu.analysis.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
