"""Learning rate and weight decay of the ladder's lowest rung, from which rules take them upwards.

mup-tpu sweep experiments/ladder_base.py

There m is 1 along every scale, so that all rules are the same: the optimum is the base of both ladders.
"""

import dataclasses

from ladder_completedp import RUNGS
from ladder_completedp import SWEEP as LADDER

SWEEP = dataclasses.replace(
    LADDER,
    experiment="ladder_base",
    base=LADDER.base.replace(parametrization="mup", **RUNGS[0]),
    scale={"width": (RUNGS[0]["width"],)},
    compare={"weight_decay": (0.0, 0.1, 0.3, 1.0, 3.0)},
    tune={"learning_rate": tuple(2.0**e for e in range(-8, -2))},
)
