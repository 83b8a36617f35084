"""Promised and realised regret of plans in worlds that follow published laws, for plan.md.

    python benchmarks/plan_literature.py --seed 70131

A law gives the exponents of the best learning rate along width, depth, tokens and batch size (LAWS); it holds
exactly, without interactions. Valley, noise and scatter are those of a sweep of the atlas. Each law has two
targets. The first half of the laws, in the order of a shuffle, is for choosing, the other for the report.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import tyro
from plan import Atlas, World, planned
from rich.progress import track

from mup_tpu import plan
from mup_tpu.tuning.plan import Plan

LAWS = {
    # Exponents of width, depth, tokens and batch size; parameters are 12·depth·width².
    "Yang et al. 2022 (μP)": (0, 0, 0, 0),
    "Li et al. 2025 (Step Law)": (-1.426, -0.713, 0.307, 0),
    "Bi et al. 2024 (DeepSeek)": (-0.25, -0.125, -0.125, 0),
    "Bjorck et al. 2024, parameters and tokens": (-0.46, -0.23, -0.32, 0),
    "Porian et al. 2024": (-0.72, -0.36, 0, 0),
    "Brown et al. 2020 (table of GPT-3)": (-0.64, -0.32, 0, 0),
    "Malladi et al. 2022 (square root of the batch)": (0, 0, 0, 0.5),
    "Goyal et al. 2017 (linear in the batch)": (0, 0, 0, 1.0),
    "Shen et al. 2024 (Power)": (0, 0, -0.51, 1.0),
    "Everett et al. 2024 (standard, full alignment)": (-1.0, 0, 0, 0),
    "Yang and Hu 2021 (standard, lazy)": (-0.5, 0, 0, 0),
    "Yang et al. 2023 (depth μP), batch by root": (0, -0.5, 0, 0.5),
    "Dey et al. 2025 (CompleteP), tokens by root": (0, 0, -0.5, 0.5),
    "Bordelon et al. 2023, standard width": (-1.0, 0, 0, 0.5),
    "Bjorck et al. 2024, tokens alone": (0, 0, -0.32, 0.5),
    "Krizhevsky 2014, standard width": (-0.5, -0.5, 0, 0.5),
    "Shen et al. 2024, batch by root": (0, 0, -0.51, 0.5),
}
TARGETS = ("300M", "1.3B")


class Law(World):
    """Losses of runs where a law holds."""

    def __init__(self, generator: np.random.Generator, made: Plan, law: str, atlas: Atlas) -> None:
        super().__init__(generator, made, "", atlas)
        slopes = dict(zip(("width", "depth", "tokens", "batch"), LAWS[law], strict=True))
        self.ends = {name: (slopes[name],) * 2 for name in made.goal.shrinks}
        self.interactions = np.zeros(3)
        self.shocks, self.target = {}, 0.0
        start = math.log2(made.rates[len(made.rates) // 2]) + generator.normal()
        self.target = start - self.optimum(made.steps[0].values)


def main(
    seed: int = 70131, half: Literal["choosing", "other", "both"] = "both", out: Path | None = None
) -> None:
    """Print promised and realised regrets, and shares inside the intervals, by half.

    Args:
        seed: of the worlds.
        half: laws to take.
        out: file for the table, a row for each target.
    """
    sweeps = pd.read_csv("results/public/sweeps.csv")
    sweeps["source_name"] = sweeps["source"]
    atlas = Atlas(sweeps, sorted(set(sweeps["source"])), "other")
    plans = {size: plan(f"params={size}", 1e22) for size in TARGETS}
    order, rows = np.random.default_rng(0).permutation([*LAWS]).tolist(), []
    for i, law in enumerate(track(order, "laws")):
        of_law = "choosing" if i < len(order) // 2 else "other"
        if half not in (of_law, "both"):
            continue
        for j, size in enumerate(TARGETS):
            world = Law(np.random.default_rng([seed, [*LAWS].index(law), j]), plans[size], law, atlas)
            with tempfile.TemporaryDirectory() as folder:
                _, one = planned(world, Path(folder))
            truth = world.optimum(world.made.goal.values)
            rows.append(
                {"half": of_law, "law": law, "target": size, "off": one.x - truth,
                 "in 50 %": one.half[0] <= truth <= one.half[1],
                 "in 95 %": one.interval[0] <= truth <= one.interval[1],
                 "half-width": (one.interval[1] - one.interval[0]) / 2,
                 "planned": plans[size].regret, "promised": one.taking.expected,
                 "came": world.rise(world.made.goal.values, one.x)}
            )  # fmt: skip
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    if out is not None:
        table.to_csv(out, index=False, float_format="%.4g")
    means = table.drop(columns=["law", "target"]).groupby("half").mean()
    means["rmse"] = table.groupby("half")["off"].apply(lambda off: float(np.sqrt((off**2).mean())))
    print(means.round(4).to_string())


if __name__ == "__main__":
    tyro.cli(main)
