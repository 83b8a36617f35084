"""Coverage of the 95 % intervals of optimum, drift exponent and regret in simulated sweeps.

    python benchmarks/interval_coverage.py --simulations 100 --out benchmarks/interval_coverage.csv

Four widths whose optima lie on a line, of one family a cell (FAMILIES), by grid step, noise and seeds. The
optimum lies anywhere between grid points, and no valley is a cubic. Nominal is 95 %; the table should lie
between 92 and 99 %.

Shapes: G grid points, S seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro
from rich.progress import track

from mup_tpu.analysis import check_table
from mup_tpu.analysis.verdict import Question, weigh

FAMILIES = (
    "valley", "asymmetric", "wall", "plateau", "half diverged", "noise grows", "near wall", "sharp",
    "off centre", "packs", "scattered", "three widths", "heavy tails", "seeds", "other seeds",
    "quadratic", "power", "ramp", "soft wall below", "machine drifts",
    "smooth wall", "flat", "own shapes",
)  # fmt: skip
"""valley: exponential on one side or straight on both, u²/2 near the optimum. asymmetric: more so than nearly
all that are stored. wall: runs from one to three steps beyond the optimum on lose 0.1 to 4 nat more. near
wall: from 0.3 to 2 octaves beyond it on, by 1 nat. plateau: losses level off 0.05 to 0.6 nat above the best.
half diverged: the higher the learning rate, the more runs diverge. noise grows: it doubles with each octave
above the optimum. sharp: a second coefficient of 0.6. off centre: the grid's middle lies two octaves off.
packs: five runs in a row share an effect of one σ. scattered: optima scatter by 0.2 octave about their line;
three widths: by 0.1, and there are three. heavy tails: the noise is Student's with 3 degrees of freedom.
seeds: all runs of a seed and width share an effect of 2σ, and a fifth of the second and later seeds' runs are
missing. other seeds: so they do, and three points in ten have seeds of their own.
The next five were written later. quadratic: u²/2 for all widths. power: |u|^p, p from
1.3 to 2.7, with sides that differ up to twofold. ramp: from 0.2 to 1.5 octaves above the optimum on, losses
rise by 0.1 to 1 nat an octave more. soft wall below: 0.3 to 2 octaves below it they rise by 0.05 to 1 nat
within half an octave. machine drifts: by the order of the grid, errors of one σ are correlated by 0.7.
The last three were written after the shapes with walls and are held out. smooth wall: from 0.2 to 1.5
octaves above the optimum on, losses rise by 0.05 to 0.5 nat times the cubed distance more. flat: |u|^p, p
from 3 to 4. own shapes: each width has one of all four forms, and an asymmetry of its own."""
STEPS = (0.5, 1.0, 2.0)
SIGMAS = (0.003, 0.01, 0.03)
SEEDS = (1, 2, 3, 5)
WIDTHS = (64, 128, 256, 512)


def linex(u: np.ndarray, asymmetry: float) -> np.ndarray:
    """A valley that rises exponentially on one side, linearly on the other; u²/2 near 0."""
    return (np.exp(asymmetry * u) - asymmetry * u - 1) / asymmetry**2


def hyperbola(u: np.ndarray, asymmetry: float) -> np.ndarray:
    """A valley with straight sides of different slope; u²/2 near 0."""
    return 4 * (np.sqrt(1 + u**2 / 4) - 1) * (1 + asymmetry * np.tanh(u / 2))


def powers(u: np.ndarray, asymmetry: float) -> np.ndarray:
    """A valley that rises exponentially on both sides, as the sum of two powers does; u²/2 near 0."""
    p, q = 0.25 + asymmetry / 2, 0.25 - asymmetry / 2
    p, q = max(p, 0.04), max(q, 0.04)
    return (q * np.expm1(p * u) + p * np.expm1(-q * u)) / (p * q * (p + q))


def bowl(u: np.ndarray, asymmetry: float) -> np.ndarray:
    """A valley that levels off, as losses do that end where training began; u²/2 near 0."""
    v = u * (1 + asymmetry * np.tanh(u / 2) / 2)
    return 8 * (1 - np.exp(-(v**2) / 16))


FORMS = {"linex": linex, "hyperbola": hyperbola, "powers": powers, "bowl": bowl}
"""Valleys: the method was chosen on the first two; the others are held out."""


@dataclass(frozen=True)
class Valley:
    """True optimum and losses of one width."""

    optimum: float
    loss: Callable[[np.ndarray], np.ndarray]
    """Loss without noise, by log2 of the learning rate."""


def draw_valley(
    family: str, optimum: float, shape: tuple[str, float, float], step: float, generator: np.random.Generator
) -> Valley:
    """Valley of a width around its optimum; all widths of a sweep share its `shape`."""
    kind, asymmetry, curvature = shape
    if family == "own shapes":
        kind, asymmetry = str(generator.choice(list(FORMS))), float(generator.uniform(-0.4, 0.4))
    form = FORMS[kind]

    def smooth(x: np.ndarray) -> np.ndarray:
        return curvature * np.minimum(form(np.asarray(x) - optimum, asymmetry), 60.0)

    if family == "near wall":
        at = optimum + float(generator.uniform(0.3, 2.0))
        return Valley(optimum, lambda x: 2.5 + smooth(x) + (np.asarray(x) > at))
    if family == "wall":
        grid = np.arange(-12.0, -3.9, step)
        best = float(grid[np.argmin(smooth(grid))])
        steps = generator.choice([1, 2, 3])
        at = max(best + (steps - generator.uniform(0.02, 1.0)) * step, optimum + 0.02)
        height = float(np.exp(generator.uniform(np.log(0.1), np.log(4.0))))
        return Valley(optimum, lambda x: 2.5 + smooth(x) + height * (np.asarray(x) > at))
    if family == "quadratic":
        return Valley(optimum, lambda x: 2.5 + curvature * (np.asarray(x) - optimum) ** 2 / 2)
    if family == "power":  # asymmetry is 0.1 to 0.4 of either sign
        p, ratio = 2 + 0.7 * (abs(asymmetry) - 0.25) / 0.15, np.exp(1.7 * asymmetry / 2)

        def power(x: np.ndarray) -> np.ndarray:
            u = np.asarray(x) - optimum
            return 2.5 + curvature / 2 * np.abs(u) ** p * np.where(u > 0, ratio, 1 / ratio)

        return Valley(optimum, power)
    if family == "ramp":
        at, slope = optimum + float(generator.uniform(0.2, 1.5)), float(generator.uniform(0.1, 1.0))
        return Valley(optimum, lambda x: 2.5 + smooth(x) + slope * np.maximum(np.asarray(x) - at, 0))
    if family == "smooth wall":
        at, height = optimum + float(generator.uniform(0.2, 1.5)), float(generator.uniform(0.05, 0.5))
        return Valley(optimum, lambda x: 2.5 + smooth(x) + height * np.maximum(np.asarray(x) - at, 0) ** 3)
    if family == "flat":
        p = float(3 + (abs(asymmetry) - 0.1) / 0.3)
        return Valley(optimum, lambda x: 2.5 + curvature / 2 * np.abs(np.asarray(x) - optimum) ** p)
    if family == "soft wall below":
        at, height = optimum - float(generator.uniform(0.3, 2.0)), float(generator.uniform(0.05, 1.0))
        rises = lambda x: height * np.clip((at - np.asarray(x)) / 0.5, 0, 1)  # noqa: E731
        return Valley(optimum, lambda x: 2.5 + smooth(x) + rises(x))
    if family == "plateau":
        top = float(np.exp(generator.uniform(np.log(0.05), np.log(0.6))))
        return Valley(optimum, lambda x: 2.5 + np.minimum(smooth(x), top))
    return Valley(optimum, lambda x: 2.5 + smooth(x))


def simulate(
    family: str,
    step: float,
    sigma: float,
    seeds: int,
    generator: np.random.Generator,
    forms: tuple[str, ...] = ("linex", "hyperbola"),
) -> list[dict[str, Any]]:
    """Intervals of one sweep: quantity, whether it holds the truth, and width."""
    grid = np.arange(-12.0, -3.9, step) + (2.0 if family == "off centre" else 0.0)
    widths = WIDTHS[:3] if family == "three widths" else WIDTHS
    kind = str(generator.choice(list(forms)))
    spread = (0.1, 0.4)
    if family == "asymmetric":
        kind, spread = "linex", (0.4, 0.6)
    asymmetry = float(generator.choice([-1, 1]) * generator.uniform(*spread))
    curvature = 1.2 if family == "sharp" else float(generator.uniform(0.06, 0.16))
    alpha = float(generator.uniform(-0.5, 0.3))
    middle = generator.uniform(-8.5, -7.5)
    scatter = {"scattered": 0.2, "three widths": 0.1}.get(family, 0.0)
    optima = [middle + alpha * (k - 1.5) for k in range(len(widths))]
    if scatter:
        optima = [x + scatter * generator.standard_normal() for x in optima]
    shape = (kind, asymmetry, curvature)
    valleys = [draw_valley(family, float(optimum), shape, step, generator) for optimum in optima]
    rows = []
    for width, valley in zip(widths, valleys, strict=True):
        true_G = valley.loss(grid)
        sd_G = np.full(len(grid), sigma)
        if family == "noise grows":
            sd_G *= 2.0 ** np.clip(grid - valley.optimum, 0, 5)
        loss_GS = true_G[:, None] + sd_G[:, None] * generator.standard_normal((len(grid), seeds))
        if family == "heavy tails":
            loss_GS = true_G[:, None] + sd_G[:, None] * generator.standard_t(3, loss_GS.shape) / np.sqrt(3)
        if family == "packs":
            packs = sigma * generator.standard_normal(loss_GS.size // 5 + 1)
            loss_GS += packs[np.arange(loss_GS.size) // 5].reshape(loss_GS.shape)
        if family == "machine drifts":
            drift = generator.standard_normal(loss_GS.size)
            for i in range(1, len(drift)):
                drift[i] = 0.7 * drift[i - 1] + np.sqrt(1 - 0.7**2) * drift[i]
            loss_GS += sigma * drift.reshape(loss_GS.shape)
        number_GS = np.broadcast_to(np.arange(seeds), loss_GS.shape)
        if family in ("seeds", "other seeds"):
            has_own_G = (generator.random(len(grid)) < 0.3) & (family == "other seeds")
            number_GS = number_GS + seeds * np.where(has_own_G, np.arange(1, len(grid) + 1), 0)[:, None]
            loss_GS += 2 * sigma * generator.standard_normal(number_GS.max() + 1)[number_GS]
            is_missing_GS = (generator.random(loss_GS.shape) < 0.2) & (np.arange(seeds) > 0)
            loss_GS[is_missing_GS] = np.inf
        if family == "half diverged":
            risk_G = np.clip((grid - valley.optimum) / 6, 0, 1)
            loss_GS[generator.random(loss_GS.shape) < risk_G[:, None]] = np.nan
        rows += [
            {"width": width, "lr": 2.0**x, "seed": seed, "loss": loss}
            for x, losses, numbers in zip(grid, loss_GS, number_GS, strict=True)
            for seed, loss in zip(numbers, losses, strict=True)
            if loss != np.inf
        ]
    table = check_table(pd.DataFrame(rows))
    evidence = weigh(table.runs, Question.of(table, seed=int(generator.integers(2**31))))
    found = []
    for estimated, valley in zip(evidence.estimates, valleys, strict=True):
        low, high = estimated.optimum.low, estimated.optimum.high
        found.append({"of": "optimum", "held": low <= valley.optimum <= high, "width": high - low})
    true = dict(zip(widths, valleys, strict=True))
    drift, lost = evidence.drift, evidence.headline
    if drift.is_known:  # α is the slope of the optima themselves, their scatter included
        known = [true[int(scale)].optimum for scale in drift.scales]
        alpha = float(np.polyfit(np.log2(drift.scales), known, 1)[0])
        found.append(
            {"of": "alpha", "held": drift.low <= alpha <= drift.high, "width": drift.high - drift.low}
        )
    if lost is not None and lost.status == "estimated":
        source, target = (true[int(scale)] for scale in (lost.source, lost.target))
        rise = target.loss(np.array([source.optimum, target.optimum]))
        held = lost.low - 1e-9 <= rise[0] - rise[1] <= lost.high
        found.append({"of": "regret", "held": held, "width": lost.high - lost.low})
    return found


def cell_rows(
    cell: tuple[int, str, float, float, int], simulations: int, seed: int, forms: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Coverage of one cell, a row for each of optimum, alpha and regret."""
    index, family, step, sigma, seeds = cell
    generator = np.random.default_rng([seed, index])
    found = pd.DataFrame(
        [f for _ in range(simulations) for f in simulate(family, step, sigma, seeds, generator, forms)]
    )
    rows = []
    for of, group in found.groupby("of", sort=False):
        covered = float(group["held"].mean())
        rows.append(
            {
                "family": family,
                "grid_step_octaves": step,
                "sigma_nat": sigma,
                "seeds": seeds,
                "of": of,
                "intervals": len(group),
                "coverage": round(covered, 3),
                "coverage_se": round(float(np.sqrt(covered * (1 - covered) / len(group))), 3),
                "median_width": float(f"{group['width'].median():.3g}"),
            }
        )
    return rows


