"""Does the best learning rate of a narrow mixture of experts stay the best of a wide one, in SP and in μP?

mup-tpu sweep experiments/moe_transfer.py --until-settled

Each layer has 8 experts, a token goes to 2, each as wide as the model. All else as in quickstart.py, with
init and multipliers of GPT-2.
"""

import dataclasses

from quickstart import SWEEP as QUICK

SWEEP = dataclasses.replace(
    QUICK,
    experiment="moe_transfer",
    base=QUICK.base.replace(architecture="moe", head_size=16),
    scale={"width": (32, 64, 128, 256)},
)
