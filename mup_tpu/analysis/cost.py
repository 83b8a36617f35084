"""Cost of a run by its scale: measured, or assumed to be a power of the scale."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.ingest.table_columns import means
from mup_tpu.analysis.run_table import RunTable

_MOST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Cost:
    """Cost of a run as a power of its scale."""

    exponent: float
    at_one: float  # Cost at scale 1
    unit: str  # "s", "FLOP", a column of the table, or "runs": of the smallest scale
    scale: str = ""  # Column of the scale
    smallest: float = math.nan
    """Scale of one run of the unit "runs"; nan with another unit, or before anything was run."""

    @property
    def is_measured(self) -> bool:
        return self.unit != "runs"

    def of(self, scale: float) -> float:
        return _exp(math.log(self.at_one) + self.exponent * math.log(scale))


def run_cost(table: RunTable) -> Cost:
    """Return the cost of a run by scale: measured where the table says, else ∝ width² or the scale itself.

    Args:
        table: checked runs; `cost` is measured.
    """
    exponent = 2.0 if means(table.columns.scale) == "width" else 1.0
    smallest = float(table.runs["scale"].min())
    known = table.runs[(table.runs["cost"] > 0) & np.isfinite(table.runs["loss"])]
    mean_costs = known.groupby("scale")["cost"].mean()
    if mean_costs.empty:
        at_one = _exp(-exponent * math.log(smallest))
        return Cost(exponent, at_one, "runs", table.columns.scale, smallest)
    if len(mean_costs) > 1:
        exponent = max(0.0, float(np.polyfit(np.log2(mean_costs.index), np.log2(mean_costs), 1)[0]))
    at_one = _exp(float(np.mean(np.log(mean_costs) - exponent * np.log(mean_costs.index))))
    return Cost(exponent, at_one, table.cost_unit, table.columns.scale)


def _exp(x: float) -> float:
    return math.inf if x > _MOST else max(math.exp(x), sys.float_info.min)
