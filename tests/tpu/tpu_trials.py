"""Packs of test_torchtpu.py, for it and for the process that trains by TorchTPU."""

from mup_tpu.config import Trial

STEPS = 50


def trials(corpus: str, architecture: str, precision: str) -> list[Trial]:
    """Three members: SP and μP, with warm-up, decay, weight decay and clipping."""
    base = Trial().replace(
        corpus=corpus, architecture=architecture, width=32, base_width=16, head_size=16, depth=1,
        batch_size=4, sequence_length=16, steps=STEPS, warmup=0.2, schedule="linear", init_std=0.08,
        eval_batches=2, precision=precision, weight_decay=0.1, grad_clip=0.5,
    )  # fmt: skip
    return [
        base.replace(parametrization=rule, learning_rate=rate)
        for rule, rate in (("sp", 0.003), ("mup", 0.003), ("mup", 0.01))
    ]
