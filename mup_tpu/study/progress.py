"""Progress of a study: one bar for all trials on a terminal, a line for each trial in a log file."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mup_tpu.study.report import Reported
from mup_tpu.study.space import Trial
from mup_tpu.training.report import format_seconds


class StudyProgress:
    """Done and running trials, and the time left.

    Args:
        trials: trials to run.
        size: words for a trial's point of the scale.
        measure: number that places it.
        console: where progress is shown.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        size: Callable[[Trial], str],
        measure: Callable[[Trial], float],
        console: Console,
    ) -> None:
        self._size, self._measure, self._console = size, measure, console
        self._left: Counter[float] = Counter(map(measure, trials))
        """Trials without a result, by their measure."""
        self._seconds: dict[float, list[float]] = defaultdict(list)
        """Seconds that ended trials took, by their measure."""
        self._running: dict[Trial, tuple[float, Reported | None]] = {}
        self._statuses: Counter[str] = Counter()
        self._total, self._most = len(trials), 1
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stored]}/{task.total} trials", justify="right"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("trials", total=self._total, stored=0, note="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def started(self, trial: Trial) -> None:
        """Show that a worker has a trial."""
        self._running[trial] = (time.monotonic(), None)
        self._most = max(self._most, len(self._running))
        self._refresh()

    def reported(self, trial: Trial, report: Reported) -> None:
        """Show a report."""
        self._running[trial] = (self._running[trial][0], report)
        self._refresh(trial, report)

    def ended(self, trial: Trial, status: str, loss: float) -> None:
        """Show that a trial has ended and is stored."""
        began, _ = self._running.pop(trial)
        measure = self._measure(trial)
        self._seconds[measure].append(time.monotonic() - began)
        self._left[measure] -= 1
        self._statuses[status] += 1
        if not self._console.is_terminal:
            done = sum(self._statuses.values())
            said = f"loss {loss:.4f}" if math.isfinite(loss) else status
            self._console.print(
                f"{self._size(trial)}, seed {trial.seed}: {said}; {done} of {self._total} trials stored, "
                f"{format_seconds(self._time_left())} left",
                highlight=False,
            )
        self._refresh()

    def _refresh(self, trial: Trial | None = None, report: Reported | None = None) -> None:
        notes = []
        if trial is not None and report is not None:
            of = f"/{report.steps}" if report.steps else ""
            loss = f", loss {report.loss:.3f}" if math.isfinite(report.loss) else ""
            notes.append(f"{self._size(trial)}: step {report.step}{of}{loss}")
        notes += [f"{n} {s}" for s, n in sorted(self._statuses.items()) if s != "finished"]
        notes += [f"{format_seconds(self._time_left())} left"] if self._seconds else []
        done = sum(self._statuses.values())
        self._bar.update(
            self._task,
            completed=done + sum(self._share(report) for _, report in self._running.values()),
            stored=done,
            note=" · ".join(notes),
        )

    @staticmethod
    def _share(report: Reported | None) -> float:
        """Share of a trial's steps that is done."""
        return min(report.step / report.steps, 1.0) if report and report.steps else 0.0

    def _time_left(self) -> float:
        """Seconds left, by the mean time of ended trials of each size; an unknown size scales the nearest."""
        known = {measure: mean(seconds) for measure, seconds in self._seconds.items()}

        def each(measure: float) -> float:
            near = min(known, key=lambda m: abs(math.log(m / measure)))
            return known[near] * measure / near

        work = sum(count * each(measure) for measure, count in self._left.items())
        now = time.monotonic()
        work -= sum(min(now - t, each(self._measure(trial))) for trial, (t, _) in self._running.items())
        return max(work, 0.0) / self._most
