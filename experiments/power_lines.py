"""How does AdamW's best weight decay follow the length of training, at one learning rate and batch?

mup-tpu sweep experiments/power_lines.py

A timescale B/(η·λ·D) that stays (Wang & Aitchison 2024, arXiv:2405.13698) is λ* ∝ steps^−1; one that falls as
(tokens/parameters)^−0.527 (Power Lines, arXiv:2505.13738, figure 1) is λ* ∝ steps^−0.473; the same λ is an
exponent of 0. The rate falls linearly to 0, as theirs.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="power_lines",
    base=TUNED.base.replace(
        width=32,
        base_width=32,
        head_size=16,
        sequence_length=64,
        batch_size=8,
        learning_rate=2.0**-6,
        warmup=0.1,
        schedule="linear",
        final_lr_fraction=0.0,
    ),
    scale={"steps": (1000, 2000, 4000, 8000)},
    compare={},
    tune={"weight_decay": tuple(2.0**e for e in range(-8, -1))},
    num_seeds=1,
)
