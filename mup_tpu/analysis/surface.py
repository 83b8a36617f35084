"""Optima in several hyperparameters at once, such as learning rate and weight decay, at each scale.

Near an optimum the loss is a quadratic surface in bent coordinates of the hyperparameters' log2 u,

    loss(u) = c_s + ½ (v − v*_s)ᵀ Q (v − v*_s),   v_h = bend(u_h − r_sh; a_h),

with one curvature Q for all scales of a rule, interactions included. bend(x; a) is the coordinate in which
(exp(ax) − 1 − ax)/a² is ½v²: a learning rate's valley is steeper above than below, and its optimum would be
missed by a plain parabola. r_s is near the optimum, from the fit before. Given bends and the points' errors
this is a linear regression on (c_s, Q·v*_s, Q), whose posterior is normal. Draws whose Q is not positive
definite have no optimum and are left out. A point's variance is its noise and a share of its rise above the
best, for what the surface misses; bends, noise and share are weighed over a grid by their evidence.

With the others at their best, the loss along one hyperparameter is ½v²/(Q⁻¹)_hh. So each has optimum, drift,
regret and verdict as a loss curve has them.

Shapes: N points, S scales, H hyperparameters, P coefficients, R draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mup_tpu.analysis.drift import fit_drift
from mup_tpu.analysis.ingest.readers import find_reader
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import check_table, default_columns, read_rows, tuned_together
from mup_tpu.analysis.optimum import LossCurve, Noise, Optimum, Status, loss_curve
from mup_tpu.analysis.prediction import Predictions, predict_analysis, read_targets
from mup_tpu.analysis.run_table import RunTable, no_column, select
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult, tolerance
from mup_tpu.analysis.trend import Trend
from mup_tpu.analysis.valley import PARABOLA, Valley
from mup_tpu.analysis.verdict import DELTA, PLAIN, Question, Regret, Verdict, decide
from mup_tpu.errors import TableError
from mup_tpu.store import Condition, load_header

MOST = 4  # Most hyperparameters of one surface
_SHARES = (0.1, 0.2, 0.4, 0.8)
"""Standard errors of the quadratic at a point, as shares of its rise, that are weighed."""
_NOISES = np.geomspace(0.01, 2.0, 10)
"""Noises that are weighed, as shares of a typical rise, where no seeds are repeated."""
_OUTSIDE = 2.0  # An optimum this far outside the values that were run is e times less likely, octaves
_BENDS = np.arange(-6, 7) / 5  # Bends that are weighed, per octave: exponents of the steeper side
_BEND_SPREAD = 0.4  # Mean size of a bend in the prior
_DRAWS = 2000
_ROUNDS = 4
_KEPT = 9  # Bends beside the best ones that are weighed with all errors
_MOST_VALUES = 16  # Values of a hyperparameter that are drawn one by one; more are joined by half an octave
_LEAST_SHARE = 0.05  # Share of draws that must have a minimum


@dataclass(frozen=True)
class Surface:
    """Draws of a rule's loss surface."""

    points: _Points
    reference_SH: np.ndarray  # log2 values at which coordinates are not bent
    bend_RH: np.ndarray
    vertex_RSH: np.ndarray  # Optimum in bent coordinates
    loss_RS: np.ndarray  # Loss at the optimum
    curvature_RHH: np.ndarray  # Q, unit of the loss per octave²
    noise: float  # Standard deviation of a single run near the optimum

    @property
    def scales(self) -> tuple[float, ...]:
        return self.points.scales

    def rise_RN(self, u_NH: np.ndarray, number_N: np.ndarray) -> np.ndarray:
        """Return how far the loss at some values lies above the optimum of their scale."""
        v_RNH = _bend(u_NH - self.reference_SH[number_N], self.bend_RH[:, None])
        away_RNH = v_RNH - self.vertex_RSH[:, number_N]
        return np.asarray(0.5 * np.einsum("rnh,rhk,rnk->rn", away_RNH, self.curvature_RHH, away_RNH))

    @cached_property
    def optimum_RSH(self) -> np.ndarray:
        # Log2 of the best values
        return self.reference_SH + _unbend(self.vertex_RSH, self.bend_RH[:, None])

    @cached_property
    def profile_RH(self) -> np.ndarray:
        # Curvature along each hyperparameter with the others at their best
        return np.asarray(1 / np.diagonal(np.linalg.inv(self.curvature_RHH), axis1=1, axis2=2))

    @cached_property
    def octave_cost(self) -> tuple[tuple[float, float], ...]:
        # Cost of an error of one octave in each hyperparameter alone, and its 97.5 % quantile
        cost_RH = np.diagonal(self.curvature_RHH, axis1=1, axis2=2) / 2
        return tuple((float(np.median(c)), float(np.quantile(c, 0.975))) for c in cost_RH.T)

    def away_RH(self, source: int, target: int) -> np.ndarray:
        """Return how far a scale's best values are from another's optimum, in the latter's coordinates."""
        moved_RH = self.optimum_RSH[:, source] - self.reference_SH[target]
        return _bend(moved_RH, self.bend_RH) - self.vertex_RSH[:, target]

    def curves(self, h: int) -> tuple[LossCurve, ...]:
        """Return the points along one hyperparameter, less what the others cost there, a curve per scale."""
        points = self.points
        v_RN = _bend(points.u_NH[:, h] - self.reference_SH[points.number_N, h], self.bend_RH[:, [h]])
        alone_RN = self.profile_RH[:, [h]] / 2 * (v_RN - self.vertex_RSH[:, points.number_N, h]) ** 2
        beside_N = np.median(self.rise_RN(points.u_NH, points.number_N) - alone_RN, axis=0)
        x_N = points.u_NH[:, h]
        if len(np.unique(x_N)) > _MOST_VALUES:  # of a random search
            x_N = np.round(2 * x_N) / 2
        runs = pd.DataFrame({"x": x_N, "loss": points.y_N - beside_N, "seed": 0, "loss_error": np.nan})
        runs = runs.assign(stopped=False, refused=False, scale=np.array(self.scales)[points.number_N])
        return tuple(loss_curve(of_scale) for _, of_scale in runs.groupby("scale"))


