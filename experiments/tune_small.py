"""Search for learning rate, warm-up, init and multipliers of a narrow GPT-2 in μP, for zero-shot transfer.

mup-tpu search experiments/tune_small.py              searches; after a stop, it goes on
mup-tpu transfer results/tune_small --at width=256
"""

from mup_tpu.config import Trial
from mup_tpu.config.sweep import Domain, Search

SEARCH = Search(
    experiment="tune_small",
    base=Trial().replace(
        depth=2,
        width=64,
        base_width=64,
        head_size=32,
        sequence_length=128,
        batch_size=16,
        steps=500,
        eval_batches=32,
    ),
    space={
        "learning_rate": Domain("loguniform", 2.0**-10, 2.0**-4),
        "warmup": Domain("uniform", 0.02, 0.4),
        "init_std": Domain("loguniform", 0.01, 0.2),
        "alpha_in": Domain("loguniform", 0.25, 16.0),
        "alpha_out": Domain("loguniform", 0.25, 16.0),
        "alpha_attn": Domain("loguniform", 0.25, 4.0),
    },
)
