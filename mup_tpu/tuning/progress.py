"""Progress of trials: bars or a table on a terminal, a line for each job in a log file."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn

from mup_tpu.config.columns import Table, write
from mup_tpu.config.sweep import Search
from mup_tpu.config.toml import stored_trial
from mup_tpu.config.values import counted, write_time
from mup_tpu.store import Store
from mup_tpu.training.record import count_statuses

if TYPE_CHECKING:
    from mup_tpu.tuning.chooser import SearchLog

T = TypeVar("T")

_UNSTARTED = "waiting for a worker"


@dataclass
class _Running:
    """Job on a worker."""

    size: str
    trials: int
    began: float = field(default_factory=lambda: time.monotonic())
    doing: str = "starting"
    """Preparation before the first report."""
    report: Any = None

    def trained(self, seconds: float) -> float:
        if self.report is not None and self.report.steps:
            return min(self.report.step / self.report.steps, 1.0)
        return min((time.monotonic() - self.began) / seconds, 1.0)

    def spent(self, seconds: float) -> float:
        """Return the share of a job's time that is spent, by the report's time left, else as `trained`.

        A GPU compiles for half a minute, and then trains for seconds.
        """
        left = getattr(getattr(self.report, "rates", None), "seconds_left", math.nan)
        took = time.monotonic() - self.began
        return self.trained(seconds) if math.isnan(left) else took / max(took + left, 1e-9)


class TrialProgress(Generic[T]):
    """Number of done and diverged trials of each size, state of running ones, and time left.

    The length of a bar is the share of steps that are done, in the last line of all work; the number beside
    it counts stored trials. Before the first report of a size, its line names the work that goes before.

    Args:
        trials: trials to run.
        size: function from a trial to its point of the scale, in words.
        work: function from a trial to its time in any unit; measured times replace it.
        console: place of the bars.
    """

    def __init__(
        self,
        trials: Sequence[T],
        size: Callable[[T], str],
        work: Callable[[T], float],
        console: Console,
    ) -> None:
        self.console, self._size = console, size
        self._work = {size(trial): work(trial) for trial in sorted(trials, key=work)}
        self._total = Counter(map(size, trials))
        self._ended: dict[str, Counter[str]] = {name: Counter() for name in self._work}
        """Stored trials by status, of each size."""
        self._seconds: dict[str, tuple[float, int]] = {}
        """Sum of the seconds a trial of ended jobs, and their number, by size."""
        self._running: dict[Any, _Running] = {}
        self._began = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= 100 else 10),
            TextColumn("{task.fields[stored]}", justify="right"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            name: self._bars.add_task(name, total=n, stored=f"0/{n} trials", note=_UNSTARTED)
            for name in self._work
            for n in [self._total[name]]
        }
        self._all = self._bars.add_task("all", total=1.0, stored=f"0/{len(trials)} trials", note="")

    def __rich__(self) -> Progress:
        return self._bars

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def started(self, job: Any) -> None:
        self._running[job] = _Running(self._size(job.trials[0]), len(job.trials))
        self._refresh(self._running[job].size)

    def preparing(self, job: Any, doing: str) -> None:
        self._running[job].doing = doing
        self._refresh(self._running[job].size)

    def reported(self, job: Any, report: Any) -> None:
        self._running[job].report = report
        self._refresh(self._running[job].size)

    def split(self, job: Any) -> None:
        self._refresh(self._running.pop(job).size)

    def ended(self, job: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show that the trials of a job are stored."""
        running, statuses = self._running.pop(job), count_statuses(rows)
        total, count = self._seconds.get(running.size, (0.0, 0))
        total += (time.monotonic() - running.began) / running.trials
        self._seconds[running.size] = (total, count + 1)
        self._ended[running.size] += statuses
        self._refresh(running.size)
        if not self.console.is_terminal:
            at, result = running.size, counted(sorted(statuses.items()))
            if len(rows) == 1:
                (row,) = rows
                at = getattr(job, "values", "") or f"{at}, seed {row['seed']}"
                result = f"loss {row['loss']:.4f}" if row["status"] == "finished" else row["status"]
            total, done = self._total.total(), self._done()
            self.console.print(f"{at}: {result}; {done} of {total} trials stored, {self._time_left()} left")

    def _done(self) -> int:
        return sum(statuses.total() for statuses in self._ended.values())

    def _refresh(self, size: str) -> None:
        if not self.console.is_terminal:  # nobody sees the bars
            return
        jobs = [running for running in self._running.values() if running.size == size]
        ended, total, expected = self._ended[size], self._total[size], self._usual(size)
        notes = [self._state(jobs)] if ended.total() < total else []
        notes += [f"{n} {status}" for status, n in sorted(ended.items()) if status != "finished"]
        self._bars.update(
            self._tasks[size],
            completed=ended.total() + sum(r.trials * r.trained(expected) for r in jobs if r.report),
            stored=f"{ended.total()}/{total} trials",
            note=" · ".join(notes),
        )
        share, took = self._share_spent(), write_time(time.monotonic() - self._began)
        self._bars.update(
            self._all,
            completed=share,
            stored=f"{self._done()}/{self._total.total()} trials",
            note=f"{took}, {self._time_left()} left" if 0 < share < 1 else took,
        )

    def _state(self, jobs: Sequence[_Running]) -> str:
        if reports := [running.report for running in jobs if running.report is not None]:
            note: str = type(reports[0]).note(reports)
            return note
        return ", ".join(dict.fromkeys(running.doing for running in jobs)) or _UNSTARTED

    def _usual(self, size: str) -> float:
        """Return the seconds of a trial: the mean of ended ones of the nearest size; inf before any."""
        if not self._seconds:
            return math.inf
        near = min(self._seconds, key=lambda name: abs(math.log(self._work[name] / self._work[size])))
        total, count = self._seconds[near]
        return total / count * self._work[size] / self._work[near]

    def _share_spent(self) -> float:
        """Return the share of all time that is spent, by measured seconds, or before any by guessed work."""
        expected = {size: self._usual(size) for size in self._work}
        each = expected if self._seconds else self._work
        done = sum(ended.total() * each[size] for size, ended in self._ended.items())
        done += sum(r.trials * each[r.size] * r.spent(expected[r.size]) for r in self._running.values())
        return done / sum(n * each[size] for size, n in self._total.items())

    def _time_left(self) -> str | None:
        """Estimate the time left from the share that is spent; None before any work is done."""
        share = self._share_spent()
        if share <= 0:
            return None
        return write_time((time.monotonic() - self._began) * (1 - share) / share)


