"""A CPU core's training step in bf16 against float32.

    python benchmarks/bf16_step.py --out benchmarks/bf16.csv

One trial of each precision, stepped in turn in one process by one thread, timed by the clock of the thread:
what other processes take of the core is not counted. 2 layers, batches of 16 × 128 tokens, heads of 32.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pandas as pd
import torch
import tyro
from rich.console import Console

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack

MODELS = (("gpt2", "adamw"), ("llama", "adamw"), ("gpt2", "muon"))


def measure(architecture: str, optimizer: str, width: int, steps: int) -> dict[str, object]:
    """Milliseconds of a step in either precision, the median and the least, with their ratios."""
    trial = Trial().replace(
        architecture=architecture, optimizer=optimizer, width=width, head_size=32,
        sequence_length=128, batch_size=16,
    )  # fmt: skip
    packs = {p: Pack([trial.replace(precision=p)], 65, get_device("cpu")) for p in ("float32", "bf16")}
    tokens_BT1 = torch.randint(0, 65, (16, 129))
    times: dict[str, list[float]] = {precision: [] for precision in packs}
    for _ in range(steps + 2):
        for precision, pack in packs.items():
            began = time.thread_time()
            pack.step(tokens_BT1)
            times[precision].append(1e3 * (time.thread_time() - began))
    found: dict[str, object] = {"architecture": architecture, "optimizer": optimizer, "width": width}
    for name, of in (("median", median), ("least", min)):
        exact, rough = (of(times[p][2:]) for p in ("float32", "bf16"))  # the first steps fault memory in
        found |= {f"float32_{name}_ms": exact, f"bf16_{name}_ms": rough, f"{name}_ratio": exact / rough}
    return found


def main(widths: tuple[int, ...] = (64, 128, 256), steps: int = 30, out: Path | None = None) -> None:
    """Measure every model at every width.

    Args:
        widths: Model widths.
        steps: Steps in each precision.
        out: CSV file for the table.
    """
    torch.set_num_threads(1)
    rows = []
    for width in widths:
        for model in MODELS:
            rows.append(measure(*model, width, steps))
            Console().print(rows[-1])
            if out is not None:
                pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
