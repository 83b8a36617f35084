"""Optima in several hyperparameters at once, such as learning rate and weight decay, at each scale.

Near an optimum the loss is a quadratic surface in bent coordinates of the hyperparameters' log2 u,

    loss(u) = c_s + ½ k_s (v − v*_s)ᵀ Q (v − v*_s) + ½ Σ_h Q_hh v_h² f_h(u_h − r_sh),
    v_h = bend(u_h − r_sh; a_h),

with one curvature Q for all scales of a rule, interactions included, and a height k_s of each, N(1, ½²).
bend(x; a) is the coordinate in which (exp(ax) − 1 − ax)/a² is ½v²: a learning rate's valley is steeper above
than below, and its optimum would be missed by a plain parabola. f is what bends miss, such as a power or
sides of another kind: a Gaussian process along each hyperparameter, shared by all scales. It is a share of
the rise and changes over octaves, so that no number of points averages it away, and it leaves an optimum at
r_s where it is. r_s is the optimum by the fit before. Given bends and the points' errors this is a linear
regression on (c_s, k_s, f, Q·v*_s, Q), whose posterior is normal. Draws whose Q is not positive definite have
no optimum and are left out. A point's variance is its noise and a share of its rise above the best; bends,
noise and the size of f are weighed over a grid by their evidence.

With the others at their best, the loss along one hyperparameter is ½v²/(Q⁻¹)_hh. So each has optimum, drift,
regret and verdict as a loss curve has them.

Shapes: N points, S scales, H hyperparameters, P coefficients, R draws, F terms of f, M centres of its kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from mup_tpu.analysis.optimum import LossCurve, loss_curve
from mup_tpu.analysis.run_table import each_of
from mup_tpu.errors import TableError

_MISSED = 0.1  # Standard error of the surface at a point by itself, as a share of its rise
_FORMS = (0.15, 0.3, 0.6)  # Standard deviations of f that are weighed
_CENTRES, _REACH = np.arange(-4.0, 4.1, 0.8), 1.0  # Centres of the kernel of f, and its length, octaves
_KINK = 0.3  # Octaves around an optimum over which its two sides may change into each other
_HEIGHT_SCATTER = 0.5  # Standard deviation of a scale's height around 1
_NOISES = np.geomspace(0.01, 2.0, 10)
"""Noises that are weighed, as shares of a typical rise, where no seeds are repeated."""
_OUTSIDE = 2.0  # An optimum this far outside the values that were run is e times less likely, octaves
_BENDS = np.arange(-6, 7) / 5  # Bends that are weighed, per octave: exponents of the steeper side
_BEND_SPREAD = 0.4  # Mean size of a bend in the prior
_DRAWS, _EVERY = 2000, 50  # Draws, and the step between those that move points onto one axis
_ROUNDS = 4
_MOVES = 2  # Times that references follow the optima which heights and f leave
_KEPT = 9  # Bends beside the best ones that are weighed with all errors
_MOST_VALUES = 16  # Values of a hyperparameter that are drawn one by one; more are joined by half an octave
_TOGETHER = 1e-3  # Least eigenvalue of the values' correlations below which they move together
_LEAST_SHARE = 0.005  # Share of draws that must have a minimum: few have, where one hyperparameter is flat


@dataclass(frozen=True)
class Surface:
    """Draws of a rule's loss surface."""

    points: _Points
    reference_SH: np.ndarray  # log2 values at which coordinates are not bent
    bend_RH: np.ndarray
    vertex_RSH: np.ndarray  # Optimum in bent coordinates
    loss_RS: np.ndarray  # Loss at the optimum
    curvature_RHH: np.ndarray  # Q, unit of the loss per octave²
    height_RS: np.ndarray  # k
    form_RHM: np.ndarray  # Coefficients of f
    noise: float  # Standard deviation of a single run near the optimum

    @property
    def scales(self) -> tuple[float, ...]:
        return self.points.scales

    @property
    def sizes(self) -> tuple[tuple[float, ...], ...]:
        return self.points.sizes

    def rise_RN(self, u_NH: np.ndarray, number_N: np.ndarray) -> np.ndarray:
        """Return how far the loss at some values lies above the optimum of their scale."""
        return self._rise((u_NH - self.reference_SH[number_N])[None], number_N)

    def regret_R(self, source: int, target: int) -> np.ndarray:
        """Return what all of a scale's best values cost at another."""
        x_RNH = self.optimum_RSH[:, [source]] - self.reference_SH[target]
        return self._rise(x_RNH, np.array([target]))[:, 0]

    def _rise(self, x_RNH: np.ndarray, number_N: np.ndarray) -> np.ndarray:
        """Return the rise at points, x octaves from the references of their scales."""
        away_RNH = _bend(x_RNH, self.bend_RH[:, None]) - self.vertex_RSH[:, number_N]
        curvature_RNHH = self.curvature_RHH[:, None] * self.height_RS[:, number_N, None, None]
        rise_RN = 0.5 * np.einsum("rnh,rnhk,rnk->rn", away_RNH, curvature_RNHH, away_RNH)
        form_RNH = np.einsum("rnhm,rhm->rnh", _kernel(x_RNH), self.form_RHM)
        alone_RNH = 0.5 * np.diagonal(self.curvature_RHH, axis1=1, axis2=2)[:, None] * away_RNH**2
        return np.asarray(np.maximum(rise_RN + (alone_RNH * form_RNH).sum(axis=2), 0.1 * rise_RN))

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
        points, every = self.points, slice(None, None, _EVERY)
        of_draws = ("bend_RH", "vertex_RSH", "loss_RS", "curvature_RHH", "height_RS", "form_RHM")
        few = replace(self, **{name: getattr(self, name)[every] for name in of_draws})
        v_RN = _bend(points.u_NH[:, h] - few.reference_SH[points.number_N, h], few.bend_RH[:, [h]])
        alone_RN = few.profile_RH[:, [h]] / 2 * (v_RN - few.vertex_RSH[:, points.number_N, h]) ** 2
        beside_N = np.median(few.rise_RN(points.u_NH, points.number_N) - alone_RN, axis=0)
        x_N = points.u_NH[:, h]
        if len(np.unique(x_N)) > _MOST_VALUES:  # of a random search
            x_N = np.round(2 * x_N) / 2
        runs = pd.DataFrame({"x": x_N, "loss": points.y_N - beside_N, "seed": 0, "loss_error": np.nan})
        runs = runs.assign(stopped=False, refused=False, scale=np.array(self.scales)[points.number_N])
        curves = (loss_curve(of_size) for _, of_size in runs.groupby(points.number_N))
        return tuple(replace(c, beside=size[1:]) for c, size in zip(curves, points.sizes, strict=True))


