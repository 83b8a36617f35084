"""The main job in minutes: GPT-2 of four widths in SP and in μP, at several learning rates, on real text.

python experiments/gpt2_quickstart.py --until-settled     buys runs until both verdicts are settled
python experiments/gpt2_quickstart.py                     runs the whole grid

SP is GPT-2 as people train it: every matrix starts at σ = 0.02, the last layers of the residual branches at
0.02/√(2·layers), and all widths have one learning rate, warmed up, with weight decay 0.1 and a cosine. At width
64 μP is the same model. Each trial sees 51,200 bytes: enough for wider to be better at its optimum, not to train
a good model.
"""

from dataclasses import replace

from mup_tpu.cli.experiments import run_experiment
from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="gpt2_quickstart",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.02,
        weight_decay=0.1,
        sequence_length=64,
        batch_size=8,
        steps=100,
        warmup=0.2,
        eval_batches=16,
    ),
    widths=(32, 64, 128, 256),
    learning_rates=tuple(2.0**e for e in range(-12, -4)),
    num_seeds=2,
)

if __name__ == "__main__":  # stored rows stay in float32; a new folder takes the device's precision
    run_experiment(replace(SWEEP, base=SWEEP.base.replace(precision="auto")), __doc__)
