"""lr_transfer.py with untuned init and multipliers (σ = 0.06, all α = 1).

mup-tpu sweep experiments/lr_transfer_untuned.py --scale 128
"""

import dataclasses

from lr_transfer import SWEEP as TUNED

SWEEP = dataclasses.replace(
    TUNED,
    experiment="lr_transfer_untuned",
    base=TUNED.base.replace(init_std=0.06, alpha_in=1.0, alpha_out=1.0, alpha_attn=1.0, warmup=0.2),
    tune={"learning_rate": tuple(2.0 ** (e / 2) for e in range(-21, -8))},
)
