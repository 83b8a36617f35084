"""Does quickstart.py come to the same verdicts from other seeds and another order of batches?

mup-tpu sweep experiments/quickstart_again.py --until-settled
"""

import dataclasses

from quickstart import SWEEP as QUICKSTART

SWEEP = dataclasses.replace(
    QUICKSTART, experiment="quickstart_again", base=QUICKSTART.base.replace(seed=1000, data_seed=1)
)