@dataclass(frozen=True)
class Pair:
    """Interaction of two hyperparameters."""

    first: str
    second: str
    correlation: float  # Q_ab / √(Q_aa·Q_bb): above 0 one's optimum falls as the other rises
    low: float
    high: float  # 95 % interval
    shift: float  # Octaves by which the first's best value moves for an octave of the second

    @property
    def interacts(self) -> bool:
        return self.low > 0 or self.high < 0


class Profile(NamedTuple):
    """Optimum and valley of one hyperparameter at a scale, with the others at their best."""

    optimum: Optimum
    valley: Valley | None


@dataclass(frozen=True)
class JointResult:
    """One rule's optima in all hyperparameters together."""

    compared: str
    surface: Surface
    pairs: tuple[Pair, ...]
    regret: Regret  # Of all values of the smallest scale at the largest
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        return {
            "parametrization": self.compared,
            "verdict": self.verdict.decision,
            "regret": asdict(self.regret),
            "octave_cost": [list(cost) for cost in self.surface.octave_cost],
            "pairs": [asdict(pair) | {"interacts": pair.interacts} for pair in self.pairs],
        }


@dataclass(frozen=True)
class JointAnalysis:
    """Analysis of several tuned hyperparameters."""

    table: RunTable
    tuned: tuple[str, ...]
    parts: tuple[TransferAnalysis, ...]  # One a hyperparameter, with the others at their best
    results: tuple[JointResult, ...]  # One a rule

    @property
    def epsilon(self) -> float:
        return self.parts[0].epsilon

    @property
    def drawn(self) -> tuple[TransferAnalysis, ...]:
        """Return the parts with the losses of the runs, less what the other hyperparameters cost there."""
        each = [
            [replace(r, curves=of.surface.curves(h)) for r, of in zip(p.results, self.results, strict=True)]
            for h, p in enumerate(self.parts)
        ]
        return tuple(replace(p, results=tuple(of)) for p, of in zip(self.parts, each, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {
            "tuned": list(self.tuned),
            "epsilon": self.epsilon,
            "together": [result.to_dict() for result in self.results],
            "each": [part.to_dict() for part in self.parts],
        }


@dataclass(frozen=True)
class JointPredictions:
    """Predicted values of several hyperparameters."""

    joint: JointAnalysis
    parts: tuple[Predictions, ...]  # One a hyperparameter


def analyze_jointly(
    table: pd.DataFrame | str | Path,
    tuned: Sequence[str] = (),
    columns: Columns | None = None,
    where: Sequence[Condition] | None = None,
    epsilon: float | None = None,
    delta: float = DELTA,
    seed: int = 0,
    **reading: Any,
) -> JointAnalysis:
    """Estimate the optima of several hyperparameters at each scale, and whether they transfer.

    The table has a row per run, of a grid or a random search; a results folder knows its tuned columns (two
    to four, plain and not log2), the others, and its conditions. Limits and seed are as for `analyze`,
    chance, states, unit and conditions of runs as for `check_table`.

    Raises:
        TableError: a column is missing or no number above 0, or a scale has too few points for a surface.
    """
    if not isinstance(table, pd.DataFrame):
        tuned, columns = tuned or tuned_together(table), columns or default_columns(table)
        if where is None and find_reader(table) is None:
            where = load_header(table).where
    checked, values = _checked(table, tuned, columns or Columns(), where or (), reading)
    notes = [
        note for note in checked.notes if note.code not in ("values merged", "unequal seeds", "sequence")
    ]
    epsilon = tolerance(checked, notes) if epsilon is None else epsilon
    checked = replace(checked, notes=tuple(notes))
    question = Question.of(checked, epsilon, delta, seed)
    results: list[JointResult] = []
    each: list[list[TransferResult]] = [[] for _ in tuned]
    for compared, runs in checked.runs.groupby("compared"):
        runs = runs.assign(**dict(zip(tuned, values[:, runs.index], strict=True)))
        surface = fit_surface(runs, tuned, np.random.default_rng(seed))
        profiles = [_profile(str(compared), surface, h, question) for h in range(len(tuned))]
        for part, profile in zip(each, profiles, strict=True):
            part.append(profile)
        results.append(_together(str(compared), tuned, surface, profiles, question))
    parts = tuple(
        TransferAnalysis(
            checked.name,
            replace(checked.columns, hyperparameter=name),
            checked.notes,
            tuple(of),
            epsilon,
            delta,
        )
        for name, of in zip(tuned, each, strict=True)
    )
    return JointAnalysis(checked, tuple(tuned), parts, tuple(results))


def predict_jointly(joint: JointAnalysis, at: Sequence[str]) -> JointPredictions:
    """Predict the best values of all hyperparameters at scales that were not run; raises as `predict`."""
    targets = read_targets(joint.table, at)
    return JointPredictions(joint, tuple(predict_analysis(part, targets) for part in joint.parts))


def _checked(
    table: pd.DataFrame | str | Path,
    tuned: Sequence[str],
    columns: Columns,
    where: Sequence[Condition],
    reading: dict[str, Any],
) -> tuple[RunTable, np.ndarray]:
    """Return the checked runs, and log2 of their tuned values (H × runs)."""
    if not 2 <= len(tuned) <= MOST or len({*tuned}) < len(tuned):
        raise TableError(f"tune {','.join(tuned)}: give two to {MOST} different columns")
    rows = select(table if isinstance(table, pd.DataFrame) else read_rows(table), where)
    if missing := [name for name in tuned if name not in rows]:
        raise TableError(no_column(rows, *missing))
    for name in tuned:
        if rows[name].dtype.kind not in "iuf" or not (np.isfinite(rows[name]) & (rows[name] > 0)).all():
            value = "text" if rows[name].dtype.kind not in "iuf" else f"{rows[name].min():g}"
            raise TableError(
                f"{name} must be a number above 0 in every row, since its log2 is fitted, and is {value} in "
                f"one; --where '{name}>=LEAST' leaves such rows out"
            )
    first, *others = tuned
    along = [name for name in (columns.scale, columns.parametrization) if name in rows]
    if columns.seed in rows:
        seeds = rows[columns.seed]
    elif columns.step in rows:
        seeds = pd.Series(0, index=rows.index)
    else:
        seeds = rows.groupby([*along, *tuned]).cumcount()
    # The table's checks know one tuned value. The others name the run, as its seed does.
    named = seeds.astype(str)
    for name in others:
        named = named + f", {name} " + rows[name].map(repr)
    # A results folder's `applied_lr` and others follow from the tuned values.
    applied = [name for name in map(str, rows) if name.startswith("applied_")]
    rows = rows.assign(**{columns.seed: named})
    rows = rows.drop(columns=["trial_id", "config", *applied], errors="ignore")
    known = rows.drop_duplicates(columns.seed).set_index(columns.seed)
    columns = replace(columns, hyperparameter=first, along=(*columns.along, *others))
    title = "table" if isinstance(table, pd.DataFrame) else Path(str(table)).name
    checked = check_table(rows, columns, name=title, **reading)
    log2 = [checked.runs["x"].to_numpy(float)]
    log2 += [np.log2(known[name].reindex(checked.runs["seed"]).to_numpy(float)) for name in others]
    return checked, np.array(log2)


def fit_surface(runs: pd.DataFrame, tuned: Sequence[str], generator: np.random.Generator) -> Surface:
    """Draw the surfaces of one rule's runs.

    They have scale, loss (+inf where lost), and log2 values in the columns `tuned`.
    """
    points = _points(runs, tuned)
    scales, h = len(points.scales), len(tuned)
    rough = _rough_fit(points)
    errors = points.errors(rough.rise_N)
    step = _BENDS[1] - _BENDS[0]
    beside = (rough.bend_H + np.array(away) for away in itertools.product((-step, 0.0, step), repeat=h))
    bends = sorted(beside, key=lambda bend_H: -rough.log_probability(points, bend_H))[:_KEPT]
    fits = [
        (bend_H, error.sigma, _regress(design_NP, points.y_N, error))
        for bend_H, design_NP in ((bend_H, points.design(bend_H, rough.reference_SH)) for bend_H in bends)
        for error in errors
    ]
    weight_K = _normalised(np.array([fit.log - _bend_penalty(bend_H) for bend_H, _, fit in fits]))
    # Draws without a minimum, and some far outside, are left out below.
    chosen_R = generator.choice(len(fits), 8 * _DRAWS, p=weight_K)
    shocks_RP = generator.standard_normal((8 * _DRAWS, len(fits[0][2].beta_P)))
    beta_RP = np.stack(
        [fits[k][2].beta_P + fits[k][2].root_PP @ z for k, z in zip(chosen_R, shocks_RP, strict=True)]
    )
    bend_RH = np.array([fits[k][0] for k in chosen_R])
    is_minimum_R = (np.linalg.eigvalsh(_curvature(beta_RP, h)) > 0).all(axis=1)
    if is_minimum_R.mean() < _LEAST_SHARE:
        raise TableError(
            f"the losses show no minimum in {', '.join(tuned)} together: widen the ranges, or tune fewer"
        )
    bend_RH, vertices = bend_RH[is_minimum_R], _vertices(beta_RP[is_minimum_R], scales, h)
    optimum_RSH = rough.reference_SH + _unbend(vertices[0], bend_RH[:, None])
    outside_RSH = np.maximum(points.low_SH - optimum_RSH, optimum_RSH - points.high_SH)
    log_R = -np.maximum(0, outside_RSH).sum(axis=(1, 2)) / _OUTSIDE
    kept_R = generator.choice(len(log_R), _DRAWS, p=_normalised(log_R))
    noise = float(weight_K @ [sigma for _, sigma, _ in fits])
    vertex_RSH, loss_RS, curvature_RHH = (v[kept_R] for v in vertices)
    return Surface(points, rough.reference_SH, bend_RH[kept_R], vertex_RSH, loss_RS, curvature_RHH, noise)


class _Error(NamedTuple):
    """Errors that points may have."""

    variance_N: np.ndarray
    log: float = 0.0  # Log evidence by the scatter of seeds
    sigma: float = 0.0  # Noise of a single run


class _Regression(NamedTuple):
    """Coefficients of a surface, given bends and errors: normal."""

    log: float  # Log evidence
    beta_P: np.ndarray
    root_PP: np.ndarray  # Root of the covariance


@dataclass(frozen=True, eq=False)
class _Points:
    """Mean losses of a rule's points."""

    scales: tuple[float, ...]
    number_N: np.ndarray  # Number of each point's scale
    u_NH: np.ndarray  # log2 of the hyperparameters
    y_N: np.ndarray  # Mean loss
    count_N: np.ndarray
    squares_N: np.ndarray  # Squared deviations of its runs from the mean

    def count_at(self, number: int, u_H: Sequence[float] | np.ndarray) -> int:
        is_it_N = (self.number_N == number) & np.isclose(self.u_NH, np.asarray(u_H)).all(axis=1)
        return int(self.count_N[is_it_N].sum())

    def _ends(self, end: Callable[..., np.ndarray]) -> np.ndarray:
        return np.array([end(self.u_NH[self.number_N == s], axis=0) for s in range(len(self.scales))])

    @cached_property
    def low_SH(self) -> np.ndarray:
        return self._ends(np.min)

    @cached_property
    def high_SH(self) -> np.ndarray:
        return self._ends(np.max)

    @cached_property
    def best_S(self) -> np.ndarray:
        order_N = np.lexsort((self.y_N, self.number_N))
        return np.asarray(order_N[np.searchsorted(self.number_N[order_N], range(len(self.scales)))])

    def design(self, bend_H: np.ndarray, reference_SH: np.ndarray) -> np.ndarray:
        """Return the regressors N × P: each scale's constant and slopes, then the curvatures of all."""
        v_NH = _bend(self.u_NH - reference_SH[self.number_N], bend_H)
        is_at_NS = (self.number_N[:, None] == np.arange(len(self.scales))).astype(float)
        slopes_NSH = is_at_NS[:, :, None] * v_NH[:, None]
        squares = [v_NH[:, a] * v_NH[:, b] * (0.5 if a == b else 1.0) for a, b in _pairs(v_NH.shape[1])]
        return np.column_stack([is_at_NS, slopes_NSH.reshape(len(v_NH), -1), *squares])

    def errors(self, rise_N: np.ndarray) -> list[_Error]:
        """Return candidates for the points' errors: a noise, and a share of the rise that is missed."""
        near = 2 * len(self.scales) * (self.u_NH.shape[1] + 2)
        typical = float(np.sort(rise_N)[:near].mean()) or float(rise_N.mean()) or 1e-12
        df, squares = float((self.count_N - 1).sum()), float(self.squares_N.sum())
        sigmas = typical * _NOISES
        if df >= 1:
            sigmas = math.sqrt(max(squares / df, 1e-24)) * np.geomspace(0.4, 2.5, 9)
        errors = []
        for sigma, share in itertools.product(sigmas.tolist(), _SHARES):
            missed_N = share * rise_N * (1 + rise_N / (5 * typical))
            log = -df * math.log(sigma) - 0.5 * squares / sigma**2
            errors.append(_Error(sigma**2 / self.count_N + missed_N**2, log, sigma))
        return errors


def _points(runs: pd.DataFrame, tuned: Sequence[str]) -> _Points:
    finite = runs[np.isfinite(runs["loss"])]
    means = finite.groupby(["scale", *tuned])["loss"].agg(["mean", "size", "var"]).reset_index()
    scales = tuple(sorted(means["scale"].unique().tolist()))
    number_N, h = np.searchsorted(scales, means["scale"]), len(tuned)
    least = min(np.bincount(number_N), default=0)
    coefficients = len(scales) * (h + 1) + len(_pairs(h))
    if least < h + 2 or len(means) < coefficients + 2:
        raise TableError(
            f"{len(means)} points with a loss ({least} at a scale) are too few for a surface in "
            f"{', '.join(tuned)}: {coefficients + 2} are needed, and {h + 2} at each scale"
        )
    count_N = means["size"].to_numpy(float)
    squares_N = means["var"].fillna(0.0).to_numpy(float) * (count_N - 1)
    u_NH, y_N = means[list(tuned)].to_numpy(float), means["mean"].to_numpy(float)
    points = _Points(scales, number_N, u_NH, y_N, count_N, squares_N)
    if np.linalg.matrix_rank(points.design(np.zeros(h), u_NH[points.best_S])) < coefficients:
        raise TableError(
            f"the runs' {', '.join(tuned)} do not vary independently: a surface needs three values of each, "
            "and runs in which two differ from their usual values together"
        )
    return points


@dataclass(frozen=True, eq=False)
class _RoughFit:
    """The likeliest bends about the optima so far, and points' errors."""

    bend_H: np.ndarray
    reference_SH: np.ndarray
    rise_N: np.ndarray  # Rises above each scale's optimum
    error: _Error

    def log_probability(self, points: _Points, bend_H: np.ndarray) -> float:
        design_NP = points.design(bend_H, self.reference_SH)
        return _regress(design_NP, points.y_N, self.error).log - _bend_penalty(bend_H)


def _rough_fit(points: _Points) -> _RoughFit:
    """Fit bends, optima and errors in turn, each given the others."""
    scales, h = len(points.scales), points.u_NH.shape[1]
    rise_N = points.y_N - points.y_N[points.best_S][points.number_N]
    # At first the losses' own rises: the lowest are low by chance, so that all near ones weigh alike.
    error = _Error(np.maximum(rise_N, np.median(rise_N)) ** 2)
    fit = _RoughFit(np.zeros(h), points.u_NH[points.best_S], rise_N, error)
    for turn in range(_ROUNDS):
        if turn > 0:
            design_NP = points.design(fit.bend_H, fit.reference_SH)
            best = max(points.errors(fit.rise_N), key=lambda e: _regress(design_NP, points.y_N, e).log)
            fit = replace(fit, error=best)
        for some in range(h):
            tried = [np.where(np.arange(h) == some, bend, fit.bend_H) for bend in _BENDS]
            fit = replace(fit, bend_H=max(tried, key=lambda bend_H: fit.log_probability(points, bend_H)))
        design_NP = points.design(fit.bend_H, fit.reference_SH)
        beta_P = _regress(design_NP, points.y_N, fit.error).beta_P
        vertex_1SH, loss_1S, curvature_1HH = _vertices(beta_P[None], scales, h)
        if (np.linalg.eigvalsh(curvature_1HH[0]) <= 0).any():
            break
        rise_N = np.maximum(design_NP @ beta_P - loss_1S[0][points.number_N], 0.0)
        moved_SH = fit.reference_SH + _unbend(vertex_1SH[0], fit.bend_H)
        fit = replace(fit, rise_N=rise_N, reference_SH=np.clip(moved_SH, points.low_SH, points.high_SH))
    return fit


def _pairs(h: int) -> list[tuple[int, int]]:
    return [*itertools.combinations_with_replacement(range(h), 2)]


def _bend_penalty(bend_H: np.ndarray) -> float:
    return float(np.abs(bend_H).sum()) / _BEND_SPREAD


def _bend(x: np.ndarray, bend: np.ndarray) -> np.ndarray:
    """Return v with ½v² = (exp(ax) − 1 − ax)/a², of the sign of x."""
    a = np.where(np.abs(bend) < 1e-3, 1e-3, bend)
    ax = np.clip(a * x, -60, 60)
    return np.asarray(np.sign(x) * np.sqrt(2 * np.maximum(np.expm1(ax) - ax, 0.0)) / np.abs(a))


def _unbend(v: np.ndarray, bend: np.ndarray) -> np.ndarray:
    """Return x of v, by interpolation; at most 20 octaves."""
    x_X = np.linspace(-20, 20, 4001)
    v, bend = np.broadcast_arrays(v, bend)
    x = np.empty(v.shape)
    for a in np.unique(bend):
        x[bend == a] = np.interp(v[bend == a], _bend(x_X, a), x_X)
    return x


def _regress(design_NP: np.ndarray, y_N: np.ndarray, error: _Error) -> _Regression:
    root_N = error.variance_N**-0.5
    q_NP, r_PP = np.linalg.qr(design_NP * root_N[:, None])
    inverse_PP = np.linalg.pinv(r_PP)
    beta_P = inverse_PP @ (q_NP.T @ (root_N * y_N))
    chi2 = float(np.square((y_N - design_NP @ beta_P) * root_N).sum())
    log = float(np.log(root_N).sum() - np.log(np.abs(np.diag(r_PP))).sum()) - 0.5 * chi2
    return _Regression(error.log + log, beta_P, inverse_PP)


def _curvature(beta_RP: np.ndarray, h: int) -> np.ndarray:
    curvature_RHH, pairs = np.empty((len(beta_RP), h, h)), _pairs(h)
    for i, (a, b) in enumerate(pairs):
        curvature_RHH[:, a, b] = curvature_RHH[:, b, a] = beta_RP[:, i - len(pairs)]
    return curvature_RHH


def _vertices(beta_RP: np.ndarray, scales: int, h: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return optima in bent coordinates (R, S, H), losses there (R, S), and curvatures (R, H, H)."""
    curvature_RHH = _curvature(beta_RP, h)
    slope_RSH = beta_RP[:, scales : scales * (h + 1)].reshape(-1, scales, h)
    optimum_RSH = -np.linalg.solve(curvature_RHH[:, None], slope_RSH[..., None])[..., 0]
    loss_RS = beta_RP[:, :scales] + 0.5 * (slope_RSH * optimum_RSH).sum(axis=2)
    return optimum_RSH, loss_RS, curvature_RHH


def _normalised(log_K: np.ndarray) -> np.ndarray:
    weight_K = np.exp(log_K - log_K.max())
    return np.asarray(weight_K / weight_K.sum())


def _profile(compared: str, surface: Surface, h: int, question: Question) -> TransferResult:
    """Return the analysis of one hyperparameter, with the others at their best."""
    height_R = surface.profile_RH[:, h] / 2
    shape_R = np.full(len(height_R), PARABOLA)
    valleys, optima = [], []
    for s, scale in enumerate(surface.scales):
        valley = Valley(surface.optimum_RSH[:, s, h], surface.loss_RS[:, s], height_R, shape_R)
        valleys.append(valley)
        low, high = surface.points.low_SH[s, h], surface.points.high_SH[s, h]
        optimum = _optimum(scale, valley, low, high, question.epsilon)
        is_flat = not optimum.is_bracketed and surface.octave_cost[h][1] < question.epsilon
        optima.append(replace(optimum, status=Status.FLAT) if is_flat else optimum)
    drift = fit_drift(optima, question.columns.scale, question.delta, valleys)
    bracketed = [s for s, optimum in enumerate(optima) if optimum.is_bracketed]
    regrets = [
        _regret(surface, optima, h, *ends, drift.trend) for ends in itertools.combinations(bracketed, 2)
    ]
    ends = (optima[bracketed[0]].scale, optima[-1].scale) if bracketed else None
    headline = next((r for r in regrets if (r.source, r.target) == ends), None)
    noise = Noise(surface.noise, 1, "lack of fit")
    verdict = decide(optima, drift, headline, question.epsilon, question.delta)
    return TransferResult(compared, noise, tuple(optima), tuple(valleys), drift, verdict, tuple(regrets))


def _optimum(scale: float, valley: Valley, least: float, most: float, epsilon: float) -> Optimum:
    low, x, high = (float(q) for q in np.quantile(valley.x_R, [0.025, 0.5, 0.975]))
    status = Status.LOWER if x <= least else Status.UPPER if x >= most else Status.BRACKETED
    away = math.sqrt(epsilon / float(np.median(valley.height_R)))
    x = float(np.clip(x, least, most))
    return Optimum(
        scale, status, x, low if low >= least else -math.inf, high if high <= most else math.inf,
        float(np.median(valley.loss_R)), x, max(x - away, least), min(x + away, most),
        se=float(valley.x_R.std()), mean=float(valley.x_R.mean()), epsilon=epsilon,
    )  # fmt: skip


def _regret(
    surface: Surface, optima: Sequence[Optimum], h: int, source: int, target: int, trend: Trend | None
) -> Regret:
    ends = (optima[source].scale, optima[target].scale)
    regret_R = 0.5 * surface.profile_RH[:, h] * surface.away_RH(source, target)[:, h] ** 2
    if trend is not None and {*ends} <= {*trend.sizes}:
        regret_R = regret_R[trend.together(*ends, surface.optimum_RSH[:, [source, target], h].T)]
    return _as_regret(ends, regret_R, optima[source].loss - optima[target].loss)


def _as_regret(ends: tuple[float, float], regret_R: np.ndarray, gain: float) -> Regret:
    low, value, high = (float(q) for q in np.quantile(regret_R, [0.025, 0.5, 0.975]))
    return Regret(*ends, value, low, high, "estimated", value / gain if gain > 0 else math.nan)


def _together(
    compared: str,
    tuned: Sequence[str],
    surface: Surface,
    profiles: Sequence[TransferResult],
    question: Question,
) -> JointResult:
    size_RHH = surface.curvature_RHH
    diagonal_RH = np.diagonal(size_RHH, axis1=1, axis2=2)
    pairs = []
    for a, b in itertools.combinations(range(len(tuned)), 2):
        correlation_R = size_RHH[:, a, b] / np.sqrt(diagonal_RH[:, a] * diagonal_RH[:, b])
        low, value, high = (float(q) for q in np.quantile(correlation_R, [0.025, 0.5, 0.975]))
        shift = float(np.median(-size_RHH[:, a, b] / diagonal_RH[:, a]))
        pairs.append(Pair(tuned[a], tuned[b], value, low, high, shift))
    last = len(surface.scales) - 1
    ends, losses = (surface.scales[0], surface.scales[-1]), [profiles[0].optima[i].loss for i in (0, -1)]
    away_RH = surface.away_RH(0, last)
    regret_R = 0.5 * np.einsum("rh,rhk,rk->r", away_RH, size_RHH, away_RH)
    regret = _as_regret(ends, regret_R, losses[0] - losses[1])
    # A hyperparameter whose octave costs less than epsilon may drift: the regret says what it costs.
    counts = [
        profile
        for profile, (_, high) in zip(profiles, surface.octave_cost, strict=True)
        if high >= question.epsilon
    ]
    known = all(o.is_bracketed for profile in counts for o in profile.optima)
    still = all(-question.delta < p.drift.low and p.drift.high < question.delta for p in counts)
    decision = "INCONCLUSIVE"
    if len(surface.scales) > 2 and known and still and regret.high < question.epsilon:
        decision = "TRANSFERS"
    elif len(surface.scales) > 2 and regret.low > question.epsilon * (
        1 if any(p.drift.excludes_0 for p in profiles) else PLAIN
    ):
        decision = "DRIFTS"
    return JointResult(compared, surface, tuple(pairs), regret, Verdict(decision))
