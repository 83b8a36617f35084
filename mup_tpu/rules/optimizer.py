"""Rules of the optimizer's hyperparameters for batch size, length of training and weight decay.

Each is chosen by name (`OptimizerConfig.batch_rule`, `token_rule`, `decay_rule`) beside a parametrization,
and multiplies its factors. The configured, tuned and stored learning rate is the base's; rows also hold the
applied one. `docs/rules.md` explains the rules, and which contradict each other.

A rule is one entry of `BATCH_RULES`, `TOKEN_RULES` or `DECAY_RULES`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mup_tpu.rules.parametrization import Growth, Parameter, Scaling


@dataclass(frozen=True)
class PowerRule:
    """Factors on the optimizer's hyperparameters that are powers of one ratio to the base."""

    source: str  # Paper and table
    learning_rate: float = 0.0  # Exponent of the factor on learning rates
    weight_decay: float = 0.0  # Exponent of the factor on weight decay, coupled
    eps: float = 0.0  # Exponent of the factor on Adam's ε
    moments: float = 0.0  # Exponent of the factors on 1 - β₁ and 1 - β₂


_COMPLETEDP = "Mlodozeniec et al. 2025 (arXiv:2512.22382), Table 1"

BATCH_RULES: Mapping[str, PowerRule] = {
    "none": PowerRule("Shallue et al. 2019 (arXiv:1811.03600): no rule holds everywhere; tune again"),
    "lr_sqrt": PowerRule("Krizhevsky 2014 (arXiv:1404.5997), section 5", learning_rate=0.5),
    "lr_linear": PowerRule("Goyal et al. 2017 (arXiv:1706.02677), section 2.1 (for SGD)", learning_rate=1),
    "completedp": PowerRule(_COMPLETEDP, learning_rate=0.5, weight_decay=0.5, eps=-0.5, moments=1),
}
"""Powers of batch size / base batch size, at equal tokens, by name of the rule."""

TOKEN_RULES: Mapping[str, PowerRule] = {
    "none": PowerRule("Yang et al. 2022 (arXiv:2203.03466), Table 2: training time is transferred across"),
    "lr_0.32": PowerRule("Bjorck et al. 2024 (arXiv:2409.19913)", learning_rate=-0.32),
    "lr_0.5": PowerRule(f"{_COMPLETEDP}, its learning rate alone", learning_rate=-0.5),
    "completedp": PowerRule(_COMPLETEDP, learning_rate=-0.5, weight_decay=-0.5, eps=0.5, moments=-1),
}
"""Powers of training tokens / the base's, at equal batch size, by name of the rule."""


@dataclass(frozen=True)
class DecayRule:
    """The factor on coupled weight decay, in place of the parametrization's."""

    source: str  # Paper and table
    factor: Callable[[Parameter, float, Scaling, Growth], float]
    """Factor of a parameter, from its width multiplier m, its other factors and the growth."""


def _of_hidden(power: float) -> Callable[[Parameter, float, Scaling, Growth], float]:

    def factor(parameter: Parameter, m: float, scaling: Scaling, growth: Growth) -> float:
        return m**power if parameter.role == "hidden" else scaling.weight_decay

    return factor


DECAY_RULES: Mapping[str, DecayRule] = {
    "parametrization": DecayRule("the parametrization's own", lambda p, m, scaling, g: scaling.weight_decay),
    "linear": DecayRule("Dey et al. 2025 (arXiv:2505.01618), Table 1: λ ∝ m", _of_hidden(1)),
    "sqrt": DecayRule("Fan et al. 2025 (arXiv:2510.15262), abstract: λ ∝ √m", _of_hidden(0.5)),
    "constant": DecayRule("Qiu et al. 2025 (arXiv:2512.05620), abstract: η·λ ∝ 1/m", _of_hidden(0)),
    "timescale": DecayRule(
        "Wang & Aitchison 2024 (arXiv:2405.13698), abstract: τ constant",
        # τ = B/(η·λ·D) is the share of the training that weights average over.
        lambda p, m, scaling, growth: growth.batch_size / (growth.tokens * scaling.learning_rate),
    ),
}
"""Rules by name; "timescale" is for all parameters that decay, and includes batch size and tokens."""


@dataclass(frozen=True)
class Rules:
    """The rules of one trial, by name."""

    batch: str = "none"
    tokens: str = "none"
    decay: str = "parametrization"

    def scaling(self, parametrization: Scaling, parameter: Parameter, m: float, growth: Growth) -> Scaling:
        """Return the parametrization's factors of one parameter, of width multiplier m, times the rules'."""
        scaling = parametrization
        for rule, ratio in self._powers(growth):
            scaling = dataclasses.replace(
                scaling,
                learning_rate=scaling.learning_rate * ratio**rule.learning_rate,
                eps=scaling.eps * ratio**rule.eps,
            )
        decay = DECAY_RULES[self.decay].factor(parameter, m, scaling, growth)
        if self.decay != "timescale":
            for rule, ratio in self._powers(growth):
                decay *= ratio**rule.weight_decay
        return dataclasses.replace(scaling, weight_decay=decay)

    def moments(self, growth: Growth) -> float:
        return float(math.prod(ratio**rule.moments for rule, ratio in self._powers(growth)))

    def _powers(self, growth: Growth) -> tuple[tuple[PowerRule, float], tuple[PowerRule, float]]:
        return (BATCH_RULES[self.batch], growth.batch_size), (TOKEN_RULES[self.tokens], growth.tokens)
