"""Regret realised at a target in several sizes: a plan and its prediction, against others at its cost.

    python benchmarks/plan.py --worlds 30 --out benchmarks/plan.csv

Each world has an exponent of the best learning rate along width, depth, tokens and batch size, a valley,
scatter of 0.1 octave, noise of 0.01 nat, and a start that is off by an octave. Exponents along the width are
those of 18 stored sweeps under rules that should keep it, or of 6 without one. A run costs its FLOPs. The
plan is swept as `mup-tpu ask` and `tell` do; the target is trained once, and its regret read off the true
valley.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro
from interval_coverage import linex

from mup_tpu import plan
from mup_tpu.analysis.planned import predict_planned
from mup_tpu.cli.study import keep_plan
from mup_tpu.store import load_runs
from mup_tpu.study.study import load_study
from mup_tpu.tuning.plan import Plan
from mup_tpu.tuning.target import Values

KEPT = (
    -1.12, -0.08, -0.08, -0.08, -0.06, -0.05, -0.04, -0.03, -0.03, -0.03, -0.02, 0.0, 0.0, 0.02, 0.04, 0.04,
    0.10, 0.17, 0.19,
)  # fmt: skip
"""Exponents along the width under rules that should keep the optimum."""
FREE = (-1.05, -0.98, -0.92, -0.84, -0.78, -0.7)
"""Exponents along the width in SP."""
CURVATURES = (0.02, 0.03, 0.03, 0.04, 0.05, 0.08, 0.11)
"""nat per octave²."""
SCATTER, NOISE = 0.1, 0.01


class World:
    """Losses of runs of any sizes and learning rate."""

    def __init__(self, generator: np.random.Generator, made: Plan, rule: str) -> None:
        self.generator, self.made = generator, made
        self.exponents = {
            "width": float(generator.choice(KEPT if rule else FREE)),
            "depth": float(generator.normal(-0.1, 0.25)),
            "tokens": float(generator.uniform(-0.5, 0.1)),
            "batch": float(generator.uniform(0.0, 0.6)),
        }
        self.curvature = float(generator.choice(CURVATURES))
        self.asymmetry = float(generator.choice([-1, 1]) * generator.uniform(0.1, 0.35))
        self.start = math.log2(made.rates[len(made.rates) // 2]) + generator.normal()
        self.shocks: dict[tuple[tuple[str, float], ...], float] = {}
        self.paid = 0.0

    def optimum(self, values: Values) -> float:
        """log2 of the best learning rate."""
        goal = self.made.goal
        sizes, first = goal.sizes(values), goal.sizes(self.made.steps[0].values)
        key = tuple(sorted(sizes.items()))
        if key not in self.shocks:
            self.shocks[key] = SCATTER * self.generator.standard_normal()
        moved = sum(a * math.log2(sizes[n] / first[n]) for n, a in self.exponents.items())
        return self.start + moved + self.shocks[key]

    def rise(self, values: Values, x: float) -> float:
        """Regret of a value, nat."""
        return min(self.curvature * float(linex(x - self.optimum(values), self.asymmetry)), 3.0)

    def run(self, values: Values, x: float) -> float:
        """Loss of a run."""
        self.paid += self.made.goal.flops(values)
        return 2.5 + self.rise(values, x) + NOISE * float(self.generator.standard_normal())


def planned(world: World, folder: Path) -> tuple[pd.DataFrame, float, float, float]:
    """Sweep the plan; returns its rows, and the prediction with its 95 % interval."""
    file = folder / "plan.toml"
    file.write_text(world.made.toml())
    study, _ = load_study(file, str(folder / "runs"))
    keep_plan(file, study)
    names = world.made.goal.values
    while trials := study.ask(100, until_settled=True):
        for trial in trials:
            values = {name: trial.values.get(name, names[name]) for name in names}
            study.tell(trial, world.run(values, math.log2(trial.values["learning_rate"])))
    (found,) = predict_planned(study.folder).optima
    assert found is not None
    return load_runs(study.folder), found.x, *found.interval


def by_hand(world: World, rows: pd.DataFrame) -> float:
    """Power law through the best value of each of the plan's sizes, by least squares."""
    goal, names = world.made.goal, world.made.changing
    at, best = [], []
    for values, runs in rows.groupby(names):
        means = runs.groupby("learning_rate")["loss"].mean()
        sizes = goal.sizes(dict(goal.values) | dict(zip(names, map(int, values), strict=True)))
        at.append([1.0, *(math.log2(size) for size in sizes.values())])
        best.append(math.log2(float(means.idxmin())))
    weights = np.linalg.lstsq(np.array(at), np.array(best), rcond=None)[0]
    return float(weights @ [1.0, *(math.log2(size) for size in goal.sizes(goal.values).values())])


def copied(world: World, budget: float, shrinks: tuple[str, ...], start: float) -> float:
    """Best of 9 values an octave apart, at the largest proxy whose grid the budget pays."""
    goal, target = world.made.goal, world.made.goal.sizes(world.made.goal.values)
    proxies = [
        goal.values_at({n: goal.floors[n] * (target[n] / goal.floors[n]) ** (i / 20) for n in shrinks})
        for i in range(20)
    ]
    paid = [values for values in proxies if 9 * goal.flops(values) <= budget]
    values = paid[-1] if paid else proxies[0]
    grid = [start + k - 4 for k in range(9)]
    return grid[int(np.argmin([world.run(values, x) for x in grid]))]


def main(worlds: int = 30, params: tuple[str, ...] = ("300M", "1.3B"), out: Path | None = None) -> None:
    """Print regret, share inside the interval and costs of each way.

    Args:
        worlds: worlds of each target, half of them under a rule that claims the width.
        params: sizes of the targets.
        out: file for the table.
    """
    rows: list[dict[str, Any]] = []
    for size, rule in itertools.product(params, ("mup", "")):
        made = plan(f"params={size}", 1e22, rule=rule or None)
        for number in range(worlds // 2):
            world = World(np.random.default_rng([number, len(size), len(rule)]), made, rule)
            goal = made.goal
            with tempfile.TemporaryDirectory() as folder:
                stored, x, low, high = planned(world, Path(folder))
            cost, truth = world.paid, world.optimum(goal.values)
            near = world.start + world.generator.normal()
            ways = {
                "plan, prediction": x,
                "the plan's sizes, law by hand": by_hand(world, stored),
                "ladder, copied": copied(world, cost, goal.shrinks, near),
                "ladder, half the cost, copied": copied(world, cost / 2, goal.shrinks, near),
                "width alone, copied": copied(world, cost, ("width",), near),
            }
            for way, taken in ways.items():
                inside = float(low <= truth <= high) if way.startswith("plan,") else math.nan
                case = {"target": size, "rule": rule or "none", "way": way, "inside": inside}
                case |= {"regret": world.rise(goal.values, taken), "planned": made.regret}
                rows.append(case | {"cost": cost / made.target_cost, "half_width": (high - low) / 2})
    table = pd.DataFrame(rows)
    groups = table.groupby(["target", "rule", "way"], sort=False)
    summary = groups.agg(
        n=("regret", "size"), regret=("regret", "mean"), median=("regret", "median"),
        worst=("regret", lambda r: float(np.quantile(r, 0.95))), inside=("inside", "mean"),
        planned=("planned", "mean"), half_width=("half_width", "median"), cost=("cost", "mean"),
    ).round(4)  # fmt: skip
    print(summary.to_string())
    if out is not None:
        summary.to_csv(out)


if __name__ == "__main__":
    tyro.cli(main)
