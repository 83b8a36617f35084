"""Progress of trials: bars on a terminal, a line for each job in a log file."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mup_tpu.config.columns import write
from mup_tpu.config.sweep import Search
from mup_tpu.config.toml import from_dict
from mup_tpu.config.trial import Trial
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
    doing: str = "starting"  # preparation before the first report
    report: Any = None

    @property
    def trained(self) -> float:
        """Return the share of steps that are done."""
        return min(self.report.step / self.report.steps, 1.0) if self.report and self.report.steps else 0.0

    @property
    def spent(self) -> float:
        """Return the share of a job's time that is spent, by the report's time left, else as `trained`.

        A GPU compiles for half a minute, and then trains for seconds.
        """
        left = getattr(getattr(self.report, "rates", None), "seconds_left", math.nan)
        took = time.monotonic() - self.began
        return self.trained if math.isnan(left) else took / max(took + left, 1e-9)


class TrialProgress(Generic[T]):
    """Number of done and diverged trials of each size, state of running ones, and time left.

    The length of a bar is the share of steps that are done, in the last line of all work; the number beside
    it counts stored trials. Before the first report of a size, its line names the work that goes before.
    `size` gives a trial's point of the scale in words, `work` its time in any unit.
    """

    def __init__(
        self, trials: Sequence[T], size: Callable[[T], str], work: Callable[[T], float], console: Console
    ) -> None:
        self.console, self._size, self._is_shown = console, size, console.is_terminal
        self._work = {size(trial): work(trial) for trial in sorted(trials, key=work)}
        self._total = Counter(map(size, trials))
        self._ended: dict[str, Counter[str]] = {name: Counter() for name in self._work}  # by status
        self._running: dict[Any, _Running] = {}
        self._began = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= 100 else 10),
            TextColumn("{task.fields[stored]}", justify="right"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not self._is_shown,
        )
        self._tasks = {
            name: self._bars.add_task(name, total=n, stored=f"0/{n} trials", note=_UNSTARTED)
            for name, n in ((name, self._total[name]) for name in self._work)
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

    def update(self, job: Any, doing: str = "", report: Any = None) -> None:
        """Show what a job does before its first report, or a report."""
        running = self._running[job]
        running.doing, running.report = doing or running.doing, report or running.report
        self._refresh(running.size)

    def split(self, job: Any) -> None:
        self._refresh(self._running.pop(job).size)

    def ended(self, job: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show that the trials of a job are stored."""
        running, statuses = self._running.pop(job), count_statuses(rows)
        self._ended[running.size] += statuses
        self._refresh(running.size)
        if not self._is_shown:
            at, result = running.size, counted(sorted(statuses.items()))
            if len(rows) == 1:
                (row,) = rows
                at = getattr(job, "values", "") or f"{at}, seed {row['seed']}"
                result = f"loss {row['loss']:.4f}" if row["status"] == "finished" else row["status"]
            total, done = self._total.total(), self._done()
            line = f"{at}: {result}; {done} of {total} trials stored, {self._time_left()} left"
            self.console.print(line, soft_wrap=True)  # Rich takes seven times as long to wrap it

    def _done(self) -> int:
        return sum(statuses.total() for statuses in self._ended.values())

    def _refresh(self, size: str) -> None:
        if not self._is_shown:  # nobody sees the bars
            return
        jobs = [running for running in self._running.values() if running.size == size]
        ended, total, notes = self._ended[size], self._total[size], list[str]()
        if ended.total() < total:
            reports = [running.report for running in jobs if running.report is not None]
            doing = ", ".join(dict.fromkeys(running.doing for running in jobs)) or _UNSTARTED
            notes = [type(reports[0]).note(reports) if reports else doing]
        notes += [f"{n} {status}" for status, n in sorted(ended.items()) if status != "finished"]
        self._bars.update(
            self._tasks[size],
            completed=ended.total() + sum(r.trials * r.trained for r in jobs),
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

    def _share_spent(self) -> float:
        done = sum(ended.total() * self._work[size] for size, ended in self._ended.items())
        done += sum(r.trials * self._work[r.size] * r.spent for r in self._running.values())
        return done / sum(n * self._work[size] for size, n in self._total.items())

    def _time_left(self) -> str | None:
        """Estimate the time left from the share that is spent; None before any work is done."""
        share = self._share_spent()
        if share <= 0:
            return None
        return write_time((time.monotonic() - self._began) * (1 - share) / share)


class SearchProgress:
    """A line for each trial that ends, with the best one of the store; on a terminal also running trials."""

    def __init__(self, console: Console, search: Search, store: Store, total: int, log: SearchLog) -> None:
        self._console, self._search, self._total, self._log = console, search, total, log
        self._ended, self._best = len(log.ended), ""
        self._running: dict[int, str] = {}
        self._status = console.status("")
        finished = store.results().query("status == 'finished'").sort_values("loss")
        self._least = math.inf
        if len(finished):
            row = finished.to_dict("records")[0]
            self._least, values = row["loss"], from_dict(Trial, json.loads(row["config"])).flat()
            self._best = f", best {self._least:.4f} ({self._words(values)})"

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def update(self, keys: Sequence[int], doing: str) -> None:
        """Show what trials do; those that end are removed."""
        self._running |= dict.fromkeys(keys, doing)
        self._status.update("; ".join(f"trial {key} {doing}" for key, doing in self._running.items()))

    def ended(self, key: int, row: Mapping[Any, Any]) -> None:
        """Print the end of a proposal whose row is stored."""
        loss, point = float(row["loss"]), self._words(self._log.proposals[key])
        if row["status"] == "finished" and loss < self._least:
            self._least, self._best = loss, f", best {loss:.4f} ({point})"
        self._end(key, f"{row['status']} at step {row['steps_done']}: loss {loss:.4f}, {point}", self._best)

    def refused(self, key: int, reason: str) -> None:
        self._end(key, f"is left out: {reason}")

    def _end(self, key: int, how: str, best: str = "") -> None:
        self._ended += 1
        self._running.pop(key, None)
        self._console.print(f"trial {key} {how}; {self._ended} of {self._total} ended{best}")

    def _words(self, values: Mapping[str, Any]) -> str:
        return " ".join(f"{name} {write(name, values[name])}" for name in self._search.space)
