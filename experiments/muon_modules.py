"""Why do Muon's best learning rates scatter over widths in μP? A factor on the rate of one part at a time.

mup-tpu sweep experiments/muon_modules.py --until-settled

Setting of muon_transfer.py at a rate of 2^-4.5, between its best ones of widths 64 and 256. Muon trains
hidden matrices; AdamW trains embeddings, which are the readout too, norms and biases.
"""

import dataclasses

from muon_transfer import SWEEP as MUON

from mup_tpu.config import Axis

SWEEP = dataclasses.replace(
    MUON,
    experiment="muon_modules",
    base=MUON.base.replace(learning_rate=2.0**-4.5),
    widths=(64, 128, 256),
    learning_rates=None,
    tune=Axis("module_lr_factor", tuple(2.0**e for e in range(-4, 4))),
    compare=Axis("module", ("embedding", "hidden", "norm", "all")),
)
