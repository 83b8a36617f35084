"""Key of a pack, equal for trials that can train together. Without torch, for drivers that plan packs."""

from __future__ import annotations

from typing import Any

from mup_tpu.config import Trial
from mup_tpu.models import declare
from mup_tpu.optimizers import constants, update_rule_of


def pack_key(trial: Trial) -> tuple[Any, ...]:
    """Shapes, batches, length, arithmetic, and the constants of the update rules.

    The rest (parametrization, learning rate, decay, schedule, seed, multipliers) may differ by member. The
    vocabulary comes with the data: here it is 1.
    """
    declaration = declare(trial.model, 1, trial.data.sequence_length)
    rules = {update_rule_of(trial.optimizer, p) for p in declaration.parameters.values()}
    by_rule = sorted(constants(trial, rules).items())
    shape = (trial.model.architecture, *declaration.structure)
    return (shape, trial.data, trial.optimizer.optimizer, *by_rule, trial.train.steps,
            trial.train.eval_batches, trial.train.precision)  # fmt: skip
