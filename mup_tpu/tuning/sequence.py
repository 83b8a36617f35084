"""Sequences: runs are bought batch after batch, with a look after each, until every verdict is settled.

The store is the only state. Each row holds the number of its purchase. Looks are counted from the rows, and
an interrupted purchase is planned again from the rows before it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import pandas as pd
from rich.console import Console

from mup_tpu.analysis.design import Batch, beyond, first_batch, next_batch, why_stop
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.ingest.table_values import Reading
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.optimum import Estimate, Optimum, Status
from mup_tpu.analysis.planned import Estimates, Planned, Profile
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost, RunTable, run_cost, selected_scales
from mup_tpu.analysis.together import design_around, moved_centre
from mup_tpu.analysis.transfer import analyze
from mup_tpu.analysis.verdict import MOST_LOOKS, LookTaken, Question, take_looks
from mup_tpu.config import Grid
from mup_tpu.config.columns import Table, label, write_scale
from mup_tpu.config.grid import DESIGNS, Point, design_points
from mup_tpu.errors import ConfigError, StoreError, TableError
from mup_tpu.jobs.pack_job import missing_trials
from mup_tpu.store import Store, done_of, load_header
from mup_tpu.words.names import exponent, listed
from mup_tpu.words.plans import at_words
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import look_verdict, price, verdict

_MOST_RUNS = 40  # runs of a planned size after which its grid is not extended
_SAME_X = 1e-6  # octaves within which two values count as the same


T = TypeVar("T", bound=Hashable)


def settleable(grid: Grid[T], points: Mapping[float, Point], folder: str) -> Mapping[float, Point]:
    """Return the points of a grid by size; refuse a grid whose verdicts no sequence settles in a folder."""
    column = grid.axes.size
    scale, tuned = label(column), f"tune {', '.join(grid.axes.tuned)}"
    is_real = all(isinstance(value, float) for values in grid.tuned.values() for value in values)
    for is_met, has, needs in (
        (len(points) >= NEEDED, f"the grid has {len(points)} {scale}s", f"{NEEDED} at least"),
        (is_real, f"{tuned} is a whole number", "a real one, as learning_rate"),
        (min(map(max, grid.tuned.values())) > 0, f"{tuned} has no value above 0", "one to start from"),
    ):
        if not is_met:
            raise ConfigError(f"{has}: until_settled needs {needs}")
    header = load_header(folder)

    def named(scales: set[float]) -> str:
        return f"{scale} {', '.join(write_scale(column, scale) for scale in sorted(scales))} too"

    if lacking := {*header.planned} - {*points}:
        raise StoreError(
            f"results folder {folder} plans {named(lacking)}, which this grid lacks: give all of its scales, "
            "or another results folder"
        )
    # Rows of scales that the folder's stored conditions exclude would never be analysed.
    conditions = [condition for condition in header.where if condition.column == column]
    if lacking := {*points} - {*selected_scales(points, column, conditions)}:
        raise StoreError(
            f"results folder {folder} asks about {', '.join(c.words for c in conditions)}, and this grid has "
            f"{named(lacking)}: give scales that it asks about, or have it ask about all "
            f"(mup-tpu analyze {folder} --keep)"
        )
    return points


def buy(
    buyer: Buyer[T],
    run: Callable[[Mapping[T, int]], Counter[str]],
    deadline: float,
    console: Console,
) -> Counter[str]:
    """Buy batch after batch until each verdict is settled, is not worth its cost, or the time is up.

    `run` runs the missing ones of some trials, with the purchase of each, and returns their number by status.
    """
    outcome: Counter[str] = Counter()
    while True:
        trials, report = buyer.next()
        for line in report:
            console.print(line)
        if not trials or time.monotonic() >= deadline:
            return outcome
        ended = run(trials)
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
    """Planner of purchases, from the rows of a store.

    Along one scale each rule's verdict is settled, look by look. Sizes of a plan are bought each once, around
    where those before expect the optimum; where a grid holds none, it is extended. Sizes whose optimum is
    expected within an octave are bought together. Of several hyperparameters the scales are such sizes, and
    runs are then bought until the verdict on all is settled.
    """

    def __init__(
        self,
        grid: Grid[T],
        points: Mapping[float, Point],  # points of the scale, by size
        trial_id: Callable[[T], str],
        store: Store,
        deadline: float = math.inf,
    ) -> None:
        self._grid, self._points, self._trial_id, self._store = grid, points, trial_id, store
        self._columns = Columns(grid.axes.size, grid.axes.tuned[0], parametrization=grid.axes.compared)
        self._began, self._deadline, self._before = time.monotonic(), deadline, store.done()
        self._given = dict(zip(grid.axes.tuned, grid.tuned.values(), strict=True))
        first, *others = self._given.values()
        self._first = first_batch("", min(points), [math.log2(value) for value in first if value > 0])
        self._seeds = grid.num_seeds if others else 1
        self._start: list[tuple[Sequence[float], int]]
        self._start = [(cell.values, cell.seeds) for cell in self._first.cells]
        if others:
            design = design_points(grid.tuned, DESIGNS[0])
            self._start = [(tuple(map(math.log2, point.values())), self._seeds) for point in design]
        planned, scale = Planned.load(str(store.folder)), grid.axes.size
        self._settles = planned is None
        self._plans = {} if planned is None else {next(iter(grid.rules)): planned}
        if planned is None and others:
            cells = tuple((grid.by_column(points[at]), {scale: at}) for at in sorted(points))
            axes = grid.axes.tuned, grid.axes.compared, (scale,), {scale: max(points)}, cells
            self._plans = {name: Planned(*axes, name) for name in grid.rules}

    def next(self) -> Purchase[T]:
        """Return the next purchase of all rules, with a report of their looks or sizes."""
        rows = self._store.results()
        done, report, bought = done_of(rows), list[Any](), list[T]()
        self._known = [{*given, *(rows[n] if len(rows) else ())} for n, given in self._given.items()]
        if not self._plans:
            table = load_table(str(self._store.folder), Reading(where=())) if len(rows) else None
            plans = [self._plan(name, table, rows, done) for name in self._grid.rules]
            return {trial: plan.purchase for plan in plans for trial in plan.trials}, self._report(plans)
        for name, planned in self._plans.items():
            column = self._columns.parametrization
            of_rule = rows[rows[column] == name] if len(rows) else rows
            trials, lines = self._sizes(name, planned, of_rule, done)
            if not trials and self._settles:
                trials, lines = self._settling(name, done)
            bought += trials
            report += lines
        return dict.fromkeys(bought, self._store.next_purchase() or 1), report

    def _trials(self, name: str, point: Point, looks: Iterable[tuple[Sequence[float], int]]) -> list[T]:
        grid, at = self._grid, {**point, **self._grid.rules[name]}
        tuned = ((dict(zip(grid.tuned, map(_exact, x, self._known), strict=True)), n) for x, n in looks)
        return [grid.trial(at | values, seed) for values, seeds in tuned for seed in range(seeds)]

    def _of_batch(self, name: str, batch: Batch) -> list[T]:
        trials = list[T]()
        for cell in batch.cells:
            point = self._points[min(self._points, key=lambda scale: abs(scale - cell.scale))]
            trials += self._trials(name, point, [(cell.values, cell.seeds)])
        return trials

    def _report(self, plans: Sequence[_Plan[T]]) -> list[Any]:
        columns = self._columns
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
            return self._bought(name, (), replace(self._first, parametrization=name), None, 1)
        question, whole = Question.of(table), table

        def following(runs: pd.DataFrame, looks: Sequence[LookTaken]) -> Batch | None:
            if not looks:
                return replace(self._first, parametrization=name)
            costs, last = run_cost(replace(whole, runs=runs)), looks[-1]
            return None if last.verdict.is_settled else next_batch(name, last.evidence, costs, question)

        looks = tuple(take_looks(runs, question))
        if last := looks[-1].purchase:
            # A killed call may have run a part of the last purchase: plan it again from the rows before it,
            # so that the same trials are bought, and a look at half a purchase does not count.
            batch = following(runs[runs["purchase"] < last], looks[:-1])
            again = self._bought(name, looks[:-1], batch, None, last)
            if missing_trials(again.trials, done, self._trial_id):
                return again
        batch = following(runs, looks)
        stops = why_stop(looks[-1], batch, self._left(batch.costs, stored)) if batch else None
        return self._bought(name, looks, batch, stops, last + 1)

    def _bought(
        self, name: str, looks: Sequence[LookTaken], batch: Batch | None, stops: Reason | None, purchase: int
    ) -> _Plan[T]:
        trials: list[T] = []
        if batch is not None and not stops:
            try:
                trials = self._of_batch(name, batch)
            except ConfigError as error:  # a value that trials do not allow ends the sequence
                stops = Reason.of("not allowed", purpose=batch.reason, error=str(error))
        return _Plan(name, tuple(looks), batch, stops, purchase, tuple(trials))

    def _left(self, costs: Cost, stored: pd.DataFrame) -> float:
        new = stored.loc[~stored["trial_id"].isin(self._before), self._columns.scale]
        bought, now = sum(costs.of(scale) for scale in new), time.monotonic()
        return (self._deadline - now) * bought / (now - self._began) if bought else math.inf

    def _sizes(
        self, name: str, planned: Planned, rows: pd.DataFrame, done: set[str]
    ) -> tuple[list[T], list[str]]:
        estimates = self._estimates(planned, rows)
        known = {tuned: estimates.known(tuned) for tuned in planned.tuned}
        wanted, report = list[T](), list[str]()
        looks: list[tuple[Sequence[float], int]]
        around = len(design_around([0.0] * len(planned.tuned))) * self._seeds

        def want(cell: int, looks: Sequence[tuple[Sequence[float], int]], line: str) -> None:
            values, _ = planned.cells[cell]
            columns = ((p, self._grid.by_column(p).items()) for p in self._points.values())
            point = next(p for p, of in columns if all(values.get(n, v) == v for n, v in of))
            trials = missing_trials(self._trials(name, point, looks), done, self._trial_id)
            at = at_words(values, [*values])
            report.extend([f"{at}, {listed([*map(label, planned.tuned)])} {line}"] if trials else [])
            wanted.extend(trials)

        for cell in range(len(planned.cells)):
            count = int(planned.rows_of(rows, cell).sum()) if len(rows) else 0
            elsewhere = [{c: e for c, e in of.items() if c != cell} for of in known.values()]
            optima = [of[cell].optimum for of in estimates.optima.values() if cell in of]
            is_known = all(cell in of for of in known.values())
            if cell == 0 and count < sum(seeds for _, seeds in self._start):
                tried = zip(*(x for x, _ in self._start), strict=True)
                ends = " and ".join(f"2^{min(x):.4g} to 2^{max(x):.4g}" for x in tried)
                want(cell, self._start, f"from {ends}")
            elif count < around:  # also after a kill within a purchase
                expected = [
                    planned.trend(tuned, of).optimum(planned.sizes(planned.cells[cell][1]))
                    for tuned, of in zip(planned.tuned, elsewhere, strict=True) if of
                ]  # fmt: skip
                spread = max((math.sqrt(one.variance) for one in expected), default=math.inf)
                if spread > 1.0 and wanted or len(expected) < len(elsewhere):
                    continue
                centre = [float(round(one.mean)) for one in expected]
                words = ((round(e.mean), f"{e.mean:.1f} ± {math.sqrt(e.variance):.1f}") for e in expected)
                at = " and ".join(f"2^{whole}, expected 2^{known}" for whole, known in words)
                want(cell, [(x, self._seeds) for x in design_around(centre)], f"around {at}")
            elif not optima or is_known and (cell > 0 or len(optima) == 1):
                continue
            elif is_known:  # the start of several hyperparameters is wide
                first = rows[rows["purchase"] == rows["purchase"].min()]
                near = [of[0].optimum for of in self._estimates(planned, first).optima.values() if 0 in of]
                looks = [(x, self._seeds) for x in design_around(moved_centre(near or optima))]
                want(cell, looks, "around its first optimum")
            elif count < max(_MOST_RUNS * self._seeds, 4 * around):
                alone, *others = (of[cell] for of in estimates.optima.values())
                if others:
                    looks = [(x, self._seeds) for x in design_around(moved_centre(optima))]
                elif "edge" in alone.optimum.status and isinstance(alone, Estimate):
                    looks = [((look.x,), look.seeds) for look in beyond(alone)]
                else:
                    continue
                ends = f"2^{looks[0][0][0]:g} and 2^{looks[-1][0][0]:g}"
                want(cell, looks, f"on to {ends}: the best so far is at an end")
        if not wanted:
            both = sum(all(cell in of for of in known.values()) for cell in range(len(planned.cells)))
            report = [f"the plan's sizes are run: {both} of {len(planned.cells)} have a known optimum"]
        return wanted, report

    def _settling(self, name: str, done: set[str]) -> tuple[list[T], list[Any]]:
        """Return the runs that bring a rule's verdict on several hyperparameters nearest per cost."""
        analysis = analyze(load_table(str(self._store.folder), Reading(where=())))
        result = next((result for result in analysis.results if result.compared == name), None)
        if result is None:
            return [], [f"{name} ends here: it has no runs"]
        report, made = [verdict(result, analysis)], result.next_batch
        purchases = int(analysis.table.runs["purchase"].nunique())
        if made is None:
            return [], [f"settled: {report[0]}"]
        if purchases >= len(self._points) + MOST_LOOKS:
            stops = Reason.of("looks used up", looks=MOST_LOOKS)
            return [], [*report, f"{name} ends here: {because(stops, self._columns)}"]
        missing = missing_trials(self._of_batch(name, made), done, self._trial_id)
        if not missing:
            report.append(f"{name} ends here: all runs that would narrow it are stored")
        else:
            report.append(f"{name}: {because(made.reason, self._columns)}: {len(missing)} runs")
        return missing, report

    def _estimates(self, planned: Planned, rows: pd.DataFrame) -> Estimates:
        if not len(rows):
            return Estimates({name: {} for name in planned.tuned})
        with contextlib.suppress(TableError):  # too few runs of several hyperparameters, or no minimum yet
            return planned.estimates(rows)
        # The lowest run of each size
        optima: dict[str, dict[int, Profile | Estimate]] = {name: {} for name in planned.tuned}
        for cell in range(len(planned.cells)):
            runs = rows[planned.rows_of(rows, cell) & (rows["loss"] < math.inf)].sort_values("loss")
            for name in planned.tuned if len(runs) else ():
                values, best = runs[name], float(runs[name].iloc[0])
                is_edge = {Status.LOWER: best == values.min(), Status.UPPER: best == values.max()}
                status = next((status for status, is_so in is_edge.items() if is_so), Status.NO_RUN)
                optimum = Optimum(cell + 1.0, status, math.log2(best), -math.inf, math.inf, se=math.nan)
                optima[name][cell] = Profile(optimum, None, None)
        return Estimates(optima)


def _exact(x: float, known: Iterable[float]) -> float:
    """Return 2^x, or the value that is known there: rounding in the last digit would make another trial."""
    near = min((value for value in known if value > 0), key=lambda value: abs(math.log2(value) - x))
    return float(near) if abs(math.log2(near) - x) < _SAME_X else 2.0**x
