"""How does the best learning rate follow the length of training, and which rule keeps it in place?

mup-tpu sweep experiments/horizon_transfer.py --until-settled

The base has 500 steps. Rules for the learning rate alone shift the axis, so that "none" predicts them.
Nothing is clipped, as by the authors of "completedp". Shorter trainings have another answer:
horizon_transfer_short.py.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="horizon_transfer",
    base=TUNED.base.replace(
        width=64,
        sequence_length=64,
        batch_size=8,
        base_batch_size=8,
        base_steps=500,
        warmup=0.1,
        weight_decay=0.1,
        grad_clip=0.0,
    ),
    scale={"steps": (250, 500, 700, 1000, 1400, 2000, 2800, 4000)},
    compare={"token_rule": ("none", "lr_0.32", "lr_0.5", "completedp")},
    tune={"learning_rate": tuple(2.0**e for e in range(-10, -3))},
    num_seeds=2,
)
