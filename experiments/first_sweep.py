"""The main job in minutes: GPT-2 of four widths in SP and in μP, at several learning rates, on real text.

mup-tpu sweep experiments/first_sweep.py --until-settled     buys runs until both verdicts are settled
mup-tpu sweep experiments/first_sweep.py                     runs the whole grid

SP is as people train it: one σ and one rate, GPT-2's smaller last layers of branches, warm-up, cosine, weight
decay. GPT-2's σ = 0.02 is what torch's 0.58/√fan_in gives at width 768; 0.05 is that of width 128, where both
rules are one here. Each trial sees 102,400 bytes of text: enough to see the optimum at each width, and that
wider is better, not to train a good model.
"""

from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="first_sweep",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=128,
        init_std=0.05,
        sequence_length=64,
        batch_size=8,
        weight_decay=0.1,
        steps=200,
        warmup=0.2,
        eval_batches=16,
    ),
    scale={"width": (64, 128, 256, 384)},
    tune={"learning_rate": tuple(2.0**e for e in range(-12, -4))},
    num_seeds=2,
)
