"""A step with a large vocabulary: logits some tokens at a time against all at once.

    python benchmarks/vocabulary.py --out benchmarks/vocabulary.csv

GPT-2 of one layer on one CPU thread; each way in processes of its own, in turn. Time is the thread's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pandas as pd
import tyro
from rich.console import Console

STEPS = """
import json, resource, sys, time, torch
from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.models import cross_entropy
from mup_tpu.training import members
from mup_tpu.training.pack import Pack

at_once, width, vocabulary = map(int, sys.argv[1:])
torch.set_num_threads(1)
if at_once:
    cross_entropy.AT_ONCE = members.AT_ONCE = 2**60
trial = Trial().replace(width=width, head_size=32, depth=1, batch_size=16, sequence_length=128)
pack = Pack([trial], vocabulary, get_device("cpu"))
tokens = torch.randint(vocabulary, (16, 129), generator=torch.Generator().manual_seed(0))
before, times, losses = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], []
for _ in range(4):
    began = time.thread_time()
    losses.append(float(pack.step(tokens)))
    times.append(time.thread_time() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([min(times[1:]), peak / 1024, losses[-1]]))
"""


def main(out: Path, width: int = 128, vocabularies: tuple[int, ...] = (16384, 50304), pairs: int = 3) -> None:
    """Measure and write the table."""
    rows = []
    for vocabulary in vocabularies:
        found: dict[int, list[list[float]]] = {0: [], 1: []}
        for i in range(2 * pairs):
            command = [sys.executable, "-c", STEPS, str(i % 2), str(width), str(vocabulary)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[i % 2].append(json.loads(done.stdout))
        ratios = [parts[0] / whole[0] for parts, whole in zip(found[0], found[1], strict=True)]
        (s, mib, loss), (s_whole, mib_whole, loss_whole) = (
            [median(column) for column in zip(*found[way], strict=True)] for way in (0, 1)
        )
        rows.append(
            {
                "width": width, "vocabulary": vocabulary, "parts_s": s, "whole_s": s_whole,
                "ratio": median(ratios), "parts_mib": mib, "whole_mib": mib_whole,
                "difference_nat": abs(loss - loss_whole),
            }
        )  # fmt: skip
        Console().print(rows[-1])
    pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