@dataclass(frozen=True)
class Interaction:
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


def fit_surface(runs: pd.DataFrame, tuned: Sequence[str], generator: np.random.Generator) -> Surface:
    """Draw the surfaces of one rule's runs.

    They have scales, loss (+inf where lost), and log2 values in the columns `tuned`.
    """
    points = _points(runs, tuned)
    scales, h = len(points.scales), len(tuned)
    rough = _rough_fit(points)
    for _ in range(_MOVES):
        terms = _Terms.of(points, rough)
        rough = terms.recentred(points, rough)
    terms, errors = _Terms.of(points, rough), points.errors(rough.rise_N)
    step = _BENDS[1] - _BENDS[0]
    beside = (rough.bend_H + np.array(away) for away in itertools.product((-step, 0.0, step), repeat=h))
    bends = sorted(beside, key=lambda bend_H: -rough.log_probability(points, bend_H))[:_KEPT]
    fits = [
        (bend_H, error.sigma, terms.regress(points, bend_H, error, form))
        for bend_H in bends
        for error in errors
        for form in _FORMS
    ]
    weight_K = _normalised(np.array([fit.log - _bend_penalty(bend_H) for bend_H, _, fit in fits]))
    # Draws without a minimum, and some far outside, are left out below.
    chosen_R = generator.choice(len(fits), 8 * _DRAWS, p=weight_K)
    shocks_RP = generator.standard_normal((8 * _DRAWS, len(fits[0][2].beta_P)))
    beta_RP = np.empty_like(shocks_RP)
    for k in np.unique(chosen_R):
        of = chosen_R == k
        beta_RP[of] = fits[k][2].beta_P + shocks_RP[of] @ fits[k][2].root_PP.T
    bend_RH = np.array([fits[k][0] for k in chosen_R])
    curvature_RHH = _curvature(beta_RP, h)
    is_minimum_R = (np.linalg.eigvalsh(curvature_RHH) > 0).all(axis=1)
    if is_minimum_R.mean() < _LEAST_SHARE:
        risen_H = (np.diagonal(curvature_RHH, axis1=1, axis2=2) > 0).mean(axis=0)
        name = tuned[int(np.argmin(risen_H))]
        raise TableError(
            f"the losses show no minimum in {', '.join(tuned)} together: widen the range of {name}, or leave "
            "it out of the tuned columns"
        )
    beta_RP, bend_RH = beta_RP[is_minimum_R], bend_RH[is_minimum_R]
    vertices = _vertices(beta_RP, scales, h)
    optimum_RSH = rough.reference_SH + _unbend(vertices[0], bend_RH[:, None])
    outside_RSH = np.maximum(points.low_SH - optimum_RSH, optimum_RSH - points.high_SH)
    log_R = -np.maximum(0, outside_RSH).sum(axis=(1, 2)) / _OUTSIDE
    kept_R = generator.choice(len(log_R), _DRAWS, p=_normalised(log_R))
    noise = float(weight_K @ [sigma for _, sigma, _ in fits])
    vertex_RSH, loss_RS, curvature_RHH = (v[kept_R] for v in vertices)
    terms_RF = beta_RP[kept_R, scales * (h + 1) : scales * (h + 2) + h * (len(_CENTRES) + 1)]
    height_RS = np.maximum(1 + terms_RF[:, :scales], 0.1)
    # Coefficients of f are shares of the curvatures so far; draws have their own.
    own_RH = np.diagonal(curvature_RHH, axis1=1, axis2=2)
    form_RHM = terms_RF[:, scales:].reshape(_DRAWS, h, -1) * (terms.size_H / own_RH)[:, :, None]
    return Surface(
        points, rough.reference_SH, bend_RH[kept_R], vertex_RSH, loss_RS, curvature_RHH, height_RS, form_RHM,
        noise,
    )  # fmt: skip


