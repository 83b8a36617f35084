"""Run by test_torchtpu.py in an environment with torch_tpu: a pack on XLA's CPU plugin. Prints JSON.

ARCHITECTURE PRECISION CORPUS CHECKPOINTS
"""

import json
import sys
from pathlib import Path

import tpu_on_cpu  # noqa: F401  (before torch: it gives torch a device "tpu")
from tpu_trials import STEPS, trials

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.tpu import torchtpu
from mup_tpu.training.loop import PackRun


def main(architecture: str, precision: str, corpus: str, checkpoints: str) -> None:
    members = trials(corpus, architecture, precision)
    dataset = data.load(members[0].data, progress=False)
    half = STEPS // 2
    options = RunOptions(device="tpu", log_every=1, eval_every=half, checkpoint_every=half)
    torchtpu.dump_programs(f"{checkpoints}/programs")
    whole = PackRun(members, dataset, options, Path(checkpoints))
    whole.finish()
    compiled = torchtpu.report()
    resumed = PackRun(members, dataset, options, Path(checkpoints))
    begun = resumed.pack.steps_done
    resumed.finish()
    losses = {"losses": whole.records.losses_SK.tolist(), "resumed": resumed.records.losses_SK.tolist()}
    print(json.dumps(losses | {"device": whole.device.name, "counts": compiled, "begun": begun}))


if __name__ == "__main__":
    main(*sys.argv[1:])
