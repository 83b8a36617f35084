"""Does the best weight decay of a narrow GPT-2 stay the best of a wide one, and under which rule?

python experiments/decay_transfer.py

In μP, at μP's best learning rate. At one batch size and length a constant timescale is the rule "linear". At
width 64 one seed gave 1.475, 1.465, 1.473, 1.820 nat at decays of 0, 1/16, 1/4, 1.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.cli import run_experiment
from mup_tpu.config import Axis, Sweep

SWEEP = Sweep(
    experiment="decay_transfer",
    base=TUNED.base.replace(
        batch_size=8,
        steps=1500,
        warmup=0.1,
        learning_rate=2.0**-7,
    ),
    widths=(32, 64, 128, 256),
    compare=Axis("decay_rule", ("linear", "sqrt", "constant")),
    tune=Axis("weight_decay", (0.0, *(2.0**e for e in range(-7, 1)))),
    num_seeds=2,
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
