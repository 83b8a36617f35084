"""Does the best angle of MuonH's steps stay the best as a GPT-2 widens, in SP and in μP?

mup-tpu sweep experiments/muonh_transfer.py --until-settled

2603.28743 (HyperP) trains all widths at one angle. Neither rule has a factor on it: they differ in the norms
at init that the steps turn. All else as in hyperball_transfer.py.
"""

import dataclasses

from hyperball_transfer import SWEEP as ADAMH

SWEEP = dataclasses.replace(
    ADAMH, experiment="muonh_transfer", base=ADAMH.base.replace(optimizer="muonh"), num_seeds=1
)
