"""Reading a large table of anybody's runs, against pandas reading the same file.

    python benchmarks/tables.py --out benchmarks/tables.csv

Each read has a process of its own. Columns are width, lr, seed and loss, with 36 cells.
"""

from __future__ import annotations

import math
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import tyro

How = Literal["pandas", "load", "analyze"]


def runs(count: int) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    width = generator.choice([64, 128, 256, 512], count)
    x = generator.choice(np.arange(-12.0, -3.0), count)
    loss = 3 - np.log2(width) / 10 + 0.05 * (x + 8) ** 2 + 0.01 * generator.standard_normal(count)
    return pd.DataFrame({"width": width, "lr": 2**x, "seed": np.arange(count), "loss": loss})


def read(file: str, how: How) -> None:
    """Read a file, and print CPU seconds and the largest memory of this process, MB."""
    from mup_tpu.analysis import analyze, load_table

    before = resource.getrusage(resource.RUSAGE_SELF)
    if how == "pandas":
        (pd.read_parquet if file.endswith("parquet") else pd.read_csv)(file)
    else:
        table = load_table(file)
        if how == "analyze":
            analyze(table)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # since exec, unlike maxrss
    print(used, int(peak[1]) / 1024 if peak else math.nan)


def main(csv_rows: int = 10**6, parquet_rows: int = 10**7, out: Path | None = None) -> None:
    """Measure the reads of both files, and print them as ratios to pandas'.

    Args:
        csv_rows: Rows of the CSV file.
        parquet_rows: Rows of the Parquet file.
        out: CSV file for the table.
    """
    rows, base = [], 1.0
    with tempfile.TemporaryDirectory() as folder:
        files = {f"{folder}/runs.csv": csv_rows, f"{folder}/runs.parquet": parquet_rows}
        runs(csv_rows).to_csv(f"{folder}/runs.csv", index=False)
        runs(parquet_rows).to_parquet(f"{folder}/runs.parquet")
        for file, count in files.items():
            for how in ("pandas", "load", "analyze"):
                call = [sys.executable, __file__, "read", file, how]
                printed = subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()
                cpu, memory = map(float, printed)
                base = cpu if how == "pandas" else base
                rows.append(
                    (Path(file).suffix[1:], count, how, round(cpu, 2), round(memory), round(cpu / base, 1))
                )
                print(*rows[-1], sep="\t")
    if out is not None:
        pd.DataFrame(rows, columns=["file", "rows", "read", "cpu_s", "memory_mb", "ratio"]).to_csv(
            out, index=False
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
    else:
        tyro.cli(main)
