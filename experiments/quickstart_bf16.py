"""The quickstart in bf16: do verdicts and best learning rates stay what they are in float32?

Runs are bought until both verdicts are settled, as in quickstart.py, whose stored rows are in float32.
"""

from dataclasses import replace

from quickstart import SWEEP as FLOAT32

SWEEP = replace(FLOAT32, experiment="quickstart_bf16", base=FLOAT32.base.replace(precision="bf16"))
