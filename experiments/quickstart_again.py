"""Does quickstart.py come to the same verdicts from other seeds and another order of batches?

python experiments/quickstart_again.py --until-settled
"""

import dataclasses

from quickstart import SWEEP as QUICKSTART

from mup_tpu.cli.experiments import run_experiment

SWEEP = dataclasses.replace(
    QUICKSTART, experiment="quickstart_again", base=QUICKSTART.base.replace(seed=1000, data_seed=1)
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
