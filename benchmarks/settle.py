"""What a settled verdict costs, and how often it is wrong: runs bought look by look, against fixed grids.

    python benchmarks/settle.py --sweeps 60 --out benchmarks/settle.csv
    python benchmarks/settle.py --replay results/lr_transfer results/nanogpt_mup

Simulated sweeps of widths 64 to 512 in 14 cells, from plain transfer over the boundary to SP's drift; a run
costs width². The sequence starts at the narrowest width with eight learning rates an octave apart and one
seed each, and buys what `mup_tpu.analysis.design` says, batch after batch, for at most 6 looks of which each
could end it. The fixed grids are centred on each width's true optimum, within half an octave, which nobody
can do, and are looked at once. A replay draws from the rows of a stored sweep instead, seeds in random order,
and says at which share of that sweep's cost the verdict was settled.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro
from interval_coverage import linex
from rich.progress import track

from mup_tpu.analysis import analyze, check_table, load_table
from mup_tpu.analysis.verdict import DELTA, EPSILON, MOST_LOOKS, Look, shows_drift

WIDTHS = (64, 128, 256, 512)
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
    alpha: float
    curvature: float = 0.08
    """Second derivative at the optimum, nat per squared octave."""
    sigma: float = 0.01

    @property
    def truth(self) -> str:
        """What is right to say."""
        moved = abs(self.alpha) * np.log2(WIDTHS[-1] / WIDTHS[0])
        harmless = self.curvature / 2 * moved**2 < EPSILON and abs(self.alpha) < DELTA
        return "TRANSFERS" if harmless else "DRIFTS"


KINDS = (
    *(Kind("base", alpha) for alpha in (-1.0, -0.5, -0.25, 0.0, 0.1, 0.2, 0.25, 0.3)),
    Kind("noisy", 0.0, sigma=0.03),
    Kind("noisy", -0.5, sigma=0.03),
    Kind("shallow", 0.0, curvature=0.03),
    Kind("shallow", -0.5, curvature=0.03),
    Kind("steep", 0.0, curvature=0.25),
    Kind("steep", -0.5, curvature=0.25),
)


class Sweep:
    """A machine that answers with simulated losses, and its bill."""

    def __init__(self, kind: Kind, generator: np.random.Generator) -> None:
        self.kind, self.generator = kind, generator
        self.middle = float(generator.uniform(-8.5, -7.5))
        self.asymmetry = float(generator.choice([-1, 1]) * generator.uniform(0.1, 0.35))
        self.rows: list[dict[str, Any]] = []
        self.cost = 0.0

    def optimum(self, width: float) -> float:
        """log2 of the best learning rate."""
        return self.middle + self.kind.alpha * float(np.log2(width / WIDTHS[0]))

    @property
    def widths(self) -> tuple[float, ...]:
        """What is planned."""
        return WIDTHS

    def first_grid(self) -> list[float]:
        """Eight learning rates an octave apart (log2), around a guess that is off by an octave at most."""
        guess = round(self.middle) + int(self.generator.integers(-1, 2))
        return [float(x) for x in range(guess - 4, guess + 4)]

    def run(self, width: float, x: float, seeds: int) -> None:
        """Train so many more seeds of one learning rate."""
        u = x - self.optimum(width)
        rise = min(self.kind.curvature * float(linex(u, self.asymmetry)), 3.0)
        known = sum(1 for row in self.rows if row["width"] == width and row["lr"] == 2.0**x)
        for seed in range(known, known + seeds):
            loss = (
                2.5 - 0.05 * np.log2(width / 64) + rise + self.kind.sigma * self.generator.standard_normal()
            )
            self.rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": loss})
        self.cost += seeds * (width / WIDTHS[0]) ** 2


class Pool:
    """A stored sweep that answers with its own rows, and its bill in their measured seconds."""

    def __init__(self, runs: pd.DataFrame, generator: np.random.Generator) -> None:
        self.left = runs.sample(frac=1, random_state=generator)
        self.rows: list[dict[str, Any]] = []
        self.total, self.cost = float(runs["cost"].sum()), 0.0

    @property
    def widths(self) -> tuple[float, ...]:
        """What was run."""
        return tuple(sorted({*self.left["scale"], *(row["width"] for row in self.rows)}))

    def first_grid(self) -> list[float]:
        """The narrowest width's learning rates, an octave apart (log2)."""
        grid = np.sort(self.left.loc[self.left["scale"] == self.widths[0], "x"].unique())
        return [float(x) for x in grid if abs((x - grid[0]) - round(x - grid[0])) < 0.01]

    def run(self, width: float, x: float, seeds: int) -> None:
        """Take so many more runs of one learning rate, or as many as there are."""
        there = self.left[(self.left["scale"] == width) & ((self.left["x"] - x).abs() < 0.01)].head(seeds)
        self.left = self.left.drop(there.index)
        self.cost += float(there["cost"].sum())
        self.rows += [
            {"width": width, "lr": 2.0**row.x, "seed": row.seed, "loss": row.loss, "wall_time_s": row.cost}
            for row in there.itertuples()
        ]


