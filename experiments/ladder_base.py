"""Which learning rate and weight decay suit the lowest rung of the ladder, from which they are taken upwards?

python experiments/ladder_base.py

There m is 1 along every way of growing, so that all rules are one: what is found is the base of both ladders.
"""

import dataclasses

from ladder_completedp import RUNGS
from ladder_completedp import SWEEP as LADDER

from mup_tpu.cli import run_experiment
from mup_tpu.config import Axis

SWEEP = dataclasses.replace(
    LADDER,
    experiment="ladder_base",
    base=LADDER.base.replace(parametrization="mup", **RUNGS[0]),
    scale=None,
    widths=(RUNGS[0]["width"],),
    compare=Axis("weight_decay", (0.0, 0.1, 0.3, 1.0, 3.0)),
    parametrizations=None,
    learning_rates=tuple(2.0**e for e in range(-8, -2)),
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
