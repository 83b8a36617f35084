"""This checkout's step against another's, such as the commit before a change.

    git worktree add ../before COMMIT
    python benchmarks/step_against.py ../before --out benchmarks/step_against.csv

Both packages are imported in one process of one thread, and the same pack of each trains in turns of a step.
Times are CPU times, on which other work of the machine has less influence.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import tyro
from rich.console import Console

ROOT = Path(__file__).parents[1]


def make_pack(checkout: Path, width: int, members: int, execution: str, precision: str) -> Any:
    """A pack by the package of a checkout, whatever package was imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mup_tpu"]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout.resolve()))
    try:
        from mup_tpu.config import Trial
        from mup_tpu.devices import get_device
        from mup_tpu.training import pack

        assert pack.__file__.startswith(str(checkout.resolve())), pack.__file__
        base = Trial().replace(
            width=width, head_size=32, sequence_length=128, batch_size=16, weight_decay=0.1,
            precision=precision,
        )  # fmt: skip
        trials = [base.replace(seed=seed) for seed in range(members)]
        return pack.Pack(trials, 256, get_device("cpu"), execution)
    finally:
        sys.path.pop(0)


def step(pack: Any, tokens_BT1: torch.Tensor) -> tuple[float, list[float]]:
    """CPU seconds of a step, and its losses."""
    began = time.process_time()
    losses = pack.read(pack.step(tokens_BT1)).tolist()
    return time.process_time() - began, losses


def main(
    other: Annotated[Path, tyro.conf.Positional],
    widths: tuple[int, ...] = (64, 256),
    members: int = 2,
    steps: int = 300,
    executions: tuple[str, ...] = ("loop", "vmap"),
    precision: str = "float32",
    out: Path | None = None,
) -> None:
    """Measure every width in both executions.

    Args:
        other: Root of the other checkout.
        widths: Model widths.
        members: Trials of a pack.
        steps: Steps of each pack at the first width; fewer at wider ones, in proportion.
        executions: Executions of the members.
        precision: Arithmetic of both.
        out: CSV file for the table.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens_BT1 = torch.randint(0, 256, (16, 129), generator=generator)
    rows = []
    for width, execution in itertools.product(widths, executions):
        pairs, same = [], True
        for checkouts in ((ROOT, other), (other, ROOT)):  # who comes first has another place in memory
            packs = {c: make_pack(c, width, members, execution, precision) for c in checkouts}
            for i in range(3 + max(20, steps * widths[0] // width // 2)):
                order = checkouts if i % 2 else checkouts[::-1]
                found = {checkout: step(packs[checkout], tokens_BT1) for checkout in order}
                same &= found[ROOT][1] == found[other][1]
                if i >= 3:  # the first steps fault memory in
                    pairs.append([found[ROOT][0], found[other][0]])
        table = pd.DataFrame(pairs, columns=["ours", "theirs"])
        ratios, fastest = table["ours"] / table["theirs"], table.quantile(0.1)
        low, median, high = ratios.quantile([0.25, 0.5, 0.75]).round(4)
        rows.append(
            {
                "width": width, "execution": execution, "precision": precision, "members": members,
                "steps": len(table),
                "step_ms": round(1000 * fastest["ours"], 2), "ratio_25": low, "ratio_median": median,
                "ratio_75": high, "ratio_fastest": round(fastest["ours"] / fastest["theirs"], 4),
                "same_losses": same,
            }
        )  # fmt: skip
        Console().print({name: str(value) for name, value in rows[-1].items()})
    if out is not None:
        pd.DataFrame(rows).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
