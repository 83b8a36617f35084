"""Learning rates that published laws and recipes give a transformer, before any run: a prior.

All are for AdamW without a rule such as μP. Their errors are root mean squares in octaves over two public
sources, of which a law's own is left out (benchmarks/published_laws.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mup_tpu.analysis.trend import NORMAL_95

_LARGE_FACTOR = 4.0  # between two laws, from which their disagreement is reported
# Parameters and learning rates, by the model cards of cerebras/Cerebras-GPT-6.7B and its kin (20 tokens a
# parameter); up to 1.3 billion parameters nearly those of GPT-3
_CEREBRAS_GPT = {
    111e6: 6e-4, 256e6: 6e-4, 590e6: 2e-4, 1.3e9: 2e-4, 2.7e9: 2e-4, 6.7e9: 1.2e-4, 13e9: 1.2e-4,
}  # fmt: skip


def rate_by_law(params: float, tokens: float) -> float:
    """Return the best learning rate with AdamW, without a rule: 1.79·N^-0.713·D^0.307 (Step Law)."""
    return 1.79 * params**-0.713 * tokens**0.307


def _of_cerebras_gpt(params: float) -> float:
    x_N, y_N = np.log2([*_CEREBRAS_GPT]), np.log2([*_CEREBRAS_GPT.values()])
    return float(2 ** np.interp(math.log2(params), x_N, y_N))


@dataclass(frozen=True)
class RateLaw:
    """A published law of the learning rate."""

    name: str
    source: str
    formula: str
    domain: Mapping[str, tuple[float, float]]  # least and most of what it was fitted to
    error: float  # octaves
    rate: Callable[[Mapping[str, float]], float]


LAWS = (
    RateLaw(
        "Step Law", "Li et al. 2025, arXiv:2503.04715", "1.79·N^-0.713·D^0.307",
        {"params": (6e7, 1.1e9), "tokens": (2e9, 1e11)}, 1.54,
        lambda of: rate_by_law(of["params"], of["tokens"]),
    ),
    RateLaw(
        "DeepSeek", "DeepSeek-AI 2024, arXiv:2401.02954", "0.3118·C^-0.125, C = 6·N·D",
        {"compute": (1e17, 2e19)}, 1.14,
        lambda of: 0.3118 * of["compute"] ** -0.125,
    ),
    RateLaw(
        "marin", "isoFLOP sweeps of marin-community/marin", "0.33·√(sequences of 4096)/width",
        {"params": (1e8, 4e9), "compute": (1e18, 1e21)}, 0.60,
        lambda of: 0.33 * math.sqrt(of["batch"] / 4096) / of["width"],
    ),
    RateLaw(
        "Cerebras-GPT", "Dey et al. 2023, arXiv:2304.03208, and its model cards", "its table, by parameters",
        {"params": (1.1e8, 1.3e10)}, 2.24,
        lambda of: _of_cerebras_gpt(of["params"]),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class PublishedRate:
    """Learning rate of a law at a target."""

    law: RateLaw
    rate: float
    outside: tuple[str, ...]  # sizes of the target that are beyond the law's domain


@dataclass(frozen=True)
class RatePrior:
    """What published laws say together."""

    rates: tuple[PublishedRate, ...]
    rate: float
    error: float  # octaves

    @property
    def low(self) -> float:
        return self.rate * 2.0 ** (-NORMAL_95 * self.error)

    @property
    def high(self) -> float:
        return self.rate * 2.0 ** (NORMAL_95 * self.error)

    @property
    def apart(self) -> float | None:
        """Return the factor between the largest and the least rate, where the laws disagree."""
        rates = [one.rate for one in self.rates]
        factor = max(rates) / min(rates)
        return factor if factor >= _LARGE_FACTOR else None

    def to_dict(self) -> dict[str, Any]:
        laws = [
            {"law": r.law.name, "rate": r.rate, "source": r.law.source, "outside": list(r.outside)}
            for r in self.rates
        ]
        return asdict(self) | {"rates": laws, "low": self.low, "high": self.high, "apart": self.apart}


def published_rates(width: float, params: float, tokens: float, batch: float) -> RatePrior:
    """Return what published laws say, and their mixture: each a normal of its error, by the inverse square.

    Examples:
        >>> made = published_rates(2048, 1.2e9, 26e9, 2**19)
        >>> print(f"{made.rate:.1e} ({made.low:.0e} to {made.high:.0e})")
        1.4e-03 (3e-04 to 7e-03)
    """
    of = {"width": width, "params": params, "tokens": tokens, "batch": batch, "compute": 6 * params * tokens}
    rates = []
    for law in LAWS:
        beyond = (name for name, (low, high) in law.domain.items() if not low <= of[name] <= high)
        rates.append(PublishedRate(law, law.rate(of), tuple(beyond)))
    x_L, error_L = np.log2([r.rate for r in rates]), np.array([r.law.error for r in rates])
    weight_L = error_L**-2 / (error_L**-2).sum()
    x = float(weight_L @ x_L)
    return RatePrior(tuple(rates), 2**x, math.sqrt(float(weight_L @ (error_L**2 + (x_L - x) ** 2))))
