"""Wrong and right verdicts of sequences in worlds of many families, on which no constant was chosen.

    python benchmarks/settle_families.py --worlds 60 --out benchmarks/settle_families.csv

A world is a rule at widths 64 to 512 (a run costs width²): a valley, noise, and optima that stay, drift or
move late. Half of the worlds transfer. What is right follows from the true losses: what the smallest width's
true optimum costs at the largest, and the true optima's slope. A wrong verdict is
*gross* if the true regret is on the wrong side of ε by more than ε/3.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression
from settle import Settled, in_sequence

from mup_tpu.analysis import Reading, analyze, check_table, load_table
from mup_tpu.analysis.optimum import EPSILON
from mup_tpu.analysis.verdict import DELTA
from mup_tpu.errors import MupTpuError

WIDTHS = (64, 128, 256, 512)
Rise = Callable[[float], float]


def exponentials(g: np.random.Generator, curvature: float) -> Rise:
    """Two exponentials whose rates differ up to fourfold."""
    mean, ratio = g.uniform(0.4, 1.2), math.exp(g.uniform(-0.7, 0.7))
    a, b = mean * ratio, mean / ratio
    return lambda u: curvature / (a + b) * (math.expm1(min(a * u, 50)) / a + math.expm1(min(-b * u, 50)) / b)


def powers(g: np.random.Generator, curvature: float) -> Rise:
    """|u|^p with p from 1.1 to 3, steeper on one side."""
    p, ratio = g.uniform(1.1, 3.0), math.exp(g.normal(0.0, 0.4))
    return lambda u: curvature / 2 * abs(u) ** p * (ratio if u > 0 else 1 / ratio)


def cliff(g: np.random.Generator, curvature: float) -> Rise:
    """A gentle slope up to a cliff; beyond it, in half of the worlds, runs diverge."""
    slope, rate = g.uniform(0.015, 0.04), g.uniform(2.0, 4.0)
    edge = g.uniform(0.3, 1.5) if g.uniform() < 0.5 else math.inf
    scale = slope / rate

    def rise(u: float) -> float:
        if u > edge:
            return math.inf
        return slope * (-u) + scale * math.expm1(rate * u) if u < 3 else 3.0

    return rise


def basins(g: np.random.Generator, curvature: float) -> Rise:
    """Two basins, the second one higher by up to 0.05 nat."""
    away, higher = g.choice([-1, 1]) * g.uniform(2.5, 4.0), g.uniform(0.01, 0.05)
    soft = 0.01

    def rise(u: float) -> float:
        first, second = curvature * u * u / 2, higher + curvature * (u - away) ** 2 / 2
        least = min(first, second)
        return least - soft * math.log(math.exp((least - first) / soft) + math.exp((least - second) / soft))

    return rise


def linex(g: np.random.Generator, curvature: float) -> Rise:
    """(e^au − au − 1) / a²."""
    a = g.choice([-1, 1]) * g.uniform(0.1, 0.5)
    return lambda u: curvature * (math.expm1(min(a * u, 50)) - a * u) / a**2


def log_cosh(g: np.random.Generator, curvature: float) -> Rise:
    """Straight sides of different slope around a round bottom, up to a plateau where training began."""
    width, tilt, top = g.uniform(0.5, 2.0), g.uniform(-0.5, 0.5), g.uniform(0.1, 0.6)

    def rise(u: float) -> float:
        side = (
            curvature
            * width**2
            * (math.log(math.cosh(u / width)) - tilt * (math.tanh(u / width) - u / width))
        )
        return top * -math.expm1(-max(side, 0.0) / top)

    return rise


@functools.cache
def measured_curves() -> dict[str, list[tuple[np.ndarray, np.ndarray, bool]]]:
    """Rise of each measured curve over octaves from its best, unimodal; and whether other rates diverged."""
    curves: dict[str, list[tuple[np.ndarray, np.ndarray, bool]]] = {}
    results = Path(__file__).parents[1] / "results"
    for place in sorted(
        [*(f.parent for f in results.glob("*/store.json")), *results.glob("public/rows/*.csv")]
    ):
        try:
            runs = load_table(place, Reading(where=())).runs
        except MupTpuError:
            continue  # a search, or a table that needs options
        for _, group in runs.groupby(["compared", "scale"]):
            mean = group.groupby("x")["loss"].mean()
            diverges, mean = not np.isfinite(mean.to_numpy()).all(), mean[np.isfinite(mean)]
            best = int(np.argmin(mean)) if len(mean) else 0
            if len(mean) < 6 or not 2 <= best <= len(mean) - 3:
                continue
            x, y = mean.index.to_numpy() - mean.index[best], mean.to_numpy()
            sides = (
                isotonic_regression(y[: best + 1], increasing=False).x[:-1],
                isotonic_regression(y[best:], increasing=True).x[1:],
            )
            rise = np.concatenate([sides[0], y[best : best + 1], sides[1]]) - y[best]
            curves.setdefault(place.stem, []).append((x, rise, diverges))
    return curves


def measured(g: np.random.Generator, curvature: float) -> Rise:
    """A curve of a stored or public sweep, in three of ten worlds mirrored; each sweep is as likely."""
    curves = measured_curves()
    of_sweep = curves[sorted(curves)[g.integers(len(curves))]]
    x, y, diverges = of_sweep[g.integers(len(of_sweep))]
    if g.uniform() < 0.3:
        x, y, diverges = -x[::-1], y[::-1], False
    inside, has_wall = PchipInterpolator(x, y), diverges and g.uniform() < 0.7
    first, last = (max(0.02, abs((y[i] - y[j]) / (x[i] - x[j]))) for i, j in ((0, 1), (-1, -2)))

    def rise(u: float) -> float:
        beside = 0.001 * u * u  # flat bottoms of the regression have one optimum
        if u < x[0]:
            return float(y[0] + first * (x[0] - u) + beside)
        if u > x[-1]:
            return math.inf if has_wall and u > x[-1] + 0.5 else float(y[-1] + last * (u - x[-1]) + beside)
        return float(inside(u)) + beside

    return rise


@dataclass(frozen=True)
class Family:
    """Valley, noise and movement of a family's worlds.

    Unless a family says otherwise, curvatures are log-uniform in 0.005 to 0.2 nat per squared octave, noises
    in 0.003 to 0.03 nat; half of the worlds have Student's noise with four degrees of freedom, and in half of
    them runs of a width and seed share an effect of 0.006 nat.
    """

    valley: Callable[[np.random.Generator, float], Rise] = linex
    noise: tuple[float, float] = (0.003, 0.03)
    grows: bool = False
    """Whether noise grows above the optimum."""
    shared: float = 0.006
    """Standard deviation of what runs of a width and seed share, nat."""
    changes: bool = False
    """Whether each width has a valley of its own, with a curvature that scatters by a factor of 1.4."""
    late: bool = False
    """Whether optima move from some width on alone."""


FAMILIES = {
    "linex": Family(),
    "exponentials": Family(exponentials),
    "powers": Family(powers),
    "cliff": Family(cliff),
    "late movers": Family(late=True),
    "two basins": Family(basins),
    "little noise": Family(powers, noise=(0.001, 0.003)),
    "much noise": Family(exponentials, noise=(0.03, 0.1)),
    "heteroscedastic": Family(exponentials, grows=True),
    "shared seeds": Family(powers, shared=0.03),
    "log-cosh": Family(log_cosh),
    "changing shapes": Family(exponentials, changes=True),
    "measured": Family(measured),
}
"""The last three were written after the method was fixed."""


@dataclass
class World:
    """A machine that answers with simulated losses, and its bill."""

    family: Family
    generator: np.random.Generator
    rows: list[dict[str, Any]] = field(default_factory=list)
    cost: float = 0.0

    def __post_init__(self) -> None:
        g = self.generator
        curvature = math.exp(g.uniform(math.log(0.005), math.log(0.2)))
        one, fine = self.family.valley(g, curvature), np.arange(-4, 4, 0.005)
        self.valleys: dict[int, tuple[Rise, float, float]] = {}
        for width in WIDTHS:
            if self.family.changes:
                one = self.family.valley(g, curvature * math.exp(0.37 * g.standard_normal()))
            rises = [one(float(u)) for u in fine]
            self.valleys[width] = one, min(rises), float(fine[int(np.argmin(rises))])
        self.noise = math.exp(g.uniform(*np.log(self.family.noise)))
        self.is_student, self.is_shared = g.uniform(size=2) < 0.5
        self.middle = float(g.uniform(-8.5, -7.5))
        octaves = np.arange(len(WIDTHS))
        transfers = g.uniform() < 0.5
        alpha = g.uniform(-0.05, 0.05) if transfers else g.choice([-1, 1]) * g.uniform(0.25, 0.9)
        moved = alpha * octaves
        if self.family.late and not transfers:
            moved = g.choice([-1, 1]) * g.uniform(0.8, 2.5) * np.maximum(0, octaves - g.integers(1, 3))
        moved = moved + 0.03 * g.standard_normal(len(WIDTHS))
        self.optima = dict(zip(WIDTHS, self.middle + moved, strict=True))
        self.alpha = float(np.polyfit(octaves, moved, 1)[0])
        self.effects: dict[tuple[float, int], float] = {}

    widths = WIDTHS

    def rise(self, width: float, x: float) -> float:
        """Loss over the best that this width can have, nat."""
        return min(self.raw(width, x), 3.0)

    def raw(self, width: float, x: float) -> float:
        """The same, infinite where runs diverge."""
        valley, least, off = self.valleys[int(width)]
        return valley(x - self.optima[int(width)] + off) - least

    @property
    def regret(self) -> float:
        """True regret of the smallest width's optimum at the largest."""
        return self.rise(WIDTHS[-1], self.optima[WIDTHS[0]])

    @property
    def truth(self) -> str:
        """Right verdict; MOVES AT NO COST is right of smaller slopes too, down to half of δ."""
        if self.regret >= EPSILON:
            return "DRIFTS"
        return "TRANSFERS" if abs(self.alpha) < DELTA else "MOVES AT NO COST"

    def is_right(self, decision: str) -> bool:
        is_move = self.regret < EPSILON and abs(self.alpha) >= DELTA / 2
        return decision == self.truth or (decision == "MOVES AT NO COST" and is_move)

    def first_grid(self) -> list[float]:
        """Eight learning rates an octave apart (log2), around a guess that is off by an octave at most."""
        guess = round(self.middle) + int(self.generator.integers(-1, 2))
        return [float(x) for x in range(guess - 4, guess + 4)]

    def run(self, width: float, x: float, seeds: int, purchase: int = 0) -> None:
        """Train more seeds of one learning rate."""
        g, f = self.generator, self.family
        known = sum(1 for row in self.rows if row["width"] == width and row["lr"] == 2.0**x)
        raw = self.raw(width, x)
        for seed in range(known, known + seeds):
            shock = g.standard_t(4) / math.sqrt(2) if self.is_student else g.standard_normal()
            noise = self.noise * shock * (1 + 2 * max(0.0, x - self.optima[int(width)]) if f.grows else 1)
            if self.is_shared:
                noise += self.effects.setdefault((width, seed), f.shared * g.standard_normal())
            loss = (
                2.5 - 0.05 * math.log2(width / 64) + (math.inf if raw == math.inf else min(raw, 3.0)) + noise
            )
            self.rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": loss, "purchase": purchase})
        self.cost += seeds * (width / WIDTHS[0]) ** 2


