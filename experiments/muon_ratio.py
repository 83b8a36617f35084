"""Does Muon's best learning rate stay in μP, if AdamW trains its share at a sixteenth of the rate?

mup-tpu sweep experiments/muon_ratio.py --until-settled

muon_modules.py finds that embeddings, norms and biases learn too fast at Muon's own rate. All else as in
muon_transfer.py.
"""

import dataclasses

from muon_transfer import SWEEP as MUON

SWEEP = dataclasses.replace(
    MUON,
    experiment="muon_ratio",
    base=MUON.base.replace(adamw_lr_ratio=2.0**-4),
    scale={"width": (64, 128, 256)},
    compare={"parametrization": ("mup",)},
)
