"""Study: a scale, a hyperparameter and somebody's training function, with a store and a verdict."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mup_tpu import words
from mup_tpu.analysis import analyze, load_table, predict
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.prediction import Predictions
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import SequenceOptions, require_above_zero
from mup_tpu.config.fields import require_count
from mup_tpu.config.options import TrackerName
from mup_tpu.config.values import parse_limit
from mup_tpu.errors import ConfigError, StoreError, raised_as
from mup_tpu.store import Store, results_folder
from mup_tpu.store.access import read_if_there, write_whole
from mup_tpu.study.asked import PATIENCE_S, Leases
from mup_tpu.study.attempt import Function, Outcome
from mup_tpu.study.function_job import How, check_function, pickled
from mup_tpu.study.functions import Functions, as_rows, place_here, place_on_ray
from mup_tpu.study.program import trainer_of
from mup_tpu.study.report import forget_rungs, number
from mup_tpu.study.space import Points, Space, Trial
from mup_tpu.tuning.runner import run_missing
from mup_tpu.tuning.sequence import Buyer, Grid, buy
from mup_tpu.tuning.tracking import Tracking

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure

FILE = "study.json"


class PrintedAnalysis(TransferAnalysis):
    """Analysis that is printed as its sentences."""

    def __str__(self) -> str:
        return words.verdicts.summary(self)


class PrintedPredictions(Predictions):
    """Predictions that are printed as their sentences."""

    def __str__(self) -> str:
        return words.predictions.summary(self)


def _fields_of(result: DataclassInstance) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in fields(result)}


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
        tune: hyperparameter: one name with its numbers.
        compare: one name with its values; None compares nothing.
        seeds: seeds of every cell, from 0.
        settings: values that all trials share.
        name: name of the study; by default the folder's.
        measured_by: name that places points which set several; by default their first.

    Raises:
        ConfigError: a name or value is not allowed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        scale: Points,
        tune: Mapping[str, Sequence[Any]],
        compare: Mapping[str, Sequence[Any]] | None = None,
        seeds: int = 1,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        measured_by: str | None = None,
    ) -> None:
        self.folder = str(results_folder(folder))
        name = name or self.folder.rstrip("/").rpartition("/")[2]
        self.space = Space.of(name, scale, tune, compare, seeds, settings, measured_by)
        self._definition = json.dumps(self.space.to_dict(), indent=1).encode()
        self._opened: tuple[Store, Leases] | None = None

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Study:
        """Study that a folder holds.

        Raises:
            StoreError: it holds none.
        """
        root = results_folder(folder)
        if (content := read_if_there(root, FILE)) is None:
            raise StoreError(f"results folder {folder} holds no study (no {FILE} in it)")
        misfits = (ValueError, TypeError, AttributeError, RecursionError)
        with raised_as(StoreError, f"results folder {folder}: {FILE} cannot be read", misfits):
            return cls(folder, **json.loads(content))

    def trials(self) -> list[Trial]:
        """Trials of the grid, small scales first."""
        return list(self.space.trials)

    def run(
        self,
        train: Function | str,
        *,
        until_settled: bool = False,
        first_looks: bool = False,
        budget: str | None = None,
        workers: int | None = None,
        timeout: str | None = None,
        heartbeat: float = 600.0,
        halving: bool = False,
        ray: bool = False,
        address: str | None = None,
        resources: Mapping[str, float] | None = None,
        track: Sequence[TrackerName] = (),
        console: Console | None = None,
    ) -> Counter[str]:
        """Run the trials that are missing, and store each as it ends.

        Args:
            train: called as `train(trial, report)`, each time in a process of its own; returns the loss. Or
                "my_package.my_module:train", or a command line with `{names}` in it.
            until_settled: buy runs where they decide, until each verdict is settled, in place of the grid.
            first_looks: with until_settled, end before seeds are added for a verdict.
            budget: longest time of this call, as 90s, 30m or 2h.
            workers: trials at once on this machine; by default one a GPU, or one a core.
            timeout: longest time of a trial, as 90s, 30m or 2h; one that takes longer has failed.
            heartbeat: seconds without a report after which a trial that has reported counts as hung.
            halving: stop trials half-way or at three quarters that are far behind the best of their group.
                They must report `steps` and `loss`.
            ray: run on Ray; without an address on this machine.
            address: Ray cluster to run on, "auto" or host:port.
            resources: resources of a trial on Ray, as {"CPU": 2, "GPU": 1}.
            track: trackers that get a copy of each trial: "tensorboard", "wandb", "mlflow".
            console: for progress.

        Returns:
            Number of this call's trials by status; empty if none was missing.

        Raises:
            ConfigError: the function, an option or the cluster cannot be used.
            StoreError: the folder cannot be written, holds another study, or is run by another process.
            Preempted: SIGTERM ended the run.
        """
        console = console or Console(markup=False, emoji=False, highlight=False)
        deadline = time.monotonic() + parse_limit("budget", budget)
        SequenceOptions(until_settled, first_looks=first_looks)  # checks them
        seconds = parse_limit("timeout", timeout)
        require_above_zero("heartbeat", heartbeat)
        function = trainer_of(train, self.space) if isinstance(train, str) else train
        check_function(function)
        on_ray = ray or address is not None or resources is not None
        if on_ray:
            threads, pool = place_on_ray(self.folder, address, resources or {}, console)
        else:
            threads, pool = place_here(self.folder, workers)
        grid = _grid_of(self.space) if until_settled else None
        store, leases = self._open(grid)
        how = How(self.folder, threads, seconds, halving)
        tracking = Tracking(track, store)
        purchase = store.next_purchase()
        busy = f"results folder {self.folder} is being run by {{who}}: wait for it, or let both ask and tell"
        try:
            with (
                store.folder.locked("driver.lock", busy),
                Functions(self.space, pickled(function, by_value=on_ray), how, pool) as functions,
            ):
                # A killed call may have left losses of trials that failed, or of an earlier function.
                done = store.done() if halving else set[str]()
                for group in (store.folder / "rungs").names() if halving else ():
                    forget_rungs(store.folder / "rungs" / group, done.__contains__)

                def run(trials: list[Trial], of: Callable[[Trial], int | None]) -> Counter[str]:
                    elsewhere = {lease.trial.id for lease in leases.running()}
                    return run_missing(
                        functions,
                        trials,
                        store,
                        tracking,
                        console,
                        heartbeat,
                        halving,
                        of,
                        deadline,
                        elsewhere,
                    )

                if grid is not None:
                    outcome = buy(grid, store, run, halving, deadline, console, first_looks)
                else:
                    outcome = run(self.trials(), lambda trial: purchase)
        except KeyboardInterrupt:
            console.print(f"stopped; finished trials are stored in {self.folder}, the same call goes on")
            raise
        if time.monotonic() >= deadline:
            console.print(f"the budget of {budget} is used up; the same call goes on")
        return outcome

    def ask(
        self, count: int = 1, *, until_settled: bool = False, patience: float = PATIENCE_S
    ) -> list[Trial]:
        """Missing trials to run elsewhere, each given once.

        Args:
            count: most trials to give.
            until_settled: choose them where they decide, in place of the grid's order.
            patience: seconds after which an untold trial may be given again.

        Returns:
            At most `count` trials; fewer if no more are missing, or decided on yet.

        Raises:
            ConfigError: count or patience is not allowed.
            StoreError: the folder cannot be written, or holds another study.
        """
        require_count("count", count)
        require_above_zero("patience", patience)
        grid = _grid_of(self.space) if until_settled else None
        store, leases = self._open(grid)
        with leases.alone():
            planned: Iterable[tuple[Trial, int | None]]
            if grid is not None:
                plans = Buyer(grid, store).plans()
                known = store.done()
                planned = [(t, plan.purchase) for plan in plans for t in plan.trials if t.id not in known]
            else:
                purchase = store.next_purchase()
                planned = ((trial, purchase) for trial in leases.missing())
            return leases.give(planned, count, patience)

    def tell(self, trial: Trial | str, loss: Any = None, *, failed: str | None = None) -> Trial:
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
                value = number("loss", loss)
            except TypeError as error:
                raise ConfigError(str(error)) from None
            is_finite = math.isfinite(value)
            outcome = Outcome("finished" if is_finite else "diverged", value if is_finite else math.inf)
        store, leases = self._open()
        with leases.alone():
            lease = leases.find(trial.id if isinstance(trial, Trial) else str(trial))
            store.append(*as_rows(lease.trial, outcome, lease.purchase))
            # The loss is stored: a lease that stays is ignored from now on.
            with contextlib.suppress(OSError):
                leases.forget(lease.trial.id)
        return lease.trial

    def verdict(self) -> TransferAnalysis:
        """Analysis of stored trials; printed, it says each verdict in a sentence.

        Raises:
            StoreError: nothing is stored yet.
            TableError: the stored trials cannot be analysed.
        """
        return PrintedAnalysis(**_fields_of(analyze(load_table(self.folder))))

    def predict(self, **target: float) -> Predictions:
        """Optimum, cost and loss at a scale that was not run, of everything compared: `predict(width=8192)`.

        Raises:
            StoreError: nothing is stored yet.
            TableError: the target is not along the scale, or two scales have no known optimum.
        """
        made = predict(self.folder, [f"{name}={value}" for name, value in target.items()])
        return PrintedPredictions(**_fields_of(made))

    def plot(self, name: str = "transfer") -> Figure:
        """Figure of stored trials.

        Args:
            name: "transfer", "optimum", "regret", "best_loss", "collapse", "learning_curves" or "sequence".

        Raises:
            ConfigError: there is no such figure, or no data for it yet.
        """
        from mup_tpu import plots

        analysis = self.verdict()
        there = plots.drawings(analysis)
        if name not in there:
            raise ConfigError(f"plot {name!r} is not one of {', '.join(there)}, for which there are runs")
        return there[name](analysis)

    def _open(self, grid: Grid[Trial] | None = None) -> tuple[Store, Leases]:
        """Store with the definition of the study and the scales that a sequence plans, and leases.

        They stay open, so that a call reads only what is new, unless the folder is removed meanwhile.
        """
        if self._opened is not None and read_if_there(self._opened[0].folder, FILE) == self._definition:
            if grid is not None:
                self._opened[0].plan(grid.points)
            return self._opened
        space = self.space
        store = Store(self.folder, space.name, space.axes, tuple(grid.points) if grid else (), space.columns)
        settings = dict(space.settings)
        for name, other in store.others(settings) if settings else ():
            raise StoreError(
                f"results folder {self.folder} holds runs with {name} {other}, and this study has "
                f"{settings[name]}: an analysis compares runs of one kind, so give another folder"
            )
        if read_if_there(store.folder, FILE) != self._definition:
            write_whole(store.folder, FILE, self._definition)
        self._opened = store, Leases(store, space)
        return self._opened


def _grid_of(space: Space) -> Grid[Trial]:
    """Grid of a study for a sequence, which buys the deciding runs."""
    return Grid(
        Columns(space.measured_by, space.tuned, parametrization=space.axes.compare.column),
        {float(point[space.measured_by]): point for point in space.scale},
        space.values,
        all(isinstance(value, float) for value in space.values),
        {str(next(iter(point.values()), space.name)): point for point in space.compare},
        space.trial,
        lambda trial: trial.id,
    )
