"""CPU seconds of commands from start to end, imports and all, each the least of several runs.

    python benchmarks/commands.py --folder FOLDER --out benchmarks/commands.csv

FOLDER holds 64 000 trials, as `benchmarks/store.py --keep FOLDER` writes them.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import tyro


def used(command: list[str]) -> float:
    """Run a command of `mup-tpu` in a process; return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "mup_tpu", *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(folder: Path | None = None, repeats: int = 3, out: Path | None = None) -> None:
    """Time commands on stored results, and on a large folder if one is given.

    Args:
        folder: Results folder of many trials.
        repeats: Runs of each command.
        out: CSV file for the table.
    """
    with tempfile.TemporaryDirectory() as scratch:
        commands = [
            ["--help"],
            ["analyze", "results/quickstart"],
            ["analyze", "results/lr_transfer"],
            ["predict", "results/lr_transfer", "--at", "width=1024"],
            ["analyze", "results/lr_transfer", "--report", "--out", f"{scratch}/report.html"],
            ["analyze", "results"],
        ]
        if folder is not None:
            large = ["analyze", str(folder)]
            commands += [[*large, "--runs"], [*large, "--csv", f"{scratch}/runs.csv"], large]
            commands += [[*large, "--report", "--out", f"{scratch}/large.html"]]
        rows = []
        for command in commands:
            words = [Path(word).name if "/" in word and word.startswith("/") else word for word in command]
            rows.append((" ".join(words), round(min(used(command) for _ in range(repeats)), 2)))
            print(*rows[-1], sep="\t")
    if out is not None:
        pd.DataFrame(rows, columns=["command", "cpu_s"]).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
