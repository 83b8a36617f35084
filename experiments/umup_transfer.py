"""Does u-μP's best learning rate stay as a GPT-2 widens? Embeddings learn 1/√m as fast there.

mup-tpu sweep experiments/umup_transfer.py
mup-tpu sweep experiments/umup_transfer.py --compare mup,umup     μP beside it, as in quickstart

All else as in quickstart.py, whose μP is the comparison; at the base width the two are one.
"""

import dataclasses

from quickstart import SWEEP as QUICK

SWEEP = dataclasses.replace(
    QUICK,
    experiment="umup_transfer",
    compare={"parametrization": ("umup",)},
    scale={"width": (64, 128, 256)},
    tune={"learning_rate": tuple(2.0**e for e in range(-8, -2))},
)
