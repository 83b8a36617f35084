"""Two verdicts within minutes of two cores: the first sweep with half the batch, to width 256.

mup-tpu sweep experiments/first_verdicts.py --until-settled

What scripts/quickstart runs. Each trial sees 51,200 bytes of text; held-out losses are of as many bytes as in
first_sweep.py.
"""

from dataclasses import replace

from first_sweep import SWEEP as FIRST

SWEEP = replace(
    FIRST,
    experiment="first_verdicts",
    base=FIRST.base.replace(batch_size=4, eval_batches=32),
    scale={"width": (64, 128, 192, 256)},
)