_SHOWN = 20  # rows of the table


class SearchProgress:
    """Table of trials with hyperparameters, step and loss, and the best finished trial of the store."""

    def __init__(self, console: Console, search: Search, store: Store, total: int, log: SearchLog) -> None:
        self._console, self._search, self._total, self._log = console, search, total, log
        self._ended = len(log.ended)
        self._rows: dict[int, dict[str, Any]] = {}
        self._best: tuple[float, str] | None = None
        finished = store.results().query("status == 'finished'").sort_values("loss")
        if len(finished):
            row = finished.to_dict("records")[0]
            self._best = row["loss"], self._words(stored_trial(json.loads(row["config"])).flat())
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> SearchProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def update(self, keys: Sequence[int], status: str, step: int = 0, loss: float | None = None) -> None:
        """Show the state of proposals; a loss stays until the next one."""
        for key in keys:
            row = self._rows.setdefault(key, {"loss": None, "step": 0})
            row |= {"status": status, "step": max(step, row["step"])}
            row["loss"] = row["loss"] if loss is None else loss
        if self._live is not None:
            self._live.update(self._table())

    def ended(self, key: int, row: Mapping[Any, Any]) -> None:
        """Count a proposal whose row is stored, and note the best finished one."""
        self._ended += 1
        loss, step, status = float(row["loss"]), int(row["steps_done"]), row["status"]
        if status == "finished" and (self._best is None or loss < self._best[0]):
            self._best = loss, self._point(key)
        self.update([key], status, step, loss)
        best = f", best {self._best[0]:.4f} ({self._best[1]})" if self._best else ""
        self._line(
            f"trial {key} {status} at step {step}: loss {loss:.4f}, {self._point(key)}; "
            f"{self._ended} of {self._total} ended{best}"
        )

    def refused(self, key: int, reason: str) -> None:
        self._ended += 1
        self.update([key], "refused")
        self._line(f"trial {key} is left out: {reason}; {self._ended} of {self._total} ended")

    def _line(self, text: str) -> None:
        if self._live is None:
            self._console.print(text)

    def _point(self, key: int) -> str:
        return self._words(self._log.proposals[key])

    def _words(self, values: Mapping[str, Any]) -> str:
        return " ".join(f"{name} {write(name, values[name])}" for name in self._search.space)

    def _table(self) -> Table:
        title = f"{self._ended} of {self._total} ended"
        if self._best is not None:
            title += f" · best {self._best[0]:.4f} at {self._best[1]}"
        rows = []
        for key, row in list(self._rows.items())[-_SHOWN:]:
            loss = f"{row['loss']:.4f}" if row["loss"] is not None else ""
            rows.append((str(key), row["status"], str(row["step"]), loss, self._point(key)))
        headings = ("trial", "status", "step", "loss", "hyperparameters")
        return Table(headings, rows, title, left=("status", "hyperparameters"))