def in_sequence(sweep: Sweep | Pool) -> tuple[str, int]:
    """Buy batch after batch until the verdict is settled: it, and how many looks it took."""
    widths = sweep.widths
    for x in sweep.first_grid():
        sweep.run(widths[0], x, 1)
    looks, has_drifted = 0, False
    while True:
        table = check_table(pd.DataFrame(sweep.rows))
        result = analyze(table, looks={"all": Look(looks + 1, has_drifted)}, planned=widths).results[0]
        headline = result.headline_regret
        if result.drift.is_known and headline is not None:
            looks += 1
            if result.next_batch is None or looks == MOST_LOOKS:
                return result.verdict.decision, looks
            has_drifted = shows_drift(result.drift, headline, EPSILON)
        assert result.next_batch is not None
        bought = len(sweep.rows)
        for cell in result.next_batch.cells:
            sweep.run(int(cell.scale), cell.x, cell.runs)
        if len(sweep.rows) == bought:
            return result.verdict.decision, looks  # a pool that holds none of what is asked for


def at_once(sweep: Sweep, step: float, points: int, seeds: int) -> tuple[str, int]:
    """Run a grid and look once."""
    for width in WIDTHS:
        offset = float(sweep.generator.uniform(-0.5, 0.5))
        for k in range(points):
            sweep.run(width, sweep.optimum(width) + offset + (k - points // 2) * step, seeds)
    return analyze(check_table(pd.DataFrame(sweep.rows))).results[0].verdict.decision, 1


def cell_row(task: tuple[int, Kind, str], sweeps: int, seed: int) -> dict[str, Any]:
    """Shares of verdicts and mean cost of one design in one cell."""
    index, kind, design = task
    decisions, looks, costs = [], [], []
    for number in range(sweeps):
        sweep = Sweep(kind, np.random.default_rng([seed, index, number]))
        decision, looked = in_sequence(sweep) if design == "sequence" else at_once(sweep, *GRIDS[design])
        decisions.append(decision)
        looks.append(looked)
        costs.append(sweep.cost)
    wrong = {"TRANSFERS": "DRIFTS", "DRIFTS": "TRANSFERS"}[kind.truth]
    return {
        "design": design,
        "cell": kind.name,
        "alpha": kind.alpha,
        "curvature": kind.curvature,
        "sigma": kind.sigma,
        "truth": kind.truth,
        "right": decisions.count(kind.truth) / sweeps,
        "wrong": decisions.count(wrong) / sweeps,
        "looks": round(float(np.mean(looks)), 2),
        "cost": round(float(np.mean(costs)), 1),
    }


def replay(folders: tuple[str, ...], orders: int, seed: int) -> pd.DataFrame:
    """At which share of its cost each stored sweep's verdicts are settled, over orders of its seeds."""
    rows = []
    for folder in folders:
        for parametrization, runs in load_table(folder).runs.groupby("parametrization"):
            runs = runs.assign(cost=runs["cost"].fillna(runs["scale"] ** 2.0))
            for order in range(orders):
                pool = Pool(runs, np.random.default_rng([seed, order]))
                decision, looks = in_sequence(pool)
                rows.append(
                    {
                        "sweep": Path(folder).name,
                        "parametrization": parametrization,
                        "decision": decision,
                        "looks": looks,
                        "share": pool.cost / pool.total,
                    }
                )
    grouped = pd.DataFrame(rows).groupby(["sweep", "parametrization", "decision"])
    return grouped.agg(orders=("share", "size"), looks=("looks", "mean"), share=("share", "mean")).round(2)


def main(
    sweeps: int = 60,
    designs: tuple[str, ...] = ("sequence", *GRIDS),
    out: Path | None = None,
    seed: int = 1,
    processes: int = 2,
    replay_of: Annotated[tuple[str, ...], tyro.conf.arg(name="replay")] = (),
) -> None:
    """Print (and store) shares of right and wrong verdicts and what they cost.

    Args:
        sweeps: Simulated sweeps a cell.
        designs: What to compare.
        out: CSV file to store the table in.
        seed: Of the simulation; constants were chosen on seed 0.
        processes: Cells at once.
        replay_of: Results folders to draw from, in 12 orders of their seeds, instead of simulating.
    """
    if replay_of:
        print(replay(replay_of, 12, seed).to_string())
        return
    tasks = [(i, kind, design) for (i, kind), design in itertools.product(enumerate(KINDS), designs)]
    with ProcessPoolExecutor(processes) as pool:
        done = pool.map(cell_row, tasks, itertools.repeat(sweeps), itertools.repeat(seed))
        table = pd.DataFrame(track(done, "simulating", len(tasks)))
    print(table.to_string(index=False))
    print(
        table.groupby("design", sort=False)[["right", "wrong", "looks", "cost"]].mean().round(3).to_string()
    )
    if out is not None:
        table.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
