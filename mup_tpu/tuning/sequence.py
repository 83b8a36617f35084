"""Sequences: deciding runs are bought, look by look, until each verdict is settled.

The store is the only state. Each row holds the number of its purchase. Looks are counted from the rows, and
an interrupted purchase is planned again from the rows before it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from mup_tpu.analysis.cost import Cost, run_cost
from mup_tpu.analysis.design import Batch, Cell, first_batch, next_batch, why_stop
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.looks import LookTaken, Question, take_looks
from mup_tpu.analysis.rows import selected_scales
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.config import RunOptions, SequenceOptions, Sweep, SweepOptions, Trial
from mup_tpu.config.columns import configured, label, write_scale
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.jobs.plan import missing_trials
from mup_tpu.store import Store, StoredAxes, done_of, load_planned, load_question
from mup_tpu.tuning.corpora import Corpora
from mup_tpu.tuning.sweep import check_alike, measured
from mup_tpu.tuning.trial_runner import TrialRunner

_SAME_X = 1e-6
"""Octaves within which two values count as the same."""


def run_until_settled(
    sweep: Sweep,
    results: str,
    until: SequenceOptions,
    options: SweepOptions,
    run: RunOptions,
    console: Console,
) -> Counter[str]:
    """Buy runs of a sweep, batch after batch, until every verdict is settled or not worth its cost.

    The sweep gives the scales, and the hyperparameter's values at the start. Stored rows count.

    Returns:
        Number of this call's trials by status; empty if none was bought.

    Raises:
        ConfigError: a trial is not allowed, the hyperparameter is no real number above 0, there are fewer
            than three scales, or the device or cluster is not there.
        StoreError: the results folder cannot be written, or does not fit the sweep: another experiment, other
            axes, runs of another kind, more scales, or a question about fewer.
        DataError: the corpus cannot be used.
    """
    deadline = time.monotonic() + (until.seconds or math.inf)
    corpora = Corpora()
    points = measured(sweep, corpora)
    _check_axes(sweep, points)
    if lacking := sorted(set(load_planned(results)) - set(points)):
        at = ", ".join(write_scale(sweep.scale_axis.column, scale) for scale in lacking)
        raise StoreError(
            f"results folder {results} plans {label(sweep.scale_axis.column)} {at} too, which this sweep "
            "lacks: give all of its scales, or another --results"
        )
    _check_question(sweep, points, results)
    store = Store(results, sweep.experiment, StoredAxes.of(sweep), tuple(points))
    check_alike(sweep, store)
    run = replace(run, tuned=sweep.tune_axis.fields)
    buyer = _Buyer(sweep, points, corpora, store, run.halving, deadline)
    outcome: Counter[str] = Counter()
    with TrialRunner(store, corpora, sweep.scale_axis.fields, options, run, console) as runner:
        while True:
            plans = buyer.plans()
            _show(plans, buyer.columns, console)
            trials = {trial: plan.purchase for plan in plans for trial in plan.trials}
            if not trials:
                return outcome
            if time.monotonic() >= deadline:
                break
            ended = runner.run(list(trials), trials.__getitem__, deadline)
            outcome += ended
            if ended["failed"] or not ended:
                break
    if time.monotonic() >= deadline:
        console.print(f"the budget of {until.budget} is used up; the same command goes on", highlight=False)
    return outcome


@dataclass(frozen=True)
class _Plan:
    """Looks at one parametrization so far, and its next purchase."""

    name: str
    looks: tuple[LookTaken, ...]
    batch: Batch | None
    """Next batch; None after a settled verdict."""
    stops: str
    """Reason not to buy the batch; "" if it is bought."""
    purchase: int
    trials: tuple[Trial, ...]
    """Trials of the batch, if it is bought."""


class _Buyer:
    """Planner of purchases, from the rows of a store."""

    def __init__(
        self,
        sweep: Sweep,
        points: Mapping[float, dict[str, Any]],
        corpora: Corpora,
        store: Store,
        halving: bool,
        deadline: float,
    ) -> None:
        self._sweep, self._points, self._store, self._corpora = sweep, points, store, corpora
        self._halving = halving
        self.columns = Columns(
            sweep.scale_axis.column, sweep.tune_axis.column, parametrization=sweep.compare_axis.column
        )
        start = points[min(points)]
        self._compared = {
            str(configured(sweep.base.replace(**start, **point))[self.columns.parametrization]): point
            for point in sweep.compare_axis.points
        }
        self._known = np.empty(0)
        """Values of the hyperparameter above 0, from the grid and the rows."""
        self._began, self._deadline, self._before = time.monotonic(), deadline, store.done()

    def plans(self) -> list[_Plan]:
        """Plan of each parametrization."""
        stored = self._store.results()
        table = load_table(str(self._store.folder), where=()) if len(stored) else None
        self._known = self._known_values(stored)
        done = done_of(stored, stopped=self._halving)
        return [self._plan(name, table, stored, done) for name in self._compared]

    def _plan(self, name: str, table: RunTable | None, stored: pd.DataFrame, done: set[str]) -> _Plan:
        runs = table.runs[table.runs["compared"] == name] if table is not None else pd.DataFrame()
        if not len(runs):
            return self._bought(name, (), self._first(name), "", 1)
        assert table is not None
        question = Question.of(table)
        looks = tuple(take_looks(name, runs, question))
        last = looks[-1].purchase
        if last:
            before = runs[runs["purchase"] < last]
            batch = self._next(name, replace(table, runs=before), looks[:-1], question)
            again = self._bought(name, looks[:-1], batch, "", last)
            if missing_trials(again.trials, done, self._corpora.trial_id):
                return again
        batch = self._next(name, replace(table, runs=runs), looks, question)
        stops = why_stop(looks[-1], batch, question, self._left(batch.costs, stored)) if batch else ""
        return self._bought(name, looks, batch, stops, last + 1)

    def _first(self, name: str) -> Batch:
        grid = [math.log2(value) for value in self._sweep.tune_axis.values if value > 0]
        return first_batch(name, min(self._points), grid)

    def _next(
        self, name: str, table: RunTable, looks: Sequence[LookTaken], question: Question
    ) -> Batch | None:
        """Batch after some looks; None if the last one settled the verdict."""
        if not looks:
            return self._first(name)
        if looks[-1].decision != "INCONCLUSIVE":
            return None
        return next_batch(name, looks[-1].evidence, run_cost(table), question)

    def _bought(
        self, name: str, looks: Sequence[LookTaken], batch: Batch | None, stops: str, purchase: int
    ) -> _Plan:
        """Plan with the trials of a batch; a value that trials do not allow ends the sequence."""
        trials: list[Trial] = []
        if batch is not None and not stops:
            try:
                trials = [t for cell in batch.cells for t in self._trials(name, cell)]
            except ConfigError as error:
                stops, trials = f"{batch.reason}, but {error}", []
        return _Plan(name, tuple(looks), batch, stops, purchase, tuple(trials))

    def _trials(self, name: str, cell: Cell) -> list[Trial]:
        at = self._points[min(self._points, key=lambda scale: abs(scale - cell.scale))]
        near = float(self._known[np.abs(np.log2(self._known) - cell.x).argmin()])
        # Rounding in the last digit would make another trial.
        value = near if abs(math.log2(near) - cell.x) < _SAME_X else 2.0**cell.x
        tuned = {self._sweep.tune_axis.field: value}
        one = self._sweep.base.replace(**at, **self._compared[name], **tuned)
        return [one.replace(seed=one.train.seed + seed) for seed in range(cell.seeds)]

    def _left(self, costs: Cost, stored: pd.DataFrame) -> float:
        """Rest of the budget at this call's pace, in units of cost; inf before the first purchase."""
        new = stored.loc[~stored["trial_id"].isin(self._before), self.columns.scale]
        bought, now = sum(costs.of(scale) for scale in new), time.monotonic()
        return (self._deadline - now) * bought / (now - self._began) if bought else math.inf

    def _known_values(self, stored: pd.DataFrame) -> np.ndarray:
        """Values of the hyperparameter above 0, from the grid and the rows."""
        values = [*self._sweep.tune_axis.values, *stored[self.columns.hyperparameter].unique()]
        return np.array([value for value in values if value > 0], dtype=float)


