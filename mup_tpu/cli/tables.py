"""Options for reading a table of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mup_tpu.analysis.ingest.units import LossUnit, UnitName
from mup_tpu.store.conditions import Condition

if TYPE_CHECKING:
    from mup_tpu.analysis import Columns, RunTable, TransferAnalysis


@dataclass(frozen=True)
class TableOptions:
    """Columns of a table, rows to take, and limits of the verdict."""

    width_col: str | None = None
    """Column of the width. By default width, or another usual name such as d_model; for a results folder the
    scale of its sweep."""
    lr_col: str | None = None
    """Column of the learning rate (plain, not log2). By default lr, or another usual name; for a results
    folder the tuned hyperparameter of its sweep."""
    loss_col: str = "loss"
    """Column of the loss. By default loss, or a held-out loss of another usual name, or the training loss."""
    seed_col: str = "seed"
    """Column of the seed; optional."""
    parametrization_col: str | None = None
    """Compared column; optional. By default parametrization; for a results folder the one of its sweep."""
    status_col: str = "status"
    """Column of the status; optional. By default also State."""
    step_col: str = "step"
    """Column of the step, in a table with a row a step; optional."""
    params_col: str = "params_non_embedding"
    """Column of the parameters without embeddings; optional, needed for a scaling law."""
    cost_col: str = ""
    """Column of a run's cost, in any unit; optional. By default wall_time_s, or flops."""
    hyperparameter: str | None = None
    """Column to analyse in place of the learning rate, e.g. init_std."""
    scale: str | None = None
    """Column to analyse in place of the width, e.g. depth."""
    along: tuple[str, ...] = ()
    """Further columns that change with the scale, as on a ladder of shapes: depth."""
    where: tuple[str, ...] = ()
    """Rows to take, as COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE: tied=true width>=64. By default the rows
    of the folder's question (`mup-tpu where`)."""
    finished_states: tuple[str, ...] = ()
    """States that mean finished, besides finished, completed, success and the like."""
    diverged_states: tuple[str, ...] = ()
    """States that mean diverged, besides diverged: failed, for example, if nothing else fails."""
    unfinished_states: tuple[str, ...] = ()
    """States without a result, besides running, failed, crashed, killed and the like."""
    loss_unit: UnitName = "auto"
    """Unit of the loss in others' tables: nat or bit a token, or bpb (bits per byte). By default the column's
    name tells it."""
    bytes_per_token: float | None = None
    """Bytes of text a token, to convert bits per byte."""
    chance: float | None = None
    """Loss of guessing, nat per token; runs at or above it count as diverged."""
    epsilon: float = 0.01
    """Largest regret that does not matter, nat per token."""
    delta: float = 0.2
    """Largest drift exponent that does not matter."""

    def columns(self, *paths: str) -> Columns:
        """Names of the table's columns."""
        from mup_tpu.analysis.load import default_columns

        usual = default_columns(paths[0] if len(paths) == 1 else paths)
        return replace(
            usual,
            scale=self.scale or self.width_col or usual.scale,
            hyperparameter=self.hyperparameter or self.lr_col or usual.hyperparameter,
            parametrization=self.parametrization_col or usual.parametrization,
            loss=self.loss_col,
            seed=self.seed_col,
            status=self.status_col,
            step=self.step_col,
            params=self.params_col,
            cost=self.cost_col,
            along=(*usual.along, *self.along),
        )

    @property
    def conditions(self) -> list[Condition] | None:
        """Conditions on rows; None if none was given."""
        return [Condition.parse(text) for text in self.where] if self.where else None

    def load(self, *paths: str) -> RunTable:
        """Read and check a results folder or table, or several tables as one."""
        from mup_tpu.analysis import load_table
        from mup_tpu.analysis.ingest.table_values import States

        states = States(self.finished_states, self.diverged_states, self.unfinished_states)
        unit = LossUnit(self.loss_unit, self.bytes_per_token)
        path = paths[0] if len(paths) == 1 else paths
        return load_table(path, self.columns(*paths), self.chance, self.conditions, states, unit)

    def analyze(self, table: RunTable) -> TransferAnalysis:
        """Analyse a table."""
        from mup_tpu.analysis import analyze

        return analyze(table, self.epsilon, self.delta)
