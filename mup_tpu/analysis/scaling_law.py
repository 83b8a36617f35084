"""Scaling laws: loss against parameters, L = E + A·N^-α, parameters and tokens, and against any scale.

L(N, D) = E + A·N^-α + B·D^-β is approach 3 of Hoffmann et al. 2022 (arXiv:2203.15556, section 3.3 and
appendix D.3): the Huber loss (δ = 1e-3) of residuals in log L, least from many starts. The original fit
stopped early (Besiroglu et al. 2024, arXiv:2404.10102), so that each fit is polished from several starts, and
not moving is an error.

`expected_loss` extrapolates along any scale. With r octaves from the largest one and L(0) the loss there,

L(r) / L(0) = β₀ + β·h(r) + W(r) + scatter,  h(r) = (1 − e^−αr) / α.

A power law E + A·scale^−a is a straight line in h. W is its model error: its slope changes by N(0, bend²) an
octave. α, bend and scatter are weighed on a grid; all else is normal. A law without W is too sure; along a
batch size none holds (benchmarks/prediction.md).

Shapes: P points, S starts (or scales), K combinations of the grid, V variables (1: N; 2: N and D), R
bootstrap draws, T parameters θ = (log E, then log coefficient and exponent of each variable).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.reasons import Reason
from mup_tpu.errors import TableError

HUBER_DELTA = 1e-3  # residual in log L above which a point counts linearly
DRAWS = 200
# Largest factor on the scatter in a draw: with one degree of freedom it is otherwise unbounded
_MOST_INFLATED = 30.0
_POLISHED = 24
_ITERATIONS = 400
_STALLED = 25  # A start ends that gains less than a millionth in this many iterations
_LOG_E = (-3.0, -1.0, -0.5, 0.0, 0.5, 1.0)
_EXPONENTS = (0.1, 0.3, 0.5, 1.0, 1.5)
_LOG_COEFFICIENTS = (-4.0, -2.0, -1.0, 0.0, 1.0)  # of the variable's term at the geometric mean of the data


@dataclass(frozen=True)
class Prediction:
    """A loss the law expects for a run it has not seen."""

    loss: float
    low: float
    high: float
    """95 % interval, of the law and of a single point's scatter about it."""

    def holds(self, loss: float) -> bool:
        return self.low <= loss <= self.high


