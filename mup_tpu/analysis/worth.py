"""Whether a transfer is worth it as a scale n grows without end: rates of loss, optimum and curvature.

- Ghosh, Wu & Bietti 2026 (arXiv:2512.22768, definitions 1 and 2, theorem 1): the loss gap falls as n^-a, the
  optimum's distance from its limit as n^-b. Transfer is *fast*, and *useful* for a given compute, if and only
  if b > a/2: its cost then vanishes faster than the loss gap.
- Kalra & Barkeshli 2026 (arXiv:2605.21486; formulas as in their code, github.com/dayal-kalra,
  quantifying-hparam-transfer): κ = α − 2β + γ for a loss gap n^-α, an optimum n^-β and a curvature n^γ over
  the hyperparameter itself. Over its logarithm, curvature grows as n^(γ − 2β), so κ is a plus that exponent:
  against the loss gap, a fixed error in octaves costs n^κ times as much, and κ < 0 is robust. R(∞) is a
  difference of irreducible losses; here it is the rule's less the lowest of the other rules in its table.

Exponents and limits are profile likelihoods of y = limit + B·n^-p with the standard errors of the draws;
sums of them have the intervals of Zou & Donner 2008 (MOVER).

Shapes: S scales, P exponents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.valley import CURVATURE_SCATTER
from mup_tpu.analysis.verdict import Regret

NEEDED = 4  # Scales with a known optimum that a limit and an exponent need
_EXPONENTS = np.geomspace(0.02, 5.0, 400)
"""Exponents that are weighed: below the first there is no limit, beyond the last it is reached at once."""
_CHI2 = 3.84
_SCATTER = 0.1  # Usual scatter of optima about a smooth line, octaves: the median of ten stored sweeps
_LEAST_ERROR = 1e-6


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval; nan if it is not known."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.value)

    def times(self, factor: float) -> Interval:
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(self.value * factor, low, high)

    def plus(self, other: Interval) -> Interval:
        value = self.value + other.value
        low = value - math.hypot(self.value - self.low, other.value - other.low)
        return Interval(value, low, value + math.hypot(self.high - self.value, other.high - other.value))

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


UNKNOWN = Interval()


@dataclass(frozen=True)
class Worth:
    """Worth of a rule's transfer along a scale."""

    loss_exponent: Interval = UNKNOWN
    """a: the loss at the optimum exceeds its limit by n^-a."""
    irreducible: Interval = UNKNOWN
    """Limit of the loss at the optimum, nat per token."""
    optimum_exponent: Interval = UNKNOWN
    """b: log2 of the optimum is n^-b from its limit; 0 without a limit."""
    kappa: Interval = UNKNOWN
    """Exponent of a fixed error's cost, in octaves, against the loss gap."""
    penalty: Interval = UNKNOWN
    """R(∞): irreducible loss less the lowest of the other rules in the table, nat per token."""
    share: Interval = UNKNOWN
    """Cost of the smallest scale's optimum at the largest, over the gain by growing."""
    why_not: Reason | None = None
    """Reason why the exponents are unknown."""

    @property
    def useful(self) -> str:
        margin = self.optimum_exponent.plus(self.loss_exponent.times(-0.5))
        return "useful" if margin.low > 0 else "not useful" if margin.high < 0 else "not told"

    @property
    def tells(self) -> bool:
        return self.loss_exponent.high - self.loss_exponent.low < 0.5 or self.useful != "not told"

    def to_dict(self) -> dict[str, Any]:
        intervals = {k: v.to_dict() for k, v in vars(self).items() if isinstance(v, Interval)}
        return intervals | {"useful": self.useful}


def worth(estimates: Sequence[Estimate], headline: Regret | None) -> Worth:
    """Return the worth of one rule's transfer, without R(∞), which needs the other rules.

    Args:
        estimates: of each scale, ascending.
        headline: regret of the smallest known optimum at the largest scale.
    """
    known = [e for e in estimates if e.optimum.is_bracketed]
    share = UNKNOWN
    if headline is not None and headline.status == "estimated":
        gain = known[0].optimum.loss - known[-1].optimum.loss
        cost = Interval(headline.value, headline.low, headline.high)
        share = cost.times(1 / gain) if gain > 0 else UNKNOWN
    if len(known) < NEEDED:
        return Worth(share=share, why_not=Reason.of("few optima", known=len(known), needed=NEEDED))
    scales = np.array([e.optimum.scale for e in known])
    losses = np.array([e.optimum.loss for e in known])
    if np.polyfit(np.log(scales), losses, 1)[0] >= 0:
        return Worth(share=share, why_not=Reason.of("loss does not fall"))
    irreducible, loss_exponent = approach(scales, losses, loss_errors(known), floor=0.0)
    optima, errors = np.array([e.optimum.x for e in known]), np.array([e.optimum.se for e in known])
    _, optimum_exponent = approach(scales, optima, np.hypot(errors, _SCATTER))
    kappa = loss_exponent.plus(_curvature_exponent(known))
    return Worth(loss_exponent, irreducible, optimum_exponent, kappa, share=share)


