"""Key of a pack, equal for trials that can train together. Without torch, for drivers that plan packs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mup_tpu.config import Trial
from mup_tpu.models import architecture_of, declare
from mup_tpu.optimizers import constants, update_rule_of


def pack_key(trial: Trial) -> tuple[Any, ...]:
    """Return what the members of a pack share: network, batches, length, arithmetic, the rules' constants.

    The rest (parametrization, learning rate, decay, schedule, seed, multipliers) may differ by member. All
    members train the first one's network, so a field of the model is in the key unless its architecture says
    that the network does not read it. The vocabulary comes with the data: here it is 1.
    """
    declaration = declare(trial.model, 1, trial.data.sequence_length)
    rules = {update_rule_of(trial.optimizer, p) for p in declaration.parameters.values()}
    by_rule = sorted(constants(trial, rules).items())
    per_member = architecture_of(trial.model).per_member
    model = [(f.name, getattr(trial.model, f.name)) for f in fields(trial.model) if f.name not in per_member]
    train, rule = trial.train, trial.optimizer.optimizer
    length = (train.steps, train.eval_batches, train.precision)
    return (*model, *declaration.structure, trial.data, rule, *by_rule, *length)
