"""Scaling laws: loss against parameters and tokens, or compute, and the loss expected along any scale.

A law is L = E + Σ A·x^-α over its sizes x: parameters N and tokens D (Hoffmann et al. 2022, arXiv:2203.15556,
equation 2), or one size, such as compute; both are forms of OLMo's ladders (Bhagia et al. 2024,
arXiv:2412.04403). The fit is Hoffmann's approach 3: the Huber loss (δ = 1e-3) of residuals in log L, least
from several starts. Theirs stopped early (Besiroglu et al. 2024, arXiv:2404.10102).

`expected_loss` extrapolates along any scale. With r octaves from the largest one and L(0) the loss there,

L(r) / L(0) = β₀ + β·h(r) + W(r) + scatter,  h(r) = (1 − e^−αr) / α.

A power law E + A·scale^−a is a straight line in h. W is its model error: its slope changes by N(0, bend²) an
octave. α, bend and scatter are weighed on a grid; all else is normal. A law without W is too sure; along a
batch size none holds (benchmarks/prediction.md).

Shapes: P points, A sizes, S starts (or scales), K combinations of the grid, R bootstrap draws, T parameters
θ = (log E, log A, α, log B, β …).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy

from mup_tpu.analysis.reasons import Reason
from mup_tpu.errors import TableError

# Operations of training for each parameter and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)
FLOP = 6
HUBER_DELTA = 1e-3  # residual in log L above which a point counts linearly
DRAWS = 200
# Largest factor on the scatter in a draw: with one degree of freedom it is otherwise unbounded
_MOST_INFLATED = 30.0
_MANY = 8  # runs a parameter from which runs themselves are drawn
_STARTS = 4
_EXPONENTS = (0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)
_LEAST, _MOST_EXPONENT = 1e-12, 5.0  # of E, A and B, whose logarithm is kept
_MOST = 1e90  # loss or size whose powers and products are numbers, as those of its inverse
_NAMES = (("A", "α"), ("B", "β"))  # coefficient and exponent of each size


@dataclass(frozen=True)
class ExpectedLoss:
    """A loss the law expects for a run it has not seen."""

    loss: float
    low: float
    high: float  # 95 % interval, of the law and of a single point's scatter about it

    def holds(self, loss: float) -> bool:
        return self.low <= loss <= self.high


@dataclass(frozen=True)
class BestSize:
    """Best split of a compute budget, C = 6·N·D, with 95 % intervals of the law."""

    compute: float  # FLOP
    params: tuple[float, float, float]  # best, low, high
    tokens: tuple[float, float, float]
    loss: tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class ScalingLaw:
    """A fitted law L = E + A·x^-α, or E + A·N^-α + B·D^-β. Its errors are those of a bootstrap."""

    theta_T: np.ndarray
    log_l_P: np.ndarray
    log_x_PA: np.ndarray
    asymptote: float | None = None  # E where it is pinned

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

    @property
    def parameters(self) -> dict[str, float]:
        # By name: E, A, α …
        return dict(zip(self._names, _plain(self.theta_T).tolist(), strict=True))

    @property
    def _names(self) -> list[str]:
        return ["E", *itertools.chain(*_NAMES[: self.log_x_PA.shape[1]])]

    @cached_property
    def residual_P(self) -> np.ndarray:
        return self.log_l_P - _log_loss(self.theta_T, self.log_x_PA)

    @cached_property
    def _freedom(self) -> int:
        return len(self.log_l_P) - len(self.theta_T) + (self.asymptote is not None)

    @cached_property
    def scatter(self) -> float:
        # Standard deviation of residuals in log L
        return float(np.sqrt((self.residual_P**2).sum() / self._freedom))

    @cached_property
    def bootstrap(self) -> tuple[np.ndarray, np.ndarray]:
        """Return draws of θ (R, T), and the scatter (R,) of each.

        Many runs are drawn themselves, as by Besiroglu et al. Resampling a handful covers far less than it
        claims: normal errors are drawn, with a scatter for each draw, which a few residuals leave uncertain.
        """
        generator, count = np.random.default_rng(0), len(self.log_l_P)
        if count >= _MANY * len(self.theta_T):
            chosen_RP = generator.integers(0, count, (DRAWS, count))
            fits = [self._refitted(self.log_l_P[chosen], self.log_x_PA[chosen]) for chosen in chosen_RP]
            return np.array(fits), np.full(DRAWS, self.scatter)
        shocks_RP = generator.standard_normal((DRAWS, count))
        inflated_R = np.sqrt(self._freedom / generator.chisquare(self._freedom, DRAWS))
        scatter_R = self.scatter * np.minimum(inflated_R, _MOST_INFLATED)
        log_l_RP = self.log_l_P - self.residual_P + scatter_R[:, None] * shocks_RP
        return np.array([self._refitted(log_l_P, self.log_x_PA) for log_l_P in log_l_RP]), scatter_R

    def _refitted(self, log_l_P: np.ndarray, log_x_PA: np.ndarray) -> np.ndarray:
        return _minimize(self.theta_T, log_l_P, log_x_PA, self.asymptote)[0]

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % intervals by name: E, A, α …"""
        low_T, high_T = _plain(np.quantile(self.bootstrap[0], [0.025, 0.975], axis=0)).tolist()
        return dict(zip(self._names, zip(low_T, high_T, strict=True), strict=True))

    @cached_property
    def why_not_identified(self) -> Reason | None:
        """Return the reason why these points do not determine the parameters; None if they do."""
        gain = float(np.ptp(self.log_l_P))
        if gain < 4 * self.scatter:
            return Reason.of("losses too alike", gain=gain, scatter=self.scatter)
        for name in self._names[2::2]:
            low, high = self.intervals[name]
            if low <= 0.01:
                return Reason.of("exponent may be 0", name=name, low=max(low, 0.0), high=high)
        low, high = self.intervals["E"]
        if high - low > 0.5 * float(np.exp(self.log_l_P.min())):
            return Reason.of("irreducible loss unknown", low=max(low, 0.0), high=high)
        return None

    def loss(self, *sizes: float) -> float:
        return float(np.exp(_log_loss(self.theta_T, np.log([sizes]))[0]))

    def predict(self, *sizes: float) -> ExpectedLoss:
        theta_RT, scatter_R = self.bootstrap
        drawn_R = np.array([_log_loss(theta_T, np.log([sizes]))[0] for theta_T in theta_RT])
        drawn_R += scatter_R * np.random.default_rng(0).standard_normal(len(drawn_R))
        low, high = np.exp(np.quantile(drawn_R, [0.025, 0.975])).tolist()
        return ExpectedLoss(self.loss(*sizes), low, high)

    def along_compute(self) -> ScalingLaw:
        """Return the law of compute C = 6·N·D at its best split, itself E + K·C^-γ, with its draws.

        Hoffmann et al. 2022, equation 4, with γ = α·β / (α + β). A law of one size is its own.
        """
        if self.log_x_PA.shape[1] == 1:
            return self
        law = replace(self, theta_T=_best_split(self.theta_T), log_x_PA=self.log_x_PA.sum(1, keepdims=True))
        theta_RT, scatter_R = self.bootstrap
        law.__dict__["bootstrap"] = np.array([_best_split(theta_T) for theta_T in theta_RT]), scatter_R
        return law

    @property
    def split(self) -> tuple[float, float, float]:
        # Exponent a of the best size, N ∝ C^a, with its 95 % interval
        with np.errstate(invalid="ignore"):  # a draw without any slope has no best size
            a_R = self.bootstrap[0][:, 4] / (self.bootstrap[0][:, 2] + self.bootstrap[0][:, 4])
        low, high = np.nanquantile(a_R, [0.025, 0.975]).tolist()
        return float(self.theta_T[4] / (self.theta_T[2] + self.theta_T[4])), low, high

    def best_size(self, compute: float) -> BestSize:
        """Return the best parameters and tokens of a compute budget, 6·N·D FLOP."""
        theta_RT = np.vstack([self.theta_T, self.bootstrap[0]])
        log_n_R = _log_best_size(theta_RT.T, math.log(compute / FLOP))
        log_d_R = math.log(compute / FLOP) - log_n_R
        log_l_R = [
            _log_loss(theta_T, np.array([[n, d]]))[0]
            for theta_T, n, d in zip(theta_RT, log_n_R, log_d_R, strict=True)
        ]

        def around(log_R: np.ndarray) -> tuple[float, float, float]:
            low, high = np.exp(np.quantile(log_R[1:], [0.025, 0.975])).tolist()
            return float(np.exp(log_R[0])), low, high

        return BestSize(compute, around(log_n_R), around(log_d_R), around(np.array(log_l_R)))

    def speedup_over(self, other: ScalingLaw, at: float) -> tuple[float, float, float]:
        """Return how many times its compute the other law needs for the loss of this one, with the interval.

        Both are laws of one size. It is infinite where the other never reaches that loss.
        """

        def factor(mine_RT: np.ndarray, others_RT: np.ndarray) -> np.ndarray:
            loss_R = np.exp(mine_RT[:, 0]) + np.exp(mine_RT[:, 1] - mine_RT[:, 2] * math.log(at))
            above_R = loss_R - np.exp(others_RT[:, 0])
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                needed_R = np.exp((others_RT[:, 1] - np.log(above_R)) / others_RT[:, 2] - math.log(at))
            return np.where(above_R > 0, needed_R, np.inf)

        best = factor(self.theta_T[None], other.theta_T[None])[0]
        # Both bootstraps draw from one seed: they are independent in another order.
        others_RT = np.random.default_rng(1).permutation(other.bootstrap[0])
        draws_R = np.sort(factor(self.bootstrap[0], others_RT))  # infinite ones have no mean
        return float(best), float(draws_R[int(0.025 * DRAWS)]), float(draws_R[int(0.975 * DRAWS)])


