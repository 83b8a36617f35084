"""Sequences: runs are bought batch after batch, with a look after each, until every verdict is settled.

The store is the only state. Each row holds the number of its purchase. Looks are counted from the rows, and
an interrupted purchase is planned again from the rows before it.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
from rich.console import Console

from mup_tpu.analysis.design import PACK, Batch, Cell, beyond, first_batch, look_around, next_batch, why_stop
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.planned import Planned
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost, RunTable, run_cost, selected_scales
from mup_tpu.analysis.verdict import LookTaken, Question, take_looks
from mup_tpu.config import RunOptions, SequenceOptions, Sweep, SweepOptions, Trial, field_column
from mup_tpu.config.columns import Table, configured, label, write_scale
from mup_tpu.config.sweep import Design
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.jobs.pack_job import missing_trials
from mup_tpu.store import Store, StoredAxes, done_of, load_header
from mup_tpu.tuning.runner import Corpora, Packs, sweep_with_precision
from mup_tpu.tuning.sweep import check_alike, measured
from mup_tpu.words.names import exponent
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import look_verdict, price

_MOST_RUNS = 40  # runs of a planned size after which its grid is not extended
_SAME_X = 1e-6  # octaves within which two values count as the same


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

    Returns the number of this call's trials by status; empty if none was bought.
    """
    deadline = time.monotonic() + until.seconds
    sweep = sweep_with_precision(sweep, results, run, console)
    corpora = Corpora()
    grid, header, column = _grid_of(sweep, corpora), load_header(results), sweep.scale_axis.column

    def named(scales: set[float]) -> str:
        return f"{label(column)} {', '.join(write_scale(column, scale) for scale in sorted(scales))} too"

    if lacking := {*header.planned} - {*grid.points}:
        raise StoreError(
            f"results folder {results} plans {named(lacking)}, which this sweep lacks: give all of its "
            "scales, or another --results"
        )
    # Rows of scales that the folder's stored conditions exclude would never be analysed.
    conditions = [condition for condition in header.where if condition.column == column]
    if lacking := {*grid.points} - {*selected_scales(grid.points, column, conditions)}:
        raise StoreError(
            f"results folder {results} asks about {', '.join(c.words for c in conditions)}, and this sweep "
            f"has {named(lacking)}: give scales that it asks about, or have it ask about all "
            f"(mup-tpu analyze {results} --keep)"
        )
    store = Store(results, sweep.experiment, StoredAxes.of(sweep), tuple(grid.points))
    check_alike(sweep, store)
    run = replace(run, tuned=sweep.tune_axis.fields)
    with Packs(store, corpora, sweep.scale_axis.fields, options, run, console) as packs:
        run_batch = functools.partial(packs.run, deadline=deadline)
        outcome = buy(grid, store, run_batch, run.halving, deadline, console, until.first_looks)
    if time.monotonic() >= deadline:
        console.print(f"the budget of {until.budget} is used up; the same command goes on")
    return outcome


T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Grid(Generic[T]):
    """Trials that a sequence may buy."""

    columns: Columns
    points: Mapping[float, Any]  # points of the scale by their measure
    values: Sequence[float]  # values of the hyperparameter to start from
    is_real: bool  # whether the hyperparameter is a real number
    compared: Mapping[str, Any]  # compared points by their names in the run table
    trial: Callable[[Any, Any, float, int], T]
    """Makes a trial of a point of the scale, a compared point, a value and a seed from 0 on."""
    trial_id: Callable[[T], str]  # name of a trial in the store
    by_column: Callable[[Any], dict[str, Any]] = dict  # returns the values of a point by their columns

    def __post_init__(self) -> None:
        scale, tuned = label(self.columns.scale), f"tune {self.columns.hyperparameter}"
        count, least = len(self.points), min(self.points)
        for is_met, has, needs in (
            (count >= NEEDED, f"the sweep has {count} {scale}s", f"{NEEDED} at least"),
            (least > 0, f"the sweep has {scale} {least:g}", "scales above 0"),
            (self.is_real, f"{tuned} is a whole number", "a real one, as learning_rate"),
            (max(self.values) > 0, f"{tuned} has no value above 0", "one to start from"),
        ):
            if not is_met:
                raise ConfigError(f"{has}: until_settled needs {needs}")

    @property
    def start(self) -> list[float]:
        """Return log2 of the values to start from."""
        return [math.log2(value) for value in self.values if value > 0]


