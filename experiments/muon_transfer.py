"""Does the best learning rate of Muon stay the best as a GPT-2 widens, in SP and in μP?

python experiments/muon_transfer.py --until-settled
python experiments/muon_transfer.py --compare muon_scale=spectral,match_rms_adamw    both scales, in μP

With updates as large as AdamW's, which μP scales by 1/√m. Embeddings, norms and biases are AdamW's at the
same learning rate. Init, warm-up and multipliers are those of lr_transfer.py, which were tuned for AdamW.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.cli import run_experiment
from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="muon_transfer",
    base=TUNED.base.replace(optimizer="muon", muon_scale="match_rms_adamw", steps=300),
    widths=(32, 64, 128, 256),
    learning_rates=tuple(2.0**e for e in range(-10, -2)),
    num_seeds=2,
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
