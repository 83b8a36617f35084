"""Width, depth, batch and steps grow together: does the best learning rate stay in μP?

python experiments/ladder_mup.py --until-settled

The rungs of ladder_completedp.py, with one rule for the width and none for the rest.
"""

import dataclasses

from ladder_completedp import SWEEP as COMPLETEDP

from mup_tpu.cli import run_experiment

SWEEP = dataclasses.replace(
    COMPLETEDP,
    experiment="ladder_mup",
    base=COMPLETEDP.base.replace(batch_rule="none", token_rule="none"),
    parametrizations=("mup",),
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
