"""Batches of runs to add: cells of a grid, their cost, and the commands that run them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from mup_tpu.analysis.cost import Cost
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.config.columns import CONFIGURED, label, write_scale


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
    reason: str
    """Purpose, one sentence without a full stop."""
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

    def commands(self, columns: Columns, command: str | None) -> tuple[str, ...]:
        """Command lines that run it where the experiment is ours, else sentences.

        Args:
            columns: names of scale and hyperparameter.
            command: command line that adds runs to the table, or None.
        """
        groups: dict[tuple[float, int], list[float]] = {}
        for cell in sorted(self.cells, key=lambda c: (c.scale, c.seeds, c.x)):
            groups.setdefault((cell.scale, cell.seeds), []).append(cell.x)
        axes = (columns.parametrization, columns.scale, columns.hyperparameter)
        is_ours = command is not None and set(columns.along) <= set(axes) <= set(CONFIGURED)
        lines = []
        for (scale, seeds), grid in groups.items():
            values = " ".join(f"2^{x:.4g}" for x in grid)
            if is_ours:
                roles = ("compare", "scale", "tune")
                compared, grown, tuned = (
                    f"--{role} {CONFIGURED[column].field}=" for role, column in zip(roles, axes, strict=True)
                )
                lines.append(
                    f"{command} {compared}{self.parametrization} {grown}{scale:g} --num-seeds {seeds} "
                    f"{tuned}{values.replace(' ', ',')}"
                )
            else:
                at = write_scale(columns.scale, scale)
                many = "1 seed" if seeds == 1 else f"{seeds} seeds each"
                lines.append(f"add {columns.hyperparameter} {values} at {label(columns.scale)} {at}, {many}")
        return tuple(lines)

    def price(self) -> str:
        """Cost of the batch, beside the cost so far and until the verdict."""
        costs = f"it costs {self.costs.write(self.cost)}, {self.costs.write(self.spent)} were spent"
        if math.isinf(self.to_verdict):
            return f"{costs}; how much more a verdict costs cannot be told yet"
        if math.isfinite(self.to_verdict):
            return f"{costs}; about {self.costs.write(self.to_verdict)} to a verdict ({self.costs.source})"
        return f"{costs} ({self.costs.source})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
