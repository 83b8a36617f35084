"""Update rules, by name: each is one entry of `UPDATE_RULES`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mup_tpu.config import OptimizerConfig, Trial
from mup_tpu.optimizers.adamw import SGD, AdamW
from mup_tpu.optimizers.base import Group, StackedParameter, UpdateRule
from mup_tpu.optimizers.hyperball import Hyperball
from mup_tpu.optimizers.muon import Muon
from mup_tpu.rules.parametrization import Parameter

__all__ = ["UPDATE_RULES", "Group", "StackedParameter", "UpdateRule", "constants", "update_rule_of"]

_ADAMW = AdamW()
UPDATE_RULES: Mapping[str, UpdateRule] = {
    rule.name: rule
    for rule in (_ADAMW, SGD(), Muon(), Hyperball("adamh", AdamW()), Hyperball("muonh", Muon("spectral")))
}


def update_rule_of(config: OptimizerConfig, parameter: Parameter) -> UpdateRule:
    """Return the update rule of a parameter: the configured one, or AdamW if that does not take it."""
    rule = UPDATE_RULES[config.optimizer]
    return rule if rule.takes(parameter) else _ADAMW


def constants(trial: Trial, rules: Iterable[UpdateRule]) -> dict[str, Any]:
    moments = trial.optimizer.rules.moments(trial.growth)
    return {rule.name: rule.constants(trial.optimizer, moments) for rule in rules}
