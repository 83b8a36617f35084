"""The coordinate check of AdamW and SGD, with tied and untied readout: no layer may grow with width in μP.

python experiments/coord_check.py                    widths 64 to 512
"""

from mup_tpu.cli.check import check_trials
from mup_tpu.config import Trial

BASE = Trial().replace(depth=2, head_size=32, base_width=64, sequence_length=128, batch_size=4)
TRIALS = [
    update_rule.replace(tied=tied)
    for update_rule in (
        BASE.replace(optimizer="adamw", learning_rate=2.0**-8),
        # Without clipping: the norm of gradients changes with width, and SGD's updates with it.
        BASE.replace(optimizer="sgd", learning_rate=2.0**-3, grad_clip=0.0),
    )
    for tied in (True, False)
]

WIDTHS = {"width": (64, 128, 256, 512)}

if __name__ == "__main__":
    check_trials("results/coord_check", TRIALS, WIDTHS)
