"""A training step by each mechanism there is, on this machine: which is fastest, what more members cost.

    python benchmarks/step.py --out benchmarks/step_cpu.csv
    python benchmarks/step.py --device cuda --precision bf16 --widths 128 512 2048 --members 1 4 16
    PJRT_DEVICE=CPU python benchmarks/step.py --device xla --widths 64 --members 1 8

Members in turns ("loop") or as one program ("vmap"), through torch.compile or not (XLA takes one program and
compiles it in any case, on all cores), for several numbers of members; each in a process of its own, so that
its peak memory is its own. GPT-2 of 2 layers, batches of 16.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd
import tyro
from rich.console import Console


@dataclass(frozen=True)
class Case:
    """One way to step a pack."""

    device: str
    width: int
    execution: Literal["loop", "vmap"]
    compile: bool
    members: int
    sequence_length: int
    precision: Literal["float32", "bf16"]
    threads: int


_MOST_STEPS = 20
"""Handed over at once, where the device takes several."""


def measure(case: Case, seconds: float) -> dict[str, object]:
    """Train a pack on one batch for about so long, and evaluate it.

    Returns:
        The case and: first_step_s (compilation included; on XLA of a chunk of steps), tokens_per_s of all
        members together, share of the matrix-product peak (FLOPs as in `mup_tpu.models.base`), peak_mib
        and what of it the pack added, estimate_mib, and evaluate_share, one evaluation batch over one
        training step.
    """
    import torch

    from mup_tpu.config import Trial
    from mup_tpu.devices import get_device
    from mup_tpu.devices.peak import peak_flops
    from mup_tpu.training.pack import Pack, estimate_pack_bytes

    torch.set_num_threads(case.threads)
    base = Trial().replace(
        width=case.width, head_size=32, batch_size=16, sequence_length=case.sequence_length,
        precision=case.precision,
    )  # fmt: skip
    trials = [base.replace(learning_rate=2**-9 * 2 ** (i / 8)) for i in range(case.members)]
    device = get_device(case.device).arrange(case.members, 16)
    chunk = min(_MOST_STEPS, device.longest_chunk(1))
    tokens_SBT1 = torch.randint(0, 256, (chunk, 16, case.sequence_length + 1))
    tokens_SBT1 = device.place_stack(tokens_SBT1, "data", chunk)
    one_batch = device.place_stack(torch.randint(0, 256, (1, 16, case.sequence_length + 1)), "data", 1)
    peak = peak_flops(device, case.precision)

    def most_memory() -> int:
        """Bytes of torch's allocator on a GPU, of the process elsewhere."""
        if case.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB

    before = most_memory()
    pack = Pack(trials, 256, device, case.execution, case.compile)

    def timed(act: object) -> float:
        began = time.perf_counter()
        assert callable(act)
        pack.read(act())  # reads a value, so that it has been computed
        device.synchronize()
        return time.perf_counter() - began

    first = timed(lambda: pack.train(tokens_SBT1, chunk))
    timed(lambda: pack.train(tokens_SBT1, chunk))
    steps: list[float] = []
    while len(steps) < 3 or chunk * sum(steps) < seconds:
        steps.append(timed(lambda: pack.train(tokens_SBT1, chunk)) / chunk)
    after = most_memory()
    timed(lambda: pack.evaluate(one_batch))
    evaluation = median(timed(lambda: pack.evaluate(one_batch)) for _ in range(3))
    rate = case.members * 16 * case.sequence_length / median(steps)
    arithmetic = pack.declaration.flops_per_token(256, case.sequence_length)
    estimated = estimate_pack_bytes(base, 256, case.members, case.execution, kind=case.device)
    return {
        **asdict(case),
        "first_step_s": first,
        "tokens_per_s": rate,
        "share_of_peak": rate * arithmetic / peak,
        "peak_gflops": peak / 1e9,
        "peak_mib": after / 2**20,
        "added_mib": (after - before) / 2**20,
        "estimate_mib": estimated / 2**20,
        "evaluate_share": evaluation / median(steps),
    }


def main(
    device: Literal["cpu", "cuda", "xla"] = "cpu",
    widths: tuple[int, ...] = (64, 256),
    members: tuple[int, ...] = (1, 4, 8),
    sequence_length: int = 128,
    precision: Literal["float32", "bf16"] = "float32",
    threads: int = 1,
    seconds: float = 5.0,
    out: Path | None = None,
) -> None:
    """Measure every case.

    Args:
        device: Where to train.
        widths: Model widths.
        members: Trials of a pack.
        sequence_length: Tokens.
        precision: Of matrix products.
        threads: CPU threads.
        seconds: About how long each case is measured.
        out: CSV file for the table.
    """
    console, rows = Console(), []
    executions: tuple[Literal["loop", "vmap"], ...] = ("vmap",) if device == "xla" else ("loop", "vmap")
    compiled = (False,) if device == "xla" else (False, True)
    cases = [
        Case(device, width, execution, by_torch, k, sequence_length, precision, threads)
        for width, execution, by_torch, k in itertools.product(widths, executions, compiled, members)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for case in cases:
            rows.append(pool.submit(measure, case, seconds).result())
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}
            console.print(shown, highlight=False, soft_wrap=True)
            if out is not None:
                pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    tyro.cli(main)
