"""Power laws of an optimum in several scales at once: lr* ∝ N^a · D^b · B^c.

A **cell** is one size: one value of each scale. Optima are estimated cell by cell, as along one scale, and
their logarithms regressed on the scales', with random effects of cells and of the values of each scale:

x = β₀ + Σ_a α_a·(size_a − mean) + Σ_a u_a(value of a) + e + N(0, error²). Cells that share a scale's value,
such as one model or one batch size, miss the law together by u_a ~ N(0, τ_a²), and each by itself by
e ~ N(0, τ₀²). Without u, many cells at few values would make exponents look surer than they are. β₀ is flat,
α ~ N(0, 1), every τ half-normal of scale 0.3 octaves. Given all τ everything is normal; the τ are drawn from
their marginal posterior by Metropolis' algorithm. Each cell is then predicted from the others.

Shapes: S cells with a known optimum, A scales, C variance components (the cells', then the scales'), R draws,
N sizes.
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
from mup_tpu.analysis.load import check_table, read_rows
from mup_tpu.analysis.looks import Question, weigh
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.rows import select
from mup_tpu.config.values import on_one_line
from mup_tpu.errors import TableError
from mup_tpu.store import Condition

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
        mean_RA, error_RA = self._fit.coefficients()
        return mean_RA.mean(axis=0), _drawn(mean_RA, error_RA)

    @cached_property
    def exponents(self) -> tuple[Exponent, ...]:
        mean_A, draws_RA = self._slopes
        ends = zip(self.scales, mean_A, *np.quantile(draws_RA, [0.025, 0.975], axis=0), strict=True)
        return tuple(Exponent(scale, *map(float, (value, low, high))) for scale, value, low, high in ends)

    @property
    def tau(self) -> float:
        # Scatter of each cell by itself about the law, octaves
        return float(self._fit.tau_RC[:, 0].mean())

    @property
    def shared(self) -> dict[str, float]:
        # Scatter that cells with one value of a scale have in common, octaves
        names = [self.scales[a] for a in self._fit.scattered]
        return dict(zip(names, self._fit.tau_RC.mean(axis=0)[1:].tolist(), strict=True))

    def trend(self, sizes_NA: np.ndarray) -> np.ndarray:
        # log2 of the law's optimum at plain sizes, without the effects of their values
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
        """Predict each cell from the others."""
        mean_RS, error_RS, weight_RS = self._fit.left_out()
        x_S, truth_S = (weight_RS * mean_RS).sum(axis=0), self._fit.x_S
        # Share of each prediction below the optimum that came out.
        below_S = (weight_RS * scipy.special.ndtr((truth_S - mean_RS) / error_RS)).sum(axis=0)
        inside = float(((below_S > 0.025) & (below_S < 0.975)).mean())
        regrets = [_regret(e, float(x)) for e, x in zip(self.estimates, x_S, strict=True)]
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
            "shared": self.shared,
            "held_out": asdict(self.held_out),
        }


def _drawn(mean_R: np.ndarray, error_R: np.ndarray, each: int = 200) -> np.ndarray:
    mean, error = np.repeat(mean_R, each, axis=0), np.repeat(error_R, each, axis=0)
    return np.asarray(mean + error * np.random.default_rng(1).standard_normal(mean.shape))


def _regret(estimate: Estimate, x: float) -> float:
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
    columns: Columns = Columns(),
    best_over: Sequence[str] = (),
    where: Sequence[Condition] = (),
) -> tuple[PowerLaw, ...]:
    """Fit a law of each rule in a table in which several scales vary together.

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
        is_known = name in rows and (name in best_over or rows[name].dtype.kind in "iuf")
        if not is_known or (name in scales and not ((rows[name] > 0) & np.isfinite(rows[name])).all()):
            known_columns = ", ".join(map(str, rows.columns[:12]))
            raise TableError(
                f"scales: {on_one_line(name)} is not a column of numbers above 0; there are {known_columns}"
            )
    sizes = rows[list(scales)].drop_duplicates().sort_values(list(scales), ignore_index=True)
    cells = sizes.assign(**{_CELL: np.arange(1.0, len(sizes) + 1)})
    rows = rows.merge(cells, on=list(scales)).drop(columns=[*scales, "trial_id", "config"], errors="ignore")
    columns = replace(columns, scale=_CELL)
    if best_over:
        group = [c for c in (_CELL, columns.hyperparameter, columns.parametrization) if c in rows]
        rows = rows.loc[rows.groupby(group)[columns.loss].idxmin()].drop(columns=list(best_over))
    checked = check_table(rows, columns)
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
    """Read sizes, NAME=VALUE,NAME=VALUE.

    Raises:
        TableError: the text has another form.
    """
    sizes = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            sizes[name.strip()] = float(value)
        except ValueError:
            raise TableError(f"at {on_one_line(text)} is not NAME=NUMBER,NAME=NUMBER") from None
    return sizes


_SCATTER = 0.3  # scale of the half-normal τ, octaves
_FLAT = 100.0  # variance of β₀, octaves²
_LEAST_ERROR = 0.01
_LEAST_VALUES = 4  # values of a scale from which their scatter is told from its exponent
_DRAWS, _THIN = 100, 10


