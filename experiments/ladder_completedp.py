"""Width, depth, batch and steps grow together: does the best learning rate stay in Complete(d)P?

mup-tpu sweep experiments/ladder_completedp.py --tune 2^-7,2^-6,2^-5,2^-4

Seven rungs of constant tokens a parameter. The last has 8 times the parameters of the first, and takes about
60 times the FLOPs. ladder_mup.py asks the same of μP, whose rule is for the width alone. No weight decay is
better on the lowest rung (ladder_base.py).
"""

from quickstart import SWEEP as QUICKSTART

from mup_tpu.config import Sweep

RUNGS = (
    {"width": 64, "depth": 2, "batch_size": 4, "steps": 250},
    {"width": 80, "depth": 2, "batch_size": 6, "steps": 260},
    {"width": 80, "depth": 3, "batch_size": 8, "steps": 293},
    {"width": 96, "depth": 3, "batch_size": 8, "steps": 422},
    {"width": 112, "depth": 3, "batch_size": 10, "steps": 459},
    {"width": 112, "depth": 4, "batch_size": 12, "steps": 510},
    {"width": 128, "depth": 4, "batch_size": 16, "steps": 500},
)

SWEEP = Sweep(
    experiment="ladder_completedp",
    base=QUICKSTART.base.replace(
        head_size=16,
        base_depth=2,
        base_batch_size=4,
        base_steps=250,
        batch_rule="completedp",
        token_rule="completedp",
        weight_decay=0.1,
        grad_clip=0.0,
    ),
    scale=RUNGS,
    compare={"parametrization": ("completedp",)},
    tune={"learning_rate": tuple(2.0**e for e in range(-10, -2))},
    num_seeds=2,
)
