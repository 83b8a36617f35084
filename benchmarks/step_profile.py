"""Shares of a training step's time on a CPU core, by torch's profiler.

    python benchmarks/step_profile.py --out benchmarks/step_profile.csv

One member, one thread, float32. GPT-2 of 2 layers, heads of 32, batches of 16 × 128 bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import torch
import tyro
from rich.console import Console
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack

_PARTS = {
    "attention": ("scaled_dot_product", "ScaledDotProduct"),
    "GELU": ("gelu", "Gelu"),
    "loss": ("softmax", "nll_loss", "cross_entropy", "NllLoss"),
    "norms": ("layer_norm", "LayerNorm"),
    "AdamW": ("adamw",),
}
"""Parts of a step, and how the operations are called in which they happen."""


def measure(width: int, rounds: int, steps: int) -> pd.DataFrame:
    """A row for each part of the step, the largest first.

    Columns: width, part, events (operations a step), ms (their own time a step), share of the step, and by
    how much the profiler lengthens it, measured in turn without it. It adds a few microseconds to every
    event, and so overstates parts of many small ones.
    """
    trial = Trial().replace(width=width, head_size=32, batch_size=16, sequence_length=128)
    pack = Pack([trial], 256, get_device("cpu"))
    tokens_BT1 = torch.randint(0, 256, (16, 129))

    def timed() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            pack.step(tokens_BT1)
        return time.perf_counter() - began

    timed()
    plain, profiled, parts = [], [], []
    for _ in range(rounds):
        plain.append(timed())
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            profiled.append(timed())
        rows = [{"part": _part(e), "events": 1, "us": e.self_cpu_time_total} for e in profiler.events()]
        parts.append(pd.DataFrame(rows).groupby("part").sum())
    count = rounds * steps
    table = pd.concat(parts).groupby("part").sum()
    table = pd.DataFrame({"events": table["events"] / count, "ms": table["us"] / 1e3 / count})
    plain_ms, step_ms = (1e3 * sum(times) / count for times in (plain, profiled))
    table.loc["Python between operations"] = [0.0, step_ms - table["ms"].sum()]
    table = table.sort_values("ms", ascending=False).reset_index(names="part")
    return table.assign(width=width, share=table["ms"] / step_ms, profiler_adds=step_ms / plain_ms - 1)


def _part(event: FunctionEvent) -> str:
    names, above = [], event
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    for part, signs in _PARTS.items():
        if any(sign in name for sign in signs for name in names):
            return part
    return "matrix products" if event.name in ("aten::mm", "aten::addmm", "aten::bmm") else "everything else"


def main(rounds: int = 10, steps: int = 10, out: Path | None = None) -> None:
    """Profile widths 64 and 256.

    Args:
        rounds: Of steps with the profiler and without it, in turn.
        steps: Of a round.
        out: CSV file for the table.
    """
    torch.set_num_threads(1)
    table = pd.concat([measure(width, rounds, steps) for width in (64, 256)])
    table = table[["width", "part", "events", "ms", "share", "profiler_adds"]]
    Console().print(table.to_string(index=False), highlight=False)
    if out is not None:
        table.to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
