"""A part of lr_transfer.py in bf16: do verdicts and best learning rates stay what they are in float32?

One seed, learning rates an octave apart; the page in results/ names those that ran at each width. The same
trials in float32 are in results/lr_transfer.
"""

from dataclasses import replace

from lr_transfer import SWEEP as FLOAT32

SWEEP = replace(
    FLOAT32,
    experiment="lr_transfer_bf16",
    base=FLOAT32.base.replace(precision="bf16"),
    scale={"width": (64, 128, 256)},
    tune={"learning_rate": tuple(2.0 ** (e / 2) for e in range(-17, -8, 2))},
    num_seeds=1,
)
