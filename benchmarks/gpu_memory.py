"""Peak memory of packs on a GPU, which `training/memory.py` is fitted to.

    python benchmarks/gpu_memory.py                     # without a GPU; goes on where it was ended
    python benchmarks/gpu_memory.py --real --out on_a_gpu.csv

Without a GPU, torch's own allocator counts on a hollow one (tools/hollow_gpu). Shapes are drawn:
whatever a pack may have is combined with all else. The estimate is fitted to all but the last 24;
`tests/training/test_memory.py` holds it to all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro
from rich.console import Console
from rich.progress import track

HOLLOW = Path(__file__).parents[1] / "tools" / "hollow_gpu"
SIZES = 5e7, 4e9
"""Least and most numbers of a pack that is drawn, by `Shape.numbers`."""


@dataclass(frozen=True)
class Shape:
    """A pack."""

    architecture: Literal["gpt2", "llama", "moe"] = "gpt2"
    optimizer: Literal["adamw", "sgd", "muon", "adamh", "muonh"] = "adamw"
    precision: Literal["float32", "float64", "bf16"] = "bf16"
    width: int = 64
    depth: int = 2
    head_size: int = 64
    sequence_length: int = 512
    batch_size: int = 16
    vocab_size: int = 256
    members: int = 8
    micro_batches: int = 1
    execution: Literal["vmap", "loop"] = "vmap"
    compile: bool = False

    def trials(self) -> list[Any]:
        """Members of the pack."""
        from mup_tpu.config import Trial

        others = ("vocab_size", "members", "micro_batches", "execution", "compile")
        own = {name: value for name, value in asdict(self).items() if name not in others}
        trial = Trial().replace(**own, base_width=self.head_size)
        return [trial.replace(seed=seed) for seed in range(self.members)]

    @property
    def numbers(self) -> float:
        """Rough count of numbers, for the choice of packs alone."""
        held = self.depth * 12 * self.width**2 + 2 * self.vocab_size * self.width
        tokens = self.batch_size * self.sequence_length / self.micro_batches
        has_scores = self.head_size == 12 or self.precision == "float64"
        scores = 4 * self.sequence_length * self.width / self.head_size if has_scores else 0
        activations = tokens * (self.depth * (30 * self.width + scores) + 4 * self.vocab_size)
        return self.members * (4 * held + activations) * (2 if self.precision == "float64" else 1)


def drawn(count: int, **fixed: Any) -> Iterator[Shape]:
    """Different packs, the same ones at each call; `fixed` are fields of all."""
    generator = random.Random(str((count, fixed)))
    choices: dict[str, list[Any]] = {
        "architecture": ["gpt2", "gpt2", "llama", "moe"],
        "optimizer": ["adamw", "adamw", "sgd", "muon", "adamh", "muonh"],
        "precision": ["bf16", "bf16", "bf16", "float32", "float32", "float32", "float64"],
        "head_size": [32, 64, 64, 128, 12],
        "depth": [1, 2, 2, 4, 8],
        "sequence_length": [64, 128, 256, 512, 1024, 2048],
        "batch_size": [4, 8, 16, 32, 64],
        "vocab_size": [256, 256, 4096, 50257],
        "members": [1, 2, 4, 8, 16, 32],
        "micro_batches": [1, 1, 1, 2, 4],
    }
    while count:
        own = {name: generator.choice(values) for name, values in choices.items()} | fixed
        widths = [48, 96, 384, 768] if own["head_size"] == 12 else [128, 256, 512, 768, 1024, 2048]
        shape = Shape(**{"width": generator.choice(widths)} | own)
        weights = shape.members * shape.depth * 12 * shape.width**2
        if SIZES[0] < shape.numbers < SIZES[1] and weights < 2e8:
            count -= 1
            yield shape


def shapes() -> list[Shape]:
    """All packs of the table."""
    named = [  # those of gpu_peers.csv, in both precisions
        Shape(width=width, members=members, precision=precision)
        for width, members in ((64, 1), (64, 8), (64, 32), (256, 8))
        for precision in ("bf16", "float32")
    ]
    in_turns = drawn(10, execution="loop")
    compiled = [
        *(
            Shape(width=256, members=8, precision=precision, compile=True)
            for precision in ("bf16", "float32")
        ),
        *drawn(8, compile=True),
    ]
    held_out = drawn(24)  # drawn after the estimate was fitted
    return [*named, *drawn(60), *in_turns, *compiled, *held_out]


def measure(shape: Shape) -> dict[str, float]:
    """GiB handed out by torch's allocator, and taken from the driver, at most."""
    import torch

    from mup_tpu.devices import get_device
    from mup_tpu.training.pack import Pack

    if not shape.compile:
        torch.compiler.set_stance("force_eager")
    device = get_device("cuda").arrange(shape.members, shape.batch_size)
    parts = {"compile": shape.compile, "micro_batches": shape.micro_batches}
    pack = Pack(shape.trials(), shape.vocab_size, device, shape.execution, **parts)
    tokens = torch.randint(0, shape.vocab_size, (4, shape.batch_size, shape.sequence_length + 1))
    for _ in range(2):
        pack.train(device.place_stack(tokens, "data", 4), 4)
    pack.evaluate(device.place_stack(tokens, "data", 4))
    peaks = {"peak_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    return {name: size / 2**30 for name, size in peaks.items()}


def rows(out: Path, only: tuple[int, ...]) -> None:
    """Measure every pack that is not in the table yet, each in a process of its own."""
    packs = shapes()
    names = [field.name for field in fields(Shape)]
    table = pd.read_csv(out) if out.exists() else pd.DataFrame()
    known = table.to_dict("records")
    done = {tuple(str(row[name]) for name in names) for row in known}
    import mup_tpu.training.pack  # noqa: F401  # once for all processes, before CUDA

    for shape in track([packs[i] for i in only] or packs, "packs", console=Console(stderr=True)):
        if tuple(map(str, asdict(shape).values())) in done:
            continue
        into, out_of = os.pipe()
        if not (child := os.fork()):
            os.write(out_of, json.dumps(measure(shape)).encode())
            os._exit(0)
        os.close(out_of)
        with os.fdopen(into) as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        if not found:
            print(f"failed: {shape}", file=sys.stderr)
            continue
        known.append(asdict(shape) | json.loads(found))
        pd.DataFrame(known).to_csv(out, index=False, float_format="%.5g")


def main(
    out: Path = Path("benchmarks/gpu_memory.csv"),
    real: bool = False,
    only: tuple[int, ...] = (),
    folder: Path | None = None,
) -> None:
    """Measure every pack that is not in the table yet.

    Args:
        out: CSV file for the table; a row is written as soon as it is known.
        real: Measure on the GPU that is here.
        only: Rows of the table to measure, from 0; by default all.
        folder: Where a hollow GPU's libraries are, and stay; by default a temporary folder.
    """
    if real or "HOLLOW_GPUS" in os.environ:
        return rows(out, only)
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, HOLLOW / "hollow_gpu.py", folder or temporary]
        words = [sys.executable, __file__, "--out", out, *(("--only", *only) if only else ())]
        sys.exit(subprocess.run(list(map(str, command + words)), check=False).returncode)


if __name__ == "__main__":
    tyro.cli(main)
