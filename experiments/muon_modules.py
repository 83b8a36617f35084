"""Why do Muon's best learning rates scatter over widths in μP? A factor on the rate of one part at a time.

mup-tpu sweep experiments/muon_modules.py --until-settled

Setting of muon_transfer.py at a rate of 2^-4.5, between its best ones of widths 64 and 256. Muon trains
hidden matrices; AdamW trains embeddings, which are the readout too, norms and biases.
"""

import dataclasses

from muon_transfer import SWEEP as MUON

SWEEP = dataclasses.replace(
    MUON,
    experiment="muon_modules",
    base=MUON.base.replace(learning_rate=2.0**-4.5),
    scale={"width": (64, 128, 256)},
    tune={"module_lr_factor": tuple(2.0**e for e in range(-4, 4))},
    compare={"module": ("embedding", "hidden", "norm", "all")},
)
