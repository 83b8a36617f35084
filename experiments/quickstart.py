"""The main job in minutes: GPT-2 of three widths in SP and in μP, swept over learning rates on real text.

Trials see 51,200 bytes of text each, so that two CPU cores finish in about four minutes: enough to see where
the optimum lies at each width, not to train a good model. experiments/lr_transfer.py is the longer form.
"""

from mup_tpu.cli import run_experiment
from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="quickstart",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.06,
        sequence_length=64,
        batch_size=8,
        steps=100,
        warmup=0.3,
        eval_batches=16,
    ),
    widths=(64, 128, 256),
    learning_rates=tuple(2.0**e for e in range(-11, -4)),
    num_seeds=2,
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
