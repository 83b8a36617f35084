"""Cost of a settled verdict, and share of wrong ones: runs bought look by look, against fixed grids.

    python benchmarks/settle.py --out benchmarks/settle.csv
    python benchmarks/settle.py --replay results/lr_transfer results/nanogpt_mup

Simulated sweeps of widths 64 to 512 in 21 cells, from plain transfer over the boundary to SP's drift; a run
costs width². What is right is told by each sweep's own optima. The sequence starts at the narrowest width
with eight learning rates an octave apart and three seeds each, and buys what `mup_tpu.analysis.design` says,
batch after batch, for at most 8 looks of which each could end it. The fixed grids are centred on each
width's true optimum, within half an octave, which nobody can do, and are looked at once. A replay draws from
the rows of a stored sweep instead, its seeds in random order, and says at which share of that sweep's cost
the verdict was settled.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro
from interval_coverage import FORMS
from rich.progress import track

from mup_tpu.analysis import Reading, analyze, check_table, load_table
from mup_tpu.analysis.design import first_batch, next_batch, why_stop
from mup_tpu.analysis.optimum import EPSILON
from mup_tpu.analysis.run_table import run_cost
from mup_tpu.analysis.verdict import DELTA, MOST_LOOKS, LookTaken, Question

WIDTHS = (64, 128, 256, 512)
SEQUENCE = "sequence"
GRIDS = {
    "octave 7 × 2": (1.0, 7, 2),
    "octave 7 × 4": (1.0, 7, 4),
    "octave 7 × 8": (1.0, 7, 8),
    "half-octave 9 × 3": (0.5, 9, 3),
}
"""Grids that people run: step in octaves, points, seeds."""


@dataclass(frozen=True)
class Kind:
    """A cell: valleys and noise as in the stored sweeps."""

    name: str
    alpha: float = 0.0
    curvature: float = 0.08
    """Second derivative at the optimum, nat per squared octave."""
    sigma: float = 0.01
    shared: float = 0.0
    """Scatter of what all runs of a width and seed share, nat."""
    tau: float = 0.0
    """Scatter of the optima about the power law, octaves."""
    saturates: bool = False
    """Whether the optimum moves by α octaves once, from the first width to the second, and then stays."""
    late: float = 0.0
    """Octaves by which the widest model's optimum alone lies lower."""
    diverges: bool = False
    """Whether the widest model diverges 0.2 to 1 octave above its optimum."""

    def moved(self, width: float) -> float:
        """Octaves by which the optimum of a width lies above the first one's, scatter aside."""
        octaves = float(np.log2(width / WIDTHS[0]))
        late = self.late if width == WIDTHS[-1] else 0.0
        return self.alpha * (min(octaves, 1.0) if self.saturates else octaves) - late


KINDS = (
    *(Kind("base", alpha) for alpha in (-1.0, -0.5, -0.25, 0.0, 0.1, 0.2, 0.25, 0.3)),
    Kind("noisy", sigma=0.03),
    Kind("noisy", -0.5, sigma=0.03),
    Kind("shallow", curvature=0.03),
    Kind("shallow", -0.5, curvature=0.03),
    Kind("steep", curvature=0.25),
    Kind("steep", -0.5, curvature=0.25),
    Kind("saturating", 1.2, saturates=True),
    Kind("scattered", tau=0.15),
    Kind("late mover", late=1.0),
    Kind("late mover", late=2.6),
    Kind("late mover", late=3.5),
    Kind("divergence beside", diverges=True),
    Kind("quickstart", -0.08, curvature=0.022, sigma=0.0035, shared=0.006),
)


