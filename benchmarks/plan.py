"""Regret realised at a target in several sizes: a plan and its prediction, against others at its cost.

    python benchmarks/plan.py --worlds 200 --half choosing
    python benchmarks/plan.py --worlds 200 --half other --out benchmarks/plan.csv

Worlds are drawn from the atlas (results/public/sweeps.csv), whose sources are split in two. Each has an
exponent of the best learning rate along width, depth, tokens and batch size, which changes from the target to
the smallest proxy as two sweeps of one source differ; sizes that interact as in Step Law's tables; valley,
noise and scatter of a sweep. The plan's priors are those of the choosing half. A run costs its FLOPs. The
plan is swept as `mup-tpu ask` and `tell` do; the target is trained once, and its regret read off the true
valley.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import prediction
import tyro
from interval_coverage import linex

from mup_tpu import plan
from mup_tpu.analysis.planned import PlannedOptimum, predict_planned
from mup_tpu.analysis.trend import BY_KIND
from mup_tpu.cli.study import keep_plan
from mup_tpu.store import load_runs
from mup_tpu.study.study import load_study
from mup_tpu.tuning.plan import Plan
from mup_tpu.tuning.target import Values, params_of

KINDS = {"width": "width", "depth": "depth", "tokens": "tokens", "batch": "batch size"}
WIDEST = 0.6
"""An exponent whose 95 % interval is wider is not drawn."""
INTERACTIONS = {"choosing": (0.085, 0.079, 0.097), "other": (0.044, 0.097, 0.026)}
"""Octaves an octave² of parameters × tokens, parameters × batch and tokens × batch: of the best rates of Step
Law's dense (±0.03) and MoE tables (±0.02), whose signs are drawn."""
SPANS = (2.3, 4.6, 7.0)
"""Octaves of parameters, tokens and batch over which the tables show them; beyond, they stay."""
MISSES = (0.35, 0.25, 2.2)
"""Octaves by which best rates exceed Step Law's formula: its MoE models (all parameters; 0.3 of scatter), 19M
parameters at their best batch (small_batches), AdamC of 130M to 1.2B (marin_adamc)."""


class Atlas:
    """Sweeps of some sources."""

    def __init__(self, sweeps: pd.DataFrame, sources: Sequence[str], half: str) -> None:
        self.half, self.sweeps = half, sweeps[sweeps["source_name"].isin(sources)]
        by_hand = self.sweeps["rule"].str.contains("×") & ~self.sweeps["kind"].isin(["width"])
        known = (self.sweeps["high"] - self.sweeps["low"]) < WIDEST
        self.slopes = self.sweeps[known & ~by_hand]
        self.valleys = self.sweeps.dropna(subset=["curvature", "noise"])
        self.scatters = [tau for optima in self.sweeps["optima"].dropna() if (tau := scatter(optima)) >= 0]

    def draw(self, generator: np.random.Generator, table: pd.DataFrame, count: int) -> pd.DataFrame:
        """Sweeps of one source, all sources alike."""
        part = table[table["source_name"] == generator.choice(sorted(set(table["source_name"])))]
        return part.iloc[generator.integers(len(part), size=count)]

    def ends(self, generator: np.random.Generator, name: str, rule: str) -> tuple[float, float]:
        """Exponents of a size at the target and at the smallest proxy."""
        of_kind = self.slopes[self.slopes["kind"] == KINDS[name]]
        if name == "width":
            of_kind = of_kind[of_kind["claimed"] == bool(rule)]
        first, last = self.draw(generator, of_kind, 2)["alpha"]
        return float(first), float(last)


def scatter(optima: str) -> float:
    """Scatter about a parabola beyond the optima's own errors, octaves; -1 below five optima."""
    scale_S, x_S, error_S = np.array([one.split() for one in optima.split("; ")], float).T
    if len(x_S) < 5:
        return -1.0
    left_S = x_S - np.polyval(np.polyfit(np.log2(scale_S), x_S, 2), np.log2(scale_S))
    return math.sqrt(max(0.0, float(left_S @ left_S) / (len(x_S) - 3) - float((error_S**2).mean())))


