"""Power laws of an optimum in several scales at once: lr* ∝ N^a · D^b · B^c.

A **cell** is one size: one value of each scale. Optima are estimated cell by cell, as along one scale, and
their trend (trend.py) is straight along each scale. Cells that share a value of a scale, such as one model or
one batch size, miss the law together, and each by itself too: without the former, many cells at few values
would make exponents look surer than they are. Each cell is then predicted from the others.

Shapes: S cells with a known optimum, A scales, N sizes.
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

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.ingest.table_values import Reading
from mup_tpu.analysis.load import check_table, read_rows
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.trend import Pace, Priors, Trend
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.config.values import on_one_line
from mup_tpu.errors import TableError, given

_CELL = "cell"
_SCATTER = 0.2  # scale of τ, octaves
_SHARED = (0.03, 0.1, 0.2, 0.45)  # scatters that cells of one value may share, octaves
_LEAST_VALUES = 4  # values of a scale from which what they share is separate from its exponent


@dataclass(frozen=True)
class ScaleExponent:
    """Exponent of one scale, with its 95 % interval."""

    scale: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Cells predicted from the others."""

    cells: int
    rmse: float  # Octaves
    regret: float  # Mean loss over the cell's best, nat
    inside: float  # Share inside the 95 % interval, widened by the optimum's own error


@dataclass(frozen=True, repr=False)
class PowerLaw:
    """A rule's optimum as a power law of several scales."""

    compared: str
    hyperparameter: str
    scales: tuple[str, ...]
    sizes_SA: np.ndarray  # log2 of each known cell's sizes
    estimates: tuple[Estimate, ...]  # Known cells' optima
    cells: int  # Cells in the table, those without a known optimum too
    notes: tuple[Reason, ...]

    @cached_property
    def _trend(self) -> Trend:
        x_S, error_S = np.array([(e.optimum.x, e.optimum.se) for e in self.estimates]).T
        straight = Priors(0.0, _SCATTER, moving=Pace(1.0, 0.0))
        shared = replace(straight, shared=_SHARED)
        # With few values, what they share cannot be separated from the exponent.
        counts = [len(np.unique(column)) for column in self.sizes_SA.T]
        priors = tuple(shared if _LEAST_VALUES <= n <= len(x_S) / 2 else straight for n in counts)
        return Trend(2**self.sizes_SA, x_S, error_S, priors)

    @cached_property
    def exponents(self) -> tuple[ScaleExponent, ...]:
        slopes = zip(self.scales, self._trend.mean_slopes(), strict=True)
        return tuple(ScaleExponent(name, m.mean, m.quantile(0.025), m.quantile(0.975)) for name, m in slopes)

    @property
    def tau(self) -> float:
        # Scatter of each cell by itself about the law, octaves
        return self._trend.tau

    def trend(self, sizes_NA: np.ndarray) -> np.ndarray:
        # log2 of the law's optimum at plain sizes, without what cells of one value share
        away_NA = np.log2(sizes_NA) - self.sizes_SA.mean(axis=0)
        return np.asarray(self._trend.x_S.mean() + away_NA @ [e.value for e in self.exponents])

    def at(self, sizes: Mapping[str, float]) -> tuple[float, float, float]:
        """Return log2 of the optimum at a size, and its 95 % interval."""
        if set(sizes) != set(self.scales) or not all(0 < v < math.inf for v in sizes.values()):
            given = ", ".join(f"{name}={value:g}" for name, value in sizes.items()) or "nothing"
            raise TableError(f"at {given}: give a number above 0 for each of {', '.join(self.scales)}")
        optimum = self._trend.optimum([sizes[name] for name in self.scales])
        return optimum.mean, optimum.quantile(0.025), optimum.quantile(0.975)

    @cached_property
    def held_out(self) -> HeldOut:
        """Predict each cell from the others."""
        predicted, truth_S = self._trend.left_out(), self._trend.x_S
        x_S = np.array([one.mean for one in predicted])
        below_S = np.array([one.below(x) for one, x in zip(predicted, truth_S, strict=True)])
        inside = float(((below_S > 0.025) & (below_S < 0.975)).mean())
        regrets = [curve_regret(e, x) for e, x in zip(self.estimates, x_S.tolist(), strict=True)]
        rmse = math.sqrt(float(np.square(x_S - truth_S).mean()))
        return HeldOut(len(x_S), rmse, float(np.mean(regrets)), inside)

    def to_dict(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "hyperparameter": self.hyperparameter,
            "exponents": [asdict(e) for e in self.exponents],
            "cells": self.cells,
            "known": len(self.estimates),
            "tau": self.tau,
            "held_out": asdict(self.held_out),
        }


def curve_regret(estimate: Estimate, x: float) -> float:
    """Read off a cell's curve what a value costs over the optimum; beyond the grid, what its end costs."""
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
    reading: Reading = Reading(),
    best_over: Sequence[str] = (),
) -> tuple[PowerLaw, ...]:
    """Fit a law of each rule in a table, file or folder in which several scales vary together.

    Of columns in `best_over`, which are tuned too, the best value is taken in each cell.

    Raises:
        TableError: a column is missing or no number above 0, or fewer cells have a known optimum than the
            law has parameters.
    """
    if not scales:
        raise TableError(f"a power law needs scales, such as {given('scale', 'width,depth')}")
    if twice := next((name for name in scales if scales.count(name) > 1), None):
        raise TableError(f"scales: {on_one_line(twice)} is given twice")
    rows, reading = read_rows(table, reading)
    for name in (*scales, *best_over):
        is_known = name in rows and (name in best_over or rows[name].dtype.kind in "iuf")
        if not is_known or (name in scales and not ((rows[name] > 0) & np.isfinite(rows[name])).all()):
            known_columns = ", ".join(map(str, rows.columns[:12]))
            raise TableError(
                f"scales: {on_one_line(name)} is not a column of numbers above 0; there are {known_columns}"
            )
    sizes = rows[list(scales)].drop_duplicates().sort_values(list(scales), ignore_index=True)
    cells = sizes.assign(**{_CELL: np.arange(1.0, len(sizes) + 1)})
    rows = rows.merge(cells, on=list(scales)).drop(columns=[*scales, "trial_id", "config"], errors="ignore")
    columns = replace(reading.columns or Columns(), scale=_CELL)
    if best_over:
        group = [c for c in (_CELL, columns.hyperparameter, columns.parametrization) if c in rows]
        rows = rows.loc[rows.groupby(group)[columns.loss].idxmin()].drop(columns=list(best_over))
    checked = check_table(rows, replace(reading, columns=columns))
    laws = []
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
        laws.append(PowerLaw(*fitted, len(evidence.estimates), checked.notes))
    return tuple(laws)


def read_sizes(text: str) -> dict[str, float]:
    """Read sizes, NAME=VALUE,NAME=VALUE."""
    sizes = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            sizes[name.strip()] = float(value)
        except ValueError:
            raise TableError(f"at {on_one_line(text)} is not NAME=NUMBER,NAME=NUMBER") from None
    return sizes