class Sweep:
    """A machine that answers with simulated losses, and its bill."""

    def __init__(self, kind: Kind, generator: np.random.Generator, form: str = "linex") -> None:
        self.kind, self.generator, self.form = kind, generator, FORMS[form]
        self.middle = float(generator.uniform(-8.5, -7.5))
        self.asymmetry = float(generator.choice([-1, 1]) * generator.uniform(0.1, 0.35))
        scatter = kind.tau * generator.standard_normal(len(WIDTHS)) if kind.tau else np.zeros(len(WIDTHS))
        self.scatter = dict(zip(WIDTHS, scatter, strict=True))
        self.edge = float(generator.uniform(0.2, 1.0)) if kind.diverges else math.inf
        self.shared: dict[tuple[float, int], float] = {}
        self.rows: list[dict[str, Any]] = []
        self.cost = 0.0

    def optimum(self, width: float) -> float:
        """log2 of the best learning rate."""
        return self.middle + self.kind.moved(width) + self.scatter[int(width)]

    def rise(self, width: float, x: float) -> float:
        """Loss over the best that this width can have, nat; +inf where it diverges."""
        u = x - self.optimum(width)
        if width == WIDTHS[-1] and u > self.edge:
            return math.inf
        return min(self.kind.curvature * float(self.form(np.array(u), self.asymmetry)), 3.0)

    @property
    def truth(self) -> str:
        """Right verdict."""
        is_harmless = self.rise(WIDTHS[-1], self.optimum(WIDTHS[0])) < EPSILON
        return "TRANSFERS" if is_harmless and abs(self.kind.alpha) < DELTA else "DRIFTS"

    @property
    def widths(self) -> tuple[float, ...]:
        """Planned widths."""
        return WIDTHS

    def first_grid(self) -> list[float]:
        """Eight learning rates an octave apart (log2), around a guess that is off by an octave at most."""
        guess = round(self.middle) + int(self.generator.integers(-1, 2))
        return [float(x) for x in range(guess - 4, guess + 4)]

    def run(self, width: float, x: float, seeds: int, purchase: int = 0) -> None:
        """Train more seeds of one learning rate."""
        rise = self.rise(width, x)
        known = sum(1 for row in self.rows if row["width"] == width and row["lr"] == 2.0**x)
        for seed in range(known, known + seeds):
            noise = self.kind.sigma * self.generator.standard_normal()
            if self.kind.shared:
                effect = self.kind.shared * self.generator.standard_normal()
                noise += self.shared.setdefault((width, seed), effect)
            loss = 2.5 - 0.05 * np.log2(width / 64) + rise + noise
            row = {"width": width, "lr": 2.0**x, "seed": seed, "loss": loss, "purchase": purchase}
            self.rows.append(row)
        self.cost += seeds * (width / WIDTHS[0]) ** 2


class Pool:
    """A stored sweep that answers with its own rows, and its bill in their measured seconds."""

    def __init__(self, runs: pd.DataFrame, generator: np.random.Generator) -> None:
        seeds = runs["seed"].unique()
        order = dict(zip(seeds, generator.permutation(len(seeds)), strict=True))
        self.left = runs.sort_values("seed", key=lambda column: column.map(order))
        self.rows: list[dict[str, Any]] = []
        self.total, self.cost = float(runs["cost"].sum()), 0.0

    @property
    def widths(self) -> tuple[float, ...]:
        """Widths that were run."""
        return tuple(sorted({*self.left["scale"], *(row["width"] for row in self.rows)}))

    def first_grid(self) -> list[float]:
        """The narrowest width's learning rates, an octave apart (log2)."""
        grid = np.sort(self.left.loc[self.left["scale"] == self.widths[0], "x"].unique())
        return [float(x) for x in grid if abs((x - grid[0]) - round(x - grid[0])) < 0.01]

    def run(self, width: float, x: float, seeds: int, purchase: int = 0) -> None:
        """Take more runs of one learning rate, as far as there are any."""
        there = self.left[(self.left["scale"] == width) & ((self.left["x"] - x).abs() < 0.01)].head(seeds)
        self.left = self.left.drop(there.index)
        self.cost += float(there["cost"].sum())
        self.rows += [
            {
                "width": width, "lr": 2.0**row.x, "seed": row.seed, "loss": row.loss, "wall_time_s": row.cost,
                "purchase": purchase,
            }
            for row in there.itertuples()
        ]  # fmt: skip


@dataclass(frozen=True)
class Settled:
    """End of a sequence."""

    decision: str
    looks: int
    costs: tuple[float, ...]
    """Cost of all runs until each look."""


def in_sequence(sweep: Sweep | Pool) -> Settled:
    """Buy batch after batch until the verdict is settled, or the sequence ends without one."""
    question = Question(planned=sweep.widths)
    batch = first_batch("all", sweep.widths[0], sweep.first_grid())
    taken, costs = None, []
    for purchase in itertools.count(1):
        bought = len(sweep.rows)
        for cell in batch.cells:
            sweep.run(int(cell.scale), cell.x, cell.runs, purchase)
        if len(sweep.rows) == bought:
            break  # a pool without such runs
        table = check_table(pd.DataFrame(sweep.rows))
        taken = LookTaken(table.runs, question, taken)
        costs += [sweep.cost] * (taken.number - len(costs))
        if taken.decision != "OPEN":
            break
        batch = next_batch("all", taken.evidence, run_cost(table), question)
        if why_stop(taken, batch):
            break
    assert taken is not None
    return Settled(taken.decision, taken.number, tuple(costs))


