"""Scaling laws: loss against parameters, L = E + A·N^-α, and the loss expected along any scale.

The law is fitted as approach 3 of Hoffmann et al. 2022 (arXiv:2203.15556, section 3.3 and appendix D.3): the
Huber loss (δ = 1e-3) of residuals in log L, least from many starts. The original fit stopped early (Besiroglu
et al. 2024, arXiv:2404.10102), so that each fit is polished from several starts, and not moving is an error.

`expected_loss` extrapolates along any scale. With r octaves from the largest one and L(0) the loss there,

L(r) / L(0) = β₀ + β·h(r) + W(r) + scatter,  h(r) = (1 − e^−αr) / α.

A power law E + A·scale^−a is a straight line in h. W is its model error: its slope changes by N(0, bend²) an
octave. α, bend and scatter are weighed on a grid; all else is normal. A law without W is too sure; along a
batch size none holds (benchmarks/prediction.md).

Shapes: P points, S starts (or scales), K combinations of the grid, R bootstrap draws, T parameters
θ = (log E, log A, α).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
_LOG_COEFFICIENTS = (-4.0, -2.0, -1.0, 0.0, 1.0)  # of the term of N at the geometric mean of the data


@dataclass(frozen=True)
class ExpectedLoss:
    """A loss the law expects for a run it has not seen."""

    loss: float
    low: float
    high: float  # 95 % interval, of the law and of a single point's scatter about it

    def holds(self, loss: float) -> bool:
        return self.low <= loss <= self.high


@dataclass(frozen=True, eq=False)
class ScalingLaw:
    """A fitted law L = E + A·N^-α. Its errors are those of a bootstrap, which is drawn on first use."""

    theta_T: np.ndarray
    log_l_P: np.ndarray
    log_n_P: np.ndarray

    @property
    def irreducible(self) -> float:
        # E, nat per token
        return float(np.exp(self.theta_T[0]))

    @property
    def coefficient(self) -> float:
        # A
        return float(np.exp(self.theta_T[1]))

    @property
    def exponent(self) -> float:
        # α
        return float(self.theta_T[2])

    @cached_property
    def _fitted_P(self) -> np.ndarray:
        return _log_loss(self.theta_T[None], self.log_n_P)[0]

    @cached_property
    def scatter(self) -> float:
        # Standard deviation of residuals in log L
        return float(np.sqrt(((self.log_l_P - self._fitted_P) ** 2).sum() / (len(self.log_l_P) - 3)))

    @cached_property
    def bootstrap(self) -> tuple[np.ndarray, np.ndarray]:
        """Return draws of θ (R, T), and the scatter (R,) of each.

        The parametric form: resampling a handful of residuals covers far less than it claims. Each draw has
        its own scatter, because a few residuals leave the scatter uncertain too.
        """
        generator, freedom = np.random.default_rng(0), len(self.log_l_P) - 3
        shocks_RP = generator.standard_normal((DRAWS, len(self.log_l_P)))
        inflated_R = np.sqrt(freedom / generator.chisquare(freedom, DRAWS))
        scatter_R = self.scatter * np.minimum(inflated_R, _MOST_INFLATED)
        starts_RT = np.tile(self.theta_T, (DRAWS, 1))
        theta_RT, _ = _solve(starts_RT, self._fitted_P + scatter_R[:, None] * shocks_RP, self.log_n_P)
        return theta_RT, scatter_R

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % intervals by name: E, A, α."""
        low_T, high_T = np.quantile(self.bootstrap[0], [0.025, 0.975], axis=0)
        for ends_T in (low_T, high_T):
            ends_T[:2] = np.exp(ends_T[:2])
        return dict(zip("EAα", zip(low_T.tolist(), high_T.tolist(), strict=True), strict=True))

    @cached_property
    def why_not_identified(self) -> Reason | None:
        """Return the reason why these points do not determine the parameters; None if they do."""
        gain = float(np.ptp(self.log_l_P))
        if gain < 4 * self.scatter:
            return Reason.of("losses too alike", gain=gain, scatter=self.scatter)
        low, high = self.intervals["α"]
        if low <= 0.01:
            return Reason.of("exponent may be 0", name="α", low=max(low, 0.0), high=high)
        low, high = self.intervals["E"]
        if high - low > 0.5 * float(np.exp(self.log_l_P.min())):
            return Reason.of("irreducible loss unknown", low=max(low, 0.0), high=high)
        return None

    def loss(self, parameters: float) -> float:
        return float(self.irreducible + self.coefficient * parameters**-self.exponent)

    def predict(self, parameters: float) -> ExpectedLoss:
        theta_RT, scatter_R = self.bootstrap
        drawn_R = _log_loss(theta_RT, np.log([parameters]))[:, 0]
        drawn_R += scatter_R * np.random.default_rng(0).standard_normal(len(drawn_R))
        low, high = np.exp(np.quantile(drawn_R, [0.025, 0.975])).tolist()
        return ExpectedLoss(self.loss(parameters), low, high)


