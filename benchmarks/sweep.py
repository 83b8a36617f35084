"""A sweep against one process a trial, or two processes that stay (benchmarks/nanogpt_peer.py), here.

    python benchmarks/sweep.py --width 64 --repeats 5 --out benchmarks/sweep_cpu_64.csv
    python benchmarks/sweep.py --width 64 --pool 2 --out benchmarks/sweep_pool_64.csv
    python benchmarks/sweep.py --width 256 --repeats 5 --out benchmarks/sweep_cpu_256.csv
    python benchmarks/sweep.py --device cuda --width 256 --out benchmarks/sweep_cuda_256.csv

Both train GPT-2 of 2 layers on the same tokens, batches of 16 × 128, for the same steps, and evaluate once at
the end. Timed as whole processes: start-up, imports, data, training, storing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro
from paired import SWEEP, compare, report

from mup_tpu.config import DataConfig
from mup_tpu.data.cache import load_cache
from mup_tpu.files import cache_root


def main(
    width: int = 64,
    trials: int = 16,
    steps: int = 300,
    repeats: int = 5,
    device: Literal["cpu", "cuda"] = "cpu",
    precision: Literal["float32", "bf16"] = "float32",
    peer_precision: Literal["float32", "bf16"] = "float32",
    threads: int = 2,
    pool: int = 0,
    out: Path | None = None,
) -> None:
    """Time both in turn.

    Args:
        width: Model width.
        trials: Learning rates.
        steps: Optimizer steps a trial.
        repeats: Pairs of runs.
        device: Where both train.
        precision: Arithmetic of ours.
        peer_precision: Arithmetic of the peer.
        threads: CPU threads of the peer's process; ours shares the machine's cores between its packs.
        pool: Peers that stay and run at once, on one thread each, with a share of the rates; 0 is a process a
            trial, one after another.
        out: CSV file for the table.
    """
    tokens = cache_root() / "tokens" / load_cache(DataConfig()).fingerprint
    rates = [2.0 ** (-10 + 5 * i / max(1, trials - 1)) for i in range(trials)]
    with tempfile.TemporaryDirectory() as scratch:
        sweep = Path(scratch) / "sweep.toml"
        sweep.write_text(
            SWEEP.format(width=width, learning_rates=rates, num_seeds=1, steps=steps, precision=precision)
        )
        ours = [[sys.executable, "-m", "mup_tpu", "sweep", str(sweep), "--results", "{run}"]]
        ours[0] += ["--device", device]
        peer = [
            [
                sys.executable, str(Path(__file__).with_name("nanogpt_peer.py")), "--tokens", str(tokens),
                "--width", str(width), "--steps", str(steps), "--learning-rates", *map(str, share),
                "--threads", str(1 if pool else threads), "--device", device,
                *(["--bf16"] if peer_precision == "bf16" else []),
            ]
            for share in ([rates[i::pool] for i in range(pool)] if pool else [[rate] for rate in rates])
        ]  # fmt: skip
        table = compare(ours, peer, repeats, Path(scratch), max(1, pool))
    table = table.assign(
        width=width, trials=trials, steps=steps, precision=precision, peer_precision=peer_precision,
        pool=pool,
    )  # fmt: skip
    report(table, out)


if __name__ == "__main__":
    tyro.cli(main)