def main(
    simulations: int = 100,
    families: tuple[str, ...] = FAMILIES,
    seeds: tuple[int, ...] = SEEDS,
    out: Path | None = None,
    seed: int = 0,
    processes: int = 2,
    steps: tuple[float, ...] = STEPS,
    sigmas: tuple[float, ...] = SIGMAS,
    forms: tuple[str, ...] = ("linex", "hyperbola"),
) -> None:
    """Print (and store) the coverage of every cell.

    Args:
        simulations: Sweeps a cell, of four curves each.
        families: Families of valleys to simulate.
        seeds: Seeds a grid point.
        out: CSV file to store the table in.
        seed: Seed of the simulation.
        processes: Cells at once.
        steps: Distances of grid points, octaves.
        sigmas: Noise of a run, nat.
        forms: Valleys: linex and hyperbola, on which the method was chosen, or powers and bowl.
    """
    every = enumerate(itertools.product(FAMILIES, STEPS, SIGMAS, SEEDS))
    cells = [
        (i, *cell)
        for i, cell in every
        if cell[0] in families and cell[1] in steps and cell[2] in sigmas and cell[3] in seeds
    ]
    with ProcessPoolExecutor(processes) as pool:
        each = (itertools.repeat(value) for value in (simulations, seed, forms))
        done = pool.map(cell_rows, cells, *each)
        table = pd.DataFrame([row for rows in track(done, "simulating", len(cells)) for row in rows])
    print(table.to_string(index=False))
    if out is not None:
        table.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
