"""Searches, of our networks or of anyone's training: Ray Tune chooses trials, and a runner runs them.

`chooser.py` proposes points and stops trials; `runner.py` runs jobs and stores their rows. The same call
again goes on with unfinished trials from their checkpoints, then with new ones.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import pandas as pd
from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.config.columns import write
from mup_tpu.config.grid import Point
from mup_tpu.config.sweep import Domain, Search, SearchOptions
from mup_tpu.errors import ConfigError, given
from mup_tpu.jobs.driver import Evaluated
from mup_tpu.store import FINAL, Store, load_curves
from mup_tpu.tuning.chooser import Chooser
from mup_tpu.tuning.progress import starting
from mup_tpu.tuning.runner import Corpora, Packs, Runner, with_precision

T = TypeVar("T")


def search_networks(
    search: Search, results: str, where: SweepOptions, run: RunOptions, console: Console
) -> Counter[str]:
    """Search hyperparameters of our networks; return the number of this call's trials by status."""
    if run.placement == "slice":  # the driver's answers reach one host alone
        raise ConfigError("placement 'slice' is for sweeps; a search takes 'host' or 'chip'")
    options = search.search
    deadline = time.monotonic() + options.seconds
    search = replace(search, base=with_precision(search.base, results, run, console))
    where = replace(where, pack_size=where.pack_size or 1)
    store, corpora = Store(results, search.experiment), Corpora([search.base])
    scale, each = ("width",), options.evaluations
    with Packs(store, corpora, scale, where, run, console, deadline=deadline, evaluations=each) as packs:
        return run_search(search.space, options, search.base.flat(), search.trial, packs, where.pack_size)


def run_search(
    space: Mapping[str, Domain],
    options: SearchOptions,
    base: Mapping[str, Any],
    trial_of: Callable[[Point], T],
    runner: Runner[T],
    pack_size: int = 1,
) -> Counter[str]:
    """Run a search, or the rest of it; return the number of this call's trials by status.

    `base` holds the values that all trials share, and `trial_of` makes a trial of a point of the space.
    """
    folder = runner.store.folder
    busy = f"results folder {folder} is being written by another search; wait for it, or stop it"
    with folder.locked("search.lock", busy):
        chooser = Chooser(space, options, base, folder)
        searched = Searched(chooser, options, trial_of, runner, pack_size)
        outcome = Counter[str]()
        what = f"{runner.store.experiment}: {options.num_samples} trials, {len(searched)} to run"
        runner.console.print(starting(what) if len(searched) else what)
        if len(searched):
            runner.place(len(searched), options.max_concurrent)
            outcome = runner.drive(searched, searched, {}, searched.decide)
        runner.say_cost(outcome)
        runner.tidy([*searched.trials.values()], runner.store.done)
    return outcome


