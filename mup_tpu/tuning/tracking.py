"""Copies of stored trials in trackers: TensorBoard and Weights & Biases.

The store stays the record. A tracker gets each trial when it ends: its configuration as hyperparameters, and
its curve. The trial_id names the copy, so that each trial is sent once. A failing tracker causes a warning
and loses no row.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mup_tpu.config.columns import CONFIGURED
from mup_tpu.config.options import TrackerName
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError, reason
from mup_tpu.files import Folder
from mup_tpu.files.local import scratch_folder
from mup_tpu.store import FINAL, Store, load_curves

# Form of our names of trials. A store that somebody else has written may hold others, such as `../x`.
_TRIAL_ID = re.compile("[0-9a-f]{16}")

# Points of a trial: tag (`train/loss`, `validation/loss`), step, and nat per token
Curve = Sequence[tuple[str, int, float]]


class Tracker(Protocol):
    """Tracker of experiments."""

    def known(self) -> set[str]: ...  # trial_ids of the trials in the tracker

    # Sends a trial, in place of its earlier copy.
    def tell(self, row: Mapping[str, Any], settings: Mapping[str, Any], curve: Curve) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/TRIAL_ID` of the folder, and hyperparameters for its HParams tab."""

    def __init__(self, folder: Folder, experiment: str) -> None:
        self._folder = folder / "tensorboard"

    def known(self) -> set[str]:
        return {name for name in self._folder.names() if (self._folder / name).names()}

    def tell(self, row: Mapping[str, Any], settings: Mapping[str, Any], curve: Curve) -> None:
        """Write a file of events: curve, final loss, hyperparameters."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import summary_v2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        hparams = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in settings.items()}
        with scratch_folder() as scratch:
            events = Path(scratch) / "events"  # the folder itself holds the mark of its process
            writer = EventFileWriter(str(events))
            begun = summary_v2.hparams_pb(hparams, trial_id=row["trial_id"])
            writer.add_event(Event(wall_time=time.time(), summary=begun))
            for tag, step, value in (*curve, ("loss", int(row["steps_done"]), _loss(row))):
                point = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(wall_time=time.time(), step=step, summary=point))
            writer.close()
            (file,) = events.iterdir()
            self._folder.remove(row["trial_id"])
            self._folder.write(f"{row['trial_id']}/{file.name}", file.read_bytes())


class WandB:
    """Runs of the project with the experiment's name; WANDB_MODE=offline keeps them in the results folder."""

    def __init__(self, folder: Folder, experiment: str) -> None:
        self._where = Path(folder.path) if folder.is_local else Path()
        self._experiment = experiment

    def known(self) -> set[str]:
        return {path.name.rpartition("-")[2] for path in self._where.glob("wandb/*run-*-*")}

    def tell(self, row: Mapping[str, Any], settings: Mapping[str, Any], curve: Curve) -> None:
        """Log the curve, with the final loss as summary."""
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # or it would ask
            raise ConfigError("nobody is logged in: `wandb login`, or WANDB_MODE=offline")
        name = " ".join(f"{key} {value}" for key, value in settings.items())
        if {"parametrization", "width", "lr"} <= settings.keys():
            name = f"{row['parametrization']} width {row['width']} lr {row['lr']:.3g} seed {row['seed']}"
        for folder in self._where.glob(f"wandb/*run-*-{row['trial_id']}"):
            shutil.rmtree(folder)
        run = wandb.init(
            project=self._experiment,
            dir=str(self._where),
            id=row["trial_id"],
            name=name,
            config={**settings, "trial_id": row["trial_id"]},
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        by_step: dict[int, dict[str, float]] = {}
        for tag, step, value in curve:
            by_step.setdefault(step, {})[tag] = value
        for step, values in sorted(by_step.items()):
            run.log(values, step=step)
        run.summary.update({"loss": _loss(row), "status": row["status"]})
        run.finish(exit_code=0 if row["status"] != "stopped" else 1)


_TRACKERS: dict[TrackerName, Callable[[Folder, str], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Tracking:
    """Sends trials of a store to trackers: first missing ones, then each that ends."""

    def __init__(self, names: Sequence[TrackerName], store: Store) -> None:
        require_packages(names)
        self._trackers: dict[str, Tracker] = {}
        self._told: dict[str, set[str]] = {}  # trial_ids in each tracker
        columns = store.own_columns
        self._settings = list(CONFIGURED) if columns is None else [*columns, "seed"]
        for name in dict.fromkeys(names):
            with self._or_without(name):
                self._trackers[name] = _TRACKERS[name](store.folder, store.experiment)
                self._told[name] = self._trackers[name].known()
        if not self._trackers:
            return
        table, told_by_all = store.results(), set[str].intersection(*self._told.values())
        untold = table[~table["trial_id"].isin(told_by_all)] if len(table) else table
        if strange := [name for name in untold["trial_id"] if not _TRIAL_ID.fullmatch(name)]:
            warnings.warn(
                f"{len(strange)} stored trials are not sent to {', '.join(self._trackers)}: trial_id "
                f"{shown(strange[0])} is not of this program's form, and could name any folder",
                stacklevel=3,
            )
        if untold.empty:
            return
        plain = untold.astype(object).where(untold.notna(), None)
        self.add(plain.to_dict("records"), load_curves(str(store.folder)).to_dict("records"), again=False)

    def add(
        self, rows: Sequence[Mapping[Any, Any]], curves: Sequence[Mapping[Any, Any]], again: bool = True
    ) -> None:
        """Send trials with a result; failed ones, which are trained again, are not sent.

        With `again`, a trial that is trained again after it was stopped early replaces its earlier copy.
        """
        points: dict[str, list[tuple[str, int, float]]] = {}
        for p in curves:
            point = (f"{p['split']}/loss", int(p["step"]), float(p["loss"]))
            points.setdefault(p["trial_id"], []).append(point)
        for row in rows:
            if row["status"] not in FINAL or not _TRIAL_ID.fullmatch(row["trial_id"]):
                continue
            settings = {name: row[name] for name in self._settings if row.get(name) is not None}
            curve = points.get(row["trial_id"], [])
            for name, tracker in list(self._trackers.items()):
                if again or row["trial_id"] not in self._told[name]:
                    with self._or_without(name):
                        tracker.tell(row, settings, curve)
                        self._told[name].add(row["trial_id"])

    @contextlib.contextmanager
    def _or_without(self, name: str) -> Iterator[None]:
        """Drop a tracker that raises an error: this command sends it nothing more."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            warnings.warn(
                f"{name} is told of no more trials: {reason(error)}; the same command tells it of all stored "
                "trials when it can be reached",
                stacklevel=2,
            )


def require_packages(names: Sequence[str]) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"track {name!r} needs its package: pip install '.[{name}]'")


def _loss(row: Mapping[str, Any]) -> float:
    loss = row.get("loss")
    return math.nan if loss is None else float(loss)
