"""How does μP's loss fall with width at one transferred learning rate, and does a law fitted on small widths
predict the largest?

python experiments/scaling_law.py       then: notebooks/03_scaling_law.ipynb
python experiments/scaling_law.py --preset h200     widths to 2048 in bf16
"""

import dataclasses

from mup_tpu.cli import run_experiment
from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="scaling_law",
    base=Trial().replace(
        depth=2,
        head_size=16,
        base_width=64,
        init_std=0.06,
        sequence_length=128,
        batch_size=16,
        steps=500,
        warmup=0.2,
        eval_batches=64,
    ),
    parametrizations=("mup",),
    widths=(32, 48, 64, 96, 128, 192, 256),
    learning_rates=(2.0**-6.5,),
)

H200 = dataclasses.replace(
    SWEEP,
    experiment="scaling_law_h200",
    base=SWEEP.base.replace(sequence_length=512, batch_size=32, steps=2000, precision="bf16"),
    widths=(96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__, H200)
