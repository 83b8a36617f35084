"""Mistakes of ablations.py that a short training leaves open: does a longer one show them?

mup-tpu sweep experiments/ablations_longer.py --until-settled

Four times the steps of ablations.py. The head size grows with the width, so that attention has a factor.
"""

import dataclasses

from quickstart import SWEEP as QUICKSTART

SWEEP = dataclasses.replace(
    QUICKSTART,
    experiment="ablations_longer",
    base=QUICKSTART.base.replace(growing_dimension="head_size", steps=400),
    compare={
        "parametrization": ("mup", "mup_sqrt_attention", "mup_unscaled_readout", "mup_hidden_embedding")
    },
)
