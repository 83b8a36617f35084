"""How does the norm of a gradient, which clipping compares with a limit, follow width, depth and batch size?

python benchmarks/gradient_norm.py --out benchmarks/gradient_norm.csv     about 2 minutes on one core
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
import tyro

from mup_tpu.config import Trial
from mup_tpu.data import load
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack

BASE = Trial().replace(
    width=64, base_width=64, depth=2, base_depth=2, head_size=32, init_std=0.14, alpha_in=3.0, alpha_out=0.9,
    alpha_attn=0.4, sequence_length=64, batch_size=8, steps=40, warmup=0.1, learning_rate=2.0**-7,
    grad_clip=0.0,
)  # fmt: skip
AFTER, MEAN_OF = 20, 5
"""Steps before the second measurement, and steps of its mean."""


def norms(trial: Trial) -> tuple[float, float]:
    """Norm of the whole gradient at init, and after `AFTER` steps."""
    dataset = load(trial.data, progress=False)
    pack = Pack([trial], dataset.vocab_size, get_device("cpu"), "vmap")
    measured = []
    for step in range(AFTER + MEAN_OF):
        tokens_BT1 = torch.from_numpy(dataset.train_batch(step))
        if step == 0 or step >= AFTER:
            gradients, _ = pack._running.gradients_and_losses(pack.parameters, pack.buffers, tokens_BT1)
            measured.append(float(torch.stack([g.norm() for g in gradients.values()]).norm()))
        pack.step(tokens_BT1)
    return measured[0], sum(measured[1:]) / MEAN_OF


def main(out: Path | None = None) -> None:
    """Print the table, and write it.

    Args:
        out: CSV file.
    """
    cells = [(p, "width", w) for p in ("sp", "sp_embedding", "mup") for w in (64, 128, 256)]
    cells += [
        (p, "depth", d) for p in ("mup", "completep_zero", "completep_half", "completep") for d in (2, 8, 32)
    ]
    cells += [("mup", "batch_size", b) for b in (2, 8, 32)]
    rows = []
    for parametrization, scale, value in cells:
        start, later = norms(BASE.replace(parametrization=parametrization, **{scale: value}))
        rows.append(
            {"parametrization": parametrization, "scale": scale, "value": value,
             "at_init": round(start, 3), f"after_{AFTER}_steps": round(later, 3)}
        )  # fmt: skip
        print(rows[-1], flush=True)
    if out is not None:
        pd.DataFrame(rows).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
