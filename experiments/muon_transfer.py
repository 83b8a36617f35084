"""Does the best learning rate of Muon stay the best as a GPT-2 widens, in SP and in μP?

mup-tpu sweep experiments/muon_transfer.py --until-settled
mup-tpu sweep experiments/muon_transfer.py --compare muon_scale=spectral,match_rms_adamw    both scales, in μP

Updates are as large as AdamW's, and μP scales them by 1/√m. AdamW trains embeddings, norms and biases at the
same learning rate. All else as in quickstart.py, with init and multipliers of AdamW.
"""

import dataclasses

from quickstart import SWEEP as QUICK

SWEEP = dataclasses.replace(
    QUICK,
    experiment="muon_transfer",
    base=QUICK.base.replace(optimizer="muon", muon_scale="match_rms_adamw"),
    scale={"width": (64, 96, 128, 192, 256, 384)},
)
