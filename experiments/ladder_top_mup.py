"""A search on the ladder's top rung in μP: does it beat the lowest rung's optimum?

python experiments/ladder_top_mup.py --num-samples 24
"""

from ladder_mup import SWEEP as LADDER

from mup_tpu.cli.experiments import run_search_experiment
from mup_tpu.config.sweep import Domain, Search

SEARCH = Search(
    experiment="ladder_top_mup",
    base=LADDER.base.replace(parametrization="mup", **LADDER.scale_axis.points[-1]),
    space={
        "learning_rate": Domain("loguniform", 2.0**-8, 2.0**-3),
        "weight_decay": Domain("loguniform", 0.01, 1.0),
    },
)

if __name__ == "__main__":
    run_search_experiment(SEARCH, __doc__)
