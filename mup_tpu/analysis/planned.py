"""Plans: what they assume of runs before these are made; targets in a folder, and the optimum there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.design import REACH, Cell
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import check_table
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.prediction import costs
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.analysis.trend import Priors, Trend, claims, fit_trend, fixed, kind_of, priors_of
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.errors import StoreError, TableError, raised_as
from mup_tpu.store import load_runs, results_folder
from mup_tpu.store.header import read_file, write_file

_PER_RUN = 0.1  # Squared standard error of an optimum times runs within reach, octaves²: median of 162 sweeps
_FLOOR = 0.04**2  # Squared standard error that no seed takes away, octaves²: the valley's unknown shape
_CURVATURES = {"width": 0.065, "depth": 0.14, "batch size": 0.047, "tokens": 0.026, "size": 0.036}
_USUAL_CURVATURE = 0.05  # Mean curvatures of valleys in the stored and public sweeps, nat per octave²


def runs_within_reach(cells: Sequence[Cell]) -> float:
    """Mean number of runs within reach of an optimum up to half an octave from the cells' middle."""
    middle = (cells[0].x + cells[-1].x) / 2
    return sum(c.runs * min(1.0, max(0.0, REACH + 0.5 - abs(c.x - middle))) for c in cells)


@dataclass(frozen=True)
class Assumed:
    """Drift and valleys of one rule along one scale, before it is run."""

    priors: Priors
    curvature: float  # Curvature of the valley at the target, nat per octave²
    per_run: float  # Squared standard error of an optimum from one run, octaves²
    source: Reason  # Origin of the numbers

    @classmethod
    def usual(cls, scale: str, rule: str) -> Assumed:
        """Return numbers of stored and public sweeps of a kind of scale, by its column."""
        kind = kind_of(scale)
        claimed = claims(rule, kind)
        source = Reason.of("usual sweeps", kind=kind, keeps=rule if claimed else "")
        return cls(priors_of(scale, claimed), _CURVATURES.get(kind, _USUAL_CURVATURE), _PER_RUN, source)

    @classmethod
    def measured(cls, analysis: TransferAnalysis, rule: str) -> Assumed:
        """Return numbers of a table of one's own.

        Raises:
            TableError: the table has no trend of that rule.
        """
        result = next((r for r in analysis.results if r.compared == rule), analysis.results[0])
        priors = priors_of(analysis.scale, claims(rule, kind_of(analysis.scale)))
        trend = fit_trend(result.optima, priors, result.valleys)
        if trend is None:
            raise TableError(
                f"from {analysis.name!r}: a plan needs two {analysis.scale}s with a known optimum of "
                f"{result.compared}"
            )
        known = [
            (o, c, v)
            for o, c, v in zip(result.optima, result.curves, result.valleys, strict=True)
            if o.is_bracketed and v is not None
        ]
        per_runs = [o.se**2 * float(c.count_G[np.abs(c.x_G - o.x) <= REACH].sum()) for o, c, _ in known]
        source = Reason.of("this sweep", name=analysis.name, compared=result.compared)
        after = replace(priors, steady=trend.steady, mean=trend.slope().mean)
        return cls(after, float(known[-1][2].curvature_R.mean()), float(np.median(per_runs)), source)

    def error(self, runs: float) -> float:
        # Squared standard error of an optimum from some runs within reach of it, octaves²
        return max(self.per_run / runs, _FLOOR)

    def regret(self, variance: float) -> float:
        # Expected regret of a value of some variance, nat
        return self.curvature / 2 * variance


_CELL = "cell"

FILE = "plan.json"


