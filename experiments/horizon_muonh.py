"""Does the best angle of MuonH's steps fall with the length of training, as tokens^-0.32?

mup-tpu sweep experiments/horizon_muonh.py --until-settled

2603.28743 (HyperP) predicts that exponent for MuonH. All else as in horizon_adamh.py.
"""

import dataclasses

from horizon_adamh import SWEEP as ADAMH

SWEEP = dataclasses.replace(ADAMH, experiment="horizon_muonh", base=ADAMH.base.replace(optimizer="muonh"))
