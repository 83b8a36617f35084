"""Sweeps on pods, from the TPU's compiler alone: packs, memory, cycles, time and price.

python benchmarks/pods.py compile pods.csv      a row a program and generation (hours; goes on where it ended)
python benchmarks/pods.py table pods.csv        the tables of `benchmarks/pods.md`
python benchmarks/pods.py split v6e-4           memory of a chip among those that split a trial of width 4096

It needs an environment with `.[tpu-on-cpu]`, and for `split` one with `.[xla-compiler]`.
Layers are alike, so that two depths are compiled and others
follow on a line. libtpu tells the memory within a minute and the cycles after minutes: with `--memory-only`
it is ended in between.
"""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import tyro

from mup_tpu.config import Trial
from mup_tpu.devices.peak import GENERATIONS, tpu_type
from mup_tpu.files import scratch_folder
from mup_tpu.models import declare
from mup_tpu.tpu import compiler

WIDTHS, DEPTHS = (256, 512, 1024, 2048, 4096), (1, 2)
TYPES = ("v5p-8", "v6e-1")
VOCAB_SIZE = 32768
TRIAL = Trial().replace(
    width=256,
    base_width=256,
    head_size=64,
    depth=1,
    sequence_length=256,
    batch_size=64,
    precision="bf16",
    grad_clip=1.0,
)
FIELDS = ("type", "width", "depth", "bytes", "hbm_bytes", "cycles", "compile_s")
HERTZ = 1.75e9  # of both: at it the units' products a cycle make the peak of the data sheet
BANDWIDTH = {"v5p": 2.765e12, "v6e": 1.64e12}  # bytes a second of HBM, Google Cloud's page of each version
PRICE = {"v5p": 4.20, "v6e": 2.70}  # US dollars a chip and hour, on demand in the United States
CHIPS = {"v5p": 128, "v6e": 256}  # of v5p-256 (cores are counted) and of v6e-256 (chips are)


def compile_all(path: tyro.conf.Positional[Path], memory_only: bool = False, limit_s: float = 3600.0) -> None:
    done = {(r["type"], int(r["width"]), int(r["depth"])) for r in rows(path) if memory_only or r["cycles"]}
    for width in (4096, 1024, 256, 2048, 512):
        for depth in DEPTHS:
            wanted = [name for name in TYPES if (name, width, depth) not in done]
            if not wanted:
                continue
            kept = path.with_suffix("") / f"{width}-{depth}.mlir"
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                kept.write_text(compiler.trace_pack([TRIAL.replace(width=width, depth=depth)], VOCAB_SIZE, 1))
            for name in wanted:
                row = compiled(kept, name, memory_only, limit_s)
                with path.open("a", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS)
                    if file.tell() == 0:
                        writer.writeheader()
                    writer.writerow({"type": name, "width": width, "depth": depth} | row)
                print(name, width, depth, row, flush=True)


def split(name: tyro.conf.Positional[str], width: int = 4096) -> None:
    """Print the memory of a chip where all chips of a type split one trial, at two depths and at twelve."""
    chips, gib = tpu_type(name).devices, list[float]()
    for depth in DEPTHS:
        with scratch_folder() as folder:
            trial = TRIAL.replace(width=width, depth=depth)
            program = folder / "program.txt"
            program.write_text(compiler.trace_pack([trial], VOCAB_SIZE, chips, split_over=chips))
            gib.append(float(compiled(program, name, True, 3600.0, chips)["bytes"]) / 2**30)
    print(f"{name}, width {width}: {gib[0]:.2f} and {gib[1]:.2f} GiB a chip at 1 and 2 layers, "
          f"{gib[0] + 11 * (gib[1] - gib[0]):.1f} at 12 on a line")  # fmt: skip


def compiled(
    program: Path, name: str, memory_only: bool, limit_s: float, chips: int = 1
) -> dict[str, float | str]:
    """Compile a program for chips of a type; return a chip's bytes, and its cycles if it has come so far."""
    with scratch_folder() as folder:
        topology = tpu_type(name).topology
        command = [sys.executable, "-m", "mup_tpu.tpu.compiler", program, topology, chips, folder]
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        began = time.monotonic()
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                time.sleep(1.0)
                if memory_only and any(folder.glob("*-memory-usage-report.txt")):
                    time.sleep(2.0)
                    break
        finally:
            process.kill()
            process.wait()
        (report,) = folder.glob("*-memory-usage-report.txt")
        # Reports of a new libtpu, and of torch_xla's
        sizes = (r"default \(color=0\)\nTotal bytes: (\d+)", r"Total bytes used: (\d+)")
        size = next(filter(None, (re.search(pattern, report.read_text()) for pattern in sizes)), None)
        assert size is not None, report.read_text()[:500]
        (fused,) = folder.glob("*.after_optimizations.txt")
        cycles = [estimated_cycles(text.read_text()) for text in folder.glob("*.after_codegen.txt")]
        return {
            "bytes": size[1],
            "hbm_bytes": traffic(fused.read_text()),
            "cycles": cycles[0] if cycles else "",
            "compile_s": round(time.monotonic() - began),
        }


