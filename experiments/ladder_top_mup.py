"""A search on the ladder's top rung in μP: does it beat the lowest rung's optimum?

mup-tpu search experiments/ladder_top_mup.py --num-samples 24
"""

from ladder_mup import SWEEP as LADDER

from mup_tpu.config.sweep import Domain, Search

SEARCH = Search(
    experiment="ladder_top_mup",
    base=LADDER.base.replace(parametrization="mup", **LADDER.points[-1]),
    space={
        "learning_rate": Domain("loguniform", 2.0**-8, 2.0**-3),
        "weight_decay": Domain("loguniform", 0.01, 1.0),
    },
)
