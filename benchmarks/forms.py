"""What each form of a network gains on a CPU: steps with another form, and with the package's own choice.

    python benchmarks/forms.py --out benchmarks/forms.csv

Both packs train in turns of a step, in one process of one thread. Times are the thread's CPU times, on which
other work of the machine has less influence.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro
from rich.console import Console

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack

VOCABULARY, TOKENS = 256, 2048

# Change, architecture, width, sequence length, members and their execution
CASES: tuple[tuple[dict[str, Any], str, int, int, int, Any], ...] = (
    ({"attention": "matmul"}, "gpt2", 64, 128, 1, "loop"),
    ({"attention": "matmul"}, "gpt2", 256, 128, 1, "loop"),
    ({"attention": "matmul"}, "gpt2", 128, 512, 1, "loop"),
    ({"gathered": False}, "moe", 128, 128, 1, "loop"),
    ({"vmapped": True}, "llama", 64, 128, 1, "loop"),
    ({"vmapped": True}, "llama", 256, 128, 1, "loop"),
    ({"vmapped": False}, "llama", 64, 128, 4, "vmap"),
    ({"vmapped": False}, "llama", 256, 128, 4, "vmap"),
)


def main(steps: int = 6, out: Path | None = None) -> None:
    """Measure every case.

    Args:
        steps: steps of each pack.
        out: table to write, CSV.
    """
    torch.set_num_threads(1)
    rows = []
    for change, architecture, width, length, members, execution in CASES:
        trial = Trial().replace(
            architecture=architecture, width=width, depth=2, sequence_length=length,
            batch_size=TOKENS // length // members,
        )  # fmt: skip
        trials = [trial.replace(seed=seed) for seed in range(members)]
        packs = [
            Pack(trials, VOCABULARY, get_device("cpu"), execution, forms=forms) for forms in ({}, change)
        ]
        tokens_BT1 = torch.randint(0, VOCABULARY, (trial.data.batch_size, length + 1))
        seconds: tuple[list[float], list[float]] = ([], [])
        for pack in packs:
            pack.step(tokens_BT1)
        for i in range(2 * steps):
            which = (i + i // 2) % 2  # A B B A
            began = time.thread_time()
            packs[which].step(tokens_BT1)
            seconds[which].append(time.thread_time() - began)
        own, other = map(statistics.median, seconds)
        case = {"architecture": architecture, "width": width, "sequence_length": length}
        case |= {"members": members, "execution": execution, "change": str(change)}
        rows.append({**case, "step_ms": round(1e3 * own, 1), "changed": round(other / own, 3)})
        Console().print(rows[-1])
    if out is not None:
        pd.DataFrame(rows).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