def _check_axes(sweep: Sweep, points: Mapping[float, dict[str, Any]]) -> None:
    """Refuse fewer scales than a verdict needs, and a hyperparameter that is no real number above 0."""
    if len(points) < NEEDED:
        name = label(sweep.scale_axis.column)
        raise ConfigError(f"the sweep has {len(points)} {name}s: until_settled needs {NEEDED} at least")
    axis = sweep.tune_axis
    if not isinstance(sweep.base.flat()[axis.field], float):
        raise ConfigError(
            f"tune {axis.field} is a whole number: until_settled needs a real one, as learning_rate"
        )
    if not any(value > 0 for value in axis.values):
        raise ConfigError(f"tune {axis.field} has no value above 0: until_settled needs one to start from")


def _check_question(sweep: Sweep, points: Mapping[float, dict[str, Any]], results: str) -> None:
    """Refuse scales that the folder's stored conditions exclude: their rows would never be analysed."""
    column = sweep.scale_axis.column
    asked = [condition for condition in load_question(results) if condition.column == column]
    if lacking := sorted(set(points) - set(selected_scales(points, column, asked))):
        at = ", ".join(write_scale(column, scale) for scale in lacking)
        raise StoreError(
            f"results folder {results} asks about {', '.join(c.words for c in asked)}, and this sweep has "
            f"{label(column)} {at} too: give scales that it asks about, or have it ask about all "
            f"(mup-tpu ask {results} --all)"
        )


def _show(plans: Sequence[_Plan], columns: Columns, console: Console) -> None:
    """Print the last look at each parametrization, and its next purchase."""
    shown = Table(title=f"best {label(columns.hyperparameter)} by {label(columns.scale)}, look by look")
    for heading in (
        label(columns.parametrization),
        "look",
        "runs",
        "α (95 %)",
        "regret (nat, 95 %)",
        "verdict",
    ):
        shown.add_column(heading, justify="left" if heading == "verdict" else "right")
    for plan in plans:
        shown.add_row(plan.name, *_cells(plan.looks[-1] if plan.looks else None))
    console.print(shown)
    for plan in plans:
        if plan.batch is None:
            line = f"settled: {plan.looks[-1].sentence}"
        elif plan.stops:
            line = f"{plan.name} ends here: {plan.stops}"
        else:
            line = f"{plan.name}, purchase {plan.purchase}: {plan.batch.reason}; {plan.batch.price()}"
        console.print(line, highlight=False, soft_wrap=True)


def _cells(look: LookTaken | None) -> tuple[str, ...]:
    if look is None:
        return "-", "0", "-", "-", "-"
    drift, regret = look.evidence.drift, look.evidence.headline
    alpha = f"{drift.alpha:.2f} ({drift.low:.2f} to {drift.high:.2f})" if drift.is_known else "-"
    lost = "-" if regret is None else regret.status
    if regret is not None and regret.status == "estimated":
        lost = f"{regret.value:.3f} ({regret.low:.3f} to {regret.high:.3f})"
    return str(look.number or "-"), str(look.runs), alpha, lost, look.decision
