"""Scaling laws: loss against parameters, L = E + A·N^-α, and against parameters and tokens.

L(N, D) = E + A·N^-α + B·D^-β is approach 3 of Hoffmann et al. 2022 (arXiv:2203.15556, section 3.3 and
appendix D.3): the Huber loss (δ = 1e-3) of residuals in log L, least from many starts. The original fit
stopped early (Besiroglu et al. 2024, arXiv:2404.10102), so that each fit is polished from several starts, and
not moving is an error.

Shapes: P points, S starts, V variables (1: N; 2: N and D), R bootstrap draws. Parameters θ = (log E, then log
coefficient and exponent of each variable).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from mup_tpu.errors import TableError

HUBER_DELTA = 1e-3
"""Residual in log L above which a point counts linearly."""
DRAWS = 200
_POLISHED = 24
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
        """Whether an observed loss lies inside."""
        return self.low <= loss <= self.high


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law."""

    irreducible: float
    """E, nat per token."""
    coefficients: tuple[float, ...]
    """A (and B)."""
    exponents: tuple[float, ...]
    """α (and β)."""
    intervals: dict[str, tuple[float, float]]
    """95 % intervals by name: E, A, α (and B, β)."""
    scatter: float
    """Standard deviation of residuals in log L."""
    why_not_identified: str
    """Why the parameters cannot be told from these points; "" where they can."""
    theta_draws: np.ndarray

    @property
    def is_identified(self) -> bool:
        """Whether every exponent is told apart from 0."""
        return not self.why_not_identified

    def loss(self, *variables: float) -> float:
        """Loss at N (and D), nat per token."""
        terms = zip(self.coefficients, self.exponents, variables, strict=True)
        return self.irreducible + sum(c * v**-e for c, e, v in terms)

    def predict(self, *variables: float, seed: int = 0) -> Prediction:
        """Loss at N (and D) with its interval."""
        generator = np.random.default_rng(seed)
        log_v_V = np.log(variables)
        drawn = np.array([_log_loss(theta, log_v_V[None])[0] for theta in self.theta_draws])
        drawn += self.scatter * generator.standard_normal(len(drawn))
        low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
        return Prediction(self.loss(*variables), float(low), float(high))

    def compute_share(self, parameters: float, regret: float) -> float:
        """Share of compute with which a well-tuned model would have reached the same loss, tokens held fixed.

        Solves L(N') = L(N) + regret; compute is proportional to N.

        Args:
            parameters: N of the badly tuned model.
            regret: what it loses by its tuning, nat per token.
        """
        gap = self.loss(parameters) - self.irreducible
        return float((gap / (gap + regret)) ** (1 / self.exponents[0]))


def fit_scaling_law(losses: np.ndarray, *variables: np.ndarray, seed: int = 0) -> ScalingLaw:
    """Fit L = E + A·N^-α, or L = E + A·N^-α + B·D^-β if two variables are given.

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
    theta = _best_fit(log_l_P, log_v_PV)
    residuals_P = log_l_P - _log_loss(theta, log_v_PV)
    scatter = float(np.sqrt((residuals_P**2).sum() / (count - parameters)))
    generator = np.random.default_rng(seed)
    # The parametric form: resampling a handful of residuals covers far less than it claims.
    draws = [
        _solve(theta, log_l_P - residuals_P + shock, log_v_PV).x
        for shock in scatter * generator.standard_normal((DRAWS, count))
    ]
    draws_R = np.array(draws)
    names = ["E", "A", "α", "B", "β"][:parameters]
    intervals = {}
    for i, name in enumerate(names):
        low, high = np.quantile(draws_R[:, i], [0.025, 0.975])
        is_log = i == 0 or i % 2 == 1
        intervals[name] = (float(np.exp(low)), float(np.exp(high))) if is_log else (float(low), float(high))
    return ScalingLaw(
        irreducible=float(np.exp(theta[0])),
        coefficients=tuple(float(np.exp(t)) for t in theta[1::2]),
        exponents=tuple(float(t) for t in theta[2::2]),
        intervals=intervals,
        scatter=scatter,
        why_not_identified=_why_not_identified(intervals, log_l_P, scatter),
        theta_draws=draws_R,
    )


def _why_not_identified(
    intervals: dict[str, tuple[float, float]], log_l_P: np.ndarray, scatter: float
) -> str:
    gain = float(np.ptp(log_l_P))
    if gain < 4 * scatter:
        return f"losses differ by {100 * gain:.2f} % and scatter by {100 * scatter:.2f} %: too little to fit"
    for name in ("α", "β"):
        if name in intervals and intervals[name][0] <= 0.01:
            low, high = intervals[name]
            return f"the exponent {name} is not told apart from 0 (95 % {low:.2f} to {high:.2f})"
    low, high = intervals["E"]
    lowest = float(np.exp(log_l_P.min()))
    if high - low > 0.5 * lowest:
        return f"the irreducible loss E is not determined (95 % {low:.2f} to {high:.2f} nat)"
    return ""


def _terms(theta: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    """Logarithms of the law's terms, (1 + V) × P."""
    terms = [theta[1 + 2 * i] - theta[2 + 2 * i] * log_v_P for i, log_v_P in enumerate(log_v_PV.T)]
    return np.array([np.full(len(log_v_PV), theta[0]), *terms])


