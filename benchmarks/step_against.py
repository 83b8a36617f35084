"""The step of this checkout against that of another, such as the commit before a change.

    git worktree add ../before COMMIT
    python benchmarks/step_against.py ../before --out benchmarks/step_against.csv

A process of one thread for each checkout, with the same pack. They train in turns of a step or two, so that
the ratio of a pair of turns holds where the machine drifts in speed. By CPU time, so that its other work
counts little; least in the fastest tenth of turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
from rich.console import Console

ROOT = Path(__file__).parents[1]
WORKER = """
import sys, time, torch
torch.set_num_threads(1)
from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack
width, members, execution, turn_steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
base = Trial().replace(width=width, head_size=32, sequence_length=128, batch_size=16, weight_decay=0.1)
pack = Pack([base.replace(seed=seed) for seed in range(members)], 256, get_device("cpu"), execution)
tokens_BT1 = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(0))
for _ in range(3):
    pack.read(pack.step(tokens_BT1))
print("ready", flush=True)
for _ in sys.stdin:
    began = time.process_time()
    for _ in range(turn_steps):
        losses = pack.read(pack.step(tokens_BT1))
    print(time.process_time() - began, losses.double().sum().item().hex(), flush=True)
"""


def start(checkout: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """A worker that imports the package of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        cwd=checkout,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    return worker


def turn(worker: subprocess.Popen[str]) -> tuple[float, str]:
    """CPU seconds of one turn, and its last losses to the last bit."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    seconds, losses = worker.stdout.readline().split()
    return float(seconds), losses


def main(
    other: Annotated[Path, tyro.conf.Positional],
    widths: tuple[int, ...] = (64, 256),
    members: int = 2,
    turns: int = 150,
    out: Path | None = None,
) -> None:
    """Measure every width in both executions.

    Args:
        other: Root of the other checkout.
        widths: Model widths.
        members: Trials of a pack.
        turns: Pairs of turns.
        out: CSV file for the table.
    """
    rows = []
    for width in widths:
        for execution in ("loop", "vmap"):
            steps = max(1, 128 // width)
            arguments = [str(width), str(members), execution, str(steps)]
            ours, theirs = (start(checkout.resolve(), arguments) for checkout in (ROOT, other))
            ratios, same = [], True
            times: dict[int, list[float]] = {ours.pid: [], theirs.pid: []}
            for i in range(turns):
                first, second = (ours, theirs) if i % 2 else (theirs, ours)
                found = {worker.pid: turn(worker) for worker in (first, second)}
                ratios.append(found[ours.pid][0] / found[theirs.pid][0])
                for pid, (seconds, _) in found.items():
                    times[pid].append(seconds / steps)
                same &= found[ours.pid][1] == found[theirs.pid][1]
            for worker in (ours, theirs):
                worker.kill()
                worker.wait()
            fastest = {pid: float(pd.Series(taken).quantile(0.1)) for pid, taken in times.items()}
            quantiles = pd.Series(ratios).quantile([0.25, 0.5, 0.75]).round(4).tolist()
            rows.append(
                {
                    "width": width, "execution": execution, "members": members, "turns": turns,
                    "step_ms": round(1000 * fastest[ours.pid], 2), "ratio_25": quantiles[0],
                    "ratio_median": quantiles[1], "ratio_75": quantiles[2],
                    "ratio_fastest": round(fastest[ours.pid] / fastest[theirs.pid], 4), "same_losses": same,
                }
            )  # fmt: skip
            Console().print(rows[-1])
    if out is not None:
        pd.DataFrame(rows).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