# Bytes of a number; `S(1)` in a layout is the vector memory on the chip.
_SIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}
_SHAPE = re.compile(r"\b(f32|s32|u32|bf16|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.-]+) = (.*?) ([a-z-]+)\((.*)")


def estimated_cycles(text: str) -> int:
    """Return the cycles of a step that libtpu estimates: of all fusions, not of waiting or collectives."""
    numbers = map(int, re.findall(r'"estimated_cycles":"(\d+)"', text))
    return sum(number for number in numbers if number < 2**62)


def traffic(program: str) -> int:
    """Return the bytes that one step moves to and from HBM: operands and results of fusions and copies."""
    body = max(re.split(r"\n(?=%|ENTRY)", program), key=lambda computation: computation.count(" fusion("))
    shapes: dict[str, str] = {}
    total = 0
    for line in body.splitlines():
        if match := _INSTRUCTION.match(line):
            name, result, operation, rest = match.groups()
            shapes[name] = result
            if operation in ("fusion", "copy", "copy-start", "slice-start", "convolution"):
                operands = re.findall(r"%([\w.-]+)", rest.partition("), ")[0])
                written = "" if operation.endswith("-start") else result
                total += sum(map(_hbm_bytes, [written, *(shapes.get(name, "") for name in operands)]))
    return total


def _hbm_bytes(shapes: str) -> int:
    return sum(
        _SIZES[kind] * math.prod(int(size) for size in sizes.split(",") if size)
        for kind, sizes, layout in _SHAPE.findall(shapes)
        if "S(" not in layout
    )


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open())) if path.exists() else []


def table(path: tyro.conf.Positional[Path], depth: int = 12, trials: int = 27, steps: int = 4000) -> None:
    """Print a row a width and generation, then the sweep's time and price.

    Args:
        path: what `compile` wrote.
        depth: layers of the networks.
        trials: trials of each width, such as nine learning rates of three seeds.
        steps: steps of a trial.
    """
    tokens = TRIAL.data.batch_size * TRIAL.data.sequence_length
    print("| chip | width | parameters | GiB a member | members a chip | GB moved a step | least ms | "
          "million cycles | ms | chip-hours |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name in TYPES:
        version = name.partition("-")[0]
        generation, jobs = GENERATIONS[version], []
        for width in WIDTHS:
            size, moved, cycles = (
                _at(path, name, width, depth, field) for field in ("bytes", "hbm_bytes", "cycles")
            )
            if math.isnan(size):
                continue
            trial = TRIAL.replace(width=width, depth=depth)
            declaration = declare(trial.model, VOCAB_SIZE, TRIAL.data.sequence_length)
            flop = declaration.flops_per_token(VOCAB_SIZE, TRIAL.data.sequence_length) * tokens
            members = int(generation.usable_bytes / size)
            chips = 1 if members else 4  # of a host, which split a member
            least_s, by_cycles_s = (
                max(flop / generation.device_flops, moved / BANDWIDTH[version]),
                cycles / HERTZ,
            )
            jobs += [steps * least_s / chips] * trials * chips
            cells = (
                version, width, f"{declaration.total / 1e6:.0f} M", f"{size / 2**30:.1f}",
                members or "none",
                f"{moved / 1e9:.0f}", f"{1e3 * least_s:.0f}", *(
                    ("–", "–") if math.isnan(cycles) else (f"{cycles / 1e6:.0f}", f"{1e3 * by_cycles_s:.0f}")
                ), f"{steps * least_s * trials / 3600:.1f}",
            )  # fmt: skip
            print("|", *(f"{cell} |" for cell in cells))
        free = [0.0] * CHIPS[version]
        for job in sorted(jobs, reverse=True):  # the longest first, each on the chip that is free first
            free[free.index(min(free))] += job
        hours, busy = max(free) / 3600, sum(jobs) / 3600
        print(f"\n{version}-256, {CHIPS[version]} chips: at least {hours:.2f} h, {busy:.0f} chip-hours; "
              f"${hours * CHIPS[version] * PRICE[version]:.0f} for the whole pod, "
              f"${busy * PRICE[version]:.0f} for chips while they are busy\n")  # fmt: skip


def _at(path: Path, name: str, width: int, depth: int, field: str) -> float:
    one, two = (
        [float(r[field]) for r in rows(path)
         if (r["type"], int(r["width"]), int(r["depth"])) == (name, width, compiled) and r[field]]
        for compiled in DEPTHS
    )  # fmt: skip
    return one[-1] + (depth - 1) * (two[-1] - one[-1]) if one and two else math.nan


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"compile": compile_all, "table": table, "split": split})
