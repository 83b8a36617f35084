"""Realised cost of predicted values beside "at most", where training breaks above a moving rate.

    python benchmarks/walls.py --worlds 60 --seed 1

Four widths, octaves of rates, two seeds, noise of 0.01 nat. The optimum moves with one slope, the wall above
which runs break with another, from 0.8 to 2.5 octaves above it at width 64. Broken runs diverge, lose 0.5 to
3 nat more, or diverge by a coin.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import tyro
from interval_coverage import FORMS, WIDTHS
from rich.progress import track

from mup_tpu.analysis import check_table, predict

KINDS = ("diverges", "loses more", "diverges by a coin")
TIMES = (4, 16, 64)
"""Targets, as multiples of the largest width."""
_RATES = np.arange(-12, -3)
_NOISE, _GUESSING = 0.01, 5.5  # nat


@dataclass(frozen=True)
class World:
    """A valley that moves with the width, and a wall above it."""

    kind: str
    valley: Callable[[np.ndarray, float], np.ndarray]
    asymmetry: float
    curvature: float
    slope: float  # of the optimum, octaves an octave
    start: float  # optimum at width 64, log2
    distance: float  # from it to the wall there, octaves
    wall_slope: float  # of that distance
    more: float  # loss beyond the wall where runs do not diverge, nat

    @classmethod
    def drawn(cls, kind: str, generator: np.random.Generator) -> World:
        return cls(
            kind,
            FORMS[generator.choice([*FORMS])],
            generator.uniform(0.1, 0.8) * generator.choice([-1, 1]),
            generator.uniform(0.03, 0.15),
            generator.normal(0, 0.35),
            generator.uniform(-8.5, -7.5),
            generator.uniform(0.8, 2.5),
            generator.normal(-0.15, 0.25),
            generator.uniform(0.5, 3),
        )

    def wall(self, width: float) -> float:
        """Return octaves from the optimum to the wall, at least −1.5."""
        return max(self.distance + self.wall_slope * math.log2(width / 64), -1.5)

    def away(self, width: float, x: float) -> float:
        return x - self.start - self.slope * math.log2(width / 64)

    def smooth(self, width: float, away: np.ndarray | float) -> np.ndarray:
        rise = self.curvature * self.valley(np.asarray(away), self.asymmetry)
        return np.minimum(3 * (width / 64) ** -0.05 + rise, _GUESSING)

    def run(self, width: float, x: float, generator: np.random.Generator) -> float:
        away = self.away(width, x)
        loss = float(self.smooth(width, away)) + _NOISE * generator.standard_normal()
        if away <= self.wall(width):
            return loss
        diverges = {"diverges": True, "loses more": False}.get(self.kind, generator.random() < 0.5)
        return math.nan if diverges else loss + self.more * (self.kind == "loses more")

    def cost(self, width: float, x: float) -> float:
        """Return the expected loss over the best that trains; a run that diverges costs as guessing."""
        away, wall = self.away(width, x), self.wall(width)
        best = float(self.smooth(width, np.arange(-7, min(wall, 7), 0.02)).min())
        loss = float(self.smooth(width, away))
        if away > wall:
            loss = min(loss + self.more, _GUESSING) if self.kind == "loses more" else (
                _GUESSING if self.kind == "diverges" else (loss + _GUESSING) / 2
            )  # fmt: skip
        return loss - best


def main(worlds: int = 60, seed: int = 1) -> None:
    """Print how often the realised cost exceeds "at most" (97.5 %), by what breaks and by target."""
    warnings.simplefilter("ignore")
    generator, rows = np.random.default_rng(seed), list[dict[str, object]]()
    for kind, _ in track([(kind, number) for kind in KINDS for number in range(worlds)], "worlds"):
        world = World.drawn(kind, generator)
        runs = [
            {"width": width, "lr": 2.0**x, "seed": number, "loss": world.run(width, x, generator)}
            for width in WIDTHS
            for x in _RATES
            for number in range(2)
        ]
        made = predict(check_table(pd.DataFrame(runs)), [f"width={WIDTHS[-1] * times}" for times in TIMES])
        for times, one in zip(TIMES, made.predictions, strict=True):
            cost = world.cost(one.scale, one.x)
            rows.append(
                {"kind": kind, "times": times, "over": cost > one.taking.high, "realised": cost,
                 "expected": one.taking.expected, "at most": one.taking.high}
            )  # fmt: skip
    print(pd.DataFrame(rows).groupby(["kind", "times"]).mean().round(3).to_string())


if __name__ == "__main__":
    tyro.cli(main)