def in_one_table(world: World) -> Settled:
    """Run three to seven rates an octave apart about each width's optimum, to an octave, and look once."""
    g = world.generator
    points = int(g.integers(3, 8))
    seeds = 1 if points > 4 or g.uniform() < 0.5 else 2
    offset = float(g.uniform(-0.5, 0.5))
    for width in WIDTHS:
        centre = round(world.optima[width] + offset + float(g.integers(-1, 2)) * (points >= 5))
        for k in range(points):
            world.run(width, centre + k - points // 2, seeds)
    table = check_table(pd.DataFrame(world.rows).drop(columns="purchase"))
    return Settled(analyze(table, whole=False).results[0].verdict.decision, 1, (world.cost,))


def main(
    worlds: int = 60,
    families: tuple[str, ...] = tuple(FAMILIES),
    seed: int = 1,
    out: Path | None = None,
    tables: bool = False,
) -> None:
    """Print (and store) shares of right and wrong verdicts, and their cost.

    Args:
        worlds: Worlds a family.
        families: Families to simulate.
        seed: Seed of the simulation.
        out: CSV file for a row a world.
        tables: Analyse one table a world, in place of a sequence of purchases.
    """
    rows = []
    for name, number in itertools.product(families, range(worlds)):
        began = time.process_time()
        world = World(FAMILIES[name], np.random.default_rng([seed, list(FAMILIES).index(name), number]))
        end = in_one_table(world) if tables else in_sequence(world)  # type: ignore[arg-type]
        decided = end.decision != "OPEN"
        wrong = decided and not world.is_right(end.decision)
        margin = abs(world.regret - EPSILON)
        rows.append(
            {
                "family": name,
                "world": number,
                "truth": world.truth,
                "decision": end.decision,
                "right": world.is_right(end.decision),
                "wrong": wrong,
                "gross": wrong and margin > EPSILON / 3,
                "looks": end.looks,
                "cost": world.cost,
                "alpha": round(world.alpha, 3),
                "regret": round(world.regret, 4),
                "noise": round(world.noise, 4),
                "student": bool(world.is_student),
                "shared": bool(world.is_shared),
                "seconds": round(time.process_time() - began, 2),
            }
        )
        if out is not None and number == worlds - 1:
            pd.DataFrame(rows).to_csv(out, index=False)
    table = pd.DataFrame(rows)
    sums = table.groupby("family", sort=False).agg(
        n=("right", "size"), right=("right", "sum"), wrong=("wrong", "sum"), gross=("gross", "sum"),
        cost=("cost", "mean"), looks=("looks", "mean"), seconds=("seconds", "mean"),
    )  # fmt: skip
    print(sums.round(2).to_string())
    print(sums[["n", "right", "wrong", "gross"]].sum().to_string(), table["cost"].mean())


if __name__ == "__main__":
    tyro.cli(main)
