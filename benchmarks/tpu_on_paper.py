"""Time of K trials at once on one TPU chip against K one after the other, without a TPU.

    python benchmarks/tpu_on_paper.py chip       # compiles for v4, v5e and v6e; goes on where it was ended
    python benchmarks/tpu_on_paper.py host       # the host's time, on this machine
    python benchmarks/tpu_on_paper.py figure

The chip's part is the sum of the cycles that the TPU's compiler estimates for each operation of a step: no
measurement, and nobody has held it to a chip's time here. The host's part is measured, with XLA's CPU client
in the place of a TPU's: how long handing a chunk over takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import tyro
from rich.console import Console
from rich.progress import track

from mup_tpu.config import Trial
from mup_tpu.devices.peak import TPU_TYPES, TpuType
from mup_tpu.models import declare
from mup_tpu.tpu.compiler import compile_program, trace_pack

CHIPS = {
    "v4": TpuType("v4", "v4:2x2x1", 1),
    "v5e": TPU_TYPES["v5litepod-1"],
    "v6e": TPU_TYPES["v6e-1"],
}
CLOCK_GHZ = {"v4": 1.05, "v5e": 1.5, "v6e": 1.75}
"""Assumed, from peak FLOP/s over the products a cycle of the chip's matrix units; nothing was measured."""

WIDTHS = (64, 128, 256, 512, 1024)
MEMBERS = (1, 2, 4, 8, 16, 32, 64)
PRECISIONS = {"float32": MEMBERS, "bf16": (1, 8)}
_MOST_PARAMETERS = 55_000_000
"""Most parameters of a pack: its program is built on this machine."""

_TRIAL = Trial().replace(
    base_width=64, head_size=32, depth=2, sequence_length=128, batch_size=16, grad_clip=1.0, steps=1000
)
_VOCAB_SIZE = 256
_CHUNK = 100


def packs() -> Iterator[tuple[int, int, str]]:
    """Width, members and precision of each pack, the narrow ones first."""
    for precision, members in PRECISIONS.items():
        for width in WIDTHS:
            size = declare(_TRIAL.replace(width=width).model, _VOCAB_SIZE, 128).total
            yield from ((width, k, precision) for k in members if k * size <= _MOST_PARAMETERS)


def chip(out: Path = Path("benchmarks/tpu_on_paper.csv")) -> None:
    """Compile every pack that is not in the table yet.

    Args:
        out: CSV file for the table; a row is written as soon as it is known.
    """
    table = pd.read_csv(out) if out.exists() else pd.DataFrame()
    keys = ["generation", "width", "members", "precision"]
    done = set(table[keys].itertuples(index=False, name=None)) if len(table) else set()
    rows = table.to_dict("records")
    for width, members, precision in track([*packs()], "packs", console=Console(stderr=True)):
        missing = [name for name in CHIPS if (name, width, members, precision) not in done]
        if not missing:
            continue
        trial = _TRIAL.replace(width=width, precision=precision)
        program = trace_pack([trial.replace(seed=k) for k in range(members)], _VOCAB_SIZE, 1)
        for name in missing:
            compiled = compile_program(program, CHIPS[name])
            cycles = compiled.cycles
            rows.append(
                dict(zip(keys, (name, width, members, precision), strict=True))
                | {"cycles": sum(cycles.values())}
                | dict(cycles)
                | {"argument_mib": compiled.argument_bytes / 2**20, "temp_mib": compiled.temp_bytes / 2**20}
                | {"compile_s": compiled.seconds}
            )
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.6g")


def host(out: Path = Path("benchmarks/tpu_on_paper_host.csv"), repeats: int = 30) -> None:
    """Time handing chunks over; the packs are tiny, since what they compute is not looked at.

    Args:
        out: CSV file for the table.
        repeats: chunks timed of each pack; the least counts, since on XLA's CPU client the steps run
            beside, on the same cores.
    """
    rows = []
    for depth in (2, 12):
        for members in MEMBERS:
            asked = ["--depth", str(depth), "--members", str(members), "--repeats", str(repeats)]
            command = [sys.executable, __file__, "one-host", *asked]
            environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            rows.append({"depth": depth, "members": members} | json.loads(done.stdout.splitlines()[-1]))
            Console().print(rows[-1], highlight=False)
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


