"""Optima of several hyperparameters on drawn worlds: coverage and wrong verdicts, for surfaces.md.

    python benchmarks/surfaces.py --seed 3 --worlds 10

A world has four widths, two or three tuned hyperparameters that interact, and a valley that is a quadratic,
steeper above the best learning rate (linex), or a power of 1.5, which no surface of the fit is. Noise is
Student t4; its size is drawn from 0.002, 0.01 and 0.03 nat. Runs that lose more than 1.5 nat have diverged.
"""

from __future__ import annotations

import itertools
import tempfile

import numpy as np
import pandas as pd
import tyro

from mup_tpu import Study, octaves
from mup_tpu.analysis import Columns, Reading, analyze, check_table
from mup_tpu.config.grid import design_points
from mup_tpu.errors import TableError

SCALES = np.array([64, 128, 256, 512])
NAMES = ("lr", "wd", "beta")


def world(generator: np.random.Generator, tuned: int, slope: float, shape: str, design: str):
    """Return runs, the true optima (scales × tuned), and the true cost of copying the smallest scale's."""
    size = np.exp(generator.normal(np.log(0.04), 0.5, tuned))
    correlation = np.eye(tuned)
    for a, b in itertools.combinations(range(tuned), 2):
        correlation[a, b] = correlation[b, a] = generator.uniform(-0.7, 0.7) / (tuned - 1)
    curvature = np.sqrt(np.outer(size, size)) * correlation
    start = np.array([-8.0, -3.0, -5.0][:tuned]) + generator.uniform(-0.5, 0.5, tuned)
    slopes = np.array([slope, 0.0, 0.0][:tuned])
    best = start + slopes * np.log2(SCALES / 64)[:, None]
    noise = generator.choice([0.002, 0.01, 0.03])

    def rise(u: np.ndarray, optimum: np.ndarray) -> np.ndarray:
        away = u - optimum
        quadratic = 0.5 * np.einsum("nh,hk,nk->n", away, curvature, away)
        if shape == "linex":
            x = away[:, 0]
            quadratic += curvature[0, 0] * (4 * (np.exp(np.minimum(x / 2, 6)) - 1 - x / 2) - x**2 / 2)
        return 0.6 * quadratic**0.75 if shape == "power" else quadratic

    def loss_of(u: np.ndarray, width: int, optimum: np.ndarray) -> np.ndarray:
        loss = rise(u, optimum)
        loss = np.where(loss > 1.5, np.inf, loss + noise * generator.standard_t(4, len(u)) / 2**0.5)
        return loss + 4 * (width / 64) ** -0.1

    cost = float(rise(best[:1], best[-1])[0])
    if design == "bought":
        lists = {n: octaves(round(s) - 4, round(s) + 3) for n, s in zip(NAMES, start, strict=False)}
        with tempfile.TemporaryDirectory() as folder:
            study = Study(folder, scale={"width": SCALES.tolist()}, tune=lists)
            while trials := study.ask(1000, until_settled=True):
                for trial in trials:
                    u = np.log2([[trial.values[name] for name in lists]])
                    optimum = best[SCALES.tolist().index(trial.width)]
                    study.tell(trial, float(loss_of(u, trial.width, optimum)[0]))
            runs = study.to_frame().drop(columns=["trial_id", "status"])
        return runs, best, slopes, cost
    rows = []
    for width, optimum in zip(SCALES, best, strict=True):
        if design == "grid":
            axes = [start[i] + np.arange(-2, 3) + np.round(optimum[i] - start[i]) for i in range(tuned)]
            u = np.array(np.meshgrid(*axes)).reshape(tuned, -1).T
        elif design == "composite":  # of one list for all widths, as in a sweep
            lists = {str(i): [2.0**x for x in range(round(s) - 5, round(s) + 4)] for i, s in enumerate(start)}
            u = np.log2([[*point.values()] for point in design_points(lists, "composite")])
        else:
            spread = generator.uniform(-3, 3, (20 * tuned, tuned))
            u = start + spread + 0.7 * (optimum - start)
        values = dict(zip(NAMES, 2.0**u.T, strict=False))
        rows.append(pd.DataFrame(values | {"width": width, "loss": loss_of(u, width, optimum)}))
    return pd.concat(rows), best, slopes, cost


def main(seed: int = 0, worlds: int = 10, only: str = "") -> None:
    """Print a row of the table for each kind of world.

    Args:
        seed: of the worlds.
        worlds: number of each kind.
        only: way of choosing runs, in place of all: "bought" is a study's `ask(until_settled=True)`.
    """
    generator = np.random.default_rng(seed)
    print(
        "| tuned | slope | valley | runs | optimum in 95 % | α in 95 % | right | open | wrong | mean runs |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    designs = [(2, "grid"), (2, "random"), (3, "random"), (2, "composite"), (3, "composite"), (2, "bought")]
    designs = [one for one in designs if only in ("", one[1])]
    for (tuned, design), slope, shape in itertools.product(
        designs, (0.0, -0.7), ("quadratic", "linex", "power")
    ):
        inside, slopes_in, numbers, counts = [], [], [], {"right": 0, "open": 0, "wrong": 0}
        for _ in range(worlds):
            runs, best, slopes, cost = world(generator, tuned, slope, shape, design)
            numbers.append(len(runs))
            try:
                columns = Columns("width", NAMES[0], tuned_beside=NAMES[1:tuned])
                analysis = analyze(check_table(runs, Reading(columns)))
            except TableError:
                counts["open"] += 1
                continue
            for h, part in enumerate(analysis.parts):
                result = part.results[0]
                inside += [o.low <= x <= o.high for o, x in zip(result.optima, best[:, h], strict=True)]
                if result.drift.is_known:
                    slopes_in.append(result.drift.low <= slopes[h] <= result.drift.high)
            truth = "TRANSFERS" if cost < 0.01 else "DRIFTS"
            decision = analysis.results[0].verdict.decision
            counts["open" if decision == "OPEN" else "right" if decision == truth else "wrong"] += 1
        covered = [f"{np.mean(inside):.2f}", f"{np.mean(slopes_in):.2f}"]
        cells = [tuned, f"{slope:g}", shape, design, *covered, *counts.values(), f"{np.mean(numbers):.0f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
