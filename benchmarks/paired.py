"""Two commands timed in turn, A B A B: the ratio of each pair holds where the machine's speed drifts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans come to this process, and count

SWEEP = """
experiment = "bench"
scale = {{width = [{width}]}}
compare = {{parametrization = ["mup"]}}
tune = {{learning_rate = {learning_rates}}}
num_seeds = {num_seeds}
[base.model]
head_size = 32
[base.train]
steps = {steps}
precision = "{precision}"
"""
"""A sweep of one width, to be timed."""


def run(commands: Sequence[Sequence[str]], log: Path, at_once: int = 1) -> tuple[float, float]:
    """Seconds, and CPU seconds, of whole processes, `at_once` at a time; their output goes to the log.

    Raises:
        subprocess.CalledProcessError: one of them failed; the log says why.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("a") as file:
        call = partial(subprocess.run, check=True, stdout=file, stderr=file, env=environment)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(call, commands))
    took = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):  # servers of forked workers outlive their command
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, used


def compare(
    ours: Sequence[Sequence[str]], peer: Sequence[Sequence[str]], repeats: int, folder: Path, at_once: int = 1
) -> pd.DataFrame:
    """Time both in turn.

    Args:
        ours: commands of one run of ours; "{run}" in an argument becomes a folder name new in each run.
        peer: likewise.
        repeats: pairs.
        folder: for logs and what the commands write.
        at_once: commands of the peer that run at a time.

    Returns:
        A row a pair: seconds of each and CPU seconds, how many times longer the peer took, and the load.
    """
    rows = []
    for i in range(repeats):
        times, load = {}, os.getloadavg()[0]
        for name, commands, together in (("ours", ours, 1), ("peer", peer, at_once)):
            fresh = str(folder / f"{name}-{i}")
            filled = [[part.replace("{run}", fresh) for part in command] for command in commands]
            times[name], times[f"{name}_cpu"] = run(filled, folder / f"{name}.log", together)
        rows.append(
            {
                "ours_s": times["ours"],
                "peer_s": times["peer"],
                "ratio": times["peer"] / times["ours"],
                "ours_cpu_s": times["ours_cpu"],
                "peer_cpu_s": times["peer_cpu"],
                "cpu_ratio": times["peer_cpu"] / times["ours_cpu"],
                "load_before": load,
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
