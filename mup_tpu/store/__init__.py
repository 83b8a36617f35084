"""The store: a run table and learning curves on disk, in parts that are whole or missing.

A results folder holds one experiment:

    store.json   experiment, axes, planned scales, columns of a study, conditions on rows (`header.py`)
    runs/*       one row per trial, in Parquet and Arrow files (`tables.py`)
    curves/*     learning curves, keyed by trial_id

Writers only add parts, and now and then merge those that are there, so any number of them may write at once,
and a kill leaves no damaged file. A row written twice (by two drivers, or by a killed merge) is one row when
read. Paths may be fsspec URLs (`gs://`, `memory://`); there a write is one atomic upload.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from mup_tpu.config.grid import Axes
from mup_tpu.config.values import TYPE_NAMES
from mup_tpu.errors import StoreError
from mup_tpu.store.header import (
    STORE_FILE,
    STUDY_COLUMNS,
    Condition,
    Header,
    accessed,
    change_header,
    create_header,
    read_header,
    results_folder,
)  # fmt: skip
from mup_tpu.store.tables import Parts, rank

__all__ = [
    "FINAL", "SEARCH_FILE", "STUDY_COLUMNS", "Condition", "Result", "Store",
    "done_of", "holds_store", "is_search", "load_axes", "load_curves", "load_header", "load_runs",
    "load_values", "results_folder",
]  # fmt: skip

SEARCH_FILE = "search.json"  # proposals of a search, in its results folder

FINAL = ("finished", "diverged", "stopped")
"""Statuses of results; "failed" and "preempted" trials are run again."""

_LOOK_EVERY = 16  # parts that a writer adds before it looks again whether there are many to merge

_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """Row of a trial, as far as writers need it."""

    status: str
    loss: float
    purchase: int | None


class Store:
    """A results folder, open for writing; one of another experiment, other axes or columns is refused."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        experiment: str,
        axes: Axes | None = None,  # axes of the sweep
        planned: Sequence[float] = (),  # scales of the sequence, added to the stored ones
        columns: Mapping[str, type] | None = None,  # columns of a study with their types; None for our trials
    ) -> None:
        self.folder, self.experiment = results_folder(path), experiment
        self._added = 0
        # Rows that were read or written: their number in each part, and the best result of each trial.
        self._rows_of: dict[str, int] = {}
        self._known: dict[str, Result] = {}
        mine = Header(experiment, axes, columns=columns).with_planned(planned)
        header = read_header(self.folder) or create_header(self.folder, mine)
        folder, stored_axes = f"results folder {self.folder}", header.axes or Axes()
        if header.experiment != experiment:
            holds = f"{folder} holds experiment {header.experiment!r}, not {experiment!r}"
            raise StoreError(f"{holds}; give this one a folder of its own")
        if axes is not None and axes != stored_axes:
            raise StoreError(
                f"{folder} holds a {'study' if header.columns is not None else 'sweep'} of {stored_axes}, "
                f"not of {axes}; give this one a folder of its own"
            )

        def add(header: Header) -> Header:
            both = header.columns if columns is None else self._join_columns(header.columns or {}, columns)
            return replace(header, columns=both).with_planned(planned)

        self.own_columns = change_header(self.folder, experiment, add).columns
        """Columns of a study with their types; None for our own trials."""
        self.runs, self.curves = (Parts(self.folder, table, self.own_columns) for table in ("runs", "curves"))

    def _join_columns(self, stored: Mapping[str, type], new: Mapping[str, type]) -> Mapping[str, type]:
        """Return a study's columns; a column of whole numbers becomes real once it has a real number."""
        if stored.keys() != new.keys():
            raise StoreError(
                f"results folder {self.folder} holds a study of {', '.join(stored)}, not of "
                f"{', '.join(new)}; give this one a folder of its own"
            )
        for name, kind in new.items():
            if kind is not stored[name] and {kind, stored[name]} != {int, float}:
                raise StoreError(
                    f"results folder {self.folder} holds runs whose {name} is {TYPE_NAMES[stored[name]]}, "
                    f"and this study's is {TYPE_NAMES[kind]}; give this one a folder of its own"
                )
        return {name: float if float in (kind, stored[name]) else kind for name, kind in new.items()}

    def plan(self, scales: Iterable[float]) -> None:
        """Add scales of a sequence to the planned ones."""
        more = [*scales]
        change_header(self.folder, self.experiment, lambda header: header.with_planned(more))

    def ask(self, where: Sequence[Condition]) -> None:
        change_header(self.folder, self.experiment, lambda header: replace(header, where=tuple(where)))

    def append(self, rows: Iterable[Mapping[str, Any]], curves: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add rows of the run table and their curve points; on return they are on disk."""
        curves, rows = list(curves), [{"experiment": self.experiment, **row} for row in rows]
        if curves:  # before the rows: a row promises that its trial's curve is stored
            self.curves.append(curves)
        if rows:
            self._note(self.runs.append(rows), rows)
        if self._added % _LOOK_EVERY == 0:
            try:
                self.runs.merge_small()
                self.curves.merge_small()
            except StoreError as error:  # the rows themselves are stored
                _log.warning("parts of %s stay as they are: %s", self.folder, error)
        self._added += 1

    def known(self) -> Mapping[str, Result]:
        """Return status, loss and purchase of each trial with a row; only new parts are read."""
        names, new = self.runs.read_new(self._rows_of, ["trial_id", "status", "loss", "purchase"])
        for name in self._rows_of.keys() - {*names}:  # a merge has moved its rows to a new part
            del self._rows_of[name]
        for name, part in new.items():
            self._note(name, part.to_pylist())
        if sum(self._rows_of.values()) >= len(self._known):
            return self._known
        self._rows_of, self._known = {}, {}  # somebody has removed rows
        return self.known()

    def _note(self, part: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows_of[part] = len(rows)
        for row in rows:
            result = Result(str(row.get("status")), row.get("loss", math.nan), row.get("purchase"))
            before = self._known.get(name := str(row["trial_id"]))
            if before is None or rank(result.status) < rank(before.status):
                self._known[name] = result

    def results(self) -> pd.DataFrame:
        runs = self.runs.table()
        return runs[runs["status"].isin(FINAL)]

    def others(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield columns in which a result has another value than `settings`, each with one such value."""
        runs = self.results()
        for column, value in settings.items():
            if others := [other for other in runs[column].dropna().unique().tolist() if other != value]:
                yield column, others[0]

    def done(self, stopped: bool = True) -> set[str]:
        """Return ids of trials with a stored result; `stopped` counts trials that were stopped early."""
        statuses = FINAL if stopped else FINAL[:-1]
        return {name for name, result in self.known().items() if result.status in statuses}

    def next_purchase(self) -> int | None:
        """Return the number of the next purchase; None if the folder holds no sequence."""
        header = read_header(self.folder)
        if header is None or not header.planned:
            return None
        results = (result for result in self.known().values() if result.status in FINAL)
        return 1 + max((r.purchase for r in results if r.purchase is not None), default=0)


def done_of(results: pd.DataFrame) -> set[str]:
    """Return trial_ids of `Store.results` without trials that were stopped early."""
    return set(results.loc[results["status"] != "stopped", "trial_id"])


def holds_store(path: str | os.PathLike[str]) -> bool:
    return STORE_FILE in results_folder(path).names()


def is_search(path: str | os.PathLike[str]) -> bool:
    folder = results_folder(path)
    with accessed(folder, "read"):
        return SEARCH_FILE in folder.names()


def load_runs(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> pd.DataFrame:
    """Load the run table of a results folder, one row per trial.

    `columns` limits it to these and the columns that sort it.

    Examples:
        >>> runs = load_runs("results/quickstart")
        >>> runs.groupby(["parametrization", "width"])["loss"].min().unstack().round(2)
        width             64    128   256   384
        parametrization
        mup              2.37  2.35  2.35  2.34
        sp               2.37  2.39  2.43  2.45

    Raises:
        StoreError: there is no such folder, or it holds no runs.
    """
    folder = results_folder(path)
    header = read_header(folder)
    if header is None:
        raise StoreError(f"results folder {path} holds no store (no store.json in it)")
    axes = header.axes or Axes()
    order = [axes.compared, axes.size, axes.tuned[0], "seed", "trial_id"]
    names = None if columns is None else [*dict.fromkeys((*columns, *order, "status"))]
    runs = Parts(folder, "runs", header.columns).table(names)
    if runs.empty:
        raise StoreError(f"results folder {path} holds no runs yet")
    return runs.sort_values(order, ignore_index=True)


def load_values(path: str | os.PathLike[str], column: str) -> list[str]:
    """Return the different values of a column in a results folder; a new folder has none."""
    runs = Parts(results_folder(path), "runs", load_header(path).columns).table()
    return [] if column not in runs else sorted(runs[column].dropna().unique())


def load_header(path: str | os.PathLike[str]) -> Header:
    return read_header(results_folder(path)) or Header("")


def load_axes(path: str | os.PathLike[str]) -> Axes:
    return load_header(path).axes or Axes()


def load_curves(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Load the learning curves of a results folder: trial_id, step, tokens, split, loss (nat per token).

    Examples:
        >>> curves = load_curves("results/quickstart")
        >>> curves[curves["split"] == "train"].groupby("step")["loss"].mean().round(2).tail(3).to_dict()
        {80: 2.56, 90: 2.52, 100: 2.46}
    """
    curves = Parts(results_folder(path), "curves").table()
    return curves.sort_values(["trial_id", "split", "step"], ignore_index=True)