@dataclass(frozen=True, eq=False)
class ScalingLaw:
    """A fitted law. Its errors are those of a bootstrap, which is drawn on first use."""

    theta_T: np.ndarray
    log_l_P: np.ndarray
    log_v_PV: np.ndarray
    seed: int

    @property
    def irreducible(self) -> float:
        # E, nat per token
        return float(np.exp(self.theta_T[0]))

    @property
    def coefficients(self) -> tuple[float, ...]:
        # A (and B)
        return tuple(np.exp(self.theta_T[1::2]).tolist())

    @property
    def exponents(self) -> tuple[float, ...]:
        # α (and β)
        return tuple(self.theta_T[2::2].tolist())

    @cached_property
    def _fitted_P(self) -> np.ndarray:
        return _log_loss(self.theta_T[None], self.log_v_PV)[0]

    @property
    def _freedom(self) -> int:
        return len(self.log_l_P) - len(self.theta_T)

    @cached_property
    def scatter(self) -> float:
        # Standard deviation of residuals in log L
        return float(np.sqrt(((self.log_l_P - self._fitted_P) ** 2).sum() / self._freedom))

    @cached_property
    def _bootstrap(self) -> tuple[np.ndarray, np.ndarray]:
        # The parametric form: resampling a handful of residuals covers far less than it claims. Each draw has
        # its own scatter, because a few residuals leave the scatter uncertain too.
        generator = np.random.default_rng(self.seed)
        shocks_RP = generator.standard_normal((DRAWS, len(self.log_l_P)))
        inflated_R = np.sqrt(self._freedom / generator.chisquare(self._freedom, DRAWS))
        scatter_R = self.scatter * np.minimum(inflated_R, _MOST_INFLATED)
        starts_RT = np.tile(self.theta_T, (DRAWS, 1))
        theta_RT, _ = _solve(starts_RT, self._fitted_P + scatter_R[:, None] * shocks_RP, self.log_v_PV)
        return theta_RT, scatter_R

    @property
    def theta_RT(self) -> np.ndarray:
        return self._bootstrap[0]

    @property
    def scatter_R(self) -> np.ndarray:
        return self._bootstrap[1]

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % intervals by name: E, A, α (and B, β)."""
        low_T, high_T = np.quantile(self.theta_RT, [0.025, 0.975], axis=0)
        for ends_T in (low_T, high_T):
            ends_T[0], ends_T[1::2] = np.exp(ends_T[0]), np.exp(ends_T[1::2])
        return dict(zip("EAαBβ", zip(low_T.tolist(), high_T.tolist(), strict=True), strict=False))

    @cached_property
    def why_not_identified(self) -> Reason | None:
        """Return the reason why these points do not determine the parameters; None if they do."""
        gain = float(np.ptp(self.log_l_P))
        if gain < 4 * self.scatter:
            return Reason.of("losses too alike", gain=gain, scatter=self.scatter)
        for name in ("α", "β"):
            low, high = self.intervals.get(name, (1.0, 1.0))
            if low <= 0.01:
                return Reason.of("exponent may be 0", name=name, low=low, high=high)
        low, high = self.intervals["E"]
        if high - low > 0.5 * float(np.exp(self.log_l_P.min())):
            return Reason.of("irreducible loss unknown", low=low, high=high)
        return None

    @property
    def is_identified(self) -> bool:
        return self.why_not_identified is None

    def loss(self, *variables: float) -> float:
        terms = zip(self.coefficients, self.exponents, variables, strict=True)
        return self.irreducible + sum(c * v**-e for c, e, v in terms)

    def predict(self, *variables: float, seed: int = 0) -> Prediction:
        """Predict the loss at N (and D) with its interval."""
        generator = np.random.default_rng(seed)
        log_v_V = np.log(variables)
        drawn = _log_loss(self.theta_RT, log_v_V[None])[:, 0]
        drawn += self.scatter_R * generator.standard_normal(len(drawn))
        low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
        return Prediction(self.loss(*variables), float(low), float(high))

    def compute_share(self, parameters: float, regret: float) -> float:
        """Return the share of compute with which a tuned model reaches the same loss, tokens held fixed.

        Solves L(N') = L(N) + regret; compute is proportional to N.

        Args:
            parameters: N of the badly tuned model.
            regret: loss by its tuning, nat per token.
        """
        gap = self.loss(parameters) - self.irreducible
        return float((gap / (gap + regret)) ** (1 / self.exponents[0]))

    def compute_share_interval(self, parameters: float, low: float, high: float) -> tuple[float, float]:
        """Return the 95 % interval of that share, over the law's draws and a regret between low and high.

        (nan, nan) where E's interval reaches the loss at N: the share could then be anything.
        """
        gap_R = np.exp(self.theta_RT[:, 1] - self.theta_RT[:, 2] * math.log(parameters))
        if self.intervals["E"][1] >= self.loss(parameters):
            return math.nan, math.nan
        exponent_R = 1 / np.maximum(self.theta_RT[:, 2], 1e-3)
        shares_2R = [(gap_R / (gap_R + regret)) ** exponent_R for regret in (high, low)]
        return float(np.quantile(shares_2R[0], 0.025)), float(np.quantile(shares_2R[1], 0.975))


def fit_scaling_law(losses: np.ndarray, *variables: np.ndarray, seed: int = 0) -> ScalingLaw:
    """Fit L = E + A·N^-α, or L = E + A·N^-α + B·D^-β if two variables are given.

    Examples:
        >>> sizes = np.array([1e4, 1e5, 1e6, 1e7, 1e8])
        >>> law = fit_scaling_law(1.5 + 20 * sizes**-0.3, sizes)
        >>> print(f"{law.irreducible:.2f} + {law.coefficients[0]:.1f}·N^-{law.exponents[0]:.2f}")
        1.50 + 20.0·N^-0.30

    Args:
        losses: nat per token, above 0.
        variables: parameters N (and tokens D) of each point.
        seed: of the bootstrap.

    Raises:
        TableError: too few points, values that are not above 0, or an optimiser that did not move.
    """
    log_l_P = np.log(_positive(losses, "loss"))
    log_v_PV = np.column_stack([np.log(_positive(v, "scaling variable")) for v in variables])
    count, parameters = len(log_l_P), 1 + 2 * len(variables)
    distinct = min(len(np.unique(np.round(column, 9))) for column in log_v_PV.T)
    if count <= parameters or distinct < 3:
        raise TableError(
            f"a scaling law with {parameters} parameters needs more than {parameters} points and at least 3 "
            f"sizes; there are {count} points and {distinct} sizes"
        )
    return ScalingLaw(_best_fit(log_l_P, log_v_PV), log_l_P, log_v_PV, seed)


def _terms(theta_ST: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    """Return the logarithms of the law's terms, S × (1 + V) × P."""
    coefficients_SV1, exponents_SV1 = theta_ST[:, 1::2, None], theta_ST[:, 2::2, None]
    of_variables = coefficients_SV1 - exponents_SV1 * log_v_PV.T
    constant = np.broadcast_to(theta_ST[:, :1, None], (len(theta_ST), 1, len(log_v_PV)))
    return np.concatenate([constant, of_variables], axis=1)


def _log_loss(theta_ST: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(_terms(theta_ST, log_v_PV), axis=1)


def _log_loss_and_jacobian(theta_ST: np.ndarray, log_v_PV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log L, S × P, and its derivatives, S × P × T: a term's share, times -log v for its exponent."""
    terms = _terms(theta_ST, log_v_PV)
    log_loss_SP = np.logaddexp.reduce(terms, axis=1)
    shares = np.exp(terms - log_loss_SP[:, None])
    jacobian_STP = np.empty((*theta_ST.shape, len(log_v_PV)))
    jacobian_STP[:, 0] = shares[:, 0]
    jacobian_STP[:, 1::2] = shares[:, 1:]
    jacobian_STP[:, 2::2] = -shares[:, 1:] * log_v_PV.T
    return log_loss_SP, jacobian_STP.swapaxes(1, 2)


def _solve(
    starts_ST: np.ndarray, log_l_SP: np.ndarray, log_v_PV: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Minimize the objectives from all starts at once, each for losses of its own; return θ and objectives.

    Levenberg and Marquardt's method on the Huber loss, with the curvature of the points in its quadratic
    part; steps end at the bounds. scipy's `least_squares` finds the same, one start after the other, in about
    twenty times the time: at its usual tolerances up to half of the bootstrap's draws end short of their fit,
    for with most points in the linear part a step may gain little for a while, and at 1e-12 none does.
    """
    # About the geometric mean of the sizes, coefficient and exponent are told apart best.
    centre_V = log_v_PV.mean(axis=0)
    log_v_PV = log_v_PV - centre_V
    theta_ST = starts_ST.copy()
    theta_ST[:, 1::2] -= theta_ST[:, 2::2] * centre_V
    lower_ST = np.full(theta_ST.shape, -np.inf)
    upper_ST = np.full(theta_ST.shape, np.inf)
    lower_ST[:, 0], upper_ST[:, 0] = -20.0, log_l_SP.min(axis=1)  # E is below every loss
    lower_ST[:, 2::2], upper_ST[:, 2::2] = 0.0, 5.0
    theta_ST = np.clip(theta_ST, lower_ST, upper_ST)
    log_loss_SP, jacobian_SPT = _log_loss_and_jacobian(theta_ST, log_v_PV)
    cost_S = _huber(log_loss_SP - log_l_SP)
    damping_S = np.full(len(theta_ST), 1e-3)
    scale_ST = np.zeros(theta_ST.shape)
    left, before_S = np.arange(len(theta_ST)), cost_S.copy()
    for turn in range(1, _ITERATIONS + 1):
        if turn % _STALLED == 0:
            left, before_S = left[cost_S[left] < (1 - 1e-6) * before_S[left]], cost_S.copy()
        if not len(left):
            break
        theta, cost, jacobian = theta_ST[left], cost_S[left], jacobian_SPT[left]
        lower, upper = lower_ST[left], upper_ST[left]
        scale_ST[left] = scale = np.maximum(scale_ST[left], (jacobian**2).sum(axis=1))
        damping = damping_S[left, None] * scale + 1e-30
        residuals = log_loss_SP[left] - log_l_SP[left]
        step = _step(residuals, jacobian, damping, theta <= lower, theta >= upper)
        moved = np.clip(theta + step, lower, upper)
        log_loss, jacobian = _log_loss_and_jacobian(moved, log_v_PV)
        new_cost = _huber(log_loss - log_l_SP[left])
        better = new_cost < cost
        at = left[better]
        theta_ST[at], cost_S[at] = moved[better], new_cost[better]
        log_loss_SP[at], jacobian_SPT[at] = log_loss[better], jacobian[better]
        damping_S[left] = np.maximum(damping_S[left] * np.where(better, 0.2, 4.0), 1e-12)
        done = np.where(better, cost - new_cost <= 1e-12 * cost, damping_S[left] > 1e8)
        left = left[~done]
    theta_ST[:, 1::2] += theta_ST[:, 2::2] * centre_V
    return theta_ST, cost_S


def _step(
    residuals: np.ndarray,
    jacobian: np.ndarray,
    damping: np.ndarray,
    is_least: np.ndarray,
    is_most: np.ndarray,
) -> np.ndarray:
    """Return a damped Gauss-Newton step from each start; parameters that press against a bound stay."""
    gradient = np.einsum("spt,sp->st", jacobian, np.clip(residuals, -HUBER_DELTA, HUBER_DELTA))
    curved = jacobian * (np.abs(residuals) <= HUBER_DELTA)[..., None]
    fixed = is_least & (gradient > 0) | is_most & (gradient < 0)
    free = np.where(fixed, 0.0, 1.0)
    hessian = np.einsum("spt,spu->stu", curved, curved) * free[:, :, None] * free[:, None, :]
    damped = hessian + np.where(fixed, 1.0, damping)[:, :, None] * np.eye(free.shape[1])
    return np.asarray(np.linalg.solve(damped, (-gradient * free)[..., None])[..., 0])


def _best_fit(log_l_P: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    centre_V = log_v_PV.mean(axis=0)
    per_variable = [
        [(c + e * centre, e) for c in _LOG_COEFFICIENTS for e in _EXPONENTS] for centre in centre_V
    ]
    starts_ST = np.array(
        [
            [min(log_e, log_l_P.min() - 1e-3), *itertools.chain(*terms)]
            for log_e, *terms in itertools.product(_LOG_E, *per_variable)
        ]
    )
    costs_S = _huber(_log_loss(starts_ST, log_v_PV) - log_l_P)
    starts_ST = starts_ST[np.argsort(costs_S)[:_POLISHED]]
    found_ST, costs_S = _solve(starts_ST, np.tile(log_l_P, (len(starts_ST), 1)), log_v_PV)
    moved_S = np.abs(found_ST - starts_ST).max(axis=1) > 1e-10
    if not moved_S.any():
        raise TableError("the scaling law's optimiser returned its start, from every start: no fit")
    return found_ST[np.where(moved_S, costs_S, math.inf).argmin()]


def _huber(residuals_SP: np.ndarray) -> np.ndarray:
    size = np.abs(residuals_SP)
    linear = HUBER_DELTA * (size - HUBER_DELTA / 2)
    return np.where(size <= HUBER_DELTA, residuals_SP**2 / 2, linear).sum(axis=1)


def _positive(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values, float)
    if not (np.isfinite(values) & (values > 0)).all():
        bad = values[~(np.isfinite(values) & (values > 0))][0]
        raise TableError(f"{what} {bad:g} is not allowed in a scaling law: it must be finite and above 0")
    return values


_SLICE = 0.15  # octaves within which two budgets are one
_LEAST_RUNS, _LEAST_SLICES = 4, 3
Interval = tuple[float, float, float]  # a value and its 95 % interval


@dataclass(frozen=True)
class Optimal:
    """Sizes for one budget."""

    flops: float
    params: Interval
    tokens: Interval
    loss: Interval


@dataclass(frozen=True, repr=False)
class ComputeOptimal:
    """Sizes of least loss by budget."""

    law: ScalingLaw
    exponent: Interval  # a in N* ∝ C^a, of the law
    parabolas: float  # The same by parabolas; nan if fewer than three slices have their minimum inside
    slices: int
    runs: int

    def at(self, flops: float) -> Optimal:
        """Return the sizes for a budget.

        Raises:
            TableError: it is no finite number above 0.
        """
        if not 0 < flops < math.inf:
            raise TableError(f"at {flops:g} is not allowed: FLOP above 0")
        params_R = np.exp(_log_params(self.law.theta_RT, flops))
        params = float(np.exp(_log_params(self.law.theta_T[None], flops))[0])
        tokens = flops / 6 / params
        loss = self.law.predict(params, tokens)
        low, high = (float(q) for q in np.quantile(params_R, [0.025, 0.975]))
        ends = (flops / 6 / high, flops / 6 / low)
        return Optimal(flops, (params, low, high), (tokens, *ends), (loss.loss, loss.low, loss.high))

    def to_dict(self) -> dict[str, Any]:
        return {
            "irreducible": self.law.irreducible,
            "coefficients": self.law.coefficients,
            "exponents": self.law.exponents,
            "intervals": self.law.intervals,
            "exponent": self.exponent,
            "parabolas": self.parabolas,
            "slices": self.slices,
            "runs": self.runs,
        }


def _log_params(theta_RT: np.ndarray, flops: float) -> np.ndarray:
    # dL/dN = 0 along D = C/6N, for θ = (log E, log A, α, log B, β)
    _, log_a, alpha, log_b, beta = theta_RT.T
    numerator = np.log(alpha) + log_a - np.log(beta) - log_b + beta * math.log(flops / 6)
    return np.asarray(numerator / (alpha + beta))


def compute_optimal(table: pd.DataFrame) -> ComputeOptimal:
    """Fit sizes of least loss by budget, from runs of several parameters and tokens.

    Args:
        table: columns params, tokens and loss (nat per token), one row a run.

    Raises:
        TableError: a column is missing or holds no numbers above 0, or the law cannot be told from the runs.
    """
    for name in ("params", "tokens", "loss"):
        if name not in table or table[name].dtype.kind not in "iuf" or not (table[name] > 0).all():
            columns = ", ".join(map(str, table.columns[:12]))
            raise TableError(f"{name} is not a column of numbers above 0; there are {columns}")
    params_P, tokens_P, loss_P = (table[name].to_numpy(float) for name in ("params", "tokens", "loss"))
    law = fit_scaling_law(loss_P, params_P, tokens_P)
    if not law.is_identified:
        raise TableError(
            f"compute-optimal sizes are unknown: the law is not identified: {law.why_not_identified}"
        )
    share_R = law.theta_RT[:, 4] / (law.theta_RT[:, 2] + law.theta_RT[:, 4])
    low, high = (float(q) for q in np.quantile(share_R, [0.025, 0.975]))
    alpha, beta = law.exponents
    minima = _minima(params_P, 6 * params_P * tokens_P, loss_P)
    slope = math.nan
    if len(minima) >= _LEAST_SLICES:
        log_c, log_n = np.array(minima).T
        slope = float(np.polyfit(log_c, log_n, 1)[0])
    return ComputeOptimal(law, (beta / (alpha + beta), low, high), slope, len(minima), len(table))


def _minima(params_P: np.ndarray, flops_P: np.ndarray, loss_P: np.ndarray) -> list[tuple[float, float]]:
    """Return log2 of the budget and of N at each minimum of a slice's parabola that lies inside it."""
    order = np.argsort(flops_P)
    gaps = np.flatnonzero(np.diff(np.log2(flops_P[order])) > _SLICE) + 1
    minima = []
    for part in np.split(order, gaps):
        log_n = np.log2(params_P[part])
        if len(np.unique(log_n)) < _LEAST_RUNS:
            continue
        bend, slope, _ = np.polyfit(log_n, loss_P[part], 2)
        at = -slope / (2 * bend) if bend > 0 else math.nan
        if log_n.min() < at < log_n.max():
            minima.append((float(np.log2(flops_P[part]).mean()), float(at)))
    return minima


LEAST = 3  # Scales that are needed
_WIDEST = 0.5  # A 95 % interval wider than this share of the loss is not reported
_LEVEL, _SLOPE = 1.0, 0.3  # Prior standard deviations of β₀, and of β per octave
_ALPHA = np.linspace(-0.377, 0.873, 51)
"""Values of α, none of them 0: the rate at which the loss's slope falls, an octave: a·log 2."""
_BEND = np.geomspace(1e-3, 0.25, 8)
_SCATTER = np.geomspace(5e-4, 0.02, 6)
_GRID_K3 = np.array(list(itertools.product(_ALPHA, _BEND, _SCATTER)))
_LOG_PRIOR_K = -0.5 * (
    ((_GRID_K3[:, 0] - 0.2) / 0.28) ** 2
    + (np.log(_GRID_K3[:, 1] / 0.015) / 0.8) ** 2
    + np.log(_GRID_K3[:, 2] / 0.0015) ** 2
)
"""Chosen by the coverage of losses one and two octaves ahead, with all sweeps in view."""


def expected_loss(losses_S: np.ndarray, scales_S: np.ndarray, scale: float) -> Prediction | Reason:
    """Predict the loss of a tuned model at a scale, with its 95 % interval, or return why that is impossible.

    Args:
        losses_S: losses of tuned models, in any unit, above 0.
        scales_S: their scales, ascending.
        scale: the one to predict.
    """
    if len(losses_S) < LEAST:
        return Reason.of("few optima", known=len(losses_S), needed=LEAST)
    if not (losses_S > 0).all():
        return Reason.of("loss not above 0", loss=float(losses_S.min()))
    octaves_S = np.log2(np.append(scales_S, scale) / scales_S[-1])
    mean_K, deviation_K, weight_K = _at_the_last(losses_S / losses_S[-1] - 1, octaves_S)
    generator = np.random.default_rng(0)
    chosen_R = generator.choice(len(weight_K), 20_000, p=weight_K)
    draws_R = mean_K[chosen_R] + deviation_K[chosen_R] * generator.standard_normal(len(chosen_R))
    low, loss, high = (float(losses_S[-1] * (1 + q)) for q in np.quantile(draws_R, [0.025, 0.5, 0.975]))
    if low <= 0 or high - low > _WIDEST * loss:
        return Reason.of("loss interval too wide", low=low, high=high)
    return Prediction(loss, low, high)


def wander_covariance(at_N: np.ndarray, to_S: np.ndarray) -> np.ndarray:
    """Return the covariance of W between distances, for a bend of 1: integrals from 0 both ways."""
    near = np.minimum(np.abs(at_N)[:, None], np.abs(to_S))
    far = np.maximum(np.abs(at_N)[:, None], np.abs(to_S))
    is_same_side = np.sign(at_N)[:, None] * np.sign(to_S) > 0
    return np.where(is_same_side, near**2 * (3 * far - near) / 6, 0.0)


def _at_the_last(y_S: np.ndarray, octaves_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard deviation and probability, K each, at the last distance, given values at the others."""
    alpha_K, bend_K, scatter_K = _GRID_K3.T
    h_KS = -np.expm1(-alpha_K[:, None] * octaves_S) / alpha_K[:, None]
    covariance_KSS = _LEVEL**2 + _SLOPE**2 * h_KS[:, :, None] * h_KS[:, None, :]
    covariance_KSS += bend_K[:, None, None] ** 2 * wander_covariance(octaves_S, octaves_S)
    covariance_KSS += scatter_K[:, None, None] ** 2 * np.eye(len(octaves_S))
    # The root's last row holds the regression on the others, and the residual's deviation.
    root_KSS = np.linalg.cholesky(covariance_KSS)
    known = slice(len(y_S))
    whitened_KS = np.linalg.solve(
        root_KSS[:, known, known], np.broadcast_to(y_S[:, None], (len(root_KSS), len(y_S), 1))
    )[..., 0]
    diagonal_KS = np.diagonal(root_KSS, axis1=1, axis2=2)
    log_K = _LOG_PRIOR_K - 0.5 * (whitened_KS**2).sum(axis=1) - np.log(diagonal_KS[:, known]).sum(axis=1)
    weight_K = np.exp(log_K - log_K.max())
    mean_K = (root_KSS[:, -1, known] * whitened_KS).sum(axis=1)
    return mean_K, diagonal_KS[:, -1], weight_K / math.fsum(weight_K)
