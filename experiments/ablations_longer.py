"""Which of the mistakes of ablations.py show in a longer training, of those that a short one leaves open?

python experiments/ablations_longer.py --until-settled

Heads grow along the width: where they do not, attention has nothing to scale. Else as ablations.py, for
four times as many steps.
"""

import dataclasses

from quickstart import SWEEP as QUICKSTART

from mup_tpu.cli import run_experiment

SWEEP = dataclasses.replace(
    QUICKSTART,
    experiment="ablations_longer",
    base=QUICKSTART.base.replace(growing_dimension="head_size", steps=400),
    parametrizations=("mup", "mup_sqrt_attention", "mup_unscaled_readout", "mup_hidden_embedding"),
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
