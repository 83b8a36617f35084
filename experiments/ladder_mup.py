"""Width, depth, batch and steps grow together: does the best learning rate stay in μP?

mup-tpu sweep experiments/ladder_mup.py --until-settled

Rungs as in ladder_completedp.py, with a rule for the width alone.
"""

import dataclasses

from ladder_completedp import SWEEP as COMPLETEDP

SWEEP = dataclasses.replace(
    COMPLETEDP,
    experiment="ladder_mup",
    base=COMPLETEDP.base.replace(batch_rule="none", token_rule="none"),
    compare={"parametrization": ("mup",)},
)
