"""Is the answer of horizon_transfer.py the same from 125 to 500 steps, where each token is worth more?

mup-tpu sweep experiments/horizon_transfer_short.py --until-settled
"""

import dataclasses

from horizon_transfer import SWEEP as LONGER

SWEEP = dataclasses.replace(
    LONGER, experiment="horizon_transfer_short", scale={"steps": (125, 180, 250, 350, 500)}
)
