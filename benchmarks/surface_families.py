"""Coverage of surfaces of two hyperparameters, by family of valley, for surfaces.md.

    python benchmarks/surface_families.py --seed 22 --worlds 6

A world has four widths and 40 to 80 random runs of each; sides, power or curvature of its valley are those of
its family. The families from "sides 1.8" on were written after the method was fixed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import numpy as np
import pandas as pd
import tyro

from mup_tpu.analysis import Columns, Reading, analyze, check_table

WIDTHS = np.array([64, 128, 256, 512])
TUNED = ("lr", "wd")
COLUMNS = Columns("width", "lr", tuned_beside=("wd",))


def sides(x: np.ndarray, ratio: float) -> np.ndarray:
    return np.where(x > 0, ratio**0.5, ratio**-0.5)


FAMILIES = {
    "quadratic": lambda x: x**2,
    "sides 1.5": lambda x: x**2 * sides(x, 1.5),
    "sides 2.3": lambda x: x**2 * sides(x, 2.3),
    "power 1.5": lambda x: np.abs(x) ** 1.5,
    "linex": lambda x: 8 * (np.exp(np.minimum(x / 2, 6)) - 1 - x / 2),
    "curvature": lambda x: x**2,  # changes four times over the widths
    "flat": lambda x: x**2,  # along the second hyperparameter
    "sides 1.8": lambda x: x**2 * sides(x, 1.8),
    "power sides": lambda x: np.abs(x) ** 1.7 * sides(x, 2.0),
    "log-cosh": lambda x: 3 * np.log(np.cosh(x)),
    "linex below": lambda x: 8 * (np.exp(np.minimum(-x / 2, 6)) - 1 + x / 2),
    "curvature, sides": lambda x: x**2 * sides(x, 1.8),
    "edge": lambda x: x**2 * sides(x, 1.5),  # optima at the end of the second one's range
}


def world(family: str, generator: np.random.Generator) -> tuple[pd.DataFrame, np.ndarray, float, float]:
    """Return runs, true optima (widths × tuned), the learning rate's slope, and the cost of copying."""
    size = np.exp(generator.normal(np.log(0.04), 0.4, 2))
    mixed = generator.uniform(-0.5, 0.5) if family in ("quadratic", "curvature") else 0.0
    if family == "flat":
        size[1] = 0.0005
    start = np.array([-8, -3.0]) + generator.uniform(-0.5, 0.5, 2)
    slope = float(generator.choice([0, generator.uniform(-0.7, 0.7)]))
    best = start + np.outer(np.log2(WIDTHS / 64), [slope, 0.0])
    noise, runs = generator.choice([0.002, 0.005, 0.01]), int(generator.integers(40, 81))
    heights = 4 ** (np.linspace(0, 1, 4) * generator.choice([-1, 1])) if "curv" in family else np.ones(4)
    off = np.array([0, 3.0 if family == "edge" else 0.0])

    def rise(u: np.ndarray, number: int) -> np.ndarray:
        x = u - best[number]
        along = (size * FAMILIES[family](x)).sum(axis=1)
        return heights[number] * (0.5 * along + mixed * np.sqrt(size.prod()) * x.prod(axis=1))

    rows = []
    for number, width in enumerate(WIDTHS):
        u = start + off + generator.uniform(-3, 3, (runs, 2)) + 0.7 * (best[number] - start)
        loss = rise(u, number)
        loss = np.where(loss > 1.5, np.inf, loss + noise * generator.standard_normal(runs))
        values = dict(zip(TUNED, 2.0**u.T, strict=True))
        rows.append(pd.DataFrame(values | {"width": width, "loss": loss + 4 * (width / 64) ** -0.1}))
    return pd.concat(rows), best, slope, float(rise(best[:1], 3)[0])


def main(seed: int = 22, worlds: int = 6, families: tuple[str, ...] = tuple(FAMILIES)) -> None:
    """Print a row for each family.

    Args:
        seed: of the worlds.
        worlds: number of each family.
        families: families to draw.
    """
    print("| family | lr | wd | α | regret | right | open | wrong | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for family in families:
        inside, ends, began = defaultdict(list), Counter[str](), time.process_time()
        for number in range(worlds):
            generator = np.random.default_rng([seed, list(FAMILIES).index(family), number])
            runs, best, slope, cost = world(family, generator)
            analysis = analyze(check_table(runs, Reading(COLUMNS)))
            for h, part in enumerate(analysis.parts):
                optima = zip(part.results[0].optima, best[:, h], strict=True)
                inside[TUNED[h]] += [o.low <= x <= o.high for o, x in optima]
            if (drift := analysis.parts[0].results[0].drift).is_known:
                inside["α"].append(drift.low <= slope <= drift.high)
            regret = analysis.results[0].headline_regret
            inside["regret"].append(regret.low - 1e-4 <= cost <= regret.high + 1e-4)
            decision = str(analysis.results[0].verdict.decision)
            is_right = {
                "TRANSFERS": cost < 0.01 and abs(slope) < 0.2,
                "MOVES AT NO COST": cost < 0.01 and abs(slope) >= 0.1,
                "DRIFTS": cost >= 0.01,
            }
            ends["open" if decision == "OPEN" else "right" if is_right[decision] else "wrong"] += 1
        cells = [f"{np.mean(inside[name]):.2f}" if inside[name] else "–" for name in (*TUNED, "α", "regret")]
        cells += [str(ends[end]) for end in ("right", "open", "wrong")]
        print(
            f"| {family} | {' | '.join(cells)} | {(time.process_time() - began) / worlds:.2f} |", flush=True
        )


if __name__ == "__main__":
    tyro.cli(main)
