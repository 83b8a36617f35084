"""Priors of a line of optima, by kind of scale and by the rule's promise along it.

They were chosen by their density at held-out optima of 162 stored and public sweeps, at the next scale and
two octaves ahead (benchmarks/prediction.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.ingest.table_columns import means, plain_name
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

_TAUS = (np.arange(60) + 0.5) / 12
"""Scatters in the sum over scatters, in units of the prior's scale."""
_STEADY = 0.15
"""Slope and bend of a steady line, as a share of another line's."""


@dataclass(frozen=True)
class Priors:
    """Scales of the priors of a line."""

    slope: float = 0.5
    """Standard deviation of the slope at the largest known scale, octaves per octave."""
    bend: float = 0.3
    """Standard deviation of the slope's change over one octave."""
    scatter: float = 0.15
    """Scale of the half-normal scatter τ, octaves."""
    steady: float = 0.0
    """Probability that the line is steady: its slope and bend are _STEADY times as large."""

    @property
    def _factors(self) -> dict[float, float]:
        """Probability of each factor on slope and bend."""
        shares = {1.0: 1 - self.steady, _STEADY: self.steady}
        return {factor: share for factor, share in shares.items() if share > 0}

    @property
    def tau_K(self) -> np.ndarray:
        """Scatters that are weighed."""
        return np.tile(self.scatter * _TAUS, len(self._factors))

    @property
    def factor_K(self) -> np.ndarray:
        """Factors on slope and bend that are weighed."""
        return np.repeat(list(self._factors), len(_TAUS))

    @property
    def weight_K(self) -> np.ndarray:
        """Prior probability of each, up to a constant."""
        return np.outer(list(self._factors.values()), np.exp(-0.5 * _TAUS**2)).ravel()


USUAL = Priors()
"""Priors of other scales."""
_BY_KIND = {
    "width": Priors(0.75, 0.4, 0.15),
    "width, kept": Priors(0.5, 0.3, 0.1, steady=0.75),
    "depth, kept": Priors(steady=0.5),
    "batch size": Priors(0.4, 0.4, 0.1),
    "tokens": Priors(0.25, 0.25, 0.17),
    "size": Priors(0.28, 0.15, 0.12, steady=0.3),
}
"""Five sweeps of depth do not tell it from the usual priors."""

_NAMES = {
    "batch size": ("batch_size", "batch", "bs", "global_batch_size"),
    "tokens": ("tokens", "tokens_planned", "steps", "steps_planned", "d", "training_tokens"),
    "size": ("params_non_embedding", "flops", "n", "na"),
}


def kind_of(scale: str) -> str:
    """Kind of a scale by its column: width, depth, batch size, tokens, size (parameters, FLOPs), or ""."""
    usual = means(scale)
    if usual in ("width", "depth", "size"):
        return usual
    name = plain_name(scale)
    return next((kind for kind, names in _NAMES.items() if name in names), "")


def keeps(rule: str, kind: str) -> bool:
    """Whether a rule's source says that the best hyperparameters stay along a kind of scale."""
    return rule in PARAMETRIZATIONS and kind in PARAMETRIZATIONS[rule].transfers


def priors_of(scale: str, rule: str) -> Priors:
    """Priors of a rule's line along a scale, by its column."""
    kind = kind_of(scale)
    kept = f"{kind}, kept" if keeps(rule, kind) else kind
    return _BY_KIND.get(kept, _BY_KIND.get(kind, USUAL))
