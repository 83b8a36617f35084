"""Does μP gain over SP by the learning rate of embeddings? Two more rules on the grid of quickstart.py.

mup-tpu sweep experiments/embedding_rate.py --until-settled

"sp_embedding" is SP with embeddings that learn m times faster; "completedp", along the width, is μP with ε/m.
"""

import dataclasses

from quickstart import SWEEP as QUICKSTART

SWEEP = dataclasses.replace(
    QUICKSTART, experiment="embedding_rate", compare={"parametrization": ("sp_embedding", "completedp")}
)