def fit_scaling_law(losses: np.ndarray, *sizes: np.ndarray, asymptote: float | None = None) -> ScalingLaw:
    """Fit L = E + A·N^-α to losses of models with N parameters, or E + A·N^-α + B·D^-β with D tokens too.

    Examples:
        >>> sizes = np.array([1e4, 1e5, 1e6, 1e7, 1e8])
        >>> law = fit_scaling_law(1.5 + 20 * sizes**-0.3, sizes)
        >>> print(f"{law.irreducible:.2f} + {law.coefficient:.1f}·N^-{law.exponent:.2f}")
        1.50 + 20.0·N^-0.30

    Args:
        losses: one a run, nat per token.
        sizes: parameters, or compute; or parameters, and tokens.
        asymptote: E, where it is not fitted.

    Raises:
        TableError: too few points, or values that are not above 0.
    """
    log_l_P = np.log(_positive(losses, "loss"))
    log_x_PA = np.column_stack([np.log(_positive(size, "scaling variable")) for size in sizes])
    count, free = len(log_l_P), 1 + 2 * len(sizes) - (asymptote is not None)
    distinct = [len(np.unique(np.round(column, 9))) for column in log_x_PA.T]
    if count <= free or min(distinct) < 3:
        raise TableError(
            f"a scaling law with {free} parameters needs more than {free} points and at least 3 sizes; there "
            f"are {count} points and {' and '.join(map(str, distinct))} sizes"
        )
    if asymptote is not None and not 0 < asymptote < math.exp(log_l_P.min()):
        least = math.exp(log_l_P.min())
        raise TableError(
            f"asymptote {asymptote:g} must be above 0 and below every loss, the least is {least:.4g}"
        )
    # For given exponents the other parameters are found by non-negative least squares: good starts.
    centred_PA, starts = log_x_PA - log_x_PA.mean(axis=0), []
    relative_P = np.exp(-log_l_P)
    for exponents in itertools.product(_EXPONENTS, repeat=len(sizes)):
        terms_PA = np.exp(-np.array(exponents) * centred_PA)
        design = np.column_stack([np.ones(count), terms_PA]) * relative_P[:, None]
        linear, _ = scipy.optimize.nnls(design, np.ones(count))
        theta_T = np.empty(1 + 2 * len(sizes))
        theta_T[::2][1:] = exponents
        theta_T[[0, *range(1, len(theta_T), 2)]] = np.log(np.maximum(linear, 1e-3))
        theta_T[1::2] += theta_T[2::2] * log_x_PA.mean(axis=0)
        starts.append(theta_T)
    starts.sort(key=lambda theta_T: _huber(_log_loss(theta_T, log_x_PA) - log_l_P))
    fits = [_minimize(theta_T, log_l_P, log_x_PA, asymptote) for theta_T in starts[:_STARTS]]
    return ScalingLaw(min(fits, key=lambda fit: fit[1])[0], log_l_P, log_x_PA, asymptote)


