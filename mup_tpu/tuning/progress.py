"""Progress of trials: bars on a terminal, a line for each job in a log file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mup_tpu.config.values import counted, write_time
from mup_tpu.training.record import count_statuses

T = TypeVar("T")


def cost(seconds: float, price: float = math.nan) -> str:
    """Write a time, and its money where the price of an hour is known: "3.0 h, 7.50 at 2.5/h"."""
    money = "" if math.isnan(price) else f", {seconds / 3600 * price:,.2f} at {price:g}/h"
    return (f"{seconds:.1f} s" if seconds < 10 else write_time(seconds)) + money


def starting(
    what: str, seconds: float = math.nan, price: float = math.nan, again: str = "the same command goes on"
) -> str:
    """Return the line of a long command at its start: what runs, what it costs, how it stops and goes on."""
    takes = "" if math.isnan(seconds) else f", about {cost(seconds, price)} of training"
    return f"{what}{takes}; Ctrl-C stops" + (f", {again}" if again else "")


class TrialProgress(Generic[T]):
    """A bar for each size, in trials, and one for all, in their expected work.

    A bar's length counts steps of running trials too. `size` gives a trial's point of the scale in words,
    `work` its time in any unit, and `loss_name` the name of the loss once a trial has ended.
    """

    def __init__(
        self,
        trials: Sequence[T],
        size: Callable[[T], str],
        work: Callable[[T], float],
        console: Console,
        loss_name: Callable[[], str] = lambda: "loss",
    ) -> None:
        self.console, self._size, self._work, self._loss_name = console, size, work, loss_name
        self._trials, self._stored, self._stored_work = len(trials), 0, 0.0
        self._cell: Any = None  # output of a notebook's cell that is updated
        size_of, note = (TextColumn(f"{{task.{of}}}", markup=False) for of in ("description", "fields[note]"))
        self._bars = Progress(  # a line with the cost takes the place of the bars
            size_of, BarColumn(bar_width=24), note, TimeRemainingColumn(), console=console, transient=True,
            disable=not console.is_terminal, speed_estimate_period=3600,
        )  # fmt: skip
        counts = Counter(map(size, sorted(trials, key=work)))
        self._ended: dict[str, Counter[str]] = {name: Counter() for name in counts}  # by status
        add, note_of = self._bars.add_task, "waiting for a worker"
        self._tasks = {name: add(name, total=n, note=note_of) for name, n in counts.items()}
        self._all = self._bars.add_task("all", total=sum(map(work, trials)), note=f"0/{len(trials)} trials")
        self._best = dict.fromkeys(counts, math.inf)  # lowest loss of each size
        self._shares: dict[Any, float] = {}  # share of each running job's steps that is done

    def __rich__(self) -> Progress:
        return self._bars

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    @property
    def ended_share(self) -> float:
        """Share of the expected work whose trials have ended."""
        return self._stored_work / (self._bars.tasks[-1].total or math.inf)

    def update(self, job: Any, doing: str = "", report: Any = None) -> None:
        if report is not None:
            doing = type(report).note([report])
        self._advance(job, report.step / report.steps if report is not None and report.steps else 0.0, doing)

    def ended(
        self, job: Any, rows: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Show that the trials of a job are stored."""
        size, statuses = self._size(job.trials[0]), count_statuses(rows)
        self._ended[size] += statuses
        self._stored += len(rows)
        self._stored_work += sum(map(self._work, job.trials))
        losses = [row["loss"] for row in rows if row["status"] == "finished"]
        self._best[size] = best = min([self._best[size], *losses])
        lowest = f", lowest {self._loss_name()} {best:.4f}" if best < math.inf else ""
        self._advance(job, 1.0, counted(sorted(self._ended[size].items())) + lowest)
        del self._shares[job]
        self._bars.update(self._all, note=f"{self._stored}/{self._trials} trials")
        if not self.console.is_terminal:
            at, result = size, counted(sorted(statuses.items()))
            if len(rows) == 1:
                (row,) = rows
                at = getattr(job, "values", "") or f"{at}, seed {row['seed']}"
                result = row["status"]
                if result == "finished":
                    result = f"{self._loss_name()} {row['loss']:.4f}"
            left = self._bars.tasks[-1].time_remaining
            ends = f", {write_time(left)} left" if left else ""
            line = f"{at}: {result}; {self._stored} of {self._trials} trials stored{ends}"
            if self.console.is_jupyter:
                self._show_in_cell(line)
            else:
                self.console.print(line, soft_wrap=True)  # wrapping takes Rich seven times as long

    def _show_in_cell(self, line: str) -> None:
        from IPython.display import display

        full = 24 * self._stored // max(self._trials, 1)
        bar = {"text/plain": f"{'━' * full}{'╌' * (24 - full)} {line}"}
        if self._cell is None:
            self._cell = display(bar, raw=True, display_id=True)
        else:
            self._cell.update(bar, raw=True)

    def _advance(self, job: Any, share: float, note: str) -> None:
        more = len(job.trials) * (share - self._shares.get(job, 0.0))
        self._shares[job] = share
        self._bars.update(self._tasks[self._size(job.trials[0])], advance=more, note=note)
        self._bars.update(self._all, advance=more * self._work(job.trials[0]))
