"""Batches of runs to add: cells of a grid, their purpose and their cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mup_tpu.analysis.cost import Cost
from mup_tpu.analysis.reasons import Reason


@dataclass(frozen=True)
class Cell:
    """Runs to add at one point of the grid."""

    scale: float
    x: float
    """log2 of the hyperparameter."""
    runs: int
    """Number of runs to add."""
    seeds: int
    """Number of seeds after the batch."""


@dataclass(frozen=True)
class Batch:
    """Next runs of one parametrization."""

    parametrization: str
    cells: tuple[Cell, ...]
    reason: Reason
    """Purpose."""
    cost: float
    to_verdict: float
    """Expected cost until the verdict, this batch included; inf if it is out of reach, nan if too
    little is known to tell."""
    spent: float
    costs: Cost

    @property
    def adds_seeds(self) -> bool:
        """Whether values that were run get further seeds, which verdicts need more than predictions do."""
        return any(cell.seeds > cell.runs for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