def with_penalties(rules: Sequence[Worth]) -> list[Worth]:
    """Return the rules of one table with R(∞), against the lowest irreducible loss of the others."""
    penalised = []
    for i, rule in enumerate(rules):
        others = [r.irreducible for k, r in enumerate(rules) if k != i and r.irreducible.is_known]
        best = min(others, key=lambda limit: limit.value, default=UNKNOWN)
        penalised.append(replace(rule, penalty=rule.irreducible.plus(best.times(-1.0))))
    return penalised


def approach(
    scales: np.ndarray, values: np.ndarray, errors: np.ndarray, floor: float = -math.inf
) -> tuple[Interval, Interval]:
    """Limit and exponent p of values = limit + B·scale^-p, each by its profile likelihood.

    Examples:
        >>> n = np.array([64.0, 128.0, 256.0, 512.0])
        >>> limit, exponent = approach(n, 1.5 + 8 * n**-0.5, np.full(4, 1e-3))
        >>> print(f"{limit.value:.2f}, {exponent.value:.2f}")
        1.50, 0.50

    Args:
        scales: (S,), four or more.
        values: (S,).
        errors: (S,), standard errors of the values.
        floor: least limit.

    Returns:
        Limit and exponent. An interval of the exponent that reaches an end of its grid goes on to 0 or ∞.
        Where values miss every such curve, their χ² enlarges the errors.
    """
    exponents_P = _EXPONENTS
    for _ in range(2):  # then once more, on a finer grid of the exponents left
        limit_P, error_P, chi2_P = _profile(exponents_P, scales, values, errors, floor)
        best = int(np.argmin(chi2_P))
        inflation = max(1.0, float(chi2_P[best]) / (len(scales) - 3))
        room_P = _CHI2 - (chi2_P - chi2_P[best]) / inflation
        inside = np.flatnonzero(room_P >= 0)
        reach = error_P[inside] * np.sqrt(inflation * room_P[inside])
        ends = (limit_P[inside] - reach).min(), (limit_P[inside] + reach).max()
        limit = Interval(*(max(float(end), floor) for end in (limit_P[best], *ends)))
        least, most = (float(exponents_P[i]) for i in (inside[0], inside[-1]))
        low = 0.0 if least == _EXPONENTS[0] else least
        exponent = Interval(float(exponents_P[best]), low, math.inf if most == _EXPONENTS[-1] else most)
        before, after = max(inside[0] - 1, 0), min(inside[-1] + 1, len(exponents_P) - 1)
        exponents_P = np.geomspace(exponents_P[before], exponents_P[after], len(_EXPONENTS))
    return limit, exponent


def _profile(
    exponents_P: np.ndarray, scales: np.ndarray, values: np.ndarray, errors: np.ndarray, floor: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Limit, its standard error, and χ² of the best curve of each exponent (P,)."""
    log_S = np.log(scales / scales.max())
    weight_S = np.maximum(errors, _LEAST_ERROR) ** -2.0
    basis_PS = -np.expm1(-exponents_P[:, None] * log_S) / exponents_P[:, None]
    design_PS2 = np.stack([np.ones_like(basis_PS), basis_PS], axis=-1)
    weighted_P2S = (design_PS2 * weight_S[:, None]).swapaxes(1, 2)
    covariance_P22 = np.linalg.inv(weighted_P2S @ design_PS2)
    beta_P2 = np.einsum("pij,pjs,s->pi", covariance_P22, weighted_P2S, values)
    left_PS = values - np.einsum("psi,pi->ps", design_PS2, beta_P2)
    to_limit_P2 = np.column_stack([np.ones_like(exponents_P), 1 / exponents_P])
    limit_P = np.einsum("pi,pi->p", to_limit_P2, beta_P2)
    error_P = np.sqrt(np.einsum("pi,pij,pj->p", to_limit_P2, covariance_P22, to_limit_P2))
    below_P = np.minimum(0.0, limit_P - floor) / error_P
    return limit_P, error_P, (weight_S * left_PS**2).sum(axis=1) + below_P**2


def loss_errors(known: Sequence[Estimate]) -> np.ndarray:
    """Return standard errors of the losses at the optima, nat: of the fits, and of what seeds share."""
    effects = [e.curve.effect_S for e in known if len(e.curve.effect_S) > 1]
    shared = math.sqrt(np.mean([effect_S.var(ddof=1) for effect_S in effects])) if effects else 0.0
    fitted = [e.valley.loss_R.std() for e in known if e.valley]
    return np.hypot(fitted, [shared / math.sqrt(len(e.curve.effect_S)) for e in known])


def _curvature_exponent(known: Sequence[Estimate]) -> Interval:
    """Return the exponent of the curvature over log2 of the hyperparameter."""
    log_n = np.log([e.optimum.scale for e in known])
    draws_SR = np.log(np.array([np.maximum(e.valley.curvature_R, 1e-12) for e in known if e.valley]))
    log_c = np.median(draws_SR, axis=1)
    weight = 1 / (draws_SR.var(axis=1) + CURVATURE_SCATTER**2)
    away = log_n - np.average(log_n, weights=weight)
    information = float((weight * away**2).sum())
    slope, reach = float((weight * away * log_c).sum()) / information, math.sqrt(_CHI2 / information)
    return Interval(slope, slope - reach, slope + reach)
