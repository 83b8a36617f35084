"""A search on the ladder's top rung in Complete(d)P: does it beat the lowest rung's optimum?

mup-tpu search experiments/ladder_top_completedp.py --num-samples 24
"""

import dataclasses

from ladder_completedp import SWEEP as LADDER
from ladder_top_mup import SEARCH as IN_MUP

SEARCH = dataclasses.replace(
    IN_MUP,
    experiment="ladder_top_completedp",
    base=LADDER.base.replace(parametrization="completedp", **LADDER.points[-1]),
)