def several_tuned(names: Sequence[str]) -> str:
    return f"until_settled buys runs for one tuned hyperparameter, not for {', '.join(names)}: run the design"


def _grid_of(sweep: Sweep, corpora: Corpora) -> Grid[Trial]:
    base, tuned = sweep.base, sweep.tune_axis
    if isinstance(tuned, Design):
        raise ConfigError(several_tuned(tuned.fields))
    points = measured(sweep, corpora)
    start = base.replace(**points[min(points)])

    def trial(point: Any, compared: Any, value: float, seed: int) -> Trial:
        return base.replace(**point, **compared, **{tuned.field: value}, seed=base.train.seed + seed)

    scale, tune, compare = (axis.column for axis in sweep.axes)
    return Grid(
        Columns(scale, tune, parametrization=compare),
        points,
        tuned.values,
        isinstance(base.flat()[tuned.field], float),
        {str(configured(start.replace(**point))[compare]): point for point in sweep.compare_axis.points},
        trial,
        corpora.trial_id,
        lambda point: {field_column(name): value for name, value in point.items()},
    )


def buy(
    grid: Grid[T],
    store: Store,
    run: Callable[[list[T], Callable[[T], int]], Counter[str]],
    halving: bool,
    deadline: float,
    console: Console,
    first_looks: bool = False,
) -> Counter[str]:
    """Buy batch after batch until each verdict is settled, is not worth its cost, or the time is up.

    `run` runs the missing ones of some trials, given the purchase of each, and returns their number by
    status. With `halving` stopped trials count as run; `first_looks` ends before seeds are added.
    """
    buyer = buyer_of(grid, store, halving, deadline, first_looks)
    outcome: Counter[str] = Counter()
    while True:
        trials, report = buyer.next()
        for line in report:
            console.print(line)
        if not trials or time.monotonic() >= deadline:
            return outcome
        ended = run(list(trials), trials.__getitem__)
        outcome += ended
        # Failed trials would be bought again without end; nothing ended where the deadline came first.
        if ended["failed"] or not ended:
            return outcome


# Trials to buy with the numbers of their purchases, and a report for a console
Purchase = tuple[dict[T, int], list[Any]]


@dataclass(frozen=True)
class _Plan(Generic[T]):
    """Looks at one parametrization so far, and its next purchase."""

    name: str
    looks: tuple[LookTaken, ...]
    batch: Batch | None  # next batch; None after a settled verdict
    stops: Reason | None  # reason not to buy the batch; None if it is bought
    purchase: int
    trials: tuple[T, ...]  # trials of the batch, if it is bought


