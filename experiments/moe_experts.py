"""Does the best learning rate of a mixture of few experts stay the best of one of many, in μP?

mup-tpu sweep experiments/moe_experts.py --until-settled

A token goes to 2 experts of 4 to 32: the more there are, the fewer tokens each one learns from. All else as
in moe_transfer.py, at width 64.
"""

import dataclasses

from moe_transfer import SWEEP as WIDTHS

SWEEP = dataclasses.replace(
    WIDTHS,
    experiment="moe_experts",
    base=WIDTHS.base.replace(width=64),
    scale={"num_experts": (4, 8, 16, 32)},
    compare={"parametrization": ("mup",)},
)
