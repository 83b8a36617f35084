"""Why does SP end better than μP at width 512 in nanogpt_mup? The same μP runs from weights twice as large.

python experiments/nanogpt_mup_init.py            runs what is missing

Its σ = 0.02 is small for such widths, and SP leaves it as it is where μP divides it by √2.
"""

from mup_tpu.cli import run_experiment
from mup_tpu.config import Sweep, Trial

SWEEP = Sweep(
    experiment="nanogpt_mup_init",
    base=Trial().replace(
        depth=2,
        head_size=64,
        base_width=256,
        init_std=0.04,
        sequence_length=256,
        batch_size=8,
        steps=122,
        schedule="constant",
        warmup=0.0,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        grad_clip=1.0,
        loss_kind="train_mean",
        eval_batches=8,
    ),
    parametrizations=("mup",),
    widths=(512,),
    learning_rates=tuple(2.0**e for e in range(-12, -7)),
    num_seeds=1,
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
