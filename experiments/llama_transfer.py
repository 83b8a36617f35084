"""Does the best learning rate of a narrow Llama stay the best of a wide one, in SP and in μP?

mup-tpu sweep experiments/llama_transfer.py --until-settled

RMS norms, rotary positions, gated MLPs; all else as in quickstart.py, with init and multipliers of GPT-2.
"""

import dataclasses

from quickstart import SWEEP as QUICK

SWEEP = dataclasses.replace(QUICK, experiment="llama_transfer", base=QUICK.base.replace(architecture="llama"))
