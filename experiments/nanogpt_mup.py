"""A published experiment repeated on other text: nanoGPT-mup's learning-rate transfer on shakespeare_char.

mup-tpu sweep experiments/nanogpt_mup.py --scale 256        runs one width
mup-tpu sweep experiments/nanogpt_mup.py                    runs all missing trials

The setting of EleutherAI/nanoGPT-mup, mup_examples/mutransfer_lr_shakespeare_char: 2 layers, heads of 64,
base width 256, tied readout, AdamW (β 0.9 and 0.95, weight decay 0.1, clipping at 1), a constant learning
rate, 122 iterations of 8 sequences, the training loss averaged over the run. The original has sequences of
1024 characters and widths to 2048; this one, for two CPU cores, 256 bytes and widths to 512. In full, on one
H200:

mup-tpu sweep experiments/nanogpt_mup.py:H200
"""

import dataclasses

from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="nanogpt_mup",
    base=Trial().replace(
        depth=2,
        head_size=64,
        base_width=256,
        init_std=0.02,
        sequence_length=256,
        batch_size=8,
        steps=122,
        schedule="constant",
        warmup=0.0,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        grad_clip=1.0,
        loss_kind="train_mean",
        eval_batches=8,
    ),
    scale={"width": (64, 128, 256, 512)},
    tune={"learning_rate": tuple(2.0**e for e in range(-14, -6))},
    num_seeds=2,
)

H200 = dataclasses.replace(
    SWEEP,
    experiment="nanogpt_mup_h200",
    base=SWEEP.base.replace(sequence_length=1024),
    scale={"width": (256, 512, 1024, 2048)},
    tune={"learning_rate": tuple(2.0**e for e in range(-18, -6))},
    num_seeds=3,
)