def _minimize(
    theta_T: np.ndarray, log_l_P: np.ndarray, log_x_PA: np.ndarray, asymptote: float | None
) -> tuple[np.ndarray, float]:
    """Return the θ of the least objective from a start, and the objective."""
    # About the geometric mean of the sizes, coefficients and exponents are told apart best. Coefficients are
    # plain here, in units of the least loss: at E = 0 a logarithm has no slope, and a fit would stay there.
    centre_A, unit = log_x_PA.mean(axis=0), math.exp(log_l_P.min())
    centred_PA, log_l_P = log_x_PA - centre_A, log_l_P - log_l_P.min()
    lower_T, upper_T = np.zeros(len(theta_T)), np.full(len(theta_T), np.inf)
    upper_T[0], upper_T[2::2] = 1.0, _MOST_EXPONENT  # E is below every loss
    if asymptote is not None:
        lower_T[0] = upper_T[0] = asymptote / unit
    start_T = theta_T.copy()
    start_T[1::2] -= theta_T[2::2] * centre_A
    start_T[0], start_T[1::2] = math.exp(start_T[0]) / unit, np.exp(start_T[1::2]) / unit

    def objective(plain_T: np.ndarray) -> tuple[float, np.ndarray]:
        power_PA = np.exp(-plain_T[2::2] * centred_PA)
        term_PA = plain_T[1::2] * power_PA
        loss_P = np.maximum(plain_T[0] + term_PA.sum(axis=1), _LEAST)
        residual_P = np.log(loss_P) - log_l_P
        slope_P = np.clip(residual_P / HUBER_DELTA, -1, 1) / loss_P
        gradient_T = np.empty(len(plain_T))
        gradient_T[0], gradient_T[1::2] = slope_P.sum(), slope_P @ power_PA
        gradient_T[2::2] = -(slope_P @ (term_PA * centred_PA))
        return _huber(residual_P) / HUBER_DELTA, gradient_T

    fit = scipy.optimize.minimize(
        objective,
        np.clip(start_T, lower_T, upper_T),
        jac=True,
        method="SLSQP",
        bounds=list(zip(lower_T, upper_T, strict=True)),
        options={"maxiter": 300, "ftol": 1e-10},
    )
    fitted_T = np.clip(fit.x, lower_T, upper_T)
    for plain in (slice(0, 1), slice(1, None, 2)):  # E, and the coefficients
        fitted_T[plain] = np.log(np.maximum(fitted_T[plain] * unit, _LEAST))
    fitted_T[1::2] += fitted_T[2::2] * centre_A
    return fitted_T, float(fit.fun)


