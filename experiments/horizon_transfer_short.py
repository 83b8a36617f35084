"""Is the answer of horizon_transfer.py the same from 125 to 500 steps, where each token is worth more?

python experiments/horizon_transfer_short.py --until-settled
"""

import dataclasses

from horizon_transfer import SWEEP as LONGER

from mup_tpu.cli.experiments import run_experiment
from mup_tpu.config import Axis

SWEEP = dataclasses.replace(
    LONGER, experiment="horizon_transfer_short", scale=Axis("steps", (125, 180, 250, 350, 500))
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
