"""What a GPU that is lent for minutes is asked first: today's speed, then a prediction that could fail.

    python benchmarks/on_gpu.py --out benchmarks/on_gpu
    python benchmarks/on_gpu.py --rehearse --out /tmp/rehearsal     on a CPU, at a hundredth of the size

1. rates.csv: GPT-2 of 124 M parameters in nanoGPT's compiled loop and in a pack of one, and eight trials of
   width 256 in a pack (gpu_peers.py says how each is measured).
2. ladder: rates of three widths of depth 12, verdict, and `predict --keep` at width 768, 124 M parameters;
   then five rates around the predicted one there, and what `analyze` says of the prediction.

Each step is a command of its own: whoever runs out of time runs the same line again.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import tyro
from gpu_peers import Case, measure_all

from mup_tpu import Sweep, Trial, octaves

LADDER = Sweep(
    experiment="on_gpu",
    base=Trial().replace(
        base_width=64, depth=12, head_size=64, tokenizer="bpe", vocab_size=50_304, sequence_length=512,
        batch_size=16, steps=300, precision="bf16",
    ),
    scale={"width": (64, 128, 256)},
    tune={"learning_rate": octaves(-10, -5)},
    compare={"parametrization": ("mup",)},
    num_seeds=2,
)  # fmt: skip
REHEARSAL = replace(
    LADDER,
    base=LADDER.base.replace(
        base_width=16, depth=2, head_size=16, vocab_size=512, sequence_length=32, batch_size=4, steps=30,
        precision="float32",
    ),
    scale={"width": (16, 32, 64)},
    tune={"learning_rate": octaves(-7, -2)},
    num_seeds=1,
)  # fmt: skip


def mup_tpu(*words: str | Path) -> str:
    """Run a command, which shows its progress; return what it prints."""
    command = [sys.executable, "-m", "mup_tpu", *map(str, words)]
    print(" ".join(map(str, ["$ mup-tpu", *words])), flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(out: Path, rehearse: bool = False, minutes: float = 3.0, seconds: float = 1.5) -> None:
    """Measure the rates, then make a prediction and try it.

    Args:
        out: Folder of the results; what is there already is not run again.
        rehearse: Train on the CPU, at a hundredth of the size.
        minutes: Longest time of the rates.
        seconds: About how long each rate is measured.
    """
    out.mkdir(parents=True, exist_ok=True)
    device, width, depth, vocabulary = ("cpu", 32, 2, 512) if rehearse else ("cuda", 768, 12, 50_304)
    if not (out / "rates.csv").exists():
        cases = [
            Case("nanogpt", device, width, 1, not rehearse, depth=depth, vocabulary=vocabulary),
            Case("stacked", device, width, 1, not rehearse, depth=depth, vocabulary=vocabulary),
            Case("nanogpt", device, width // 3, 1, not rehearse),
            Case("stacked", device, width // 3, 8, not rehearse),
        ]
        measure_all(cases[:2] if rehearse else cases, seconds, minutes, out / "rates.csv")

    ladder, target = out / "ladder", 128 if rehearse else 768
    sweep = [f"{__file__}:{'REHEARSAL' if rehearse else 'LADDER'}", "--results", ladder, "--device", device]
    mup_tpu("sweep", *sweep)
    print(mup_tpu("analyze", ladder))
    if not (ladder / "predictions.json").exists():
        print(mup_tpu("predict", ladder, "--at", f"width={target}", "--keep"))
    kept = json.loads((ladder / "predictions.json").read_text())
    centre = round(2 * kept[0]["x"]) / 2  # half octaves of log2(learning rate)
    rates = [f"2^{centre + k:g}" for k in (-2, -1, 0, 1, 2)]
    mup_tpu("sweep", *sweep, "--scale", str(target), "--tune", ",".join(rates))
    print(mup_tpu("analyze", ladder))
    print(f"predicted 2^{kept[0]['x']:.2f} at width {target}; tried {math.log2(2**centre):g} ± 2 octaves")


if __name__ == "__main__":
    tyro.cli(main)
