"""Does the best angle of AdamH's steps follow the length of training as AdamW's learning rate does?

mup-tpu sweep experiments/horizon_adamh.py

AdamH keeps the norm of each hidden matrix, so that its rate is the effective one. Two papers predict how the
best angle follows the tokens: as tokens^-0.32 (2603.28743, for Muon's steps), and without the bend of AdamW's
rate (2606.29158). All else as in horizon_transfer.py, whose rule "none" is AdamW's side; AdamW trains
embeddings, norms and biases at a quarter of the angle.
"""

import dataclasses

from horizon_transfer import SWEEP as ADAMW

SWEEP = dataclasses.replace(
    ADAMW,
    experiment="horizon_adamh",
    base=ADAMW.base.replace(optimizer="adamh", adamw_lr_ratio=2.0**-2),
    scale={"steps": (250, 1000, 4000)},
    compare={"token_rule": ("none",)},
    tune={"learning_rate": tuple(2.0**e for e in range(-8, -2))},
    num_seeds=1,
)
