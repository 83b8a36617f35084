"""Why does SP end better than μP at width 512 in nanogpt_mup? The same μP runs from weights twice as large.

mup-tpu sweep experiments/nanogpt_mup_init.py

σ = 0.02 is small for such widths; SP leaves it, and μP divides it by √2.
"""

import dataclasses

from nanogpt_mup import SWEEP as PUBLISHED

SWEEP = dataclasses.replace(
    PUBLISHED,
    experiment="nanogpt_mup_init",
    base=PUBLISHED.base.replace(init_std=0.04),
    compare={"parametrization": ("mup",)},
    scale={"width": (512,)},
    tune={"learning_rate": tuple(2.0**e for e in range(-12, -7))},
    num_seeds=1,
)