def halves(sweeps: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Sources for choosing and others: the first shuffle that leaves both of them every kind of scale."""
    sources = sorted(set(sweeps["source_name"]))
    for seed in range(1000):
        shuffled = np.random.default_rng(seed).permutation(sources).tolist()
        parts = shuffled[::2], shuffled[1::2]
        atlases = [Atlas(sweeps, part, "") for part in parts]
        if all(len(a.slopes[a.slopes["kind"] == kind]) for a in atlases for kind in KINDS.values()) and all(
            set(a.slopes[a.slopes["kind"] == "width"]["claimed"]) == {True, False} for a in atlases
        ):
            return parts
    raise ValueError("no split leaves both halves every kind of scale")


class World:
    """Losses of runs of any sizes and learning rate."""

    def __init__(self, generator: np.random.Generator, made: Plan, rule: str, atlas: Atlas) -> None:
        self.generator, self.made = generator, made
        self.ends = {name: atlas.ends(generator, name, rule) for name in made.goal.shrinks}
        self.interactions = np.array(INTERACTIONS[atlas.half]) * generator.choice([-1, 1], 3)
        valley = atlas.draw(generator, atlas.valleys, 1).iloc[0]
        self.curvature, self.noise = float(valley["curvature"]), float(valley["noise"])
        # A linex rises by e^a - a - 1 above and e^-a + a - 1 below: about a/3 in logarithms each.
        self.asymmetry = float(np.clip(1.5 * valley["steeper"], -1.2, 1.2)) or 1e-3
        self.scatter = float(generator.choice(atlas.scatters))
        self.shocks: dict[tuple[tuple[str, float], ...], float] = {}
        self.paid, self.target = 0.0, 0.0
        start = math.log2(made.rates[len(made.rates) // 2]) + generator.normal()
        self.target = start - self.optimum(made.steps[0].values)

    def optimum(self, values: Values) -> float:
        """log2 of the best learning rate."""
        goal = self.made.goal
        sizes, whole, least = (goal.sizes(v) for v in (values, goal.values, self.made.steps[0].values))
        key = tuple(sorted(sizes.items()))
        if key not in self.shocks:
            self.shocks[key] = self.scatter * self.generator.standard_normal()
        octaves = {name: math.log2(size / whole[name]) for name, size in sizes.items()}
        moved = sum(
            near * octaves[name]
            + (far - near) * octaves[name] ** 2 / 2 / math.log2(least[name] / whole[name])
            for name, (near, far) in self.ends.items()
        )
        params = math.log2(
            params_of(values["width"], values["depth"])
            / params_of(goal.values["width"], goal.values["depth"])
        )
        n, d, b = np.maximum([params, octaves["tokens"], octaves["batch"]], [-span for span in SPANS])
        return self.target + moved + self.interactions @ [n * d, n * b, d * b] + self.shocks[key]

    def rise(self, values: Values, x: float) -> float:
        """Regret of a value, nat."""
        return min(self.curvature * float(linex(x - self.optimum(values), self.asymmetry)), 3.0)

    def run(self, values: Values, x: float) -> float:
        """Loss of a run."""
        self.paid += self.made.goal.flops(values)
        return 2.5 + self.rise(values, x) + self.noise * float(self.generator.standard_normal())


def planned(world: World, folder: Path) -> tuple[pd.DataFrame, PlannedOptimum]:
    """Sweep the plan; returns its rows and the prediction."""
    file = folder / "plan.toml"
    file.write_text(world.made.toml())
    study, _ = load_study(file, str(folder / "runs"))
    keep_plan(study.grid, study.folder)
    names = world.made.goal.values
    while trials := study.ask(100, until_settled=True):
        for trial in trials:
            values = {name: trial.values.get(name, names[name]) for name in names}
            study.tell(trial, world.run(values, math.log2(trial.values["learning_rate"])))
    recipe = predict_planned(study.folder)
    assert recipe is not None
    return load_runs(study.folder), recipe.optima[0]


def law(world: World, best: Mapping[tuple[float, ...], float]) -> float:
    """Power law through the best values of sizes, by least squares."""
    at = np.array([[1.0, *sizes] for sizes in best])
    weights = np.linalg.lstsq(at, np.array([*best.values()]), rcond=None)[0]
    return float(weights @ [1.0, *octaves_of(world, world.made.goal.values)][: len(weights)])


def octaves_of(world: World, values: Values) -> tuple[float, ...]:
    return tuple(math.log2(size) for size in world.made.goal.sizes(values).values())


def by_hand(world: World, rows: pd.DataFrame) -> float:
    """Power law through the best value of each of the plan's sizes."""
    goal, names, best = world.made.goal, world.made.changing, dict[tuple[float, ...], float]()
    for values, runs in rows.groupby(names):
        means = runs.groupby("learning_rate")["loss"].mean()
        at = octaves_of(world, dict(goal.values) | dict(zip(names, map(int, values), strict=True)))
        best[at] = math.log2(float(means.idxmin()))
    return law(world, best)


def proxies_of(world: World, shrinks: Sequence[str], count: int = 20) -> list[Values]:
    """Sizes from the smallest towards the target, together."""
    goal, target = world.made.goal, world.made.goal.sizes(world.made.goal.values)
    return [
        goal.values_at({n: goal.floors[n] * (target[n] / goal.floors[n]) ** (i / count) for n in shrinks})
        for i in range(count)
    ]


def copied(world: World, budget: float, shrinks: Sequence[str]) -> float:
    """Best of 9 values an octave apart, about the right one, at the largest proxy that the budget pays."""
    proxies, goal = proxies_of(world, shrinks), world.made.goal
    values = [proxies[0], *(values for values in proxies if 9 * goal.flops(values) <= budget)][-1]
    middle = world.optimum(values) + float(world.generator.normal())
    grid = [middle + k - 4 for k in range(9)]
    return grid[int(np.argmin([world.run(values, x) for x in grid]))]


def random_search(world: World, budget: float) -> float:
    """Rates of eight octaves at sizes of a ladder, both drawn; then a power law of the compute."""
    goal = world.made.goal
    rungs = [values for values in proxies_of(world, goal.shrinks, 10) if 9 * goal.flops(values) <= budget]
    runs: list[tuple[int, float, float]] = []
    ends = world.optimum(rungs[0]), world.optimum(rungs[-1])
    middle = sum(ends) / 2 + float(world.generator.normal())
    while len(runs) < 300:
        number = int(world.generator.integers(len(rungs)))
        budget -= goal.flops(rungs[number])
        if budget < 0:
            break
        x = middle + float(world.generator.uniform(-4, 4))
        runs.append((number, x, world.run(rungs[number], x)))
    table = pd.DataFrame(runs, columns=["rung", "x", "loss"])
    best = table.loc[table.groupby("rung")["loss"].idxmin()]
    compute = [math.log2(goal.flops(rungs[number])) for number in best["rung"]]
    slope, start = np.polyfit(compute, best["x"], 1) if len(best) > 1 else (0.0, best["x"].iloc[0])
    return float(start + slope * math.log2(goal.flops(goal.values)))


def choose_priors(sweeps: pd.DataFrame, sources: Sequence[str]) -> None:
    """Put priors of some sources in place of the package's, chosen as those are."""
    known = prediction.prefixes(sweeps[sweeps["source_name"].isin(sources)])
    for kind in sorted(set(known.kind_P) - {""}):
        made = prediction.chosen(known.part(known.kind_P == kind), prediction.START)
        BY_KIND[kind] = replace(made, mixed=BY_KIND[kind].mixed)
        print(f"{kind}: {BY_KIND[kind]}", flush=True)


def main(
    worlds: int = 200,
    half: Literal["choosing", "other"] = "choosing",
    priors: Literal["choosing", "package"] = "choosing",
    params: tuple[str, ...] = ("300M", "1.3B"),
    out: Path | None = None,
) -> None:
    """Print regret, shares inside the intervals and costs of each way.

    Args:
        worlds: worlds in all, half of them under a rule that claims the width.
        half: sources that worlds are drawn from.
        priors: sources that the plan's priors are chosen from: the choosing half, or all.
        params: sizes of the targets.
        out: file for the table, a row for each world and way.
    """
    sweeps = pd.read_csv("results/public/sweeps.csv")
    names = sweeps["sweep"].str.split("_").str[0]
    sweeps["source_name"] = sweeps["source"].where(sweeps["source"] != "ours", "ours: " + names)
    choosing, other = halves(sweeps)
    print(f"choosing: {', '.join(choosing)}\nother: {', '.join(other)}", flush=True)
    if priors == "choosing":
        choose_priors(sweeps, choosing)
    atlas = Atlas(sweeps, choosing if half == "choosing" else other, half)
    rows: list[dict[str, Any]] = []
    cases = [(size, rule) for size in params for rule in ("mup", "")]
    plans = {case: plan(f"params={case[0]}", 1e22, rule=case[1] or None) for case in cases}
    for number in range(worlds):
        (size, rule) = cases[number % len(cases)]
        made = plans[size, rule]
        world = World(np.random.default_rng([number, half == "other"]), made, rule, atlas)
        goal = made.goal
        with tempfile.TemporaryDirectory() as folder:
            stored, predicted = planned(world, Path(folder))
        cost, truth = world.paid, world.optimum(goal.values)
        miss = float(world.generator.choice(MISSES) + 0.3 * world.generator.normal())
        ways = {
            "plan": predicted.x,
            "the plan's runs, law by hand": by_hand(world, stored),
            "width alone, copied": copied(world, cost, ("width",)),
            "ladder, copied": copied(world, cost, goal.shrinks),
            "ladder for half the cost, copied": copied(world, cost / 2, goal.shrinks),
            "random search, law": random_search(world, cost),
            "Step Law's formula": truth - miss,
        }
        ends = {
            f"{name}_{end}": v for name, both in world.ends.items() for end, v in zip("01", both, strict=True)
        }
        ends |= {"curvature": world.curvature, "noise": world.noise, "scatter": world.scatter}
        for way, x in ways.items():
            case = {"world": number, "target": size, "rule": rule or "none", "way": way, "off": x - truth}
            case |= {"regret": world.rise(goal.values, x), "cost": cost / made.target_cost}
            if way == "plan":
                (low, high), (low_50, high_50) = predicted.interval, predicted.half
                case |= {"in_50": float(low_50 <= truth <= high_50), "in_95": float(low <= truth <= high)}
                case |= {"half_width": (high - low) / 2, "promised": predicted.taking.expected, **ends}
            rows.append(case)
        if number % 20 == 19:
            print(f"{number + 1} worlds", flush=True)
            if out is not None:
                pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")
    table = pd.DataFrame(rows)
    if out is not None:
        table.to_csv(out, index=False, float_format="%.4g")
    print(
        summary(table, ["target", "rule", "way"]).to_string(), summary(table, ["way"]).to_string(), sep="\n"
    )
    ours = table[table["way"] == "plan"].set_index("world")["regret"]
    for way, part in table[table["way"] != "plan"].groupby("way", sort=False):
        less = part.set_index("world")["regret"] - ours
        print(f"plan less {way}: {-less.mean():.4f} ± {less.sem():.4f}; better in {(less > 0).mean():.2f}")


def summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    return table.groupby(by, sort=False).agg(
        n=("regret", "size"), regret=("regret", "mean"), error=("regret", "sem"),
        median=("regret", "median"), worst=("regret", lambda r: float(np.quantile(r, 0.95))),
        in_50=("in_50", "mean"), in_95=("in_95", "mean"), promised=("promised", "mean"),
        half_width=("half_width", "median"), cost=("cost", "mean"),
    ).round(4)  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
