"""Does training in bf16 move the best learning rate?

PJRT_DEVICE=CPU python experiments/bf16_vs_float32.py --device xla

The sweep below once in float32 and once in bf16 (matrix products in bfloat16; weights, optimizer state,
softmax and loss in float32), on the same batches from the same weights. XLA's CPU client multiplies as a TPU
does, by float32 sums of bfloat16 products, and needs no bfloat16 instructions of the CPU.
"""

from mup_tpu.cli import run_experiment
from mup_tpu.config import Axis, Sweep, Trial

SWEEP = Sweep(
    experiment="bf16_vs_float32",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.14,
        alpha_in=3.0,
        alpha_out=0.9,
        alpha_attn=0.4,
        sequence_length=128,
        batch_size=16,
        steps=150,
        warmup=0.25,
        eval_batches=32,
    ),
    compare=Axis("precision", ("float32", "bf16")),
    widths=(64,),
    learning_rates=tuple(2.0**e for e in range(-10, -3)),
    num_seeds=2,
)

if __name__ == "__main__":
    run_experiment(SWEEP, __doc__)
