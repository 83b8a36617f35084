"""Does torch.compile pay on a CPU whose cores are all busy, as a sweep keeps them?

    python benchmarks/compile.py --out benchmarks/compile.csv

A process of one thread on every core, each with the same pack twice, eager and compiled, that train in turns,
all processes the same one at once. benchmarks/step.py measures one process while the other cores are idle.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pandas as pd
import tyro
from rich.console import Console


def work(width: int, members: int, rounds: int, seconds: float, together: Barrier, rates: Queue) -> None:
    """One process: put (round, compiled, tokens/s) for each turn."""
    import torch

    from mup_tpu.config import Trial
    from mup_tpu.devices import get_device
    from mup_tpu.training.pack import Pack

    torch.set_num_threads(1)
    base = Trial().replace(width=width, depth=2, head_size=32, sequence_length=128, batch_size=16)
    trials = [base.replace(seed=seed) for seed in range(members)]
    tokens_BT1 = torch.randint(0, 256, (16, 129))
    packs = {compiled: Pack(trials, 256, get_device("cpu"), "loop", compiled) for compiled in (False, True)}
    for pack in packs.values():
        for _ in range(2):
            pack.read(pack.step(tokens_BT1))
    for turn in range(rounds):
        for compiled, pack in packs.items():
            together.wait()
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                pack.read(pack.step(tokens_BT1))
                steps += 1
            rates.put((turn, compiled, steps * members * 16 * 128 / (time.perf_counter() - began)))


def main(
    widths: tuple[int, ...] = (64, 128, 256),
    members: int = 4,
    rounds: int = 5,
    seconds: float = 6.0,
    out: Path | None = None,
) -> None:
    """Measure every width.

    Args:
        widths: Model widths.
        members: Trials of a pack.
        rounds: Turns of each.
        seconds: Length of a turn.
        out: CSV file for the table.
    """
    spawn, cores = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    rows = []
    for width in widths:
        together, rates = spawn.Barrier(cores), spawn.Queue()
        arguments = (width, members, rounds, seconds, together, rates)
        processes = [spawn.Process(target=work, args=arguments) for _ in range(cores)]
        for process in processes:
            process.start()
        measured = [rates.get() for _ in range(2 * rounds * cores)]
        for process in processes:
            process.join()
        for turn in range(rounds):
            eager, compiled = (
                sum(r for t, c, r in measured if (t, c) == (turn, which)) for which in (False, True)
            )
            rows.append(
                {"width": width, "round": turn, "eager_tokens_per_s": eager, "ratio": compiled / eager}
            )
        Console().print(pd.DataFrame(rows).groupby("width")["ratio"].describe())
        if out is not None:
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