class Buyer(Generic[T]):
    """Planner of purchases, from the rows of a store. Arguments as for `buy`."""

    def __init__(
        self,
        grid: Grid[T],
        store: Store,
        halving: bool = False,
        deadline: float = math.inf,
        first_looks: bool = False,
    ) -> None:
        self._grid, self._store, self._halving, self._first_looks = grid, store, halving, first_looks
        self._known = np.empty(0)  # values of the hyperparameter above 0, from the grid and the rows
        self._began, self._deadline, self._before = time.monotonic(), deadline, store.done()

    def next(self) -> Purchase[T]:
        """Return the next purchase of all parametrizations, with a table of their looks so far."""
        stored = self._store.results()
        table = load_table(str(self._store.folder), where=()) if len(stored) else None
        values = [*self._grid.values, *stored[self._grid.columns.hyperparameter].unique()]
        self._known = np.array([value for value in values if value > 0], dtype=float)
        done = done_of(stored, stopped=self._halving)
        plans = [self._plan(name, table, stored, done) for name in self._grid.compared]
        return {trial: plan.purchase for plan in plans for trial in plan.trials}, self._report(plans)

    def _report(self, plans: Sequence[_Plan[T]]) -> list[Any]:
        columns = self._grid.columns
        title = f"best {label(columns.hyperparameter)} by {label(columns.scale)}, look by look"
        texts = (label(columns.parametrization), "verdict")
        headings = (texts[0], "look", "runs", "α (95 %)", "regret (nat, 95 %)", texts[1])
        rows, lines = [], []
        for plan in plans:
            cells = ["-", "0", "-", "-", "-"]
            if plan.looks:
                look = plan.looks[-1]
                drift, regret = look.evidence.drift, look.evidence.headline
                alpha = exponent(drift.alpha, drift.low, drift.high) if drift.is_known else "-"
                lost = "-" if regret is None else regret.status
                if regret is not None and regret.status == "estimated":
                    lost = f"{regret.value:.3f} ({regret.low:.3f} to {regret.high:.3f})"
                cells = [str(look.number or "-"), str(look.runs), alpha, lost, look.decision]
            rows.append((plan.name, *cells))
            if plan.batch is None:
                lines.append(f"settled: {look_verdict(plan.name, plan.looks[-1], columns)}")
            elif plan.stops:
                lines.append(f"{plan.name} ends here: {because(plan.stops, columns)}")
            else:
                purpose = because(plan.batch.reason, columns)
                lines.append(f"{plan.name}, purchase {plan.purchase}: {purpose}; {price(plan.batch)}")
        return [Table(headings, rows, title, texts, texts), *lines]

    def _plan(self, name: str, table: RunTable | None, stored: pd.DataFrame, done: set[str]) -> _Plan[T]:
        runs = table.runs[table.runs["compared"] == name] if table is not None else pd.DataFrame()
        if table is None or not len(runs):
            return self._bought(name, (), self._next(name, None, (), None), None, 1)
        question = Question.of(table)
        looks = tuple(take_looks(runs, question))
        last = looks[-1].purchase
        if last:
            # A killed call may have run a part of the last purchase: plan it again from the rows before it,
            # so that the same trials are bought, and a look at half a purchase does not count.
            before = runs[runs["purchase"] < last]
            batch = self._next(name, replace(table, runs=before), looks[:-1], question)
            again = self._bought(name, looks[:-1], batch, None, last)
            if missing_trials(again.trials, done, self._grid.trial_id):
                return again
        batch = self._next(name, replace(table, runs=runs), looks, question)
        stops = why_stop(looks[-1], batch, question, self._left(batch.costs, stored)) if batch else None
        if batch and batch.reason.code == "wide interval" and self._first_looks:
            stops = Reason.of("first looks taken")
        return self._bought(name, looks, batch, stops, last + 1)

    def _next(
        self, name: str, table: RunTable | None, looks: Sequence[LookTaken], question: Question | None
    ) -> Batch | None:
        """Return the batch after some looks; None if the last one settled the verdict."""
        if table is None or question is None or not looks:
            return first_batch(name, min(self._grid.points), self._grid.start)
        if looks[-1].decision != "INCONCLUSIVE":
            return None
        return next_batch(name, looks[-1].evidence, run_cost(table), question)

    def _bought(
        self, name: str, looks: Sequence[LookTaken], batch: Batch | None, stops: Reason | None, purchase: int
    ) -> _Plan[T]:
        trials: list[T] = []
        if batch is not None and not stops:
            try:
                trials = [t for cell in batch.cells for t in self._trials(name, cell)]
            except ConfigError as error:  # a value that trials do not allow ends the sequence
                stops = Reason.of("not allowed", purpose=batch.reason, error=str(error))
        return _Plan(name, tuple(looks), batch, stops, purchase, tuple(trials))

    def _trials(self, name: str, cell: Cell) -> list[T]:
        grid = self._grid
        at = grid.points[min(grid.points, key=lambda scale: abs(scale - cell.scale))]
        near = float(self._known[np.abs(np.log2(self._known) - cell.x).argmin()])
        # Rounding in the last digit would make another trial.
        value = near if abs(math.log2(near) - cell.x) < _SAME_X else 2.0**cell.x
        return [grid.trial(at, grid.compared[name], value, seed) for seed in range(cell.seeds)]

    def _left(self, costs: Cost, stored: pd.DataFrame) -> float:
        new = stored.loc[~stored["trial_id"].isin(self._before), self._grid.columns.scale]
        bought, now = sum(costs.of(scale) for scale in new), time.monotonic()
        return (self._deadline - now) * bought / (now - self._began) if bought else math.inf


