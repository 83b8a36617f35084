"""Does the best learning rate of a narrow GPT-2 stay the best of a wide one, in SP and in μP?

mup-tpu sweep experiments/lr_transfer.py --scale 128     runs one width
mup-tpu sweep experiments/lr_transfer.py                 runs all missing trials
mup-tpu sweep experiments/lr_transfer.py:H200            the same question on one H200, 128 to 2048 in bf16

Init, warm-up and multipliers come from the best trial of results/tune_small (width 64), rounded.
"""

import dataclasses

from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="lr_transfer",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.14,
        alpha_in=3.0,
        alpha_out=0.9,
        alpha_attn=0.4,
        sequence_length=128,
        batch_size=16,
        steps=500,
        warmup=0.25,
        eval_batches=32,
    ),
    scale={"width": (32, 64, 128, 256)},
    tune={"learning_rate": tuple(2.0 ** (e / 2) for e in range(-20, -4))},
    num_seeds=3,
)

H200 = dataclasses.replace(
    SWEEP,
    experiment="lr_transfer_h200",
    base=SWEEP.base.replace(sequence_length=512, batch_size=32, steps=1000, precision="bf16"),
    scale={"width": (128, 256, 512, 1024, 2048)},
)