def _log_loss(theta: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(_terms(theta, log_v_PV), axis=0)  # scipy's logsumexp takes ten times as long


def _jacobian(theta: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    """Derivative of log L: each term's share, times -log v for its exponent."""
    terms = _terms(theta, log_v_PV)
    shares = np.exp(terms - np.logaddexp.reduce(terms, axis=0))
    columns = [shares[0]]
    for share_P, log_v_P in zip(shares[1:], log_v_PV.T, strict=True):
        columns += [share_P, -share_P * log_v_P]
    return np.column_stack(columns)


def _solve(start: np.ndarray, log_l_P: np.ndarray, log_v_PV: np.ndarray) -> OptimizeResult:
    lower = np.full(len(start), -np.inf)
    upper = np.full(len(start), np.inf)
    lower[0], upper[0] = -20.0, log_l_P.min()  # E is below every loss
    lower[2::2], upper[2::2] = 0.0, 5.0
    return least_squares(
        lambda theta: _log_loss(theta, log_v_PV) - log_l_P,
        np.clip(start, lower + 1e-9, upper - 1e-9),
        jac=lambda theta: _jacobian(theta, log_v_PV),
        bounds=(lower, upper),
        loss="huber",
        f_scale=HUBER_DELTA,
        x_scale="jac",
        max_nfev=400,
    )


def _best_fit(log_l_P: np.ndarray, log_v_PV: np.ndarray) -> np.ndarray:
    """The least objective over a grid of starts, the most promising of them polished."""
    centre_V = log_v_PV.mean(axis=0)
    per_variable = [
        [(c + e * centre, e) for c in _LOG_COEFFICIENTS for e in _EXPONENTS] for centre in centre_V
    ]
    starts = np.array(
        [
            [min(log_e, log_l_P.min() - 1e-3), *itertools.chain(*terms)]
            for log_e, *terms in itertools.product(_LOG_E, *per_variable)
        ]
    )
    costs_S = [_huber(_log_loss(start, log_v_PV) - log_l_P) for start in starts]
    best, cost = None, math.inf
    for start in starts[np.argsort(costs_S)[:_POLISHED]]:
        solution = _solve(start, log_l_P, log_v_PV)
        if solution.cost < cost and not np.allclose(solution.x, start, rtol=0, atol=1e-10):
            best, cost = solution.x, solution.cost
    if best is None:
        raise TableError("the scaling law's optimiser returned its start, from every start: no fit")
    return best


def _huber(residuals: np.ndarray) -> float:
    small = np.abs(residuals) <= HUBER_DELTA
    linear = HUBER_DELTA * (np.abs(residuals) - HUBER_DELTA / 2)
    return float(np.where(small, residuals**2 / 2, linear).sum())


def _positive(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values, float)
    if not (np.isfinite(values) & (values > 0)).all():
        bad = values[~(np.isfinite(values) & (values > 0))][0]
        raise TableError(f"{what} {bad:g} is not allowed in a scaling law: it must be finite and above 0")
    return values
