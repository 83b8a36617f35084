"""lr_transfer with init and multipliers as they come (σ = 0.06, all α = 1): what not tuning them costs.

python experiments/lr_transfer_untuned.py --width 128
"""

from mup_tpu.cli import run_experiment
from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="lr_transfer_untuned",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.06,
        sequence_length=128,
        batch_size=16,
        steps=500,
        warmup=0.2,
        eval_batches=32,
    ),
    widths=(32, 64, 128, 256),
    learning_rates=tuple(2.0 ** (e / 2) for e in range(-21, -8)),
    num_seeds=3,
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