class PlanBuyer(Generic[T]):
    """Buyer of the sizes of a plan: each once, around where those before expect its optimum.

    Where a grid holds no optimum, it is extended. Sizes whose optimum is expected within an octave are bought
    together.
    """

    def __init__(self, grid: Grid[T], store: Store, planned: Planned, halving: bool = False) -> None:
        self._grid, self._store, self._planned, self._halving = grid, store, planned, halving
        self._name = next(iter(grid.compared))
        self._start = first_batch(self._name, 0.0, grid.start).cells

    def next(self) -> Purchase[T]:
        """Return the next purchase of the plan, with a line for each size of it."""
        planned, rows = self._planned, self._store.results()
        done = done_of(rows, stopped=self._halving)
        estimates = planned.estimates(rows) if len(rows) else {}
        known = {cell: e for cell, e in sorted(estimates.items()) if e.optimum.is_bracketed}
        tuned, report, wanted = label(planned.columns.hyperparameter), list[Any](), list[Cell]()
        for cell in range(len(planned.cells)):
            lines, x, spread = list[str](), math.nan, math.inf
            others = {c: e for c, e in known.items() if c != cell}
            if others:
                optimum = planned.trend(others).optimum(planned.sizes(planned.cells[cell][1]))
                x, spread = optimum.mean, math.sqrt(optimum.variance)
            count = int(planned.rows_of(rows, cell).sum()) if len(rows) else 0
            looks: Sequence[Cell] = ()
            if cell == 0 and count < sum(look.runs for look in self._start):
                looks = self._start
                lines = [f"from 2^{looks[0].x:g} to 2^{looks[-1].x:g}"]
            elif count < PACK:  # also after a kill within a purchase
                if spread > 1.0 and wanted or not others:
                    continue
                looks = look_around(float(cell), float(round(x)))
                lines = [f"around 2^{round(x)}, expected 2^{x:.1f} ± {spread:.1f}"]
            elif cell in known or cell not in estimates or count >= _MOST_RUNS:
                continue
            elif "edge" in estimates[cell].optimum.status:
                looks = [replace(look, scale=float(cell)) for look in beyond(estimates[cell])]
                lines = [f"on to 2^{looks[0].x:g} and 2^{looks[-1].x:g}: the best so far is at an end"]
            wanted += looks
            at_cell = ", ".join(f"{label(n)} {value:g}" for n, value in planned.cells[cell][0].items())
            report += [f"{at_cell}, {tuned} {line}" for line in lines]
        trials = [trial for look in wanted for trial in self._trials(look)]
        trials = missing_trials(trials, done, self._grid.trial_id)
        if not trials:
            report = [f"the plan's sizes are run: {len(known)} of {len(planned.cells)} have a known optimum"]
        return dict.fromkeys(trials, self._store.next_purchase() or 1), report

    def _trials(self, look: Cell) -> list[T]:
        grid, (values, _) = self._grid, self._planned.cells[int(look.scale)]
        point = next(
            p
            for p in grid.points.values()
            if all(values.get(n, v) == v for n, v in grid.by_column(p).items())
        )
        return [grid.trial(point, grid.compared[self._name], 2.0**look.x, seed) for seed in range(look.seeds)]


def buyer_of(
    grid: Grid[T],
    store: Store,
    halving: bool = False,
    deadline: float = math.inf,
    first_looks: bool = False,
) -> Buyer[T] | PlanBuyer[T]:
    """Return the buyer of a folder: of its plan, if it holds one. Arguments as for `buy`."""
    if (planned := Planned.load(str(store.folder))) is not None:
        return PlanBuyer(grid, store, planned, halving)
    return Buyer(grid, store, halving, deadline, first_looks)
