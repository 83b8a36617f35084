"""Compute-optimal sizes: parameters N* and tokens D* of least loss for a budget of C = 6·N·D FLOP.

From the law L(N, D) = E + A·N^-α + B·D^-β (`scaling_law.py`): N* ∝ C^(β/(α+β)). And from slices of equal
compute, a parabola in log N through each (approach 2 of Hoffmann et al. 2022), whose minima lie off where the
grid lies off or α differs from β. The law is the answer; the parabolas are said beside it.

Shapes: P runs, R draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.scaling_law import ScalingLaw, fit_scaling_law
from mup_tpu.errors import TableError

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
    exponent: Interval
    """a in N* ∝ C^a, of the law."""
    parabolas: float
    """The same by parabolas; nan if fewer than three slices have their minimum inside."""
    slices: int
    runs: int

    def at(self, flops: float) -> Optimal:
        """Return the sizes for a budget.

        Raises:
            TableError: it is no finite number above 0.
        """
        if not 0 < flops < math.inf:
            raise TableError(f"at {flops:g} is not allowed: FLOP above 0")
        theta_RT = self.law.theta_draws
        params_R = np.exp(_log_params(theta_RT, flops))
        e, (a, b), (alpha, beta) = self.law.irreducible, self.law.coefficients, self.law.exponents
        theta_1T = np.array([[math.log(e), math.log(a), alpha, math.log(b), beta]])
        params = float(np.exp(_log_params(theta_1T, flops))[0])
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
    """Log of N* by θ = (log E, log A, α, log B, β): dL/dN = 0 along D = C/6N."""
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
    share_R = law.theta_draws[:, 4] / (law.theta_draws[:, 2] + law.theta_draws[:, 4])
    low, high = (float(q) for q in np.quantile(share_R, [0.025, 0.975]))
    alpha, beta = law.exponents
    minima = _minima(params_P, 6 * params_P * tokens_P, loss_P)
    slope = math.nan
    if len(minima) >= _LEAST_SLICES:
        log_c, log_n = np.array(minima).T
        slope = float(np.polyfit(log_c, log_n, 1)[0])
    return ComputeOptimal(law, (beta / (alpha + beta), low, high), slope, len(minima), len(table))


def _minima(params_P: np.ndarray, flops_P: np.ndarray, loss_P: np.ndarray) -> list[tuple[float, float]]:
    """log2 of the budget and of N at the minimum of each slice's parabola, where it lies inside the slice."""
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