def _log_loss(theta_T: np.ndarray, log_x_PA: np.ndarray) -> np.ndarray:
    irreducible_P = np.full(len(log_x_PA), theta_T[0])
    log_term_PC = np.column_stack([irreducible_P, theta_T[1::2] - theta_T[2::2] * log_x_PA])
    most_P = log_term_PC.max(axis=1)
    return np.asarray(most_P + np.log(np.exp(log_term_PC - most_P[:, None]).sum(axis=1)))


def _huber(residual_P: np.ndarray) -> float:
    size_P = np.abs(residual_P)
    linear_P = HUBER_DELTA * (size_P - HUBER_DELTA / 2)
    return float(np.where(size_P <= HUBER_DELTA, residual_P**2 / 2, linear_P).sum())


def _plain(theta: np.ndarray) -> np.ndarray:
    plain = theta.copy()
    plain[..., 0], plain[..., 1::2] = np.exp(theta[..., 0]), np.exp(theta[..., 1::2])
    return plain


def _log_best_size(theta: np.ndarray, log_nd: float) -> np.ndarray:
    """Return log N of the best split of N·D: equal marginal gains, αA·N^-α = βB·D^-β."""
    _, log_a, alpha, log_b, beta = theta
    return np.asarray((np.log(alpha) + log_a - np.log(beta) - log_b + beta * log_nd) / (alpha + beta))


def _best_split(theta_T: np.ndarray) -> np.ndarray:
    """Return θ of the law of compute at the best split: log E, log K, γ."""
    log_e, log_a, alpha, log_b, beta = theta_T
    log_n = _log_best_size(theta_T, -math.log(6.0))  # of a budget of 1 FLOP
    log_d = -math.log(6.0) - log_n
    log_k = np.logaddexp(log_a - alpha * log_n, log_b - beta * log_d)
    return np.array([log_e, log_k, alpha * beta / (alpha + beta)])


def _positive(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values, float)
    is_allowed = (values > 1 / _MOST) & (values < _MOST)
    if not is_allowed.all():
        bad = values[~is_allowed][0]
        raise TableError(
            f"{what} {bad:g} is not allowed in a scaling law: it must be above 0 and below {_MOST:g}"
        )
    return values


LEAST = 3  # scales that are needed
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
