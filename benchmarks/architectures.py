"""A training step of Llama against one of GPT-2 on a CPU: a member of each, stepped in turn in one process.

    python benchmarks/architectures.py --out benchmarks/architectures.csv

Both have 2 layers, heads of 32, and about the same arithmetic: 43/16 of the width, three times, is 8.06·D² of
the MLP, and GPT-2's is 8·D².
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median, quantiles

import pandas as pd
import tyro
from rich.console import Console

KINDS: dict[str, dict] = {
    "gpt2": {},
    "llama": {"architecture": "llama"},
    "llama, QK norms": {"architecture": "llama", "qk_norm": True},
    "llama, groups of 2": {"architecture": "llama", "query_group_size": 2},
}


def measure(width: int, sequence_length: int, seconds: float) -> list[dict[str, object]]:
    """A row for each kind: its step, over GPT-2's beside it, and the same over the ratio of arithmetic."""
    import torch

    from mup_tpu.config import Trial
    from mup_tpu.devices import get_device
    from mup_tpu.training.pack import Pack

    torch.set_num_threads(1)
    base = Trial().replace(width=width, head_size=32, batch_size=16, sequence_length=sequence_length)
    packs = {kind: Pack([base.replace(**own)], 256, get_device("cpu")) for kind, own in KINDS.items()}
    tokens_BT1 = torch.randint(0, 256, (16, sequence_length + 1))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times["gpt2"]) < 12:
        for kind, pack in packs.items():
            began = time.perf_counter()
            pack.read(pack.step(tokens_BT1))
            times[kind].append(time.perf_counter() - began)
    flops = {kind: p.declaration.flops_per_token(256, sequence_length) for kind, p in packs.items()}
    rows: list[dict[str, object]] = []
    for kind, own_times in times.items():
        ratios = [t / t0 for t, t0 in zip(own_times[2:], times["gpt2"][2:], strict=True)]
        low, *_, high = quantiles(ratios, n=10)
        arithmetic = flops[kind] / flops["gpt2"]
        rows.append(
            {"kind": kind, "width": width, "sequence_length": sequence_length, "steps": len(ratios)}
            | {"step_ms": 1e3 * median(own_times[2:]), "ratio": median(ratios), "ratio_low": low}
            | {
                "ratio_high": high,
                "arithmetic": arithmetic,
                "at_equal_arithmetic": median(ratios) / arithmetic,
            }
        )
    return rows


def main(
    widths: tuple[int, ...] = (64, 128, 256),
    sequence_length: int = 128,
    seconds: float = 40.0,
    out: Path | None = None,
) -> None:
    """Measure every kind.

    Args:
        widths: Model widths.
        sequence_length: Tokens.
        seconds: About how long each width is measured.
        out: CSV file for the table; ratio_low and ratio_high are the deciles of the pairs.
    """
    rows = [row for width in widths for row in measure(width, sequence_length, seconds)]
    table = pd.DataFrame(rows)
    Console(width=140).print(table.to_string(float_format="%.3f"), highlight=False)
    if out is not None:
        table.to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