def at_once(sweep: Sweep, step: float, points: int, seeds: int) -> Settled:
    """Run a grid and look once."""
    for width in WIDTHS:
        offset = float(sweep.generator.uniform(-0.5, 0.5))
        for k in range(points):
            sweep.run(width, sweep.optimum(width) + offset + (k - points // 2) * step, seeds)
    verdict = analyze(check_table(pd.DataFrame(sweep.rows))).results[0].verdict
    return Settled(verdict.decision, 1, (sweep.cost,))


def cell_rows(task: tuple[int, Kind, str], sweeps: int, seed: int, form: str) -> list[dict[str, Any]]:
    """Shares of verdicts and mean cost of one design in one cell; for a sequence, by the most looks."""
    index, kind, design = task
    ends, truths = [], []
    for number in range(sweeps):
        sweep = Sweep(kind, np.random.default_rng([seed, index, number]), form)
        truths.append(sweep.truth)
        ends.append(in_sequence(sweep) if design == SEQUENCE else at_once(sweep, *GRIDS[design]))
    rows = []
    for most in range(MOST_LOOKS, 0, -1) if design == SEQUENCE else (1,):
        decisions = [end.decision if end.looks <= most else "OPEN" for end in ends]
        right = float(np.mean([said == true for said, true in zip(decisions, truths, strict=True)]))
        settled = float(np.mean([said != "OPEN" for said in decisions]))
        costs = [end.costs[min(end.looks, most) - 1] if end.costs else math.nan for end in ends]
        rows.append(
            {
                "design": f"{SEQUENCE}, {most} looks" if design == SEQUENCE else design,
                "cell": kind.name,
                "alpha": kind.alpha,
                "curvature": kind.curvature,
                "sigma": kind.sigma,
                "tau": kind.tau,
                "late": kind.late,
                "transfers": truths.count("TRANSFERS") / sweeps,
                "right": right,
                "right_se": round(math.sqrt(right * (1 - right) / sweeps), 3),
                "wrong": settled - right,
                "looks": round(float(np.mean([min(end.looks, most) for end in ends])), 2),
                "cost": round(float(np.nanmean(costs)), 1),
                "cost_se": round(float(np.nanstd(costs)) / math.sqrt(sweeps), 1),
            }
        )
    return rows


def cost_at(table: pd.DataFrame, right: float) -> float:
    """Cost of a sequence at a share of right verdicts, interpolated over its most looks."""
    means = table[table["design"].str.startswith(SEQUENCE)].groupby("design")[["right", "cost"]].mean()
    means = means.sort_values("right")
    if not means["right"].iloc[0] <= right <= means["right"].iloc[-1]:
        return math.nan
    return float(np.interp(right, means["right"], means["cost"]))


def replay(folders: tuple[str, ...], orders: int, seed: int) -> pd.DataFrame:
    """Share of its cost at which each stored sweep's verdicts are settled, over orders of its seeds."""
    rows = []
    for folder in folders:
        for parametrization, runs in load_table(folder, Reading(where=())).runs.groupby("compared"):
            runs = runs.assign(cost=runs["cost"].fillna(runs["scale"] ** 2.0))
            for order in range(orders):
                pool = Pool(runs, np.random.default_rng([seed, order]))
                end = in_sequence(pool)
                rows.append(
                    {
                        "sweep": Path(folder).name,
                        "parametrization": parametrization,
                        "decision": end.decision,
                        "looks": end.looks,
                        "share": pool.cost / pool.total,
                    }
                )
    grouped = pd.DataFrame(rows).groupby(["sweep", "parametrization", "decision"])
    return grouped.agg(orders=("share", "size"), looks=("looks", "mean"), share=("share", "mean")).round(2)


def main(
    sweeps: int = 200,
    designs: tuple[str, ...] = (SEQUENCE, *GRIDS),
    out: Path | None = None,
    seed: int = 1,
    form: str = "linex",
    cells: tuple[int, ...] = (),
    processes: int = 2,
    replay_of: Annotated[tuple[str, ...], tyro.conf.arg(name="replay")] = (),
) -> None:
    """Print (and store) shares of right and wrong verdicts, and their cost.

    Args:
        sweeps: Simulated sweeps a cell.
        designs: Designs to compare.
        out: CSV file to store the table in.
        seed: Seed of the simulation; constants were chosen on seed 0.
        form: Valleys: linex, on which constants were chosen, or hyperbola, powers or bowl.
        cells: Numbers of the cells to simulate; all where none are given.
        processes: Cells at once.
        replay_of: Results folders to draw from, in 12 orders of their seeds, instead of simulating.
    """
    if replay_of:
        print(replay(replay_of, 12, seed).to_string())
        return
    tasks = [(i, kind, design) for (i, kind), design in itertools.product(enumerate(KINDS), designs)]
    tasks = [task for task in tasks if not cells or task[0] in cells]
    with ProcessPoolExecutor(processes) as pool:
        done = pool.map(
            cell_rows, tasks, itertools.repeat(sweeps), itertools.repeat(seed), itertools.repeat(form)
        )
        rows = itertools.chain.from_iterable(track(done, "simulating", len(tasks)))
        table = pd.DataFrame(rows).sort_values(["design", "cell", "alpha"], kind="stable")
    print(table.to_string(index=False))
    means = table.groupby("design")[["right", "wrong", "looks", "cost"]].mean()
    means["cost of the sequence at that share"] = [cost_at(table, right) for right in means["right"]]
    print(means.round(3).to_string())
    if out is not None:
        table.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
