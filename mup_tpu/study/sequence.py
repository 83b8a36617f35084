"""Grid of a study for a sequence, which buys the deciding runs."""

from __future__ import annotations

from typing import Any

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.study.space import Space, Trial
from mup_tpu.tuning.sequence import Grid, check_axes


class StudyGrid(Grid[Trial]):
    """Trials of a study that a sequence may buy.

    Raises:
        ConfigError: there are fewer than three scales, or the hyperparameter is no real number above 0.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.columns = Columns(space.measured_by, space.tuned, parametrization=space.axes.compare.column)
        self.points = {float(point[space.measured_by]): point for point in space.scale}
        self.values = space.values
        self.compared = {str(next(iter(point.values()), space.name)): point for point in space.compare}
        check_axes(self, all(isinstance(value, float) for value in space.values))

    def trial(self, point: Any, compared: Any, value: float, seed: int) -> Trial:
        """Trial with a point of the scale, a compared point, a value and a seed."""
        return self._space.trial(point, compared, value, seed)

    def trial_id(self, trial: Trial) -> str:
        """Name of a trial in the store."""
        return trial.id
