"""Cost of depth: time to compile, time of a step, memory; with blocks in turn and as one loop of XLA's.

    python benchmarks/deep.py     # goes on where it was ended

GPT-2 of width 64 under CompleteP, on the CPU by torch, on the CPU by XLA (optimized as on a TPU) and by the
compiler of a TPU v5e, which says what a step takes but runs none. Each measurement has a process of its own;
times are CPU seconds of all its threads, since others may use the machine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from rich.console import Console
from rich.progress import track

from mup_tpu.config import Trial
from mup_tpu.devices.peak import TPU_TYPES
from mup_tpu.tpu.compiler import compile_program, trace_pack

VOCABULARY = 256
STEPS = 5
BLOCKS = {"in turn": False, "one loop": True}


def trials(depth: int, members: int) -> list[Trial]:
    """Members of a pack of this depth."""
    trial = Trial().replace(
        width=64, base_width=64, depth=depth, base_depth=2, head_size=32, sequence_length=128, batch_size=8,
        grad_clip=1.0, parametrization="completep",
    )  # fmt: skip
    return [trial.replace(seed=seed) for seed in range(members)]


def on_this_machine(device_name: str, depth: int, scan: bool) -> dict[str, float]:
    """A member's first chunk, then steps; in a process of its own."""
    import torch

    from mup_tpu.devices import get_device
    from mup_tpu.training.pack import Pack

    torch.set_num_threads(1)

    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    device = get_device(device_name)
    device = device.arrange(1, 8, "auto") if device_name == "xla" else device
    before = peak_mib()
    pack = Pack(trials(depth, 1), VOCABULARY, device, forms={"scan": device.scan if scan else None})
    tokens_SBT1 = device.place_stack(torch.randint(0, VOCABULARY, (STEPS, 8, 129)), "data", STEPS)
    times = [time.process_time()]
    for _ in range(2):
        pack.read(pack.train(tokens_SBT1, STEPS))
        times.append(time.process_time())
    first, later = times[1] - times[0], times[2] - times[1]
    return {
        "compile_s": first - later if device_name == "xla" else 0.0,
        "step_s": later / STEPS,
        "memory_mib": peak_mib() - before,
    }


def by_tpu_compiler(depth: int, scan: bool, members: int) -> dict[str, float]:
    """Numbers of the compiler for a chunk of steps on one chip."""
    program = trace_pack(trials(depth, members), VOCABULARY, 1, scan=scan)
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiled = compile_program(program, TPU_TYPES["v5litepod-1"])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "compile_s": ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime,
        "memory_mib": (compiled.argument_bytes + compiled.temp_bytes) / 2**20,
        "temp_mib": compiled.temp_bytes / 2**20,
    }


def measure(device: str, depth: int, scan: bool, members: int) -> dict[str, float]:
    """One row's numbers, by this script in another process."""
    if device == "tpu v5e":
        return by_tpu_compiler(depth, scan, members)
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    command = [sys.executable, __file__, "--one", json.dumps([device, depth, scan])]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def main(
    out: Path = Path("benchmarks/deep.csv"),
    depths: tuple[int, ...] = (4, 16, 64),
    members: int = 8,
) -> None:
    """Measure the rows that the table lacks.

    Args:
        out: CSV file for the table; a row is written as soon as it is known.
        depths: Blocks.
        members: Trials of the packs for a TPU; on this machine there is one.
    """
    rows: list[dict[str, Any]] = pd.read_csv(out).to_dict("records") if out.exists() else []
    done = {(row["device"], row["depth"], row["blocks"]) for row in rows}
    cases = [("cpu", d, "in turn") for d in depths] + [
        (device, d, blocks) for device in ("tpu v5e", "xla") for d in depths for blocks in reversed(BLOCKS)
    ]
    for device, depth, blocks in track(cases, "cases", console=Console(stderr=True)):
        if (device, depth, blocks) not in done:
            found = measure(device, depth, BLOCKS[blocks], members)
            count = members if device == "tpu v5e" else 1
            rows.append({"device": device, "depth": depth, "blocks": blocks, "members": count} | found)
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(on_this_machine(*json.loads(sys.argv[2]))))
    else:
        tyro.cli(main)