class Searched(Generic[T]):
    """Trials of a search: their jobs, each made when a worker is free, and their progress.

    Trials are known by their trial_id; an algorithm may propose one again, under another number.
    """

    def __init__(
        self,
        chooser: Chooser,
        options: SearchOptions,
        trial_of: Callable[[Point], T],
        runner: Runner[T],
        pack_size: int,
    ) -> None:
        self._chooser, self._options, self._trial_of = chooser, options, trial_of
        self._runner, self._pack_size = runner, pack_size
        self.trials: dict[str, T] = {}
        self._numbers: dict[str, list[int]] = defaultdict(list)  # numbers of a trial's proposals
        self._points: dict[str, list[tuple[int, float]]] = defaultdict(list)  # known losses by step
        self._told: Counter[str] = Counter()  # points of a trial that the scheduler knows
        self._steps: dict[str, int] = {}  # steps of a whole trial, where they are known
        self._longest = 0  # steps of finished trials, for those whose steps are not known
        self._best, self._best_words = math.inf, ""
        self._ended: set[int] = set()
        self._running: dict[int, str] = {}
        self._status = runner.console.status("")
        store = runner.store
        self._final: dict[str, Mapping[Any, Any]] = {
            str(row["trial_id"]): row for row in store.results().to_dict("records")
        }
        names = {number: self._trial_id(number) for number in range(len(chooser.points))}
        self._unfinished = [n for n, name in names.items() if name and name not in self._final]
        ended = [name for name in self._final if name in names.values()]
        points = load_curves(store.folder.path) if ended else pd.DataFrame({"trial_id": []})
        by_id = {str(name): part.to_dict("records") for name, part in points.groupby("trial_id")}
        # A finished trial may tell how long a stopped one would have been.
        for name in sorted(ended, key=lambda name: str(self._final[name]["status"])):
            self._end(self._final[name], by_id.get(name, []))
        self._known = len(self._ended)  # trials of earlier calls

    def __len__(self) -> int:
        return len(self._unfinished) + max(0, self._options.num_samples - len(self._chooser.points))

    def __iter__(self) -> Iterator[Any]:
        while trials := self._draw():
            yield from self._runner.jobs(trials)  # of several shapes, several jobs

    def _draw(self) -> list[T]:
        trials = list[T]()
        while len(trials) < self._pack_size and time.monotonic() < self._runner.deadline:
            if self._unfinished:
                trial_id = self._trial_id(self._unfinished.pop(0))
            elif len(self._chooser.points) < self._options.num_samples:
                if (number := self._chooser.propose()) is None:
                    break
                trial_id = self._trial_id(number)
            else:
                break
            if trial_id in self._final:
                self._end(self._final[trial_id], ())
            elif trial_id and len(self._numbers[trial_id]) == 1:  # else it runs already
                trials.append(self.trials[trial_id])
        return trials

    def _trial_id(self, number: int) -> str:
        """Return the trial_id of a proposal; "" if no trial may have its values."""
        try:
            trial = self._trial_of(self._chooser.points[number])
        except ConfigError as error:  # the ends of each domain are allowed, not all between them
            self._chooser.end(number, [(1.0, math.inf)])
            self._print_end(number, f"is left out: {error}")
            return ""
        trial_id = self._runner.trial_id(trial)
        self.trials[trial_id] = trial
        if number not in self._numbers[trial_id]:
            self._numbers[trial_id].append(number)
        return trial_id

    def decide(self, job: Any, question: Evaluated) -> set[str]:
        """Return the trial_ids that the scheduler stops."""
        stopped = set()
        for trial_id, points in question.points.items():
            step, loss = points[-1]
            self._show([self._numbers[trial_id][0]], f"at step {step}: loss {loss:.4f}")
            self._points[trial_id] += points
            if question.steps:
                self._steps[trial_id] = question.steps
            if self._tell(trial_id):
                stopped.add(trial_id)
        return stopped

    def _tell(self, trial_id: str) -> bool:
        """Tell the scheduler what it does not know of a trial; return whether it stops it."""
        if not (steps := self._steps.get(trial_id, self._longest)):
            return False
        new = self._points[trial_id][self._told[trial_id] :]
        self._told[trial_id] += len(new)
        return self._chooser.stops(self._numbers[trial_id][0], [(step / steps, loss) for step, loss in new])

    def _end(self, row: Mapping[Any, Any], curve: Sequence[Mapping[Any, Any]]) -> None:
        """Take the end of a trial whose row is stored."""
        trial_id, status = str(row["trial_id"]), row["status"]
        splits = {point["split"] for point in curve}
        split = "validation" if "validation" in splits else "train"
        known = self._points[trial_id]
        last = known[-1][0] if known else 0
        of_split = [(int(p["step"]), float(p["loss"])) for p in curve if p["split"] == split]
        known += [point for point in of_split if point[0] > last]
        if planned := row.get("steps_planned"):
            self._steps[trial_id] = int(planned)
        if status == "finished" and known:
            self._longest = max(self._longest, known[-1][0])
        for name in [*self._points]:  # for which the steps were not known, perhaps
            self._tell(name)
        steps = self._steps.get(trial_id, self._longest)
        shares = [(step / steps, loss) for step, loss in known if step < steps]
        reached = shares[-1][0] if shares and status == "stopped" else 1.0
        for number in self._numbers[trial_id]:
            self._chooser.end(number, [*shares, (reached, float(row["loss"]))])
            self._ended.add(number)
        if status in FINAL:
            self._final[trial_id] = row
        if status == "finished" and row["loss"] < self._best:
            self._best = float(row["loss"])
            self._best_words = f", best {self._best:.4f} ({self._words(self._numbers[trial_id][0])})"

    @property
    def ended_share(self) -> float:
        """Share of this call's trials that have ended."""
        return (len(self._ended) - self._known) / max(self._options.num_samples - self._known, 1)

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def started(self, job: Any) -> None:
        self.update(job, "starting")

    def split(self, job: Any) -> None:
        self.update(job, "split")

    def update(self, job: Any, doing: str = "", report: Any = None) -> None:
        doing = doing or f"at step {report.step}"
        self._show([n for t in job.trials for n in self._numbers[self._runner.trial_id(t)]], doing)

    def _show(self, numbers: Collection[int], doing: str) -> None:
        self._running |= dict.fromkeys(numbers, doing)
        self._status.update("; ".join(f"trial {number} {doing}" for number, doing in self._running.items()))

    def ended(self, job: Any, rows: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]) -> None:
        """Take and print the ends of a job's trials, whose rows are stored."""
        for row in rows:
            if row["status"] == "preempted":
                continue
            trial_id, loss = str(row["trial_id"]), float(row["loss"])
            self._end(row, [point for point in curves if point["trial_id"] == trial_id])
            for number in self._numbers[trial_id]:
                at = f"{row['status']} at step {row['steps_done']}"
                lost = f"{self._runner.loss_name()} {loss:.4f}"
                self._print_end(number, f"{at}: {lost}, {self._words(number)}")
            steps, points = self._steps.get(trial_id, self._longest), self._points[trial_id]
            if (
                self._options.scheduler != "none"
                and row["status"] == "finished"
                and not any(step < steps for step, _ in points)
            ):
                raise ConfigError(
                    f"scheduler {self._options.scheduler!r} stops trials by their losses on the way, and "
                    f"{self.trials[trial_id]} reported none before its end: report some, or give "
                    f"{given('scheduler', 'none')}"
                )

    def _print_end(self, number: int, how: str) -> None:
        self._ended.add(number)
        self._running.pop(number, None)
        self._runner.console.print(
            f"trial {number} {how}; {len(self._ended)} of {self._options.num_samples} ended{self._best_words}"
        )

    def _words(self, number: int) -> str:
        return " ".join(f"{name} {write(name, v)}" for name, v in self._chooser.points[number].items())
