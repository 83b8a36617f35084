"""Progress of a sweep on the terminal: a live bar for people, a line a pack for log files."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from statistics import mean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mup_tpu.config import Trial
from mup_tpu.training.report import PackResult, Rates, Report, format_seconds
from mup_tpu.tuning.plan import describe, work


class SweepProgress:
    """How many trials of each size are done and diverged, the rate, and the time left.

    Args:
        trials: those to run.
        scale: fields that tell their sizes.
        console: where to show it; not a terminal gets a line for each finished pack.
    """

    def __init__(self, trials: list[Trial], scale: Sequence[str], console: Console) -> None:
        self.console, self._scale = console, scale
        sizes = {describe(trial, scale): trial for trial in sorted(trials, key=work)}
        self.total = Counter(describe(trial, scale) for trial in trials)
        self.done: Counter[str] = Counter()
        self.diverged: Counter[str] = Counter()
        self._running: dict[int, tuple[list[Trial], Report | None]] = {}
        self._cost = {size: work(trial) for size, trial in sizes.items()}
        self._began = time.monotonic()
        self._rates: list[Rates] = []
        """Of each pack that has ended, over all of its training."""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("trials"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            size: self._bars.add_task(size, total=self.total[size], note="", start=False) for size in sizes
        }

    def __enter__(self) -> SweepProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def started(self, pack_index: int, pack: list[Trial]) -> None:
        """A pack has gone to a worker."""
        self._running[pack_index] = (pack, None)
        self._bars.start_task(self._tasks[describe(pack[0], self._scale)])

    def reported(self, pack_index: int, report: Report) -> None:
        """A pack has come further."""
        pack, _ = self._running[pack_index]
        self._running[pack_index] = (pack, report)
        self._refresh(describe(pack[0], self._scale))

    def split(self, pack_index: int) -> None:
        """A pack did not fit in memory; its parts will start as packs of their own."""
        del self._running[pack_index]

    def finished(self, pack_index: int, result: PackResult) -> None:
        """A pack has ended and is stored."""
        pack, _ = self._running.pop(pack_index)
        size, statuses = describe(pack[0], self._scale), count_statuses(result)
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
        """One line over the packs of all hosts: tokens, rate in all and of a device, MFU, input wait."""
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
        packs = [(p, r) for p, r in self._running.values() if describe(p[0], self._scale) == size]
        partial = sum(len(p) * r.step / r.steps for p, r in packs if r)
        rate = sum(r.rates.tokens_per_second for _, r in packs if r)
        notes = [f"{rate / 1000:.0f}k tokens/s"] if rate else []
        if self.diverged[size]:
            notes.append(f"{self.diverged[size]} diverged")
        notes.append(f"{self._time_left()} left")
        self._bars.update(
            self._tasks[size],
            completed=int(self.done[size] + partial),
            note=" · ".join(notes) if self.done[size] < self.total[size] else "",
        )

    def _time_left(self) -> str:
        """From the share of the work that is done."""
        total = sum(n * self._cost[size] for size, n in self.total.items())
        done = sum(n * self._cost[size] for size, n in self.done.items())
        done += sum(len(p) * work(p[0]) * r.step / r.steps for p, r in self._running.values() if r)
        if done <= 0:
            return "?"
        seconds = (time.monotonic() - self._began) * (total - done) / done
        return format_seconds(seconds)


def count_statuses(result: PackResult) -> Counter[str]:
    """How the members of a pack ended."""
    return Counter(row["status"] for row in result.rows)
