"""Power laws of an optimum in several scales at once: lr* ∝ N^a · D^b · B^c.

A **cell** is one size: one value of each scale. Optima are estimated cell by cell, as along one scale, and
their logarithms regressed on the scales' (`random_effects.py`). Each cell is then predicted from the others.

Shapes: S cells with a known optimum, A scales, R draws, N sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy

from mup_tpu.analysis.ingest.table import check_table
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import read_rows
from mup_tpu.analysis.looks import Question, weigh
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.random_effects import Regression
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.rows import select
from mup_tpu.config.values import on_one_line
from mup_tpu.errors import TableError
from mup_tpu.store.conditions import Condition

_CELL = "cell"


@dataclass(frozen=True)
class Exponent:
    """Exponent of one scale, with its 95 % interval."""

    scale: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Cells predicted from the others."""

    cells: int
    rmse: float
    """Octaves."""
    regret: float
    """Mean loss over the cell's best, nat."""
    inside: float
    """Share inside the 95 % interval, widened by the optimum's own error."""


@dataclass(frozen=True, repr=False)
class PowerLaw:
    """A rule's optimum as a power law of several scales."""

    compared: str
    hyperparameter: str
    scales: tuple[str, ...]
    sizes_SA: np.ndarray
    """log2 of each known cell's sizes."""
    estimates: tuple[Estimate, ...]
    """Known cells' optima."""
    cells: int
    """Cells in the table, those without a known optimum too."""
    notes: tuple[Reason, ...]

    @cached_property
    def _fit(self) -> Regression:
        x_S, error_S = np.array([(e.optimum.x, e.optimum.se) for e in self.estimates]).T
        return Regression(x_S, error_S, self.sizes_SA)

    @cached_property
    def _slopes(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean of each exponent, and draws, R × A."""
        mean_RA, error_RA = self._fit.coefficients()
        return mean_RA.mean(axis=0), _drawn(mean_RA, error_RA)

    @cached_property
    def exponents(self) -> tuple[Exponent, ...]:
        """Exponent of each scale."""
        mean_A, draws_RA = self._slopes
        ends = zip(self.scales, mean_A, *np.quantile(draws_RA, [0.025, 0.975], axis=0), strict=True)
        return tuple(Exponent(scale, *map(float, (value, low, high))) for scale, value, low, high in ends)

    @property
    def tau(self) -> float:
        """Scatter of each cell by itself about the law, octaves."""
        return float(self._fit.tau_RC[:, 0].mean())

    @property
    def shared(self) -> dict[str, float]:
        """Scatter that cells with one value of a scale have in common, octaves, by scale."""
        names = [self.scales[a] for a in self._fit.scattered]
        return dict(zip(names, self._fit.tau_RC.mean(axis=0)[1:].tolist(), strict=True))

    def trend(self, sizes_NA: np.ndarray) -> np.ndarray:
        """log2 of the law's optimum at sizes (plain numbers), without the effects of their values."""
        away_NA = np.log2(sizes_NA) - self.sizes_SA.mean(axis=0)
        return np.asarray(self._fit.x_S.mean() + away_NA @ self._slopes[0])

    def at(self, sizes: Mapping[str, float]) -> tuple[float, float, float]:
        """log2 of the optimum at a size, and its 95 % interval.

        Raises:
            TableError: a scale is missing, unknown, or not above 0.
        """
        if set(sizes) != set(self.scales) or not all(0 < v < math.inf for v in sizes.values()):
            given = ", ".join(f"{name}={value:g}" for name, value in sizes.items()) or "nothing"
            raise TableError(f"at {given}: give a number above 0 for each of {', '.join(self.scales)}")
        mean_R, error_R = self._fit.predicted(np.log2([sizes[name] for name in self.scales]))
        low, high = np.quantile(_drawn(mean_R, error_R), [0.025, 0.975])
        return float(mean_R.mean()), float(low), float(high)

    @cached_property
    def held_out(self) -> HeldOut:
        """Cells predicted from the others."""
        mean_RS, error_RS, weight_RS = self._fit.left_out()
        x_S, truth_S = (weight_RS * mean_RS).sum(axis=0), self._fit.x_S
        # Share of each prediction below the optimum that came out.
        below_S = (weight_RS * scipy.special.ndtr((truth_S - mean_RS) / error_RS)).sum(axis=0)
        inside = float(((below_S > 0.025) & (below_S < 0.975)).mean())
        regrets = [_regret(e, float(x)) for e, x in zip(self.estimates, x_S, strict=True)]
        rmse = math.sqrt(float(np.square(x_S - truth_S).mean()))
        return HeldOut(len(x_S), rmse, float(np.mean(regrets)), inside)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "compared": self.compared,
            "hyperparameter": self.hyperparameter,
            "exponents": [asdict(e) for e in self.exponents],
            "cells": self.cells,
            "known": len(self.estimates),
            "tau": self.tau,
            "shared": self.shared,
            "held_out": asdict(self.held_out),
        }


