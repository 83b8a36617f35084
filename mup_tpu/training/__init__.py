"""Training of packs. Here: what a trial's fields decide about its steps, without torch, for drivers."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from mup_tpu.config import TrainConfig, Trial
from mup_tpu.errors import ConfigError
from mup_tpu.models import architecture_of, declare
from mup_tpu.optimizers import constants, update_rule_of


def pack_key(trial: Trial) -> tuple[Any, ...]:
    """Return what the members of a pack share: network, batches, length, arithmetic, the rules' constants.

    The rest (parametrization, learning rate, decay, schedule, seed, multipliers) may differ by member. All
    members train the first one's network, so a field of the model is in the key unless its architecture says
    that the network does not read it. The vocabulary comes with the data: here it is 1.
    """
    declaration = declare(trial.model, 1, trial.data.sequence_length)
    per_member = architecture_of(trial.model).per_member
    model = [(f.name, getattr(trial.model, f.name)) for f in fields(trial.model) if f.name not in per_member]
    rules = {update_rule_of(trial.optimizer, p) for p in declaration.parameters.values()}
    by_rule = sorted(constants(trial, rules).items())
    train, rule = trial.train, trial.optimizer.optimizer
    length = (train.steps, train.eval_batches, train.precision)
    return (*model, *declaration.structure, trial.data, rule, *by_rule, *length)


def schedule_factor(config: TrainConfig, step: int) -> float:
    """Return the learning rate of `step` (from 0) over the peak learning rate.

    Linear warm-up reaches 1 at its last step. Then it is constant, or falls linearly or as a cosine to
    `final_lr_fraction` at the last step (Loshchilov & Hutter 2017, equation 5, without restarts). "wsd" is
    constant up to a cooldown (Hu et al. 2024, arXiv:2404.06395, section 4) by 1 - √progress (Hägele et al.
    2024, arXiv:2405.18392, section 3).
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        begun = step + 1 - (config.steps - config.cooldown_steps)
        if begun <= 0:
            return 1.0
        left = 1 - math.sqrt(begun / config.cooldown_steps)
    else:
        progress = (step - warmup) / max(1, config.steps - 1 - warmup)
        left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * left


def learning_rate(trial: Trial, step: int) -> float:
    return trial.optimizer.learning_rate * schedule_factor(trial.train, step)


def open_steps(trial: Trial) -> int:
    """Return the number of first steps that do not depend on the length of the run; 0 for none.

    A longer run can go on from a checkpoint of these: batches are a function of (data seed, step).
    """
    train = trial.train
    if train.schedule not in ("constant", "wsd") or 0 < train.warmup < 1:
        return 0
    return train.steps - (train.cooldown_steps if train.schedule == "wsd" else 0)


def longer(trial: Trial, steps: int) -> Trial:
    """Return the trial with more steps, whose first steps are those of the trial."""
    train, optimizer, option = trial.train, trial.optimizer, f"continue_to {steps}"
    if steps <= train.steps:
        raise ConfigError(f"{option} is not allowed: it must be above the trial's steps, {train.steps}")
    if train.schedule not in ("constant", "wsd"):
        raise ConfigError(
            f"{option} needs schedule 'constant' or 'wsd': {train.schedule!r} falls over all of the steps, "
            "so that a longer run differs from the first on"
        )
    if 0 < train.warmup < 1:
        raise ConfigError(
            f"{option} needs a warmup in steps: {train.warmup:g} is a share, {train.warmup_steps} steps of "
            f"{train.steps} but more of a longer run"
        )
    more = trial.replace(steps=steps)
    if more.growth != trial.growth and (
        optimizer.token_rule != "none" or optimizer.decay_rule == "timescale"
    ):
        name = "token_rule" if optimizer.token_rule != "none" else "decay_rule"
        raise ConfigError(
            f"{option} needs {name} without tokens: {getattr(optimizer, name)!r} sets hyperparameters by the "
            "number of steps, so that a longer run differs from the first on"
        )
    return more