@dataclass(frozen=True, repr=False)
class Regression:
    """Optima of cells and the sizes that explain them; fitted on first use."""

    x_S: np.ndarray
    """log2 of optima."""
    error_S: np.ndarray
    """Standard errors of the optima."""
    sizes_SA: np.ndarray
    """log2 of sizes."""

    @cached_property
    def scattered(self) -> tuple[int, ...]:
        # Scales with several values, each in several cells on average
        counts = [len(np.unique(column)) for column in self.sizes_SA.T]
        return tuple(a for a, n in enumerate(counts) if _LEAST_VALUES <= n <= len(self.x_S) / 2)

    def _shared(self, sizes_NA: np.ndarray) -> list[np.ndarray]:
        return [sizes_NA[:, a, None] == self.sizes_SA[:, a] for a in self.scattered]

    @cached_property
    def _fixed_SS(self) -> np.ndarray:
        design_SA = self._centred(self.sizes_SA)
        error_S = np.maximum(self.error_S, _LEAST_ERROR)
        return np.asarray(_FLAT + design_SA @ design_SA.T + np.diag(error_S**2))

    @cached_property
    def _same(self) -> list[np.ndarray]:
        return [np.eye(len(self.x_S)), *self._shared(self.sizes_SA)]

    def _centred(self, sizes_NA: np.ndarray) -> np.ndarray:
        return np.asarray(sizes_NA - self.sizes_SA.mean(axis=0))

    @cached_property
    def _away_S(self) -> np.ndarray:
        return np.asarray(self.x_S - self.x_S.mean())

    def _covariance(self, tau_C: np.ndarray) -> np.ndarray:
        return self._fixed_SS + sum(t**2 * same for t, same in zip(tau_C, self._same, strict=True))

    def _log_density(self, log_tau_C: np.ndarray) -> float:
        """Log posterior density of the logs of all τ."""
        tau_C = np.exp(np.clip(log_tau_C, -10, 3))
        root_SS = np.linalg.cholesky(self._covariance(tau_C))
        whitened_S = np.linalg.solve(root_SS, self._away_S)
        fit = -0.5 * whitened_S @ whitened_S - np.log(np.diag(root_SS)).sum()
        return float(fit - 0.5 * ((tau_C / _SCATTER) ** 2).sum() + log_tau_C.sum())

    @cached_property
    def tau_RC(self) -> np.ndarray:
        """Draws of the scatters, octaves."""
        generator = np.random.default_rng(0)
        start_C = np.full(len(self._same), np.log(_SCATTER / 2))
        at_C = scipy.optimize.minimize(lambda log_tau_C: -self._log_density(log_tau_C), start_C, tol=0.01).x
        density, step, draws = self._log_density(at_C), 1.5 / len(at_C) ** 0.5, []
        for _ in range(_DRAWS * _THIN):
            proposed_C = at_C + step * generator.standard_normal(len(at_C))
            other = self._log_density(proposed_C)
            if np.log(generator.uniform()) < other - density:
                at_C, density = proposed_C, other
            draws.append(at_C)
        return np.exp(draws[::_THIN])

    @cached_property
    def _inverse_RSS(self) -> np.ndarray:
        return np.stack([np.linalg.inv(self._covariance(tau_C)) for tau_C in self.tau_RC])

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the exponents in each draw, normal: means (R, A) and standard deviations (R, A)."""
        gain_RAS = self._centred(self.sizes_SA).T @ self._inverse_RSS
        variance_RA = 1 - np.einsum("ras,sa->ra", gain_RAS, self._centred(self.sizes_SA))
        return gain_RAS @ self._away_S, np.sqrt(variance_RA)

    def predicted(self, size_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict a cell's optimum in each draw, normal: means (R) and standard deviations (R)."""
        design_A = self._centred(size_A)
        shared_CS = np.array([np.zeros(len(self.x_S)), *(s[0] for s in self._shared(size_A[None]))])
        across_RS = _FLAT + self._centred(self.sizes_SA) @ design_A + self.tau_RC**2 @ shared_CS
        gain_RS = np.einsum("rs,rst->rt", across_RS, self._inverse_RSS)
        whole_R = _FLAT + design_A @ design_A + (self.tau_RC**2).sum(axis=1)
        variance_R = whole_R - (gain_RS * across_RS).sum(axis=1)
        return self.x_S.mean() + gain_RS @ self._away_S, np.sqrt(variance_R)

    def left_out(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predict each measured optimum from the others: normals' means, deviations and weights, R × S.

        The weights turn draws of the τ from all cells into draws from the others.
        """
        precision_RS = np.diagonal(self._inverse_RSS, axis1=1, axis2=2)
        miss_RS = self._inverse_RSS @ self._away_S / precision_RS
        log_RS = 0.5 * (precision_RS * miss_RS**2 - np.log(precision_RS))
        weight_RS = np.exp(log_RS - log_RS.max(axis=0))
        return self.x_S - miss_RS, precision_RS**-0.5, weight_RS / weight_RS.sum(axis=0)
