"""Runs of a study that are bought where they decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.store import Store
from mup_tpu.study.space import Space, Trial
from mup_tpu.tuning.sequence import Buyer, Grid, buy, check_axes


class _Grid(Grid[Trial]):
    """Trials that a sequence may buy of a study."""

    def __init__(self, space: Space) -> None:
        self._space = space
        axes = space.axes
        self.columns = Columns(space.measured_by, space.tuned, parametrization=axes.compare.column)
        self.points = {float(point[space.measured_by]): point for point in space.scale}
        self.values = space.values
        self.compared = {str(next(iter(point.values()), space.name)): point for point in space.compare}

    def trial(self, point: Any, compared: Any, value: float, seed: int) -> Trial:
        """Trial of a point of the scale, what is compared, a value and a seed."""
        return self._space.trial(point, compared, value, seed)

    def trial_id(self, trial: Trial) -> str:
        """Its name in the store."""
        return trial.id


def planned_scales(space: Space) -> tuple[float, ...]:
    """Scales that a sequence plans.

    Raises:
        ConfigError: there are fewer than three, or the hyperparameter is no real number above 0.
    """
    grid = _Grid(space)
    check_axes(grid, all(isinstance(value, float) for value in space.values))
    return tuple(grid.points)


def buy_until_settled(
    space: Space,
    store: Store,
    run: Callable[[list[Trial], Callable[[Trial], int | None]], Counter[str]],
    halving: bool,
    deadline: float,
    console: Console,
) -> Counter[str]:
    """Buy runs as `mup_tpu.tuning.sequence.buy` does."""
    return buy(_Grid(space), store, run, halving, deadline, console)


def next_purchase(space: Space, store: Store) -> list[tuple[Trial, int | None]]:
    """Trials of the next purchase of everything compared, each with its number."""
    return [(trial, plan.purchase) for plan in Buyer(_Grid(space), store).plans() for trial in plan.trials]
