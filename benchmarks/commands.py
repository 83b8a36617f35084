"""CPU seconds of commands from start to end, imports and all, beside those of an earlier checkout.

    python benchmarks/commands.py --folder FOLDER --before CHECKOUT --out benchmarks/commands.csv

FOLDER holds 64 000 trials, as `benchmarks/store.py --keep FOLDER` writes them. The versions take turns,
and the least of each one's runs counts.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import tyro
from paired import SWEEP

HERE = Path(__file__).parents[1]


def used(command: list[str], checkout: Path) -> float:
    """Run a command of a checkout's `mup-tpu` in a process; return its CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call = [sys.executable, "-m", "mup_tpu", *command]
    subprocess.run(call, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=HERE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(
    folder: Path | None = None, before: Path | None = None, repeats: int = 3, out: Path | None = None
) -> None:
    """Time commands on stored results, and on a large folder if one is given.

    Args:
        folder: Results folder of many trials.
        before: Checkout of an earlier version.
        repeats: Runs of each command.
        out: CSV file for the table.
    """
    checkouts = [HERE] if before is None else [before.resolve(), HERE]
    with tempfile.TemporaryDirectory() as scratch:
        one = {"width": 64, "learning_rates": [0.01], "num_seeds": 1, "steps": 1, "precision": "float32"}
        Path(scratch, "sweep.toml").write_text(SWEEP.format(**one))
        runs = (f"{scratch}/run-{number}" for number in itertools.count())
        commands = {
            "--help": ["--help"],
            "sweep --help": ["sweep", "--help"],
            "sweep of one trial and step": ["sweep", f"{scratch}/sweep.toml", "--results", "{run}"],
            "analyze results/quickstart": ["analyze", "results/quickstart"],
            "predict results/lr_transfer": ["predict", "results/lr_transfer", "--at", "width=1024"],
            "plan --at width=2048": [
                "plan", "--at", "width=2048", "--budget", "2h", "--on", "8xA100", "--json"
            ],
            "analyze results/lr_transfer --report": [
                "analyze", "results/lr_transfer", "--report", "--out", f"{scratch}/report.html"
            ],
            "analyze results": ["analyze", "results"],
        }  # fmt: skip
        if folder is not None:
            large = ["analyze", str(folder)]
            commands |= {
                "analyze FOLDER": large,
                "analyze FOLDER --runs": [*large, "--runs"],
                "analyze FOLDER --csv": [*large, "--csv", f"{scratch}/runs.csv"],
                "analyze FOLDER --report": [*large, "--report", "--out", f"{scratch}/large.html"],
            }
        rows = []
        for name, command in commands.items():
            turns = [
                [
                    used([next(runs) if w == "{run}" else w for w in command], checkout)
                    for checkout in checkouts
                ]
                for _ in range(repeats)
            ]
            *earlier, now = map(min, zip(*turns, strict=True))
            ratio = {"before_cpu_s": earlier[0], "ratio": now / earlier[0]} if earlier else {}
            rows.append({"command": name, "cpu_s": now, **ratio})
            print(rows[-1], flush=True)
    if out is not None:
        pd.DataFrame(rows).round(2).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
