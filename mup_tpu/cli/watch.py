"""The command watch: a results folder as it fills, on the terminal and as a page that reloads itself."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mup_tpu.cli.console import Console, to_json, write_file
from mup_tpu.config.columns import Table
from mup_tpu.config.options import File, Where
from mup_tpu.config.values import counted, parse_seconds, write_time
from mup_tpu.errors import MupTpuError

if TYPE_CHECKING:
    import pandas as pd

    from mup_tpu.analysis.surface import JointAnalysis
    from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult

_RECENT = 20  # rows whose times give the time left
_RUNNING, _FAILURES = 8, 4  # lines shown of each


def watch(
    folder: Where, every: str = "5s", once: bool = False, html: File | None = None, json: bool = False
) -> None:
    """Show a results folder as it fills: optima, time left, failures.

    It reads the folder alone, so the runs may be anywhere: in another process, on a cluster, in a bucket. It
    ends with Ctrl-C, or when a study's grid is complete.

    Args:
        folder: Results folder of a sweep or study, or its fsspec URL. It need not exist yet.
        every: Time between two looks, as 5s or 1m.
        once: Look once.
        html: Also write a page that reloads itself.
        json: Print a JSON object for each look, for machines.
    """
    from html import escape

    import rich.console
    from rich.console import Group
    from rich.live import Live

    pause, console, watched = parse_seconds("every", every), Console(), Watched(folder)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not (once or json) else None
    if live is not None:
        live.start()
    try:
        while True:
            if is_new := watched.look():
                if json:
                    console.write(to_json(watched.state()))
                elif live is not None:
                    live.update(Group(*watched.view()), refresh=True)
                else:
                    for part in watched.view():
                        console.print(part)
            if html is not None and is_new:
                text = io.StringIO()
                page = rich.console.Console(file=text, width=110, markup=False, emoji=False, highlight=False)
                for part in watched.view():
                    page.print(part)
                head = (
                    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" '
                    f'content="{max(1, round(pause))}"><title>{escape(folder)}</title>'
                )
                write_file(f"page {html}", html, f"{head}<pre>{escape(text.getvalue())}</pre>\n")
            if once or watched.is_complete:
                break
            time.sleep(pause)
    finally:
        if live is not None:
            live.stop()


class Watched:
    """A results folder, and its optima at the first look that had them."""

    def __init__(self, path: str) -> None:
        from mup_tpu.store import results_folder

        self.path, self._folder = path, results_folder(path)
        self._seen: Any = None
        self._first: dict[tuple[str, float], float] = {}
        """Width of an optimum's first interval, in octaves, by rule and scale."""
        self.runs: pd.DataFrame | None = None
        self.analysis: TransferAnalysis | None = None
        self.joint: JointAnalysis | None = None  # of several tuned hyperparameters, in its place
        self.why_not, self.total, self.replaced = "no run is stored yet", 0, ""
        self._grid = set[str]()  # ids of a study's trials
        self.running: list[tuple[str, str]] = []

    @property
    def is_complete(self) -> bool:
        return self.runs is not None and 0 < self.total <= int(self.runs["status"].ne("failed").sum())

    def look(self) -> bool:
        """Read the folder; return whether something has changed since the last look."""
        from mup_tpu.analysis import analyze, analyze_jointly, load_table
        from mup_tpu.analysis.load import tuned_together
        from mup_tpu.store import load_runs
        from mup_tpu.store.tables import part_names

        before, parts = self._seen, part_names(self._folder, "runs")
        self.running = self._running_trials()
        self._seen = parts, self.running
        if before and before[0] == parts:
            return bool(before != self._seen)
        runs = load_runs(self.path) if parts else None
        if self.runs is not None and (runs is None or not {*self.runs["trial_id"]} <= {*runs["trial_id"]}):
            self._first.clear()
            self.replaced = "the runs that were shown before are gone: the folder was removed or replaced"
        self.runs, self.analysis, self.joint, self.why_not = runs, None, None, "no run is stored yet"
        if self.runs is None:
            return True
        if not self._grid.issuperset(self.runs["trial_id"]):  # bought where they decide
            self.total = 0
        self.why_not = ""
        try:
            if tuned_together(self.path):
                self.joint = analyze_jointly(self.path)
            else:
                self.analysis = analyze(load_table(self.path, rows=self.runs))
        except MupTpuError as error:
            self.why_not = str(error)
        for result in self.analysis.results if self.analysis else ():
            for optimum in result.optima:
                if math.isfinite(width := optimum.high - optimum.low):
                    self._first.setdefault((result.compared, optimum.scale), width)
        return True

    def _running_trials(self) -> list[tuple[str, str]]:
        """List trials that run, with their last saved step or lease; of a study alone, which names them."""
        from mup_tpu.store.header import read_file

        self.total, self._grid = 0, set()
        if (content := read_file(self._folder, "study.json", 2**24)) is None:
            return []
        from mup_tpu.study.space import Space

        try:
            space = Space.of(**json.loads(content))
        except (MupTpuError, ValueError, TypeError, AttributeError, RecursionError):
            return []
        self.total, self._grid, running = len(space.trials), {*space.trial_of}, {}
        for name in (self._folder / "work").names():
            saved = read_file(self._folder, f"work/{name}/resume.json", 2**20)
            try:
                step = (
                    "no step saved yet" if saved is None else f"step {int(json.loads(saved)['step'])} saved"
                )
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
            running[name] = step
        for file in (self._folder / "asked").names():
            if file.endswith(".json"):
                running.setdefault(file.removesuffix(".json"), "leased")
        done = set() if self.runs is None else {*self.runs.loc[self.runs["status"] != "failed", "trial_id"]}
        trials = space.trial_of
        return [(str(trials[k]), v) for k, v in running.items() if k in trials and k not in done]

    def time_left(self) -> float:
        """Return the seconds until the grid is complete, at the pace of the last rows; nan if unknown."""
        if self.runs is None or not self.total:
            return math.nan
        import pandas as pd

        ends = pd.to_datetime(self.runs["finished_at"], errors="coerce", format="ISO8601", utc=True).dropna()
        times = [end.timestamp() for end in ends.sort_values()[-_RECENT:]]
        left = self.total - int(self.runs["status"].ne("failed").sum())
        if len(times) < 2 or times[-1] <= times[0]:
            return math.nan
        return left * (times[-1] - times[0]) / (len(times) - 1)

    def state(self) -> dict[str, Any]:
        """Return the look as plain values."""
        statuses = {} if self.runs is None else self.runs["status"].value_counts().to_dict()
        results = [] if self.analysis is None else self.analysis.to_dict()["results"]
        optima = {one["parametrization"]: one["optima"] for one in results}
        left = self.time_left()
        return {
            "statuses": statuses, "trials": self.total or None, "running": dict(self.running),
            "seconds_left": None if math.isnan(left) else left, "optima": optima,
            "verdicts": {one["parametrization"]: one["verdict"]["verdict"] for one in results},
        } | ({} if self.joint is None else {"together": self.joint.to_dict()})  # fmt: skip

    def view(self) -> Sequence[str | Table]:
        """Return lines and tables for people."""
        from mup_tpu.words import surfaces, verdicts

        gone = [self.replaced] if self.replaced else []
        if self.runs is None:
            return [*gone, f"{self.path}: {self.why_not}", *self._running_lines()]
        counts = counted(self.runs["status"].value_counts().items())
        of, left = f" of {self.total}" if self.total else "", self.time_left()
        title = f"{self.path}: {len(self.runs)}{of} trials stored ({counts})"
        parts: list[str | Table] = [
            *gone,
            title if math.isnan(left) else f"{title}; about {write_time(left)} left",
        ]
        if self.joint is not None:
            parts += surfaces.lines(self.joint)
        elif self.analysis is None:
            best = self.runs["loss"].min()
            parts += [f"best loss so far: {best:.4f}"] if math.isfinite(best) else []
            parts += [f"no optimum yet: {self.why_not}"]
        else:
            parts += [self._optima_table(result) for result in self.analysis.results]
            parts += [verdicts.verdict(result, self.analysis) for result in self.analysis.results]
        failed = self.runs[self.runs["status"] == "failed"]
        reasons = failed["reason"].dropna().astype(str).value_counts()
        parts += [f"failed ({count} ×): {why}" for why, count in reasons.head(_FAILURES).items()]
        return [*parts, *self._running_lines()]

    def _running_lines(self) -> list[str]:
        lines = [f"running: {trial}: {doing}" for trial, doing in self.running[:_RUNNING]]
        return lines + ([f"and {more} more"] if (more := len(self.running) - _RUNNING) > 0 else [])

    def _optima_table(self, result: TransferResult) -> Table:
        from mup_tpu.config.columns import label
        from mup_tpu.words.names import name
        from mup_tpu.words.tables import optima_table

        assert self.analysis is not None
        table = optima_table(result, self.analysis.columns, "")
        rows = []
        for row, optimum in zip(table.rows, result.optima, strict=True):
            curve = next((c for c in result.curves if c.scale == optimum.scale), None)
            runs = "-" if curve is None else str(int(curve.count_G.sum()))
            first = self._first.get((result.compared, optimum.scale), math.nan)
            width = optimum.high - optimum.low
            narrows = f"{first:.2f} → {width:.2f}" if math.isfinite(width) else "-"
            best = f"2^{optimum.best_x:.1f}" if math.isfinite(optimum.best_x) else "-"
            at = f"2^{optimum.x:.2f}" if optimum.is_bracketed else "-"
            rows.append((row[0], runs, best, at, *row[2:4], narrows))
        headings = (*table.headings[:1], "runs", "best run", *table.headings[1:4], "width, octaves")
        rule, tuned = name(result.compared, self.analysis.compares), label(self.analysis.hyperparameter)
        return Table(headings, rows, f"{rule}: best {tuned}")