def fit_scaling_law(losses: np.ndarray, parameters: np.ndarray) -> ScalingLaw:
    """Fit L = E + A·N^-α to losses (nat per token) of models with N parameters.

    Examples:
        >>> sizes = np.array([1e4, 1e5, 1e6, 1e7, 1e8])
        >>> law = fit_scaling_law(1.5 + 20 * sizes**-0.3, sizes)
        >>> print(f"{law.irreducible:.2f} + {law.coefficient:.1f}·N^-{law.exponent:.2f}")
        1.50 + 20.0·N^-0.30

    Raises:
        TableError: too few points, values that are not above 0, or an optimiser that did not move.
    """
    log_l_P, log_n_P = np.log(_positive(losses, "loss")), np.log(_positive(parameters, "scaling variable"))
    count, distinct = len(log_l_P), len(np.unique(np.round(log_n_P, 9)))
    if count <= 3 or distinct < 3:
        raise TableError(
            "a scaling law with 3 parameters needs more than 3 points and at least 3 sizes; there are "
            f"{count} points and {distinct} sizes"
        )
    starts_ST = np.array(
        [
            [min(log_e, log_l_P.min() - 1e-3), log_a + alpha * log_n_P.mean(), alpha]
            for log_e, log_a, alpha in itertools.product(_LOG_E, _LOG_COEFFICIENTS, _EXPONENTS)
        ]
    )
    costs_S = _huber(_log_loss(starts_ST, log_n_P) - log_l_P)
    starts_ST = starts_ST[np.argsort(costs_S)[:_POLISHED]]
    fitted_ST, costs_S = _solve(starts_ST, np.tile(log_l_P, (len(starts_ST), 1)), log_n_P)
    moved_S = np.abs(fitted_ST - starts_ST).max(axis=1) > 1e-10
    if not moved_S.any():
        raise TableError("the scaling law's optimiser returned its start, from every start: no fit")
    theta_T = fitted_ST[np.where(moved_S, costs_S, math.inf).argmin()]
    return ScalingLaw(theta_T, log_l_P, log_n_P)


def _log_loss(theta_ST: np.ndarray, log_n_P: np.ndarray) -> np.ndarray:
    log_e_S1, log_a_S1, alpha_S1 = theta_ST.T[..., None]
    return np.logaddexp(log_e_S1, log_a_S1 - alpha_S1 * log_n_P)


def _log_loss_and_jacobian(theta_ST: np.ndarray, log_n_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log L, S × P, and its derivatives, S × P × T: a term's share, times -log N for its exponent."""
    log_e_S1, log_a_S1, alpha_S1 = theta_ST.T[..., None]
    log_term_SP = log_a_S1 - alpha_S1 * log_n_P
    log_loss_SP = np.logaddexp(log_e_S1, log_term_SP)
    share_SP = np.exp(log_term_SP - log_loss_SP)
    return log_loss_SP, np.stack([np.exp(log_e_S1 - log_loss_SP), share_SP, -share_SP * log_n_P], axis=-1)


def _solve(starts_ST: np.ndarray, log_l_SP: np.ndarray, log_n_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimize the objectives from all starts at once, each for losses of its own; return θ and objectives.

    Levenberg and Marquardt's method on the Huber loss, with the curvature of the points in its quadratic
    part; steps end at the bounds. scipy's `least_squares` finds the same, one start after the other, in about
    twenty times the time: at its usual tolerances up to half of the bootstrap's draws end short of their fit,
    for with most points in the linear part a step may gain little for a while, and at 1e-12 none does.
    """
    # About the geometric mean of the sizes, coefficient and exponent are told apart best.
    centre = log_n_P.mean()
    log_n_P = log_n_P - centre
    theta_ST = starts_ST.copy()
    theta_ST[:, 1] -= theta_ST[:, 2] * centre
    lower_ST = np.full(theta_ST.shape, -np.inf)
    upper_ST = np.full(theta_ST.shape, np.inf)
    lower_ST[:, 0], upper_ST[:, 0] = -20.0, log_l_SP.min(axis=1)  # E is below every loss
    lower_ST[:, 2], upper_ST[:, 2] = 0.0, 5.0
    theta_ST = np.clip(theta_ST, lower_ST, upper_ST)
    log_loss_SP, jacobian_SPT = _log_loss_and_jacobian(theta_ST, log_n_P)
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
        log_loss, jacobian = _log_loss_and_jacobian(moved, log_n_P)
        new_cost = _huber(log_loss - log_l_SP[left])
        better = new_cost < cost
        at = left[better]
        theta_ST[at], cost_S[at] = moved[better], new_cost[better]
        log_loss_SP[at], jacobian_SPT[at] = log_loss[better], jacobian[better]
        damping_S[left] = np.maximum(damping_S[left] * np.where(better, 0.2, 4.0), 1e-12)
        done = np.where(better, cost - new_cost <= 1e-12 * cost, damping_S[left] > 1e8)
        left = left[~done]
    theta_ST[:, 1] += theta_ST[:, 2] * centre
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


def expected_loss(losses_S: np.ndarray, scales_S: np.ndarray, scale: float) -> ExpectedLoss | Reason:
    """Predict the loss of a tuned model at a scale, with its 95 % interval, or return why that is impossible.

    Scales ascend; losses may be in any unit.
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
        return Reason.of("loss interval too wide", low=max(low, 0.0), high=high)
    return ExpectedLoss(loss, low, high)


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
