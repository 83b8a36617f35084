"""Is it weight decay, and not μP, that keeps the best learning rate in a long training (arXiv:2510.19093)?

mup-tpu sweep experiments/decay_late.py         μP: η·λ the same at every width, or falling as 1/width
mup-tpu sweep experiments/decay_late.py:SP      SP, without decay and with it

At a rate of 2^-6 weights decay by e^1.6 within the training. By the claim the best rate stays where η·λ
stays, in SP too, and moves where it does not. At width 32 all rules are one.
"""

import dataclasses

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="decay_late",
    base=TUNED.base.replace(
        base_width=32,
        sequence_length=64,
        batch_size=8,
        steps=2000,
        schedule="linear",
        final_lr_fraction=0.0,
        weight_decay=0.1,
    ),
    scale={"width": (32, 64, 128)},
    compare={"decay_rule": ("linear", "constant")},
    tune={"learning_rate": tuple(2.0**e for e in range(-9, -3))},
    num_seeds=1,
)

SP = dataclasses.replace(
    SWEEP,
    experiment="decay_late_sp",
    base=SWEEP.base.replace(parametrization="sp"),
    compare={"weight_decay": (0.1, 0.0)},
)
