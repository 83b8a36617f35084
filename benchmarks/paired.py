"""Two commands timed in turn, A B A B: the ratio of each pair holds where the machine's speed drifts."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

SWEEP = """
experiment = "bench"
widths = [{width}]
parametrizations = ["mup"]
learning_rates = {learning_rates}
num_seeds = {num_seeds}
[base.model]
head_size = 32
[base.train]
steps = {steps}
precision = "{precision}"
"""
"""A sweep of one width, to be timed."""


def run(commands: Sequence[Sequence[str]], log: Path) -> float:
    """Seconds that commands take one after the other, as whole processes; their output goes to the log.

    Raises:
        subprocess.CalledProcessError: one of them failed; the log says why.
    """
    began = time.perf_counter()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("a") as file:
        for command in commands:
            subprocess.run(command, check=True, stdout=file, stderr=file, env=environment)
    return time.perf_counter() - began


def compare(
    ours: Sequence[Sequence[str]], peer: Sequence[Sequence[str]], repeats: int, folder: Path
) -> pd.DataFrame:
    """Time both in turn.

    Args:
        ours: commands of one run of ours; "{run}" in an argument becomes a folder name new in each run.
        peer: likewise.
        repeats: pairs.
        folder: for logs and what the commands write.

    Returns:
        A row a pair: seconds of each, and how many times longer the peer took.
    """
    rows = []
    for i in range(repeats):
        times = {}
        for name, commands in (("ours", ours), ("peer", peer)):
            fresh = str(folder / f"{name}-{i}")
            filled = [[part.replace("{run}", fresh) for part in command] for command in commands]
            times[name] = run(filled, folder / f"{name}.log")
        rows.append(
            {
                "ours_s": times["ours"],
                "peer_s": times["peer"],
                "ratio": times["peer"] / times["ours"],
            }
        )
        Console().print({name: round(value, 2) for name, value in rows[-1].items()})
    return pd.DataFrame(rows)


def report(table: pd.DataFrame, out: Path | None) -> None:
    """Print the medians, and keep the table."""
    median = table.select_dtypes("number").median()
    Console().print(f"median: {', '.join(f'{name} {value:.2f}' for name, value in median.items())}")
    if out is not None:
        table.to_csv(out, index=False, float_format="%.3f")
