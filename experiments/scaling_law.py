"""The loss by width in μP at one transferred learning rate: does a law of small widths predict the largest?

mup-tpu sweep experiments/scaling_law.py                   then: notebooks/03_scaling_law.ipynb
mup-tpu sweep experiments/scaling_law.py:H200     widths to 2048 in bf16
"""

import dataclasses

from lr_transfer_untuned import SWEEP as UNTUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="scaling_law",
    base=UNTUNED.base.replace(head_size=16, eval_batches=64),
    compare={"parametrization": ("mup",)},
    scale={"width": (32, 48, 64, 96, 128, 192, 256)},
    tune={"learning_rate": (2.0**-6.5,)},
)

H200 = dataclasses.replace(
    SWEEP,
    experiment="scaling_law_h200",
    base=SWEEP.base.replace(sequence_length=512, batch_size=32, steps=2000, precision="bf16"),
    scale={"width": (96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)},
)
