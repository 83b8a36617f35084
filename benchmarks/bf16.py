"""Training in bf16 against float32, on this machine: how long it takes, and the loss it reaches.

    python benchmarks/bf16.py --width 64 --repeats 3 --out benchmarks/bf16_64.csv
    python benchmarks/bf16.py --width 256 --repeats 3 --out benchmarks/bf16_256.csv

Both run the same trials from the same weights on the same batches, as a sweep with a process a trial.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tyro
from paired import SWEEP, compare, report

from mup_tpu.store import load_runs


def main(
    width: int = 64,
    trials: int = 2,
    steps: int = 150,
    repeats: int = 3,
    device: str = "cpu",
    threads: int = 1,
    out: Path | None = None,
) -> None:
    """Time both in turn.

    Args:
        width: Model width.
        trials: Seeds.
        steps: Optimizer steps a trial.
        repeats: Pairs of runs.
        device: Where to train.
        threads: CPU threads.
        out: CSV file for the table.
    """
    with tempfile.TemporaryDirectory() as scratch:
        commands = {}
        for precision in ("bf16", "float32"):
            file = Path(scratch) / f"{precision}.toml"
            file.write_text(
                SWEEP.format(
                    width=width, learning_rates=[0.004], num_seeds=trials, steps=steps, precision=precision
                )
            )
            commands[precision] = [
                [
                    sys.executable, "-m", "mup_tpu", "sweep", str(file), "--results", "{run}",
                    "--device", device, "--threads", str(threads),
                ]
            ]  # fmt: skip
        table = compare(commands["bf16"], commands["float32"], repeats, Path(scratch))
        for name, precision in (("ours", "bf16"), ("peer", "float32")):
            runs = [load_runs(Path(scratch) / f"{name}-{i}") for i in range(repeats)]
            table[f"{precision}_training_s"] = [run["wall_time_s"].sum() for run in runs]
            table[f"{precision}_loss"] = [run["loss"].mean() for run in runs]
    table = table.rename(columns=lambda name: name.replace("ours", "bf16").replace("peer", "float32"))
    table["training_ratio"] = table["float32_training_s"] / table["bf16_training_s"]
    report(table.assign(width=width, trials=trials, steps=steps), out)


if __name__ == "__main__":
    tyro.cli(main)
