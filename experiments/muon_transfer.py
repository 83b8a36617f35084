"""Does the best learning rate of Muon stay the best as a GPT-2 widens, in SP and in μP?

python experiments/muon_transfer.py --until-settled
python experiments/muon_transfer.py --compare muon_scale=spectral,match_rms_adamw    both scales, in μP

With updates as large as AdamW's, which μP scales by 1/√m. Embeddings, norms and biases are AdamW's at the
same learning rate. All else is as in quickstart.py, whose init and multipliers were tuned for AdamW.
"""

import dataclasses

from quickstart import SWEEP as QUICK

from mup_tpu.cli import run_experiment

SWEEP = dataclasses.replace(
    QUICK,
    experiment="muon_transfer",
    base=QUICK.base.replace(optimizer="muon", muon_scale="match_rms_adamw"),
    widths=(64, 96, 128, 192, 256, 384),
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
