"""The command watch: a results folder as it fills."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_tpu.cli.analysis import last_folder
from mup_tpu.cli.console import Console, to_json, write_output
from mup_tpu.config.options import File, Where
from mup_tpu.config.values import counted, parse_seconds, write_time
from mup_tpu.errors import MupTpuError

if TYPE_CHECKING:
    import pandas as pd

    from mup_tpu.cli.results import Results

_RECENT = 20  # number of last rows from whose times the time left is estimated
_RUNNING, _FAILURES = 8, 4  # largest number of lines for running trials, and for reasons of failures


def watch(
    folder: Where = "", every: str = "5s", once: bool = False, html: File | None = None, json: bool = False
) -> None:
    """Show a results folder as it fills: what analyze shows, time left, failures.

    It reads the folder alone, so the runs may be anywhere: in another process, on a cluster, in a bucket. It
    ends with Ctrl-C, or when a study's grid or search is complete.

    Args:
        folder: Results folder of a sweep or study, or its fsspec URL. It need not exist yet. By default the
            folder in results that was written last.
        every: Time between two looks, as 5s or 1m.
        once: Look once.
        html: File for the report of the runs so far; a browser that shows it loads it again by itself.
        json: Print a JSON object for each look, for machines.
    """
    pause, console, watched = parse_seconds("every", every), Console(), Watched(folder or last_folder())
    while True:
        if watched.look():
            if json:
                console.write(to_json(watched.state()))
            else:
                if not once:
                    console.clear()  # does nothing where output is no terminal
                watched.show(console)
            if html is not None:
                watched.write(html, 0.0 if once else pause)
        if once or watched.is_complete:
            break
        time.sleep(pause)


class Watched:
    """A results folder as it was at the last look."""

    def __init__(self, path: str) -> None:
        from mup_tpu.store import results_folder

        self.path, self._folder = path, results_folder(path)
        self._seen: Any = None
        self.runs: pd.DataFrame | None = None
        self.total, self.replaced = 0, ""
        self._grid = set[str]()  # ids of a study's trials
        self.running: list[tuple[str, str]] = []

    @property
    def is_complete(self) -> bool:
        return self.runs is not None and 0 < self.total <= int(self.runs["status"].ne("failed").sum())

    def look(self) -> bool:
        """Read the folder; return whether something has changed since the last look."""
        from mup_tpu.store import load_runs
        from mup_tpu.store.tables import Parts

        before, parts = self._seen, Parts(self._folder, "runs").names()
        if before is None or before[0] != parts:
            runs = load_runs(self.path) if parts else None
            ids = set() if runs is None else {*runs["trial_id"]}
            if self.runs is not None and not ids.issuperset(self.runs["trial_id"]):
                self.replaced = "the runs that were shown before are gone: the folder was removed or replaced"
            self.runs = runs
        self.running = self._running_trials()
        if self.runs is not None and not self._grid.issuperset(self.runs["trial_id"]):
            self.total = 0  # trials are bought one batch after the other
        self._seen = parts, self.running
        return bool(before != self._seen)

    def _running_trials(self) -> list[tuple[str, str]]:
        from mup_tpu.store.header import read_file

        self.total, self._grid = 0, set()
        if read_file(self._folder, "study.json", 2**24) is None:
            return []
        from mup_tpu.study.study import Study

        try:
            study = Study.load(self.path)
        except MupTpuError:
            return []
        trials, running = study.grid.trial_of, {}
        self.total, self._grid = len(trials), {*trials}
        if study.grid.space is not None and self.runs is not None:
            self.total, self._grid = study.search.num_samples, {*self.runs["trial_id"]}
        for name in (self._folder / "work").names():
            saved = read_file(self._folder, f"work/{name}/resume.json", 2**20)
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                step = None if saved is None else int(json.loads(saved)["step"])
                running[name] = "no step saved yet" if step is None else f"step {step} saved"
        for file in (self._folder / "asked").names():
            if file.endswith(".json"):
                running.setdefault(file.removesuffix(".json"), "leased")
        done = set() if self.runs is None else {*self.runs.loc[self.runs["status"] != "failed", "trial_id"]}
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

    @property
    def results(self) -> Results:
        from mup_tpu.cli.results import open_results
        from mup_tpu.cli.table import TableOptions

        return open_results(self.path, TableOptions())

    def state(self) -> dict[str, Any]:
        """Return the look as plain values; analysis is None before an optimum is known."""
        analysis, left = None, self.time_left()
        with contextlib.suppress(MupTpuError):
            analysis = None if self.runs is None else self.results.to_dict()
        return {
            "statuses": {} if self.runs is None else self.runs["status"].value_counts().to_dict(),
            "trials": self.total or None,
            "running": dict(self.running),
            "seconds_left": None if math.isnan(left) else left,
            "analysis": analysis,
        }

    @property
    def lines(self) -> list[str]:
        """State of the runs, the first line first: counts, time left, running trials and failures."""
        if self.runs is None:
            head = f"{self.path}: no run is stored yet"
        else:
            counts = counted(self.runs["status"].value_counts().items())
            of, left = f" of {self.total}" if self.total else "", self.time_left()
            head = f"{self.path}: {len(self.runs)}{of} trials stored ({counts})"
            head += f"; about {write_time(left)} left" if left > 0 else ""
        lines = [*filter(None, [self.replaced]), head]
        if self.runs is not None:
            failed = self.runs[self.runs["status"] == "failed"]
            reasons = failed["reason"].dropna().astype(str).value_counts().head(_FAILURES)
            lines += [f"failed ({count} ×): {why}" for why, count in reasons.items()]
        lines += [f"running: {trial}: {doing}" for trial, doing in self.running[:_RUNNING]]
        more = len(self.running) - _RUNNING
        return lines + ([f"and {more} more"] if more > 0 else [])

    def not_yet(self, error: MupTpuError) -> str:
        from mup_tpu.analysis.load import named_loss

        best = math.nan if self.runs is None else self.runs["loss"].min()
        name, _ = named_loss(() if self.runs is None else self.runs.get("versions", ()))
        so_far = f"best {name} so far: {best:.4f}; " if math.isfinite(best) else ""
        return f"{so_far}no optimum yet: {error}"

    def show(self, console: Console) -> None:
        """Print the state for people."""
        head, *others = self.lines
        console.print(head)
        if self.runs is not None:
            try:
                self.results.show(console)
            except MupTpuError as error:
                console.print(self.not_yet(error))
        for line in others:
            console.print(line)

    def write(self, file: Path, reload_s: float) -> None:
        """Write the report of the runs so far, with their state at its top."""
        from mup_tpu.report import Box, Page, Text, render

        head, *others = self.lines
        try:
            page = self.results.page()
        except MupTpuError as error:
            page = Page(self.path, [Text(self.not_yet(error))] if self.runs is not None else [], [], "")
        page = replace(
            page, lead=[Box(head, others), *page.lead], reload_s=0.0 if self.is_complete else reload_s
        )
        write_output("html", file, render(page))
