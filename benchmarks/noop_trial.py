"""CPU time of a trial that does nothing, through a study's driver, joblib and multiprocessing, in turns.

    python benchmarks/noop_trial.py --out benchmarks/noop_trial.csv

A study runs each trial in a process of its own that finds memory, seeds and devices untouched, stores its
row on disk, and ends what it leaves behind; joblib calls a function in processes that stay; multiprocessing
forks one for each call. Each is run with many trials and with few: the difference is what a trial costs, over
all processes, without start and end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import tyro

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

OURS = """
import tempfile, mup_tpu
def train(trial, report): return 2.5
with tempfile.TemporaryDirectory() as folder:
    rates = mup_tpu.octaves(-5, 4)
    study = mup_tpu.Study(folder, scale={"width": [1, 2]}, tune={"lr": rates}, seeds=COUNT // 20)
    study.run(train, workers=1)
"""
JOBLIB = """
import joblib
def train(seed): return 2.5
joblib.Parallel(n_jobs=1 + 1, batch_size=1)(joblib.delayed(train)(i) for i in range(COUNT))
"""
FORK = """
import multiprocessing
def train(pipe): pipe.send(2.5)
for i in range(COUNT):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=train, args=(theirs,))
    process.start()
    ours.recv()
    process.join()
"""
CODES = {"study": OURS, "before": OURS, "joblib": JOBLIB, "fork": FORK}


def used(code: str, count: int, checkout: Path) -> float:
    """Run code in a process; return CPU seconds of it and of all that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(code.replace("COUNT", str(count)))
        subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.DEVNULL, env=environment)
    try:
        while True:  # orphans come to this process
            os.wait()
    except ChildProcessError:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(
    before: Path | None = None, few: int = 40, many: int = 540, repeats: int = 5, out: Path | None = None
) -> None:
    """Time all three.

    Args:
        before: Checkout of an earlier version.
        few: Trials of the short runs.
        many: Trials of the long runs.
        repeats: Turns.
        out: CSV file for the table; printed in any case.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rows = []
    for _ in range(repeats):
        row = {}
        for name, code in CODES.items():
            checkout = before if name == "before" else Path(__file__).parents[1]
            if checkout is not None:
                cpu_s = used(code, many, checkout.resolve()) - used(code, few, checkout.resolve())
                row[f"{name}_cpu_ms"] = 1e3 * cpu_s / (many - few)
        rows.append(row)
    table = pd.DataFrame(rows)
    print(table.round(2).to_string(index=False), f"\nmedians: {table.median().round(2).to_dict()}")
    if out is not None:
        table.round(2).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
