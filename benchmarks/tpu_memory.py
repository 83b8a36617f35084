"""Memory of packs by the TPUs' own compilers, which `training/memory.py` is fitted to.

    python benchmarks/tpu_memory.py     # goes on where it was ended
    python benchmarks/tpu_memory.py --architecture llama --out benchmarks/tpu_memory_llama.csv

One chip of v4 and of v5e; the last shapes are so deep that their blocks are one loop.
`tests/training/test_memory.py` holds the estimate to the tables. Llama's hold 5 of the shapes so far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pandas as pd
import tyro
from rich.console import Console
from rich.progress import track

from mup_tpu.config import Trial
from mup_tpu.devices.peak import TPU_TYPES, TpuType
from mup_tpu.tpu.compiler import compile_program, trace_pack

CHIPS = {"v4": TpuType("v4", "v4:2x2x1", 1), "v5e": TPU_TYPES["v5litepod-1"]}
COLUMNS = ["width", "depth", "sequence_length", "batch_size", "members", "vocab_size", "precision"]
SHAPES = [
    (64, 2, 128, 16, 32, 256, "float32"),
    (128, 4, 64, 32, 16, 256, "float32"),
    (256, 4, 32, 64, 4, 256, "float32"),
    (64, 12, 128, 16, 16, 256, "float32"),
    (128, 2, 512, 16, 8, 256, "float32"),
    (128, 2, 2048, 8, 2, 256, "float32"),
    (256, 2, 128, 16, 8, 256, "float32"),
    (256, 2, 128, 16, 8, 256, "bf16"),
    (256, 8, 128, 16, 4, 256, "float32"),
    (256, 2, 256, 16, 8, 4096, "float32"),
    (256, 2, 1024, 16, 4, 256, "float32"),
    (256, 2, 1024, 16, 4, 256, "bf16"),
    (512, 4, 1024, 16, 1, 256, "float32"),
    (512, 4, 128, 16, 8, 256, "float32"),
    (768, 4, 1024, 4, 1, 50257, "float32"),
    (1024, 4, 256, 16, 2, 4096, "float32"),
    (64, 16, 128, 8, 8, 256, "float32"),
    (256, 16, 128, 16, 2, 256, "float32"),
]


def main(
    out: Path = Path("benchmarks/tpu_memory.csv"),
    architecture: Literal["gpt2", "llama"] = "gpt2",
    qk_norm: bool = False,
) -> None:
    """Compile every shape that is not in the table yet.

    Args:
        out: CSV file for the table; a row is written as soon as it is known.
        architecture: Of the packs.
        qk_norm: Whether queries and keys have norms.
    """
    kind = {"architecture": architecture, "qk_norm": qk_norm}
    table = pd.read_csv(out) if out.exists() else pd.DataFrame()
    done = set(table[["generation", *COLUMNS]].itertuples(index=False, name=None)) if len(table) else set()
    rows = table.to_dict("records")
    for shape in track(SHAPES, "shapes", console=Console(stderr=True)):
        fields = dict(zip(COLUMNS, shape, strict=True))
        missing = [name for name in CHIPS if (name, *shape) not in done]
        if not missing:
            continue
        model = {k: v for k, v in fields.items() if k not in ("members", "vocab_size")}
        trial = (
            Trial()
            .replace(base_width=64, head_size=32 if shape[0] < 512 else 64, grad_clip=1.0, **model)
            .replace(**kind)
        )
        trials = [trial.replace(seed=k) for k in range(fields["members"])]
        program = trace_pack(trials, fields["vocab_size"], 1)
        for name in missing:
            compiled = compile_program(program, CHIPS[name])
            sizes = {"argument_mib": compiled.argument_bytes, "temp_mib": compiled.temp_bytes}
            rows.append({"generation": name} | fields | {k: v / 2**20 for k, v in sizes.items()})
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.6g")


if __name__ == "__main__":
    tyro.cli(main)
