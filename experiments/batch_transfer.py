"""At equal tokens, how does the best learning rate follow the batch size, and which rule keeps it in place?

mup-tpu sweep experiments/batch_transfer.py --until-settled

The base has batch size 16. Rules for the learning rate alone shift the axis, so that "none" predicts them.
Held-out text is the same for all, and nothing is clipped, since the norm of a gradient follows its batch.
"""

from lr_transfer import SWEEP as TUNED

from mup_tpu.config import Sweep

SEQUENCES = 4096

SWEEP = Sweep(
    experiment="batch_transfer",
    base=TUNED.base.replace(
        width=64,
        sequence_length=64,
        base_batch_size=16,
        base_steps=SEQUENCES // 16,
        warmup=0.1,
        weight_decay=0.1,
        grad_clip=0.0,
    ),
    scale=[
        {"batch_size": batch, "steps": SEQUENCES // batch, "eval_batches": 256 // batch}
        for batch in (4, 8, 16, 32, 64)
    ],
    measured_by="batch_size",
    compare={"batch_rule": ("none", "lr_sqrt", "lr_linear", "completedp")},
    tune={"learning_rate": tuple(2.0**e for e in range(-10, -3))},
    num_seeds=2,
)
