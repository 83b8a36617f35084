"""Does the best angle of AdamH's steps stay the best as a GPT-2 widens, in SP and in μP?

mup-tpu sweep experiments/hyperball_transfer.py
mup-tpu sweep experiments/hyperball_transfer.py --compare optimizer=adamh,muonh     MuonH beside it, in μP

SP has no factor, as the authors of Hyperball; μP scales AdamH's learning rate by 1/√m. AdamW trains
embeddings, norms and biases at a quarter of the rate. All else as in quickstart.py, with init and multipliers
of AdamW.
"""

import dataclasses

from quickstart import SWEEP as QUICK

SWEEP = dataclasses.replace(
    QUICK,
    experiment="hyperball_transfer",
    base=QUICK.base.replace(optimizer="adamh", adamw_lr_ratio=2.0**-2),
    scale={"width": (64, 128, 256)},
    tune={"learning_rate": tuple(2.0**e for e in range(-7, -1))},
)
