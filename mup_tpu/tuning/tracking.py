"""Copies of trials in trackers: TensorBoard and Weights & Biases.

The store stays the record. A tracker gets each trial when it ends: its configuration as hyperparameters, and
its curve. A tracker that fails is reported once, and gets nothing more; no row is lost.
"""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mup_tpu.config.columns import CONFIGURED
from mup_tpu.config.options import TrackerName
from mup_tpu.errors import ConfigError, reason
from mup_tpu.files import Folder, scratch_folder
from mup_tpu.store import FINAL, Store

# Points of a trial: tag (`train/loss`, `validation/loss`), step, and nat per token
Curve = Sequence[tuple[str, int, float]]
Send = Callable[[Mapping[str, Any], Mapping[str, Any], Curve], None]


def tensorboard(folder: Folder, experiment: str) -> Send:
    """Return a function that writes a trial's events to `tensorboard/TRIAL_ID` of the folder."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def send(row: Mapping[str, Any], settings: Mapping[str, Any], curve: Curve) -> None:
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
            trials = folder / "tensorboard"
            trials.remove(row["trial_id"])  # of a trial that was stopped, and is trained again
            trials.write(f"{row['trial_id']}/{file.name}", file.read_bytes())

    return send


def wandb(folder: Folder, experiment: str) -> Send:
    """Return a function that logs a run to the project; WANDB_MODE=offline keeps it in the results folder."""
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # or it would ask
        raise ConfigError("nobody is logged in: `wandb login`, or WANDB_MODE=offline")

    def send(row: Mapping[str, Any], settings: Mapping[str, Any], curve: Curve) -> None:
        name = " ".join(f"{key} {value}" for key, value in settings.items())
        if {"parametrization", "width", "lr"} <= settings.keys():
            name = f"{row['parametrization']} width {row['width']} lr {row['lr']:.3g} seed {row['seed']}"
        place, trial = folder.path if folder.is_local else ".", row["trial_id"]
        quiet = wandb.Settings(silent=True, console="off", init_timeout=30)
        config = {**settings, "trial_id": trial}
        run = wandb.init(project=experiment, dir=place, id=trial, name=name, config=config, settings=quiet)
        by_step: dict[int, dict[str, float]] = {}
        for tag, step, value in curve:
            by_step.setdefault(step, {})[tag] = value
        for step, values in sorted(by_step.items()):
            run.log(values, step=step)
        run.summary.update({"loss": _loss(row), "status": row["status"]})
        run.finish(exit_code=0 if row["status"] != "stopped" else 1)

    return send


_TRACKERS: dict[TrackerName, Callable[[Folder, str], Send]] = {"tensorboard": tensorboard, "wandb": wandb}


class Tracking:
    """Sends each trial that ends to trackers."""

    def __init__(self, names: Sequence[TrackerName], store: Store) -> None:
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise ConfigError(f"track {name!r} needs its package: pip install '.[{name}]'")
        self._store, self._send = store, dict[TrackerName, Send]()
        self._left = list(dict.fromkeys(names))  # trackers that have not failed
        columns = store.own_columns
        self._settings = list(CONFIGURED) if columns is None else [*columns, "seed"]

    def add(self, rows: Sequence[Mapping[Any, Any]], curves: Sequence[Mapping[Any, Any]]) -> None:
        """Send trials with a result; failed ones, which are trained again, are not sent."""
        points: dict[str, list[tuple[str, int, float]]] = {}
        for p in curves:
            point = (f"{p['split']}/loss", int(p["step"]), float(p["loss"]))
            points.setdefault(p["trial_id"], []).append(point)
        for row in rows:
            settings = {name: row[name] for name in self._settings if row.get(name) is not None}
            for name in [*self._left] if row["status"] in FINAL else []:
                try:
                    if name not in self._send:
                        self._send[name] = _TRACKERS[name](self._store.folder, self._store.experiment)
                    self._send[name](row, settings, points.get(row["trial_id"], []))
                except Exception as error:  # whatever a tracker raises, the rows are stored
                    self._left.remove(name)
                    warnings.warn(f"{name} gets no more trials: {reason(error)}", stacklevel=2)


def _loss(row: Mapping[str, Any]) -> float:
    loss = row.get("loss")
    return math.nan if loss is None else float(loss)
