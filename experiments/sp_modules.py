"""Which part of a GPT-2 carries SP's drift with width? A factor on the learning rate of one part at a time.

mup-tpu sweep experiments/sp_modules.py --until-settled
mup-tpu sweep experiments/sp_modules.py --compare module=hidden,all    two of them

Setting and SP of first_sweep.py, at its best rate of the base width, with a readout of its own. A module
whose best factor falls with width learns too fast there; the others, at factor 1, keep SP's rate.
"""

import dataclasses

from first_sweep import SWEEP as FIRST

SWEEP = dataclasses.replace(
    FIRST,
    experiment="sp_modules",
    base=FIRST.base.replace(parametrization="sp", tied=False, learning_rate=2.0**-8),
    scale={"width": (64, 128, 256)},
    tune={"module_lr_factor": tuple(2.0**e for e in range(-4, 4))},
    compare={"module": ("embedding", "hidden", "readout", "norm", "all")},
)
