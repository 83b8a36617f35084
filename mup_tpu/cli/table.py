"""Options that name the columns and rows of a table and limit its verdict.

Signatures of commands hold them, so this module imports the analysis only in functions: --help stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mup_tpu.cli.console import ROLES
from mup_tpu.config.options import Repeated
from mup_tpu.errors import ConfigError

if TYPE_CHECKING:
    from mup_tpu.analysis import Columns, Reading, RunTable, TransferAnalysis
    from mup_tpu.store import Condition

_STATES = ("finished", "diverged", "unfinished")


@dataclass(frozen=True)
class TableOptions:
    """Columns of a table, rows to take, and limits of the verdict."""

    scale: str | None = None
    """Column of the scale, such as width or depth, or an expression of columns, such as tokens/params. By
    default that of the folder's sweep, or a column called width, d_model or similar."""
    tune: str | None = None
    """Column of the tuned hyperparameter, with plain values (not log2), or an expression such as
    lr*weight_decay; two to four separated by commas are analyzed together. By default those of the folder's
    sweep, or a column called lr, learning_rate or similar."""
    best_over: tuple[str, ...] = ()
    """Further columns that are tuned too: at each size and value the best run over them is taken."""
    compare: str | None = None
    """Column whose values are compared, such as a rule or an optimizer. By default that of the folder's
    sweep, or a column called parametrization."""
    columns: Repeated = ()
    """Other columns by role, ROLE=COLUMN: loss=eval/loss seed=run. Roles are loss, seed, status, step, params
    (parameters without embeddings), tokens, cost (of a run, in any unit), and along: what changes with the
    scale, such as depth where wider models are deeper too."""
    where: Repeated = ()
    """Rows to use: COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE, such as tied=true width>=64. By default the
    selection that --keep stored in the folder."""
    only: Repeated = ()
    """Conditions on an optimum, such as "max_grad_norm < 5"; runs that violate one count as lost."""
    states: Repeated = ()
    """How to read further states: STATE=finished, STATE=diverged or STATE=unfinished, such as failed=diverged
    if runs fail for no other reason."""
    loss_unit: Literal["auto", "nat", "bit", "bpb"] = "auto"
    """Unit of the loss in a table of another tool: nat or bit (per token), or bpb (bits per byte). By default
    it is read from the column's name."""
    maximize: bool = False
    """Higher values of the loss column are better, as for accuracy or PSNR."""
    bytes_per_token: float | None = None
    """Bytes of text per token, for converting bits per byte to nat per token."""
    chance: float | None = None
    """Loss of random guessing, nat per token; runs at or above it count as diverged."""
    epsilon: float | None = None
    """Largest regret that does not matter, in the unit of the loss. By default 0.01 nat per token; for other
    metrics, 2 % of the difference between the scales' best values."""
    delta: Annotated[float, tyro.conf.Suppress] = 0.2  # largest drift exponent that does not matter

    def role(self, name: str, default: str) -> str:
        """Return the column of a role, `default` unless --columns gives it."""
        given: dict[str, str] = {}
        for text in self.columns:
            role, equals, column = text.partition("=")
            if not equals or role not in ROLES:
                raise ConfigError(
                    f"columns {text!r} is not ROLE=COLUMN with a role of {', '.join(ROLES)}; the options "
                    "--scale, --tune and --compare name those columns"
                )
            given[role] = f"{given[role]},{column}" if role == "along" and role in given else column
        return given.get(name, default)

    def table_columns(self, *paths: str) -> Columns:
        """Return the names of a table's columns."""
        from mup_tpu.analysis.load import default_columns

        defaults = default_columns(paths[0] if len(paths) == 1 else paths)
        others = ("loss", "seed", "status", "step", "params", "cost")
        tuned = [name.strip() for name in self.tune.split(",")] if self.tune else [*defaults.tuned]
        scale, *beside = [name.strip() for name in self.scale.split(",")] if self.scale else [defaults.scale]
        roles: dict[str, Any] = {role: self.role(role, getattr(defaults, role)) for role in others}
        return replace(
            defaults,
            scale=scale,
            scales_beside=tuple(beside),
            hyperparameter=tuned[0],
            tuned_beside=tuple(tuned[1:]),
            parametrization=self.compare or defaults.parametrization,
            along=(*defaults.along, *filter(None, self.role("along", "").split(","))),
            **roles,
        )

    @property
    def conditions(self) -> list[Condition] | None:
        from mup_tpu.store import Condition

        return [Condition.parse(text) for text in self.where] if self.where else None

    def reading(self, *paths: str) -> Reading:
        """Return how a results folder or table is read, or several tables as one."""
        from mup_tpu.analysis.ingest.table_values import LossUnit, Reading, States
        from mup_tpu.store import Condition

        by_meaning: dict[str, list[str]] = {meaning: [] for meaning in _STATES}
        for text in self.states:
            state, _, meaning = text.rpartition("=")
            if not state or meaning not in by_meaning:
                raise ConfigError(f"states {text!r} is not STATE=MEANING with one of {', '.join(_STATES)}")
            by_meaning[meaning].append(state)
        return Reading(
            self.table_columns(*paths),
            self.conditions,
            tuple(map(Condition.parse, self.only)),
            self.chance,
            States(*(tuple(by_meaning[meaning]) for meaning in _STATES)),
            LossUnit(self.loss_unit, self.bytes_per_token, self.maximize),
            best_over=self.best_over,
        )

    def load(self, *paths: str) -> RunTable:
        """Read and check a results folder or table, or several tables as one."""
        from mup_tpu.analysis import load_table

        table = load_table(paths[0] if len(paths) == 1 else paths, self.reading(*paths))
        if table.stored is None:
            return table
        # Our experiments' scripts take the results folder as an option.
        experiment = str(table.stored["experiment"].iloc[0])
        script = Path("experiments") / f"{experiment.removesuffix('_h200')}.py"
        preset = ":H200" if experiment.endswith("_h200") else ""
        command = f"mup-tpu sweep {script}{preset} --results {paths[0].rstrip('/')}"
        return replace(table, command=command if (Path(__file__).parents[2] / script).exists() else None)

    def analyze(self, table: RunTable, whole: bool = True) -> TransferAnalysis:
        from mup_tpu.analysis import analyze

        return analyze(table, self.epsilon, self.delta, whole=whole)