@dataclass(frozen=True)
class Planned:
    """A plan in its results folder: the target, and the sizes to run, the cheapest first."""

    columns: Columns  # Of the run table: hyperparameter, compared field
    follows: tuple[str, ...]  # Sizes that the optimum may follow
    target: dict[str, float]  # Sizes of the target
    cells: tuple[tuple[dict[str, float], dict[str, float]], ...]
    """Values of each cell by column, and its sizes."""
    rule: str = ""
    fix: dict[str, float] = field(default_factory=dict)  # Known exponents by size

    @property
    def priors(self) -> tuple[Priors, ...]:
        by_kind = (priors_of(name, claims(self.rule, kind_of(name))) for name in self.follows)
        return tuple(
            fixed(self.fix[name]) if name in self.fix else priors
            for name, priors in zip(self.follows, by_kind, strict=True)
        )

    def trend(self, known: Mapping[int, Estimate]) -> Trend:
        sizes = np.array([self.sizes(self.cells[cell][1]) for cell in known])
        x_S, error_S = np.array([(e.optimum.mean, e.optimum.se) for e in known.values()]).T
        return Trend(sizes, x_S, error_S, self.priors)

    def sizes(self, values: Mapping[str, float]) -> list[float]:
        return [values[name] for name in self.follows]

    def rows_of(self, rows: pd.DataFrame, cell: int) -> pd.Series:
        """Return which rows are a cell's."""
        is_its = pd.Series(True, rows.index)
        for column, value in self.cells[cell][0].items():
            is_its &= rows[column] == value
        return is_its

    def estimates(self, rows: pd.DataFrame) -> dict[int, Estimate]:
        """Return the optimum of each cell that has been run, by its number."""
        number = pd.Series(np.nan, rows.index)
        for cell in range(len(self.cells)):
            number[self.rows_of(rows, cell)] = cell + 1.0
        known = rows.assign(**{_CELL: number})[number.notna()]
        if known.empty or not np.isfinite(known["loss"].astype(float)).any():
            return {}
        taken = [c for c in (_CELL, self.columns.hyperparameter, self.columns.parametrization) if c in known]
        table = check_table(known[[*taken, "loss", "status", "seed"]], replace(self.columns, scale=_CELL))
        evidence = weigh(table.runs, Question.of(table))
        return {int(e.optimum.scale) - 1: e for e in evidence.estimates}

    @classmethod
    def load(cls, folder: str) -> Planned | None:
        """Return the plan of a results folder; None if it holds none."""
        content = read_file(results_folder(folder), FILE)
        if content is None:
            return None
        misfits = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
        with raised_as(StoreError, f"results folder {folder}: {FILE} cannot be read", misfits):
            values = json.loads(content)
            tuned, compared = values["columns"]
            return cls(
                Columns(hyperparameter=tuned, parametrization=compared),
                tuple(values["follows"]),
                {str(k): float(v) for k, v in values["target"].items()},
                tuple(({**at}, {**sizes}) for at, sizes in values["cells"]),
                str(values["rule"]),
                {str(k): float(v) for k, v in values["fix"].items()},
            )

    def keep(self, folder: str) -> None:
        values = asdict(self) | {"columns": [self.columns.hyperparameter, self.columns.parametrization]}
        write_file(results_folder(folder), FILE, json.dumps(values, indent=1).encode())


@dataclass(frozen=True)
class PlannedOptimum:
    """The optimum at the target of a plan."""

    hyperparameter: str
    rule: str
    sizes: dict[str, float]  # Of the target
    x: float  # log2 of the optimum
    half: tuple[float, float]
    interval: tuple[float, float]  # 95 % interval of x
    expected_cost: float  # Of taking x, nat; nan if no curvature is known
    high_cost: float  # 97.5 % quantile of that cost, nat
    exponents: dict[str, tuple[float, float]]  # Exponent of each size and its standard deviation
    known: int  # Cells with a known optimum
    cells: int
    runs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"value": 2.0**self.x}


def predict_planned(
    folder: str, at: Mapping[str, float] | None = None, seed: int = 0
) -> PlannedOptimum | None:
    """Predict the optimum at the target of a folder's plan, or at other sizes; None for a folder without one.

    Raises:
        TableError: no planned size has a known optimum yet, or a size is not one that the plan follows.
        StoreError: the folder holds no runs, or its plan cannot be read.
    """
    planned = Planned.load(folder)
    if planned is None:
        return None
    if unknown := next((name for name in at or {} if name not in planned.follows), None):
        raise TableError(f"at {unknown!r}: the plan follows {', '.join(planned.follows)}")
    target = planned.target | dict(at or {})
    rows = load_runs(folder)
    estimates = planned.estimates(rows)
    known = {cell: e for cell, e in sorted(estimates.items()) if e.optimum.is_bracketed}
    if not known:
        raise TableError("no planned size has an optimum inside its grid yet: run the plan first")
    trend = planned.trend(known)
    optimum = trend.optimum(planned.sizes(target))
    low, half_low, half_high, high = (optimum.quantile(q) for q in (0.025, 0.25, 0.75, 0.975))
    valley = next((e.valley for e in reversed([*known.values()]) if e.valley is not None), None)
    (cost,), _ = costs(optimum, valley, (optimum.mean,), seed)
    exponents = dict(zip(planned.follows, trend.exponents(planned.sizes(target)), strict=True))
    return PlannedOptimum(
        hyperparameter=planned.columns.hyperparameter,
        rule=planned.rule,
        sizes={name: target[name] for name in planned.follows},
        x=optimum.mean,
        half=(half_low, half_high),
        interval=(low, high),
        expected_cost=cost.expected,
        high_cost=cost.high,
        exponents=exponents,
        known=len(known),
        cells=len(planned.cells),
        runs=len(rows),
    )
