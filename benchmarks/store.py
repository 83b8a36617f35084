"""Writing, opening and analysing a store of many trials.

    python benchmarks/store.py --out benchmarks/store.csv

Rows and curves are the quickstart's under new trial ids and seeds, 16 trials a part, as of packs of 16.
Writers merge small parts as they go; "merged" is after all became one. The analysis includes the reading.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import tyro

from mup_tpu.analysis import analyze
from mup_tpu.store import Store, load_curves, load_runs

ROWS = 16
"""Trials a part."""


def fill(folder: str, parts: int, first: int = 0) -> None:
    """Append rows to a store as a sweep does."""
    store = Store(folder, "quickstart")
    runs = load_runs("results/quickstart").dropna(axis="columns", how="all")
    curves = load_curves("results/quickstart")
    points = {name: own for name, own in curves.groupby("trial_id")}
    for part in range(first, first + parts):
        at = ROWS * part
        rows = runs.iloc[[row % len(runs) for row in range(at, at + ROWS)]].drop(columns="experiment")
        names = [f"{row:016x}" for row in range(at, at + ROWS)]
        own = [points[of].assign(trial_id=name) for of, name in zip(rows["trial_id"], names, strict=True)]
        rows = rows.assign(trial_id=names, seed=rows["seed"] + 100 * (at // len(runs)))
        store.append(rows.to_dict("records"), pd.concat(own).to_dict("records"))


def timed(read: Callable[[], object]) -> tuple[float, float]:
    """Wall time and CPU time of a call, s."""
    cpu, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    read()
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    return time.perf_counter() - wall, used


def main(parts: int = 4000, keep: Path | None = None, out: Path | None = None) -> None:
    """Time both tables and their analysis.

    Args:
        parts: Parts of each table.
        keep: Results folder to write and keep, for `benchmarks/commands.py`; by default a temporary one.
        out: CSV file for the times; printed in any case.
    """
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["MUP_TPU_CACHE"] = f"{scratch}/cache"
        folder = str(keep or f"{scratch}/quickstart")
        began = time.perf_counter()
        fill(folder, parts)
        rows = [{"what": "write", "table": "both", "parts": parts, "s": time.perf_counter() - began}]
        for what in ("as written", "merged"):
            if what == "merged":
                Store(folder, "quickstart").compact()
            for table, load in (("runs", load_runs), ("curves", load_curves), ("analysis", analyze)):
                wall, cpu = timed(lambda load=load: load(folder))  # type: ignore[misc]
                rows.append({"what": what, "table": table, "parts": parts, "s": wall, "cpu_s": cpu})
    found = pd.DataFrame(rows).round(2)
    print(found.to_string(index=False))
    if out is not None:
        found.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
