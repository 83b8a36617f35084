"""Searches, of our networks or of anyone's training: Ray Tune chooses trials, and a runner runs them.

The same call again goes on with unfinished trials from their checkpoints, then with new ones.

Tune's own loop (`Tuner.fit`) would bring a second set of attempts, heartbeats and checkpoints, and it keeps
its state in pickles. Its API does without the loop, but for two things. A scheduler takes the controller, of
which only its live trials are read, and a Tune trial, of which only `trial_id` is. An algorithm is restored
from a pickle only, so that a resumed search replays its proposals, with the losses known before each, into a
new one of the same seed. search.json holds both. It is written whole before a proposed trial runs.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import pandas as pd
from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher
from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.config.columns import write
from mup_tpu.config.grid import Point
from mup_tpu.config.sweep import Domain, Search, SearchOptions
from mup_tpu.config.values import parse_limit
from mup_tpu.errors import ConfigError, StoreError, given, not_installed, raised_as
from mup_tpu.files import Folder
from mup_tpu.jobs.driver import Request
from mup_tpu.store import FINAL, SEARCH_FILE, Store, load_curves
from mup_tpu.store.header import read_file, write_file
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
    deadline = time.monotonic() + parse_limit("budget", options.budget)
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

    def decide(self, job: Any, request: Request) -> set[str]:
        """Return the trial_ids that the scheduler stops."""
        stopped = set()
        for trial_id, points in request.points.items():
            step, loss = points[-1]
            self._show([self._numbers[trial_id][0]], f"at step {step}: loss {loss:.4f}")
            self._points[trial_id] += points
            if request.steps:
                self._steps[trial_id] = request.steps
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
        return (len(self._ended) - self._known) / max(self._options.num_samples - self._known, 1)

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

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


_LOSS, _SHARE = "loss", "share"
_ALL = 100  # share of a trial's steps at its end, per cent
_UNKNOWN = 1e3  # loss of a divergence before any loss is known
_NO_CONTROLLER = SimpleNamespace(get_live_trials=list)

Curve = Sequence[tuple[float, float]]  # losses after shares of a trial's steps, from 0 to 1


class _Trial(NamedTuple):
    trial_id: str


def _per_cent(share: float) -> int:
    return max(1, int(_ALL * share))


class Chooser:
    """Algorithm and scheduler of a search, with its numbered proposals, which it stores in a folder.

    `base` holds the values that all trials share.
    """

    def __init__(
        self, space: Mapping[str, Domain], options: SearchOptions, base: Mapping[str, Any], folder: Folder
    ) -> None:
        self._options, self._folder, self._file = options, folder, f"{folder}/{SEARCH_FILE}"
        domains = {name: asdict(domain) for name, domain in space.items()}
        identity = {"space": domains, "algorithm": options.algorithm, "seed": options.seed, "base": {**base}}
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._algorithm, self._scheduler = _algorithm(space, options), _scheduler(options)
        self._worst = -math.inf  # highest finite loss that is known
        self.points: list[Point] = []
        # Before each proposal, the ends since the one before: shares of steps with losses, by number
        self._ends: list[dict[str, list[tuple[int, float]]]] = []
        self._ends_since: dict[str, list[tuple[int, float]]] = {}
        self._ended: set[str] = set()
        self._written = read_file(folder, SEARCH_FILE)
        if self._written is not None:
            self._replay(self._written)

    def _replay(self, content: bytes) -> None:
        misfits = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
        with raised_as(StoreError, f"{self._file} cannot be read: it is no search", misfits):
            stored = json.loads(content)
            before = {name: stored[name] for name in self._identity}
            # Later versions may know more settings.
            now = self._identity | {"base": {name: self._identity["base"][name] for name in before["base"]}}
            proposals = []
            for proposal in stored["proposals"]:
                point = {name: proposal["point"][name] for name in now["space"]}
                ended = {
                    str(int(n)): [(int(s), float(x)) for s, x in c] for n, c in proposal["ended"].items()
                }
                proposals.append((point, ended))
        for name, value in now.items():
            if before[name] != value:
                why = f"{name} of the search differs from that in {self._file}"
                raise ConfigError(f"{why}: a search goes on as it was begun, so give another folder")
        for point, ends in proposals:
            for number, losses in ends.items():
                self._complete(number, losses)
            if self._suggest() != point and self._options.algorithm != "bohb":
                raise ConfigError(
                    f"algorithm {self._options.algorithm} proposes other points than those in {self._file}, "
                    "as another version of its package does: install that version, or give another folder"
                )
            if self._options.algorithm == "bohb":  # it draws from numpy's own state
                self._algorithm.trial_to_params[str(len(self.points))] = point
            self._note(point, ends)

    def propose(self) -> int | None:
        """Propose a new point; return its number, or None if there is none."""
        if (point := self._suggest()) is None:
            return None
        self._note(point, self._ends_since)
        self._ends_since = {}
        proposals = [{"point": p, "ended": e} for p, e in zip(self.points, self._ends, strict=True)]
        content = json.dumps(self._identity | {"proposals": proposals}).encode()
        if not self._folder.is_local and read_file(self._folder, SEARCH_FILE) != self._written:
            raise StoreError(  # in a bucket there are no locks
                f"results folder {self._folder} is being written by another search; wait for it, or stop it"
            )
        write_file(self._folder, SEARCH_FILE, content)
        self._written = content
        return len(self.points) - 1

    def _suggest(self) -> Point | None:
        point = self._algorithm.suggest(str(len(self.points)))
        if point is None or point == Searcher.FINISHED:
            return None
        values = ((name, point[name]) for name in self._identity["space"])
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in values}

    def _note(self, point: Point, ends: dict[str, list[tuple[int, float]]]) -> None:
        if self._scheduler is not None:
            self._scheduler.on_trial_add(_NO_CONTROLLER, _Trial(str(len(self.points))))
        self.points.append(point)
        self._ends.append(ends)

    def stops(self, number: int, curve: Curve) -> bool:
        """Report losses of a trial; return whether it is hopeless."""
        actions = []
        for share, loss in curve if self._scheduler is not None else ():
            if share < 1:  # at the end there is nothing to stop
                result = {_SHARE: _per_cent(share), _LOSS: self._finite(loss)}
                actions.append(self._scheduler.on_trial_result(_NO_CONTROLLER, _Trial(str(number)), result))
        return any(action != TrialScheduler.CONTINUE for action in actions)

    def end(self, number: int, curve: Curve) -> None:
        """Report the end of a trial whose curve is whole; the last loss is its result."""
        if str(number) in self._ended:
            return
        losses = [(_per_cent(share), self._finite(loss)) for share, loss in curve]
        kept = losses[-1:]
        if self._options.algorithm == "bohb":  # it models each length at which trials are compared
            rungs = [100 * self._options.grace * self._options.reduction_factor**k for k in range(9)]
            firsts = (next((p for p in losses if p[0] >= rung), None) for rung in rungs if rung < _ALL)
            kept = [*dict.fromkeys(point for point in (*firsts, losses[-1]) if point)]
        self._ends_since[str(number)] = kept
        self._complete(str(number), kept)
        share, loss = kept[-1]
        if self._scheduler is not None and share >= _ALL:
            result = {_SHARE: share, _LOSS: loss}
            self._scheduler.on_trial_complete(_NO_CONTROLLER, _Trial(str(number)), result)

    def _complete(self, number: str, losses: Sequence[tuple[int, float]]) -> None:
        self._ended.add(number)
        for share, loss in losses if self._options.algorithm == "bohb" else ():
            self._algorithm.on_trial_result(number, {_LOSS: loss, "hyperband_info": {"budget": share}})
        self._algorithm.on_trial_complete(number, {_LOSS: losses[-1][1]})

    def _finite(self, loss: float) -> float:
        # Algorithms and schedulers need a number for a divergence: it is as bad as the worst.
        if math.isfinite(loss):
            self._worst = max(self._worst, loss)
            return loss
        return self._worst if math.isfinite(self._worst) else _UNKNOWN


def _scheduler(options: SearchOptions) -> Any:
    common: dict[str, Any] = {"time_attr": _SHARE, "metric": _LOSS, "mode": "min"}
    common["grace_period"] = _per_cent(options.grace)
    if options.scheduler == "asha":
        return ASHAScheduler(max_t=_ALL, reduction_factor=options.reduction_factor, **common)
    # A hard stop would refuse later losses of a stopped trial, which a resumed search reports.
    return MedianStoppingRule(hard_stop=False, **common) if options.scheduler == "median" else None


def _algorithm(space: Mapping[str, Domain], options: SearchOptions) -> Any:
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it warns that it converts the space by itself
    draws = {"loguniform": tune.loguniform, "uniform": tune.uniform}
    domains = {
        name: tune.choice([*d.values]) if d.kind == "choice" else draws[d.kind](d.low, d.high)
        for name, d in space.items()
    }
    common: dict[str, Any] = {"space": domains, "metric": _LOSS, "mode": "min"}
    if options.algorithm == "hyperopt":
        from ray.tune.search.hyperopt import HyperOptSearch

        # HyperOpt draws its first points at random, 20 by default: more than half of a small search.
        return HyperOptSearch(random_state_seed=options.seed, n_initial_points=8, **common)
    if options.algorithm == "bohb":
        try:
            import hpbandster  # noqa: F401
        except ImportError:
            raise ConfigError(f"algorithm 'bohb' {not_installed('hpbandster')}") from None
        from ray.tune.search.bohb import TuneBOHB

        return TuneBOHB(seed=options.seed, **common)
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"optuna": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    return OptunaSearch(sampler=samplers[options.algorithm](seed=options.seed), **common)
