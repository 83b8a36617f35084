"""A run table: one row a run, its hyperparameter on a log2 axis, lost runs as +inf.

`load.py` names the columns of a results folder, `ingest/` of anybody's table; `standard_form.py` does the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.reasons import Reason
from mup_tpu.errors import TableError

# Ends of runs; unfinished ones say nothing of their trial
FINISHED, DIVERGED, STOPPED, UNFINISHED = "finished", "diverged", "stopped", "unfinished"
REFUSED = "refused"  # by a condition that an optimum has to meet
ENDS = pd.CategoricalDtype([FINISHED, DIVERGED, STOPPED, UNFINISHED, REFUSED])

RUN = ["compared", "scale", "x", "seed"]  # columns that name a run
HISTORY = [*RUN, "step", "loss"]


@dataclass(frozen=True, repr=False)
class RunTable:
    """A checked table, and notes on it."""

    runs: pd.DataFrame
    """One row a run: compared (as a parametrization), scale, x (log2 of the hyperparameter), loss
    (+inf where diverged or stopped), stopped (early, for being behind, or refused by a condition), refused,
    seed, purchase (0 outside a sequence), and loss_error, params, tokens, cost (nan if unknown)."""
    notes: tuple[Reason, ...]
    columns: Columns
    name: str
    cost_unit: str = ""
    """Unit of the column cost."""
    command: str | None = None
    """Command line that adds runs; None unless an experiment's script made the results folder."""
    history: pd.DataFrame | None = None
    """Training losses by step, where known: compared, scale, x, seed, step, loss."""
    stored: pd.DataFrame | None = None
    """Rows of the results folder, which say how the runs were made; None for other tables."""
    planned: tuple[float, ...] = ()
    """Scales of a sequence, which has a look after each purchase; none for a table with one look."""
    zeros: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Runs at hyperparameter 0, which has no log2; columns of `runs` without x."""
    at_scale_0: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Other runs at scale 0, such as without weight decay; columns of `runs`."""

    def __repr__(self) -> str:
        scales = ", ".join(f"{scale:g}" for scale in sorted(self.runs["scale"].unique()))
        compared = ", ".join(sorted(self.runs["compared"].unique()))
        return f"{self.name}: {len(self.runs)} runs of {compared} at {self.columns.scale} {scales}"

    def part(self, keep: Callable[[pd.DataFrame], pd.Series]) -> RunTable:
        """Return the table of some runs, with their history.

        Args:
            keep: mask of a frame's rows, called with each frame of runs.
        """

        def kept(frame: pd.DataFrame) -> pd.DataFrame:
            return frame[keep(frame)] if len(frame) else frame

        return replace(
            self,
            runs=kept(self.runs),
            history=None if self.history is None else kept(self.history),
            zeros=kept(self.zeros),
            at_scale_0=kept(self.at_scale_0),
        )


def require_above_zero(name: str, value: float) -> None:
    """Check a setting of an analysis.

    Raises:
        TableError: it is not a finite number above 0.
    """
    if not (value > 0 and np.isfinite(value)):
        raise TableError(f"{name} {value:g} is not allowed: it must be a finite number above 0")


def power(x: float) -> str:
    return "0" if x == -np.inf else f"2^{x:.4g}"
