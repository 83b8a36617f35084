"""How often an optimum's 95 % interval holds the true optimum, by grid step, noise and seeds.

    python benchmarks/interval_coverage.py --simulations 400 --out benchmarks/interval_coverage.csv

Loss curves are valleys of two families, with random curvature and asymmetry: real sweeps rise more steeply
on one side, and straighten out, so that no cubic is exactly right. The optimum lies anywhere between grid
points. Nominal is 95 %; the table should lie between 92 and 99 %.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from rich.progress import track

from mup_tpu.analysis import check_table
from mup_tpu.analysis.optimum import estimate, loss_curve, pooled_noise

STEPS = (0.5, 1.0, 2.0)
SIGMAS = (0.003, 0.01, 0.03)
SEEDS = (1, 3, 5)
WIDTHS = 3
"""Curves that share one noise estimate, as in a sweep."""


def linex(u: np.ndarray, asymmetry: float) -> np.ndarray:
    """A valley that rises exponentially on one side, linearly on the other; u²/2 near 0."""
    return (np.exp(asymmetry * u) - asymmetry * u - 1) / asymmetry**2


def hyperbola(u: np.ndarray, asymmetry: float) -> np.ndarray:
    """A valley with straight sides of different slope; u²/2 near 0."""
    return 4 * (np.sqrt(1 + u**2 / 4) - 1) * (1 + asymmetry * np.tanh(u / 2))


def simulate(
    step: float, sigma: float, seeds: int, generator: np.random.Generator
) -> list[tuple[bool, float]]:
    """One sweep of three curves: whether each interval holds its optimum, and how wide it is, octaves."""
    grid = np.arange(-12.0, -3.9, step)
    optima = generator.uniform(-9, -7, WIDTHS)
    rows = []
    for width, optimum in enumerate(optima, start=1):
        family = linex if generator.random() < 0.5 else hyperbola
        asymmetry = generator.choice([-1, 1]) * generator.uniform(0.1, 0.4)
        losses = 2.5 + generator.uniform(0.06, 0.16) * family(grid - optimum, asymmetry)
        for x, loss in zip(grid, losses, strict=True):
            for seed in range(seeds):
                noisy = loss + sigma * generator.standard_normal()
                rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": noisy})
    table = check_table(pd.DataFrame(rows)).runs
    curves = [loss_curve(group) for _, group in table.groupby("scale")]
    noise = pooled_noise(curves)
    found = []
    for curve, truth in zip(curves, optima, strict=True):
        optimum = estimate(curve, noise, generator).optimum
        found.append((optimum.low <= truth <= optimum.high, optimum.high - optimum.low))
    return found


def main(simulations: int = 400, out: Path | None = None, seed: int = 0) -> None:
    """Print (and store) the coverage of every cell.

    Args:
        simulations: Sweeps a cell, of three curves each.
        out: CSV file to store the table in.
        seed: Of the simulation.
    """
    cells = list(itertools.product(STEPS, SIGMAS, SEEDS))
    rows = []
    for index, (step, sigma, seeds) in enumerate(track(cells, "simulating")):
        generator = np.random.default_rng([seed, index])
        found = [f for _ in range(simulations) for f in simulate(step, sigma, seeds, generator)]
        covered = np.array([c for c, _ in found])
        widths = np.array([w for _, w in found])
        error = np.sqrt(covered.mean() * (1 - covered.mean()) / len(covered))
        rows.append(
            {
                "grid_step_octaves": step,
                "sigma_nat": sigma,
                "seeds": seeds,
                "coverage": round(covered.mean(), 3),
                "coverage_se": round(error, 3),
                "median_width_octaves": round(float(np.median(widths)), 2),
            }
        )
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    if out is not None:
        table.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