def _kernel(x: np.ndarray) -> np.ndarray:
    """Return the roots of the kernel of f at x octaves from a reference, (…, M): smooth ones, and a step."""
    root = np.exp(-(((x[..., None] - _CENTRES) / _REACH) ** 2))
    smooth = root / np.sqrt((root**2).sum(axis=-1, keepdims=True) + 1e-12)
    return np.concatenate([smooth, np.tanh(x[..., None] / _KINK)], axis=-1)


@dataclass(frozen=True)
class _Terms:
    """Regressors of heights and of f, about the optima so far."""

    design_NF: np.ndarray
    size_H: np.ndarray  # Curvatures along each hyperparameter, unit of the loss per octave²
    reference_SH: np.ndarray

    @classmethod
    def of(cls, points: _Points, rough: _RoughFit) -> _Terms:
        x_NH = points.u_NH - rough.reference_SH[points.number_N]
        v_NH = _bend(x_NH, rough.bend_H)
        design_NP = points.design(rough.bend_H, rough.reference_SH)
        beta_P = _regress(design_NP, points.y_N, rough.error).beta_P
        curvature_HH = _curvature(beta_P[None], x_NH.shape[1])[0]
        size_H = np.maximum(np.diag(curvature_HH), 1e-6 * np.abs(np.diag(curvature_HH)).max() + 1e-30)
        is_at_NS = points.number_N[:, None] == np.arange(len(points.scales))
        heights_NS = is_at_NS * (0.5 * np.einsum("nh,hk,nk->n", v_NH, curvature_HH, v_NH))[:, None]
        forms_NHM = (0.5 * size_H * v_NH**2)[:, :, None] * _kernel(x_NH)
        return cls(
            np.column_stack([heights_NS, forms_NHM.reshape(len(x_NH), -1)]), size_H, rough.reference_SH
        )

    def regress(self, points: _Points, bend_H: np.ndarray, error: _Error, form: float) -> _Regression:
        """Regress with priors on these terms, which are rows of their own."""
        design_NP = points.design(bend_H, self.reference_SH)
        first = len(points.scales) * (design_NP.shape[1] and self.reference_SH.shape[1] + 1)
        count_F = self.design_NF.shape[1]
        columns = np.hstack([design_NP[:, :first], self.design_NF, design_NP[:, first:]])
        prior_FP = np.zeros((count_F, columns.shape[1]))
        prior_FP[:, first : first + count_F] = np.eye(count_F)
        scatter_F = np.full(count_F, form)
        scatter_F[: len(points.scales)] = _HEIGHT_SCATTER
        variance = np.append(error.variance_N, scatter_F**2)
        y = np.append(points.y_N, np.zeros(count_F))
        return _regress(np.vstack([columns, prior_FP]), y, error._replace(variance_N=variance))

    def recentred(self, points: _Points, rough: _RoughFit) -> _RoughFit:
        """Return the fit about the optima that these terms leave, with its likeliest error."""
        fits = [
            (self.regress(points, rough.bend_H, error, form), error)
            for error in points.errors(rough.rise_N)
            for form in _FORMS
        ]
        best, error = max(fits, key=lambda fit: fit[0].log)
        scales, h = rough.reference_SH.shape
        vertex_1SH, _, curvature_1HH = _vertices(best.beta_P[None], scales, h)
        if (np.linalg.eigvalsh(curvature_1HH[0]) <= 0).any():
            return rough
        moved_SH = rough.reference_SH + _unbend(vertex_1SH[0], rough.bend_H)
        reference_SH = np.clip(moved_SH, points.low_SH, points.high_SH)
        return replace(rough, reference_SH=reference_SH, error=error)


class _Error(NamedTuple):
    """Errors that points may have."""

    variance_N: np.ndarray
    log: float = 0.0  # Log evidence by the scatter of seeds
    sigma: float = 0.0  # Noise of a single run


