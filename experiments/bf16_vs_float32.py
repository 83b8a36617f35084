"""Does training in bf16 move the best learning rate?

PJRT_DEVICE=CPU mup-tpu sweep experiments/bf16_vs_float32.py --device xla

A shorter lr_transfer.py, once in float32 and once in bf16 (matrix products in bfloat16; weights, optimizer
state, softmax and loss in float32), on the same batches from the same weights. XLA's CPU client multiplies as
a TPU does, by float32 sums of bfloat16 products, and needs no bfloat16 instructions of the CPU.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SWEEP = Sweep(
    experiment="bf16_vs_float32",
    base=TUNED.base.replace(steps=150),
    compare={"precision": ("float32", "bf16")},
    scale={"width": (64,)},
    tune={"learning_rate": tuple(2.0**e for e in range(-10, -3))},
    num_seeds=2,
)
