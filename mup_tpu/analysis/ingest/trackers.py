"""Runs in trackers (Weights & Biases, MLflow, TensorBoard), read by the trackers' own packages."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.errors import TableError, reason
from mup_tpu.store.header import FILE as STORE
from mup_tpu.store.runs import LOG_FILE

_EVENTS = "events.out.tfevents"
_OFFLINE = "offline-run-*/*.wandb"
_OURS = (STORE, LOG_FILE)


def is_tracked(path: str | Path) -> bool:
    """Whether a path is a tracker's: `wandb:…`, `mlflow:…`, or a folder with event files of TensorBoard."""
    if str(path).startswith(tuple(f"{tracker}:" for tracker in TRACKERS)):
        return True
    folder = Path(str(path))
    return is_foreign(folder) and any(
        next(folder.rglob(pattern), None) is not None for pattern in (f"*{_EVENTS}*", _OFFLINE)
    )


def is_foreign(folder: Path) -> bool:
    """Whether a path is a local folder, and none of our results."""
    return folder.is_dir() and not any((folder / name).exists() for name in _OURS)


def read_tracked(path: str | Path) -> pd.DataFrame:
    """Runs of a tracker, a row a run; TensorBoard's a row a step.

    Args:
        path: `wandb:ENTITY/PROJECT`; or `mlflow:EXPERIMENT`, of the tracking server or database that
            MLFLOW_TRACKING_URI names; or a folder with event files of TensorBoard, a folder for each run.

    Raises:
        TableError: the tracker's package is not installed, it cannot be reached, or it knows no such runs.
    """
    tracker, colon, name = str(path).partition(":")
    table = TRACKERS[tracker](name) if colon and tracker in TRACKERS else _tensorboard(Path(str(path)))
    if table.empty:
        raise TableError(f"{path} holds no runs")
    return table


def package(path: str, name: str, module: str, extra: str = "") -> Any:
    """Module of a package that an extra of this one installs, by default one of the package's name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TableError(
            f"{path} needs the package {name} ({reason(error)}): pip install 'mup_tpu[{extra or name}]'"
        ) from None


@contextlib.contextmanager
def errors_in_a_sentence(path: str) -> Iterator[None]:
    """Errors of a tracker's package, of any kind, as one sentence."""
    try:
        yield
    except TableError:
        raise
    except Exception as error:
        raise TableError(f"{path} cannot be read: {reason(error)}") from None


def _wandb(project: str) -> pd.DataFrame:
    """Runs of a project: their settings as `config/…`, and the last value of each metric."""
    path = f"wandb:{project}"
    if len(project.split("/")) != 2 or not all(project.split("/")):
        raise TableError(f"{path} is not wandb:ENTITY/PROJECT")
    wandb = package(path, "wandb", "wandb")
    with errors_in_a_sentence(path):
        runs = wandb.Api().runs(project, per_page=500, lazy=False)
        rows = [
            {"Name": run.name, "State": run.state, "config": run.config, **run.summary_metrics}
            for run in runs
        ]
        return pd.json_normalize(rows, sep="/")


def hush_mlflow() -> None:
    """Silence MLflow's lines about each table of a new database."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _mlflow(experiment: str) -> pd.DataFrame:
    """Runs of an experiment: `params.…`, and the last value of each metric as `metrics.…`."""
    path = f"mlflow:{experiment}"
    mlflow = package(path, "mlflow", "mlflow")
    hush_mlflow()
    with errors_in_a_sentence(path):
        if mlflow.get_experiment_by_name(experiment) is None:
            there = ", ".join(sorted(e.name for e in mlflow.search_experiments()))
            raise TableError(f"{path}: {mlflow.get_tracking_uri()} has no such experiment; there are {there}")
        return mlflow.search_runs(experiment_names=[experiment])


TRACKERS = {"wandb": _wandb, "mlflow": _mlflow}
"""Readers of trackers whose runs are named `TRACKER:…`."""


def _tensorboard(folder: Path) -> pd.DataFrame:
    """Scalars by run and step, with the run's hyperparameters as `hparams/…`.

    `SummaryWriter.add_hparams` writes into a folder of its own below the run's, which is part of the run.
    """
    path = str(folder)
    if next(folder.rglob(_OFFLINE), None) is not None:
        raise TableError(
            f"{path} holds offline runs of Weights & Biases, which has no reader for their files: send them "
            "with `wandb sync` and give wandb:ENTITY/PROJECT"
        )
    accumulators = package(path, "tensorboard", "tensorboard.backend.event_processing.event_accumulator")
    hparams = package(path, "tensorboard", "tensorboard.plugins.hparams.plugin_data_pb2")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    runs: dict[Path, tuple[dict[str, Any], list[pd.Series]]] = {}
    with errors_in_a_sentence(path):
        for inside in sorted({file.parent for file in folder.rglob(f"*{_EVENTS}*")}):
            events = accumulators.EventAccumulator(os.fspath(inside), size_guidance={"scalars": 0})
            if all(file.is_file() for file in inside.glob(f"*{_EVENTS}*")):  # a pipe would never end
                events.Reload()
            settings = _settings(events, hparams)
            scalars = [_scalar(events, tag) for tag in events.Tags()["scalars"]]
            parent = runs.get(inside.parent)
            if settings and parent and not parent[0]:
                parent[0].update(settings)
                parent[1].extend(scalars)
            else:
                runs[inside] = settings, scalars
    if lost := [run for run, (_, scalars) in runs.items() if not _is_whole(run, scalars)]:
        warnings.warn(
            f"{len(lost)} of {len(runs)} runs in {path} are left out, the first {lost[0].name}: their event "
            "files are empty, cut or damaged",
            stacklevel=2,
        )
    tables = [
        pd.concat(scalars, axis=1)
        .rename_axis("step")
        .reset_index()
        .assign(run=os.fspath(run.relative_to(folder)), **{f"hparams/{k}": v for k, v in settings.items()})
        for run, (settings, scalars) in runs.items()
        if run not in lost
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _is_whole(run: Path, scalars: list[pd.Series]) -> bool:
    """Whether a run has a value to show. TensorBoard's reader stops without a word where a file is damaged.

    Of the runs that `--track tensorboard` writes, in folders named by trial_id, `loss` is the last value.
    """
    is_ours = re.fullmatch("[0-9a-f]{16}", run.name) is not None
    return any(scalar.name == "loss" for scalar in scalars) if is_ours else bool(scalars)


def _scalar(events: Any, tag: str) -> pd.Series:
    """A scalar by step; the last value of a step that was logged twice, as after a restart."""
    values = {event.step: event.value for event in events.Scalars(tag)}
    return pd.Series(values, name=tag, dtype="float64")


def _settings(events: Any, hparams: Any) -> dict[str, Any]:
    """Hyperparameters of a run; none where it logged none."""
    try:
        content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    except KeyError:
        return {}
    stored = hparams.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in stored.items()}
