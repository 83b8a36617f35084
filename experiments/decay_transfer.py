"""Does the best weight decay of a narrow GPT-2 stay the best of a wide one, and under which rule?

mup-tpu sweep experiments/decay_transfer.py --until-settled

In μP at its best learning rate. At one batch size and length, a constant timescale is the rule "linear".
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="decay_transfer",
    base=TUNED.base.replace(
        sequence_length=64,
        batch_size=8,
        steps=1000,
        warmup=0.1,
        learning_rate=2.0**-6,
    ),
    scale={"width": (64, 128, 192)},
    compare={"decay_rule": ("linear", "sqrt", "constant")},
    tune={"weight_decay": tuple(2.0**e for e in range(-5, 2))},
    num_seeds=2,
)