@dataclass(frozen=True)
class _Regression:
    """Coefficients of a surface, given bends and errors: normal."""

    log: float  # Log evidence
    r_PP: np.ndarray  # Triangular factor of the weighted design
    y_P: np.ndarray  # Weighted losses along its columns

    @cached_property
    def root_PP(self) -> np.ndarray:
        # Root of the covariance
        return np.asarray(np.linalg.pinv(self.r_PP))

    @cached_property
    def beta_P(self) -> np.ndarray:
        return np.asarray(self.root_PP @ self.y_P)


@dataclass(frozen=True, eq=False)
class _Points:
    """Mean losses of a rule's points."""

    sizes: tuple[tuple[float, ...], ...]  # Of each scale, or of each size of several scales
    number_N: np.ndarray  # Number of each point's size
    u_NH: np.ndarray  # log2 of the hyperparameters
    y_N: np.ndarray  # Mean loss
    count_N: np.ndarray
    squares_N: np.ndarray  # Squared deviations of its runs from the mean

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(size[0] for size in self.sizes)

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
        """Return candidates for the points' errors: a noise, beside the share of the rise that is missed."""
        near = 2 * len(self.scales) * (self.u_NH.shape[1] + 2)
        typical = float(np.sort(rise_N)[:near].mean()) or float(rise_N.mean()) or 1e-12
        df, squares = float((self.count_N - 1).sum()), float(self.squares_N.sum())
        sigmas = typical * _NOISES
        if df >= 1:
            sigmas = math.sqrt(max(squares / df, 1e-24)) * np.geomspace(0.4, 2.5, 9)
        errors = []
        missed_N = _MISSED * rise_N * (1 + rise_N / (5 * typical))
        for sigma in sigmas.tolist():
            log = -df * math.log(sigma) - 0.5 * squares / sigma**2
            errors.append(_Error(sigma**2 / self.count_N + missed_N**2, log, sigma))
        return errors


def _points(runs: pd.DataFrame, tuned: Sequence[str]) -> _Points:
    finite = runs[np.isfinite(runs["loss"])]
    means = (
        finite.groupby([*each_of("scale", runs), *tuned])["loss"].agg(["mean", "size", "var"]).reset_index()
    )
    sizes_NA, h = means[each_of("scale", runs)].to_numpy(float), len(tuned)
    sizes_SA, number_N = np.unique(sizes_NA, axis=0, return_inverse=True)
    number_N = number_N.ravel()
    least = min(np.bincount(number_N), default=0)
    coefficients = len(sizes_SA) * (h + 1) + len(_pairs(h))
    if least < h + 2 or len(means) < coefficients + 2:
        raise TableError(
            f"{len(means)} points with a loss ({least} at a scale) are too few for a surface in "
            f"{', '.join(tuned)}: {coefficients + 2} are needed, and {h + 2} at each scale: add runs by the "
            "best one of each scale, one hyperparameter an octave or two away"
        )
    if still := next((name for name in tuned if means[name].nunique() < 3), None):
        values = "one value" if means[still].nunique() == 1 else "two values"
        raise TableError(
            f"{still} has {values} in the runs with a loss, and a surface needs three: run {still} an "
            "octave or two on either side, or leave it out of the tuned columns"
        )
    count_N = means["size"].to_numpy(float)
    squares_N = means["var"].fillna(0.0).to_numpy(float) * (count_N - 1)
    u_NH, y_N = means[list(tuned)].to_numpy(float), means["mean"].to_numpy(float)
    sizes = tuple(map(tuple, sizes_SA.tolist()))
    points = _Points(sizes, number_N, u_NH, y_N, count_N, squares_N)
    inside_NH = u_NH - means.groupby(number_N)[list(tuned)].transform("mean").to_numpy(float)
    is_still = (np.ptp(inside_NH, axis=0) == 0).any()  # Within each scale, as where it follows the scale
    together = is_still or np.linalg.eigvalsh(np.corrcoef(inside_NH.T)).min() < _TOGETHER
    if together or np.linalg.matrix_rank(points.design(np.zeros(h), u_NH[points.best_S])) < coefficients:
        raise TableError(
            f"the runs' {', '.join(tuned)} do not vary independently: add runs in which one moves an octave "
            "or two and the others stay, in both directions, or tune one of them"
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
    # The factor of design and losses together has their product and the residual in its last column.
    whole = np.asarray(np.linalg.qr(np.column_stack([design_NP, y_N]) * root_N[:, None], mode="r"))
    r_PP, y_P, residual = whole[:-1, :-1], whole[:-1, -1], float(whole[-1, -1])
    log = float(np.log(root_N).sum() - np.log(np.abs(np.diag(r_PP))).sum()) - 0.5 * residual**2
    return _Regression(error.log + log, r_PP, y_P)


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
