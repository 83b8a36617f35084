"""GPT-2 of four widths in SP and in μP, with init and multipliers that are tuned for μP at width 64.

mup-tpu sweep experiments/quickstart.py --until-settled     buys runs until both verdicts are settled
mup-tpu sweep experiments/quickstart.py                     runs the whole grid

Other experiments change one thing of it. Each trial sees 51,200 bytes of text. Init and multipliers come from
lr_transfer.py, the longer form. SP keeps that σ at every width, which its users would not: first_sweep.py has
SP as people train it.
"""

from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="quickstart",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.14,
        alpha_in=3.0,
        alpha_out=0.9,
        alpha_attn=0.4,
        sequence_length=64,
        batch_size=8,
        steps=100,
        warmup=0.3,
        eval_batches=16,
    ),
    scale={"width": (64, 128, 256, 384)},
    tune={"learning_rate": tuple(2.0**e for e in range(-10, -2))},
    num_seeds=2,
)
