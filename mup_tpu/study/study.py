"""Study: a scale, a hyperparameter and somebody's training function, with a store and a verdict."""

from __future__ import annotations

import contextlib
import functools
import html
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from mup_tpu.analysis import analyze, load_table, predict
from mup_tpu.analysis.prediction import Predictions
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import SearchOptions, require_above_zero, shown
from mup_tpu.config.grid import Points
from mup_tpu.config.options import TrackerName
from mup_tpu.config.toml import from_dict, read_grid, replace_axis
from mup_tpu.config.values import parse_limit, parse_price, require_count
from mup_tpu.errors import ConfigError, StoreError, raised_as
from mup_tpu.store import Store, results_folder
from mup_tpu.store.header import read_file, write_file
from mup_tpu.study.attempt import Function, Outcome
from mup_tpu.study.calls import Calls, finished, is_whole, place_here, place_on_ray, rows_of
from mup_tpu.study.grid import PATIENCE_S, Leases, StudyGrid
from mup_tpu.study.report import StudyTrial, number
from mup_tpu.study.trainer import FunctionJob, find_trainer, fingerprint, pickled
from mup_tpu.tuning.sequence import Buyer, settleable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

T = TypeVar("T")

FILE = "study.json"


class Study:
    """Anyone's training, swept along a scale: does the best value of a hyperparameter stay?

    Names are the user's own. The folder is the only state: the same lines again run missing trials.

    Examples:
        >>> import tempfile
        >>> from mup_tpu import Study, octaves
        >>> study = Study(tempfile.mkdtemp(), scale={"width": [1, 2, 4]}, tune={"rate": octaves(-2, 2)})
        >>> len(study.trials())
        15

    Args:
        folder: results folder, or its fsspec URL.
        scale: one name with its numbers, or a list of points that set several names; it grows.
        tune: hyperparameter: one name with its numbers; or two to four, which are tuned together.
        space: for a search, names with a `Domain` each, in place of `tune`; the scale then has one point.
        compare: one name with its values; None compares nothing.
        seeds: seeds of every cell, from 0.
        settings: values that all trials share.
        name: name of the study; by default the folder's.
        measured_by: name that places points which set several; by default their first.
        design: points of several hyperparameters: "composite", the default, has a centre, axes and corners;
            "grid" all combinations.
        continued: name of the scale, such as "steps", whose longer runs begin with the checkpoints of shorter
            ones that are equal otherwise: for schedules that can go on, such as a constant one.
        loss: loss in the output of a training program: the text before the number, or a regular expression
            with one group; None recognises it.
        config: YAML, TOML or JSON file of a training program; each trial gets a copy with its values.
        search: how the space is searched, as {"algorithm": "hyperopt", "num_samples": 24}.

    Raises:
        ConfigError: a name or value is not allowed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        scale: Points,
        tune: Mapping[str, Sequence[Any]] | None = None,
        space: Mapping[str, Any] | None = None,
        compare: Mapping[str, Sequence[Any]] | None = None,
        seeds: int = 1,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        measured_by: str | None = None,
        design: str | None = None,
        continued: str | None = None,
        loss: str | None = None,
        config: str | None = None,
        search: SearchOptions | Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = str(results_folder(folder))
        name = name or self.folder.rstrip("/").rpartition("/")[2]
        self.grid = StudyGrid(
            name, scale=scale, tune=tune, compare=compare, num_seeds=seeds, settings=settings or {},
            measured_by=measured_by, design=design, continued=continued, space=space,
        )  # fmt: skip
        if search is not None and space is None:
            raise ConfigError(f"search {shown(search)} needs a space: names with a domain each")
        if not isinstance(search, SearchOptions):
            search = from_dict(SearchOptions, dict(search or {}), "search")
        self.loss, self.config, self.search = loss, config, search
        more = {"loss": loss, "config": config, "search": asdict(search) if space is not None else None}
        given = {key: value for key, value in more.items() if value is not None}
        self._definition = json.dumps(self.grid.to_dict() | given, indent=1).encode()
        self._opened: tuple[Store, Leases] | None = None

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Study:
        """Open the study that a folder holds.

        Raises:
            StoreError: it holds none.
        """
        root = results_folder(folder)
        if (content := read_file(root, FILE)) is None:
            raise StoreError(f"results folder {folder} holds no study (no {FILE} in it)")
        misfits = (ValueError, TypeError, AttributeError, RecursionError)
        with raised_as(StoreError, f"results folder {folder}: {FILE} cannot be read", misfits):
            return cls(folder, **json.loads(content))

    def trials(self) -> list[StudyTrial]:
        return self.grid.trials()

    def run(
        self,
        train: Function | str,
        *,
        until_settled: bool = False,
        budget: str | None = None,
        workers: int | None = None,
        timeout: str | None = None,
        heartbeat: float = 600.0,
        address: str | None = None,
        resources: Mapping[str, float] | None = None,
        track: Sequence[TrackerName] = (),
        price: str | None = None,
        console: Console | None = None,
    ) -> Counter[str]:
        """Run the trials that are missing, or search the space, and store each trial as it ends.

        Args:
            train: called as `train(trial, report)`, each time in a process of its own; returns the loss. Or
                "my_package.my_module:train", or a command line with `{names}` in it, whose output tells it.
            until_settled: buy runs where they decide, until each verdict is settled, in place of the grid.
            budget: longest time of this call, as 90s, 30m or 2h.
            workers: trials at once on this machine; by default one per GPU, or one per core.
            timeout: longest time of a trial, as 90s, 30m or 2h; one that takes longer has failed.
            heartbeat: seconds without a report after which a trial that has reported counts as hung.
            address: run on Ray: "local" on this machine, or a cluster's address, "auto" or host:port.
            resources: resources of a trial on Ray, as {"CPU": 2, "GPU": 1}.
            track: trackers that get a copy of each trial: "tensorboard", "wandb".
            price: price of an hour of each worker, as "2.5/h"; costs are then money too.
            console: for progress.

        Returns:
            Number of this call's trials by status; empty if none was missing.

        Raises:
            ConfigError: the function, an option or the cluster cannot be used.
            StoreError: the folder cannot be written, holds another study, or is run by another process.
            Preempted: SIGTERM ended the run.
            TrialsFailed: the first trials all failed for one reason.
        """
        console = console or Console(markup=False, emoji=False, highlight=False)
        deadline = time.monotonic() + parse_limit("budget", budget)
        seconds = parse_limit("timeout", timeout)
        require_above_zero("heartbeat", heartbeat)
        space, options = self.grid.space, self.search
        if space is not None:
            deadline = min(deadline, time.monotonic() + parse_limit("budget", options.budget))
            if until_settled:
                raise ConfigError("until_settled is for a sweep; this study searches a space")
        function = find_trainer(train, self.grid, self.loss, self.config)
        on_ray = address is not None or resources is not None
        at_most = 0 if space is None else options.max_concurrent
        if on_ray:
            threads, pool = place_on_ray(self.folder, address or "local", resources or {}, console, at_most)
        else:
            threads, pool = place_here(self.folder, at_most or None if workers is None else workers)
        points = settleable(self.grid, self.grid.by_size, self.folder) if until_settled else None
        store, leases = self._open(points)
        code = fingerprint(function)
        # Rows without a fingerprint do not count.
        codes = store.results()["versions"].str.extract(r'"trainer": "([0-9a-f]{16})"')[0].dropna()
        if code is not None and (changed := int((codes != code).sum())):
            console.print(
                f"the trainer has changed since {changed} of the rows in {self.folder} were stored: they "
                "stay, and new trials run the new code; give another folder to run all trials again"
            )
        busy = f"results folder {self.folder} is being run by another process; wait for it"
        try:
            with store.folder.locked("driver.lock", busy), contextlib.ExitStack() as at_end:
                opened = functools.cache(lambda: at_end.enter_context(pool()))
                job = functools.partial(
                    FunctionJob, pickled(function, by_value=on_ray), folder=self.folder, threads=threads,
                    timeout=seconds, asks=space is not None,
                )  # fmt: skip
                calls = Calls(
                    store, console, heartbeat, track, deadline, self.grid, leases, code, job, opened,
                    price=parse_price(price),
                )  # fmt: skip
                if space is None:
                    return calls.run_grid(self.grid, points)
                from mup_tpu.tuning.search import run_search  # with Ray Tune

                shared = {**self.grid.points[0], **self.grid.settings}
                first = self.grid.points[0]
                return run_search(
                    space, options, shared, lambda at: self.grid.trial({**first, **at}, 0), calls
                )
        except KeyboardInterrupt:
            console.print(f"stopped; finished trials are stored in {self.folder}, the same call goes on")
            raise

    def ask(
        self, count: int = 1, *, until_settled: bool = False, patience: float = PATIENCE_S
    ) -> list[StudyTrial]:
        """Give missing trials to run elsewhere, each once.

        Args:
            count: most trials to give.
            until_settled: choose them where they decide, in place of the grid's order.
            patience: lease of a trial, in seconds; without a loss it may then be given again.

        Returns:
            At most `count` trials; fewer if no more are missing, or decided on yet.

        Raises:
            ConfigError: count or patience is not allowed.
            StoreError: the folder cannot be written, or holds another study.
        """
        if self.grid.space is not None:
            raise ConfigError(
                "a search gives no trials away: it asks about each while it runs, so run it here"
            )
        require_count("count", count)
        require_above_zero("patience", patience)
        points = settleable(self.grid, self.grid.by_size, self.folder) if until_settled else None
        store, leases = self._open(points)
        with leases.alone():
            planned: Iterable[tuple[StudyTrial, int | None]]
            if points is not None:
                trials, _ = Buyer(self.grid, points, lambda trial: trial.id, store).next()
                known = store.done()
                planned = [(trial, number) for trial, number in trials.items() if trial.id not in known]
            else:
                purchase = store.next_purchase()
                planned = ((trial, purchase) for trial in leases.missing())
            if self.grid.continued:  # longer ones wait for the shorter
                planned = [*planned]
                waiting = {lease.trial.id for lease in leases.running()}
                waiting |= {trial.id for trial, _ in planned}
                planned = [p for p in planned if waiting.isdisjoint(t.id for t in self.grid.shorter(p[0]))]
            return leases.give(planned, count, patience)

    def shorter(self, trial: StudyTrial) -> StudyTrial | None:
        """Return the longest finished run from whose checkpoint a trial can go on; None without one."""
        store, _ = self._open()
        known, work = store.known(), store.folder / "work"
        return next((t for t in self.grid.shorter(trial) if finished(t, known) and is_whole(work, t)), None)

    def tell(self, trial: StudyTrial | str, loss: Any = None, *, failed: str | None = None) -> StudyTrial:
        """Store the loss of a trial that was asked for.

        Args:
            trial: the trial, or its id.
            loss: loss of the trial; nan or inf if it diverged.
            failed: reason why it has no loss; it may be given again.

        Returns:
            The trial.

        Raises:
            ConfigError: loss is no number, or was given beside `failed`.
            StoreError: nobody asked for the trial, or its loss is stored.
        """
        if (loss is None) == (failed is None):
            raise ConfigError("loss and failed: give one of them")
        outcome = Outcome("failed", math.nan, failed)
        if failed is None:
            try:
                outcome = Outcome.of(number("loss", loss))
            except TypeError as error:
                raise ConfigError(str(error)) from None
        store, leases = self._open()
        with leases.alone():
            lease = leases.find(trial.id if isinstance(trial, StudyTrial) else str(trial))
            store.append(*rows_of(lease.trial, outcome, lease.purchase))
            # The loss is stored: a lease that stays is ignored from now on.
            with contextlib.suppress(OSError):
                leases.forget(lease.trial.id)
        return lease.trial

    def verdict(self, epsilon: float | None = None, unit: str | None = None) -> TransferAnalysis:
        """Return the analysis of stored trials; printed, it says each verdict in a sentence.

        Of several tuned hyperparameters it has a verdict for each, and one for all together.

        Args:
            epsilon: largest regret that does not matter, in the unit; by default 0.01 nat, and for other
                units 2 % of the difference between the scales' best values.
            unit: unit of the losses, as people read it: "nat" per token, "MSE"; by default "bpb" where the
                output of a program names its loss so, else "nat".
        """
        return analyze(self._table(unit), epsilon)

    def predict(self, epsilon: float | None = None, unit: str | None = None, **target: float) -> Predictions:
        """Predict optimum, cost and loss at a scale that was not run: `predict(width=8192)`.

        Args:
            epsilon: as for `verdict`.
            unit: as for `verdict`.
            target: value of the scale.
        """
        at = [f"{name}={value}" for name, value in target.items()]
        return predict(self._table(unit), at, epsilon)

    def _table(self, unit: str | None) -> RunTable:
        table = load_table(self.folder)
        return replace(table, columns=replace(table.columns, unit=unit or table.columns.unit))

    def plot(self, name: str = "transfer") -> Figure:
        """Draw a figure of stored trials.

        Args:
            name: "transfer", "optimum", "regret", "best_loss", "learning_curves", "sequence"; of
                several tuned hyperparameters the first three of each: "transfer_learning_rate".
        """
        from mup_tpu import plots

        analysis = self.verdict()
        drawings = plots.drawings(analysis)
        if name not in drawings:
            raise ConfigError(f"plot {name!r} is not one of {', '.join(drawings)}, for which there are runs")
        return drawings[name](analysis)

    def to_frame(self) -> pd.DataFrame:
        """Return the stored trials, one row each; empty if none is stored."""
        columns = [*self.grid.columns, "seed", "loss", "status", "trial_id"]
        return self._open()[0].results()[columns].reset_index(drop=True)

    def __repr__(self) -> str:
        what = f"{len(self.grid.trials())} trials" if self.grid.space is None else "a search"
        return f"Study({self.folder!r}: {self.grid.axes}, {what})"

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        head = f"<p>{html.escape(repr(self))}: {len(frame)} stored</p>"
        return head + str(frame.drop(columns="trial_id").to_html(max_rows=20, index=False))

    def _open(self, planned: Iterable[float] | None = None) -> tuple[Store, Leases]:
        """Open the store, with the definition of the study and the scales that a sequence plans, and leases.

        They stay open, so that a call reads only what is new, unless the folder is removed meanwhile.
        """
        if self._opened is not None and read_file(self._opened[0].folder, FILE) == self._definition:
            if planned is not None:
                self._opened[0].plan(planned)
            return self._opened
        grid = self.grid
        store = Store(self.folder, grid.experiment, grid.axes, tuple(planned or ()), grid.columns)
        settings = grid.settings
        for name, other in store.others(settings) if settings else ():
            raise StoreError(
                f"results folder {self.folder} holds runs with {name} {other}, and this study has "
                f"{settings[name]}: an analysis compares runs of one kind, so give another folder"
            )
        if read_file(store.folder, FILE) != self._definition:
            write_file(store.folder, FILE, self._definition)
        self._opened = store, Leases(store, grid)
        return self._opened


def load_study(
    path: str | Path,
    results: str | None = None,
    loss: str | None = None,
    grid: Mapping[str, Any] | None = None,
) -> tuple[Study, str | None]:
    """Open the study that a TOML file describes; return it with the trainer that the file names.

    `loss` is read in place of the file's. `grid` has axes as the command line writes them, such as
    `{"tune": "2^-8,2^-7"}`, and a number of seeds.
    """
    keys = read_grid(path, "study")
    for option, given in (grid or {}).items():
        keys[option] = given if option == "num_seeds" else replace_axis(keys.get(option), given, option)
    trainer, config = keys.pop("trainer", None), keys.pop("config", None)
    target = keys.pop("target", None)
    if config and not Path(config).exists() and (beside := Path(path).parent / config).exists():
        config = str(beside)  # from the working folder, or else from the folder of the study's file
    keys |= {"name": keys.pop("experiment"), "seeds": keys.pop("num_seeds", 1), "config": config}
    keys["loss"] = loss or keys.get("loss")
    with raised_as(ConfigError, str(path), (ConfigError,)):
        study = Study(results or f"results/{keys['name']}", **{"scale": None, "tune": None, **keys})
    study.grid = replace(study.grid, target=target)
    return study, trainer
