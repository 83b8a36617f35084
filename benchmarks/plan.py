"""Regret realised at a target: plan, sequence and prediction, against what people do at the same cost.

    python benchmarks/plan.py --worlds 100 --out benchmarks/plan.csv

Each world has a drift and a valley of one of 18 stored sweeps under rules that should keep the optimum along
the width (17 do: |α| < 0.2), an optimum that scatters by 0.1 octave, noise of 0.01 nat and a guess of the
learning rate that is off by an octave. A run costs as much as a GPT-2 of that width. The target is trained
once, at the value that each way gives, and its regret read off the true valley. Half-widths are of 95 %
intervals, octaves: as planned, and as predicted after the runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from interval_coverage import linex
from rich.progress import track

from mup_tpu import plan, predict
from mup_tpu.analysis import check_table
from mup_tpu.analysis.cost import run_cost
from mup_tpu.analysis.design import first_batch, next_batch, why_stop
from mup_tpu.analysis.looks import Question, take_look
from mup_tpu.config import Trial
from mup_tpu.errors import MupTpuError
from mup_tpu.models import training_flops

DRIFTS = (
    (-1.12, 0.033), (-0.08, 0.025), (-0.08, 0.027), (-0.08, 0.110), (-0.06, 0.022), (-0.05, 0.020),
    (-0.04, 0.033), (-0.03, 0.033), (-0.03, 0.033), (-0.02, 0.031), (0.00, 0.031), (0.00, 0.097),
    (0.02, 0.031), (0.04, 0.077), (0.04, 0.138), (0.10, 0.071), (0.17, 0.118), (0.19, 0.118),
)  # fmt: skip
"""Drift exponent and curvature (nat per octave²) of each sweep."""
SCATTER, NOISE = 0.1, 0.01
UNIT = training_flops(Trial().replace(width=64), 256)


def cost(width: float) -> float:
    """Cost of a run, in runs of width 64."""
    return training_flops(Trial().replace(width=int(width)), 256) / UNIT


class World:
    """Losses at any width and learning rate, and what was paid for them."""

    def __init__(self, generator: np.random.Generator, target: int) -> None:
        self.generator, self.target = generator, target
        self.alpha, self.curvature = DRIFTS[generator.integers(len(DRIFTS))]
        self.asymmetry = float(generator.choice([-1, 1]) * generator.uniform(0.1, 0.35))
        self.guess = -6.0 + generator.normal()
        self.shocks: dict[float, float] = {}
        self.paid = self.planned = 0.0
        self.half_width = math.nan
        """As planned."""

    def optimum(self, width: float) -> float:
        """log2 of the best learning rate."""
        if width not in self.shocks:
            self.shocks[width] = SCATTER * self.generator.standard_normal()
        return -6.0 + self.alpha * math.log2(width / 64) + self.shocks[width]

    def rise(self, width: float, x: float) -> float:
        """Regret of a value, nat."""
        return min(self.curvature * float(linex(x - self.optimum(width), self.asymmetry)), 3.0)

    def run(self, width: float, x: float) -> float:
        """Loss of a run."""
        self.paid += cost(width)
        loss = 2.5 - 0.05 * math.log2(width / 64) + self.rise(width, x)
        return loss + NOISE * float(self.generator.standard_normal())


Value = tuple[float, float, float]
"""log2 of the value at the target, and its 95 % interval; nan where there is none."""


def plan_alone(world: World, budget: float) -> Value:
    """Plan, buy its runs alone, predict."""
    return planned(world, budget, alone=True)


def planned(world: World, budget: float, alone: bool = False) -> Value:
    """Plan, buy its runs and then seeds, look by look within the budget, predict."""
    found = plan(f"width={world.target}", budget * UNIT, Trial())
    world.half_width, world.planned = found.half_width, found.cost / UNIT
    widths = [int(w) for w in found.sweep.scale_axis.values]
    centre = round(world.guess)
    batch = first_batch("mup", widths[0], [float(centre + k) for k in range(-4, 4)])
    rows: list[dict[str, float | str | int]] = []
    question, taken = Question(planned=tuple(map(float, widths))), None
    for purchase in itertools.count(1):
        if world.paid + sum(cell.runs * cost(cell.scale) for cell in batch.cells) > budget:
            break
        for cell in batch.cells:
            seeds = sum(row["width"] == cell.scale and row["lr"] == 2.0**cell.x for row in rows)
            rows += [
                {
                    "width": cell.scale, "lr": 2.0**cell.x, "seed": seeds + k, "purchase": purchase,
                    "loss": world.run(cell.scale, cell.x), "parametrization": "mup",
                }
                for k in range(cell.runs)
            ]  # fmt: skip
        table = check_table(pd.DataFrame(rows))
        taken = take_look(table.runs, question, taken)
        is_seen = len({row["width"] for row in rows}) == len(widths)
        if taken.decision != "INCONCLUSIVE" or (alone and is_seen):
            break
        batch = next_batch("mup", taken.evidence, run_cost(table), question)
        if why_stop(taken, batch, question):
            break
    try:
        made = predict(pd.DataFrame(rows), f"width={world.target}").predictions[0]
    except MupTpuError:
        best = min(rows, key=lambda row: (-float(row["width"]), float(row["loss"])))
        return math.log2(float(best["lr"])), math.nan, math.nan
    return made.x, *made.interval


def grid(world: World, width: int, step: float, points: int, seeds: int) -> Value:
    """Best mean of a grid around the guess, copied."""
    at = [world.guess + (k - points // 2) * step for k in range(points)]
    means = [np.mean([world.run(width, x) for _ in range(seeds)]) for x in at]
    return at[int(np.argmin(means))], math.nan, math.nan


def largest(budget: float, runs: int, target: int) -> int:
    """Width of the largest proxy whose runs fit a budget."""
    widths = [w for w in (64, 128, 256, 512, 1024, 2048) if w < target and runs * cost(w) <= budget]
    return max(widths, default=64)


def proxy_grid(world: World, budget: float) -> Value:
    """9 values half an octave apart, at least 3 seeds each, at the largest proxy that fits."""
    width = largest(budget, 27, world.target)
    return grid(world, width, 0.5, 9, int(budget / (9 * cost(width))))


def plan_copied(world: World, budget: float) -> Value:
    """The same grid at the cost of the plan alone."""
    return proxy_grid(world, plan(f"width={world.target}", budget * UNIT, Trial()).cost / UNIT)


def half_on_the_largest(world: World, budget: float) -> Value:
    """7 values an octave apart at the largest proxy that half of the budget pays."""
    return grid(world, largest(budget / 2, 7, world.target), 1.0, 7, 1)


def at_the_target(world: World, budget: float) -> Value:
    """Grid at the target itself, an octave apart, as large as the budget pays; at least one value."""
    return grid(world, world.target, 1.0, min(9, max(1, int(budget / cost(world.target)))), 1)


WAYS: dict[str, Callable[[World, float], Value]] = {
    "plan, sequence, prediction": planned,
    "plan alone, prediction": plan_alone,
    "proxy on a 9 × 3 grid at the cost of the plan alone, copied": plan_copied,
    "proxy on a 9 × 3 grid, copied": proxy_grid,
    "half the budget on the largest proxy, copied": half_on_the_largest,
    "grid at the target": at_the_target,
}


def main(
    worlds: int = 100,
    targets: tuple[int, ...] = (1024, 4096),
    budget: float = 600.0,
    out: Path | None = None,
) -> None:
    """Print regret, share inside the interval, half-widths and costs of each way.

    Args:
        worlds: Worlds of each target.
        targets: Widths of targets.
        budget: Cost that each way may take, in runs of width 64.
        out: File for the table.
    """
    rows = []
    for target, number in track([*itertools.product(targets, range(worlds))], "worlds"):
        for way, take in WAYS.items():
            world = World(np.random.default_rng([number, target]), target)
            truth = world.optimum(target)
            x, low, high = take(world, budget)
            inside = float(low <= truth <= high) if math.isfinite(low) else math.nan
            plans = {"planned": world.half_width, "half_width": (high - low) / 2, "inside": inside}
            costs = {"planned_cost": world.planned or math.nan, "cost": world.paid}
            case = {"worlds": "keeps" if abs(world.alpha) < 0.2 else "drifts", "target": target, "way": way}
            rows.append(case | {"regret": world.rise(target, x)} | plans | costs)
    found = pd.DataFrame(rows)
    keeps = found[found["worlds"] == "keeps"]
    table = (
        pd.concat([found.assign(worlds="all"), keeps])
        .groupby(["worlds", "target", "way"], sort=False)
        .agg(
            n=("regret", "size"),
            regret=("regret", "mean"),
            median=("regret", "median"),
            worst=("regret", lambda r: float(np.quantile(r, 0.95))),
            planned=("planned", "median"),
            half_width=("half_width", "median"),
            inside=("inside", "mean"),
            planned_cost=("planned_cost", "mean"),
            cost=("cost", "mean"),
        )
        .round(4)
    )
    print(table.to_string())
    if out is not None:
        table.to_csv(out)


if __name__ == "__main__":
    tyro.cli(main)
