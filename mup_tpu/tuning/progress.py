"""Progress of a sweep: bars on a terminal, a line for each pack in a log file."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mup_tpu.config import Trial
from mup_tpu.jobs.pack_job import PackJob
from mup_tpu.jobs.plan import describe, work
from mup_tpu.training.report import PackResult, Rates, Report, count_statuses, format_seconds

_UNSTARTED = "waiting for a worker"


@dataclass
class _Running:
    """Pack on a worker."""

    pack: list[Trial]
    doing: str = "starting"
    """Preparation before the first report."""
    report: Report | None = None

    @property
    def trained(self) -> float:
        return self.report.step / self.report.steps if self.report else 0.0


class SweepProgress:
    """Number of done and diverged trials of each size, rate, and time left.

    The length of a bar is the share of steps that are done, in the last line of all work; the number beside
    it counts stored trials. Before the first report of a size, its line names the work that goes before.
    """

    def __init__(self, trials: list[Trial], scale: Sequence[str], console: Console) -> None:
        self.console, self._scale = console, scale
        sizes = {describe(trial, scale): trial for trial in sorted(trials, key=work)}
        self.total = Counter(describe(trial, scale) for trial in trials)
        self.done: Counter[str] = Counter()
        self.diverged: Counter[str] = Counter()
        self._running: dict[PackJob, _Running] = {}
        self._cost = {size: work(trial) for size, trial in sizes.items()}
        self._began = time.monotonic()
        self._rates: list[Rates] = []
        """Rates of each ended pack, over all of its training."""
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= 100 else 10),
            TextColumn("{task.fields[stored]}", justify="right"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            size: self._bars.add_task(size, total=n, stored=f"0/{n} trials", note=_UNSTARTED)
            for size in sizes
            for n in [self.total[size]]
        }
        everything = f"0/{len(trials)} trials"
        self._all = self._bars.add_task("all", total=1.0, stored=everything, note="")

    def __rich__(self) -> Progress:
        """Bars as they are shown."""
        return self._bars

    def __enter__(self) -> SweepProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def started(self, job: PackJob) -> None:
        """Show a pack that has started."""
        self._running[job] = _Running(job.trials)
        self._refresh(describe(job.trials[0], self._scale))

    def preparing(self, job: PackJob, doing: str) -> None:
        """Show the work before the first report of a pack."""
        running = self._running[job]
        running.doing = doing
        self._refresh(describe(running.pack[0], self._scale))

    def reported(self, job: PackJob, report: Report) -> None:
        """Show a pack's report."""
        running = self._running[job]
        running.report = report
        self._refresh(describe(running.pack[0], self._scale))

    def split(self, job: PackJob) -> None:
        """Forget a pack that did not fit in memory; its parts start as packs of their own."""
        self._refresh(describe(self._running.pop(job).pack[0], self._scale))

    def finished(self, job: PackJob, result: PackResult) -> None:
        """Count a pack that has ended."""
        pack = self._running.pop(job).pack
        size, statuses = describe(pack[0], self._scale), count_statuses(result.rows)
        self.done[size] += len(pack)
        self.diverged[size] += statuses["diverged"]
        self._rates += [result.rates] if result.rates else []
        self._refresh(size)
        if not self.console.is_terminal:
            outcome = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
            total, done = sum(self.total.values()), sum(self.done.values())
            self.console.print(
                f"{size}: {outcome}; {done} of {total} trials stored, {self._time_left()} left",
                highlight=False,
            )

    def summary(self) -> str:
        """One line about packs of all hosts: tokens, total rate, rate of a device, MFU, input wait."""
        tokens = sum(r.tokens for r in self._rates)
        rate = tokens / max(time.monotonic() - self._began, 1e-9)
        parts = [f"{tokens:,} tokens in this call, {rate:,.0f} tokens/s in all"]
        if self._rates:
            per_device = mean(r.overall_tokens_per_second / r.devices for r in self._rates)
            parts.append(f"{per_device:,.0f} a device while it trained")
            known = [r.mfu for r in self._rates if not math.isnan(r.mfu)]
            parts += [f"MFU {mean(known):.1%}"] if known else []
            waits = [r.input_wait for r in self._rates]
            parts.append(f"input wait {mean(waits):.1%}, at most {max(waits):.1%}")
        return " · ".join(parts)

    def _refresh(self, size: str) -> None:
        packs = [r for r in self._running.values() if describe(r.pack[0], self._scale) == size]
        reports = [r.report for r in packs if r.report]
        if reports:
            rate = sum(report.rates.tokens_per_second for report in reports)
            notes = [f"{rate / 1000:.0f}k tokens/s"]
        else:
            notes = [", ".join(dict.fromkeys(r.doing for r in packs)) or _UNSTARTED]
        if self.diverged[size]:
            notes.append(f"{self.diverged[size]} diverged")
        self._bars.update(
            self._tasks[size],
            completed=self.done[size] + sum(len(r.pack) * r.trained for r in packs),
            stored=f"{self.done[size]}/{self.total[size]} trials",
            note=" · ".join(notes) if self.done[size] < self.total[size] else "",
        )
        share, stored, total = self._share_done(), sum(self.done.values()), sum(self.total.values())
        took = format_seconds(time.monotonic() - self._began)
        self._bars.update(
            self._all,
            completed=share,
            stored=f"{stored}/{total} trials",
            note=f"{took}, {self._time_left()} left" if 0 < share < 1 else took,
        )

    def _share_done(self) -> float:
        total = sum(n * self._cost[size] for size, n in self.total.items())
        done = sum(n * self._cost[size] for size, n in self.done.items())
        done += sum(len(r.pack) * work(r.pack[0]) * r.trained for r in self._running.values())
        return done / total

    def _time_left(self) -> str | None:
        """Time left by the share of work that is done; None before any is done."""
        share = self._share_done()
        if share <= 0:
            return None
        return format_seconds((time.monotonic() - self._began) * (1 - share) / share)
