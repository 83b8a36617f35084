"""Learning-rate schedules, as a factor of the peak learning rate."""

from __future__ import annotations

import math

from mup_tpu.config import TrainConfig


def schedule_factor(config: TrainConfig, step: int) -> float:
    """Learning rate of `step` (from 0) over the peak learning rate; always above 0.

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
        return config.final_lr_fraction + (1 - config.final_lr_fraction) * left
    progress = (step - warmup) / max(1, config.steps - 1 - warmup)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * left
