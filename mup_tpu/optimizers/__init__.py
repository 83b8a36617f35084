"""Update rules, by name. An update rule is one entry of `UPDATE_RULES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mup_tpu.config import OptimizerConfig
from mup_tpu.optimizers.adamw import AdamW
from mup_tpu.optimizers.base import Factors, Group, UpdateRule, weight_decay
from mup_tpu.optimizers.sgd import SGD

if TYPE_CHECKING:
    from mup_tpu.models.base import Parameter

__all__ = ["UPDATE_RULES", "Factors", "Group", "UpdateRule", "update_rule_of", "weight_decay"]

_ADAMW = AdamW()
UPDATE_RULES: Mapping[str, UpdateRule] = {rule.name: rule for rule in (_ADAMW, SGD())}


def update_rule_of(config: OptimizerConfig, parameter: Parameter) -> UpdateRule:
    """The update rule that trains a parameter: the configured one, or AdamW where that does not take it."""
    rule = UPDATE_RULES[config.optimizer]
    return rule if rule.takes(parameter) else _ADAMW
