"""A CPU core's training step with attention in blocks of rows against torch's fused kernel.

    python benchmarks/attention.py --out benchmarks/attention.csv

One trial of each kind, stepped in turn in one process by one thread. GPT-2 of 2 layers, heads of 32.
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


def measure(width: int, sequence_length: int, batch_size: int, seconds: float) -> dict[str, float]:
    """Median milliseconds of a step in either form, and the median of their ratios step by step."""
    trial = Trial().replace(width=width, head_size=32, sequence_length=sequence_length, batch_size=batch_size)
    packs = {}
    for form in ("fused", "blocks"):
        packs[form] = Pack([trial], 256, get_device("cpu"), forms={"attention": form})
    tokens_BT1 = torch.randint(0, 256, (batch_size, sequence_length + 1))
    times: dict[str, list[float]] = {form: [] for form in packs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["blocks"]) < 7:
        for form, pack in packs.items():
            began = time.perf_counter()
            pack.step(tokens_BT1)
            times[form].append(time.perf_counter() - began)
    fused, blocks = (times[form][2:] for form in ("fused", "blocks"))  # the first steps fault memory in
    return {
        "width": width,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "fused_ms": 1e3 * median(fused),
        "blocks_ms": 1e3 * median(blocks),
        "ratio": median(b / f for b, f in zip(blocks, fused, strict=True)),
    }


def main(seconds: float = 15.0, out: Path | None = None) -> None:
    """Measure every shape.

    Args:
        seconds: About how long each is measured.
        out: CSV file for the table.
    """
    torch.set_num_threads(1)
    rows = []
    for shape in ((64, 128, 16), (128, 128, 16), (256, 128, 16), (64, 512, 16), (128, 512, 16),
                  (128, 1024, 4), (128, 1024, 16), (64, 2048, 4)):  # fmt: skip
        rows.append(measure(*shape, seconds))
        Console().print({k: round(v, 3) for k, v in rows[-1].items()}, highlight=False)
        if out is not None:
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