def one_host(depth: int, members: int, repeats: int) -> None:
    """One pack of `host`, in a process of its own; prints milliseconds a step."""
    import torch

    from mup_tpu.devices import get_device
    from mup_tpu.training.pack import Pack

    trial = _TRIAL.replace(width=16, base_width=16, head_size=8, depth=depth, sequence_length=8, batch_size=1)
    trial = trial.replace(steps=_CHUNK * (repeats + 3))
    device = get_device("xla")
    pack = Pack([trial.replace(seed=k) for k in range(members)], 16, device)
    tokens_SBT1 = device.place_stack(torch.randint(0, 16, (_CHUNK, 1, 9)), "data", _CHUNK)
    times = []
    for _ in range(repeats + 2):
        device.synchronize()
        began = time.perf_counter()
        losses_SR = pack.train(tokens_SBT1, _CHUNK)
        times.append(1e3 * (time.perf_counter() - began) / _CHUNK)
        pack.read(losses_SR)
    print(json.dumps({"ms_per_step": min(times[2:])}))


def figure(
    table: Path = Path("benchmarks/tpu_on_paper.csv"),
    hosts: Path = Path("benchmarks/tpu_on_paper_host.csv"),
    out: Path = Path("benchmarks/tpu_on_paper.png"),
) -> None:
    """Draw time a trial and step, of chip and host, and what stacking gains.

    Args:
        table: CSV file of `chip`.
        hosts: CSV file of `host`.
        out: PNG file.
    """
    found = pd.read_csv(table)
    by_host = pd.read_csv(hosts).query("depth == 2").set_index("members").ms_per_step
    fig, axes = plt.subplots(2, len(CHIPS), figsize=(11, 6.4), sharex=True, sharey="row")
    colours = dict(zip(WIDTHS, plt.colormaps["viridis"]([0.0, 0.22, 0.45, 0.68, 0.9]), strict=True))
    for (time_axis, gain_axis), name in zip(axes.T, CHIPS, strict=True):
        for (width, precision), rows in found.query("generation == @name").groupby(["width", "precision"]):
            rows = rows.sort_values("members").set_index("members")
            style = {"color": colours[width], "linestyle": "-" if precision == "float32" else ":"}
            milliseconds = rows.cycles / CLOCK_GHZ[name] / 1e6
            time_axis.plot(milliseconds.index, milliseconds / milliseconds.index, marker="o", ms=3, **style)
            gain = rows.cycles.loc[1] * rows.index / rows.cycles
            gain_axis.plot(gain.index, gain, marker="o", ms=3, **style)
        time_axis.plot(by_host.index, by_host / by_host.index, color="black", ls="--", marker="s", ms=3)
        time_axis.set(title=f"{name}, at {CLOCK_GHZ[name]} GHz", xscale="log", yscale="log")
        gain_axis.axhline(1, color="grey", lw=0.8)
        gain_axis.set(xlabel="trials at once, K", xticks=MEMBERS, xticklabels=MEMBERS)
        gain_axis.minorticks_off()
    axes[0, 0].set_ylabel("ms a trial and step")
    axes[1, 0].set_ylabel("K one after the other\nover K at once, chip alone")
    lines = [plt.Line2D([], [], color=colours[width], label=f"width {width}") for width in WIDTHS]
    lines += [
        plt.Line2D([], [], color="grey", label="float32"),
        plt.Line2D([], [], color="grey", ls=":", label="bf16"),
    ]
    lines += [plt.Line2D([], [], color="black", ls="--", marker="s", ms=3, label="host (measured)")]
    fig.legend(handles=lines, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    fig.suptitle(
        "One chip by its compiler's estimated cycles (no measurement): GPT-2 of depth 2, batches of 16 × 128"
    )
    fig.tight_layout(rect=(0, 0.05, 1, 1))
    fig.savefig(out, dpi=130)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"chip": chip, "host": host, "one-host": one_host, "figure": figure})
