"""The coordinate check along depth: output and update of each block in SP, μP and CompleteP.

python experiments/coord_check_depth.py                  depths 2 to 64
"""

from mup_tpu.cli.check import check_trials
from mup_tpu.config import Trial

# Width 64 is twice the base width, so that SP and μP differ.
TRIALS = [
    Trial().replace(
        width=64,
        head_size=32,
        base_width=32,
        base_depth=2,
        sequence_length=128,
        batch_size=4,
        learning_rate=2.0**-8,
    )
]
DEPTHS = {"depth": (2, 4, 8, 16, 32, 64)}
RULES = ("sp", "mup", "completep_half", "completep")

if __name__ == "__main__":
    check_trials("results/coord_check_depth", TRIALS, DEPTHS, RULES, steps=10)