def _drawn(mean_R: np.ndarray, error_R: np.ndarray, each: int = 200) -> np.ndarray:
    """Draws of normals, `each` from one."""
    mean, error = np.repeat(mean_R, each, axis=0), np.repeat(error_R, each, axis=0)
    return np.asarray(mean + error * np.random.default_rng(1).standard_normal(mean.shape))


def _regret(estimate: Estimate, x: float) -> float:
    """Loss of a value over that at the optimum, read off the cell's curve; at the grid's end beyond it."""
    curve, optimum = estimate.curve, estimate.optimum
    used = np.isfinite(curve.mean_G) & (np.abs(curve.x_G - optimum.x) > 0.05)
    at = np.append(curve.x_G[used], optimum.x)
    rise = np.append(np.maximum(curve.mean_G[used] - optimum.loss, 0.0), 0.0)
    order = np.argsort(at)
    inside = float(np.clip(x, at.min(), at.max()))
    return float(scipy.interpolate.PchipInterpolator(at[order], rise[order])(inside))


def fit_power_laws(
    table: pd.DataFrame | str | Path,
    scales: Sequence[str],
    columns: Columns = Columns(),
    best_over: Sequence[str] = (),
    where: Sequence[Condition] = (),
) -> tuple[PowerLaw, ...]:
    """A law of each rule in a table in which several scales vary together.

    Args:
        table: one row a run; a file, or a results folder.
        scales: columns of sizes, such as width and depth, or N, D and bs.
        columns: names of its other columns.
        best_over: columns that are tuned too: of their values the best is taken in each cell.
        where: conditions on rows.

    Raises:
        TableError: a column is missing or no number above 0, or fewer cells have a known optimum than the law
            has parameters.
        StoreError: the results folder holds no runs.
    """
    if not scales:
        raise TableError("a power law needs scales: give for example --scale width,depth")
    if twice := next((name for name in scales if scales.count(name) > 1), None):
        raise TableError(f"scales: {on_one_line(twice)} is given twice")
    rows = select(table if isinstance(table, pd.DataFrame) else read_rows(table), where)
    for name in (*scales, *best_over):
        if name not in rows or (name in scales and not _is_size(rows[name])):
            there = ", ".join(map(str, rows.columns[:12]))
            raise TableError(
                f"scales: {on_one_line(name)} is not a column of numbers above 0; there are {there}"
            )
    sizes = rows[list(scales)].drop_duplicates().sort_values(list(scales), ignore_index=True)
    cells = sizes.assign(**{_CELL: np.arange(1.0, len(sizes) + 1)})
    rows = rows.merge(cells, on=list(scales)).drop(columns=[*scales, "trial_id", "config"], errors="ignore")
    columns = replace(columns, scale=_CELL)
    if best_over:
        group = [c for c in (_CELL, columns.hyperparameter, columns.parametrization) if c in rows]
        rows = rows.loc[rows.groupby(group)[columns.loss].idxmin()].drop(columns=list(best_over))
    checked = check_table(rows, columns)
    found = []
    for compared, runs in checked.runs.groupby("compared"):
        evidence = weigh(runs, Question.of(checked))
        known = [e for e in evidence.estimates if e.optimum.is_bracketed]
        if len(known) < len(scales) + 2:
            raise TableError(
                f"{compared}: a power law in {', '.join(scales)} needs {len(scales) + 2} cells with an "
                f"optimum inside their grid, and {len(known)} of {len(evidence.estimates)} have one"
            )
        at = [int(e.optimum.scale) - 1 for e in known]
        sizes_SA = np.log2(sizes.to_numpy(float)[at])
        fitted = (str(compared), checked.columns.hyperparameter, tuple(scales), sizes_SA, tuple(known))
        found.append(PowerLaw(*fitted, len(evidence.estimates), checked.notes))
    return tuple(found)


def read_sizes(text: str) -> dict[str, float]:
    """Sizes as NAME=VALUE,NAME=VALUE.

    Raises:
        TableError: the text has another form.
    """
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise TableError(f"at {on_one_line(text)} is not NAME=NUMBER,NAME=NUMBER") from None
    return found


def _is_size(values: pd.Series) -> bool:
    return values.dtype.kind in "iuf" and bool((values > 0).all()) and bool(np.isfinite(values).all())
