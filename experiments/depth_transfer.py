"""Does the best learning rate of a shallow GPT-2 stay the best of a deep one, in μP and in CompleteP?

mup-tpu sweep experiments/depth_transfer.py --until-settled

At the base width SP is μP, so that one run stands for both. Trials see 1.5 million tokens: at a tenth, all
rules look alike and deeper is worse. Init and multipliers come from lr_transfer.py.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="depth_transfer",
    base=TUNED.base.replace(
        width=64,
        base_depth=2,
        batch_size=8,
        steps=1500,
        warmup=0.1,
    ),
    scale={"depth": (2, 3, 4, 6, 8, 16)},
    compare={"parametrization": ("mup", "completep_half", "completep")},
    tune={"learning_rate": tuple(2.0**e for e in range(-10, -4))},
    num_seeds=2,
)
