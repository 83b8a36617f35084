"""Makes a pack and hands a stretch of its training over to XLA: python -m mup_tpu.tpu_compiler.program

`pack.py` runs it with PJRT_DEVICE=CPU and XLA's option to dump programs, and ends it once the program is
there: the CPU need not compile or run it. The pack comes as JSON on standard input.
"""

import json
import sys

import torch

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack


def main() -> None:
    """Train one stretch on tokens that are all 0."""
    asked = json.load(sys.stdin)
    trials = [Trial().replace(**fields) for fields in asked["trials"]]
    data = trials[0].data
    device = get_device("xla").arrange(len(trials), data.batch_size, asked["mesh"])
    pack = Pack(trials, asked["vocab_size"], device, forms=asked["forms"])
    tokens_SBT1 = torch.zeros(asked["steps"], data.batch_size, data.sequence_length + 1, dtype=torch.int64)
    pack.train(device.place_stack(tokens_SBT1, "data", len(tokens_SBT1)), len(tokens_SBT1))


if __name__ == "__main__":
    main()
