"""A part of depth_transfer.py in bf16: do verdicts and best learning rates stay what they are in float32?

One seed, learning rates an octave apart; the page in results/ names those that ran at each depth. The same
trials in float32 are in results/depth_transfer.
"""

from dataclasses import replace

from depth_transfer import SWEEP as FLOAT32

SWEEP = replace(
    FLOAT32,
    experiment="depth_transfer_bf16",
    base=FLOAT32.base.replace(precision="bf16"),
    scale={"depth": (2, 4, 8)},
    compare={"parametrization": ("mup", "completep")},
    tune={"learning_rate": tuple(2.0**e for e in range(-8, -4))},
    num_seeds=1,
)
