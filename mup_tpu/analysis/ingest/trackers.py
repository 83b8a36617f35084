"""Runs that the packages of their tools read: Weights & Biases, MLflow, TensorBoard, Optuna."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sqlite3
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from mup_tpu.errors import TableError, reason

_EVENTS = "events.out.tfevents"


def read_project(path: str | Path) -> pd.DataFrame:
    """Read the runs of a tracker, a row a run.

    Args:
        path: `wandb:ENTITY/PROJECT`; or `mlflow:EXPERIMENT`, of the tracking server or database that
            MLFLOW_TRACKING_URI names.

    Raises:
        TableError: the tracker's package is not installed, it cannot be reached, or it knows no such runs.
    """
    tracker, _, name = str(path).partition(":")
    table = TRACKERS[tracker](name)
    if table.empty:
        raise TableError(f"{path} holds no runs")
    return table


def package(path: str, name: str, module: str, extra: str = "") -> Any:
    """Import a module of a package that an extra of this one installs, by default one of its name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TableError(
            f"{path} needs the package {name} ({reason(error)}): pip install '.[{extra or name}]'"
        ) from None


@contextlib.contextmanager
def errors_in_a_sentence(path: str) -> Iterator[None]:
    """Raise errors of a tracker's package, of any kind, as one sentence."""
    try:
        yield
    except TableError:
        raise
    except Exception as error:
        raise TableError(f"{path} cannot be read: {reason(error)}") from None


def _wandb(project: str) -> pd.DataFrame:
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
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _mlflow(experiment: str) -> pd.DataFrame:
    path = f"mlflow:{experiment}"
    mlflow = package(path, "mlflow", "mlflow")
    hush_mlflow()
    with errors_in_a_sentence(path):
        if mlflow.get_experiment_by_name(experiment) is None:
            known = ", ".join(sorted(e.name for e in mlflow.search_experiments()))
            raise TableError(f"{path}: {mlflow.get_tracking_uri()} has no such experiment; there are {known}")
        return mlflow.search_runs(experiment_names=[experiment])


TRACKERS = {"wandb": _wandb, "mlflow": _mlflow}  # readers of trackers whose runs are named `TRACKER:…`


def tensorboard(folder: Path) -> pd.DataFrame:
    """Read scalars by run and step, with the run's hyperparameters as `hparams/…`.

    `SummaryWriter.add_hparams` writes into a folder of its own below the run's, which is part of the run.
    """
    path = str(folder)
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
    if not tables:
        raise TableError(f"{path} holds no runs")
    return pd.concat(tables, ignore_index=True)


def offline_wandb(folder: Path) -> pd.DataFrame:
    """Refuse offline runs of Weights & Biases: its package has no reader for their files."""
    raise TableError(
        f"{folder} holds offline runs of Weights & Biases, which has no reader for their files: send them "
        "with `wandb sync` and give wandb:ENTITY/PROJECT"
    )


def _is_whole(run: Path, scalars: list[pd.Series]) -> bool:
    """TensorBoard's reader stops without a word where a file is damaged.

    Of the runs that `--track tensorboard` writes, in folders named by trial_id, `loss` is the last value.
    """
    is_ours = re.fullmatch("[0-9a-f]{16}", run.name) is not None
    return any(scalar.name == "loss" for scalar in scalars) if is_ours else bool(scalars)


def _scalar(events: Any, tag: str) -> pd.Series:
    """Keep the last value of a step that was logged twice, as after a restart."""
    values = {event.step: event.value for event in events.Scalars(tag)}
    return pd.Series(values, name=tag, dtype="float64")


def _settings(events: Any, hparams: Any) -> dict[str, Any]:
    try:
        content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    except KeyError:
        return {}
    stored = hparams.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in stored.items()}


def database(file: Path) -> pd.DataFrame:
    """Runs in a SQLite database of MLflow or Optuna."""
    with sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if {"trials", "studies"} <= tables:
        return optuna_trials(file)
    if {"experiments", "runs"} <= tables:
        return _mlflow_database(file)
    raise TableError(f"{file} is a database of neither MLflow nor Optuna: it has the tables {_some(tables)}")


def _mlflow_database(file: Path) -> pd.DataFrame:
    mlflow = package(str(file), "mlflow", "mlflow")
    hush_mlflow()
    before, uri = mlflow.get_tracking_uri(), f"sqlite:///{file.absolute()}"
    mlflow.set_tracking_uri(uri)
    try:
        runs = mlflow.search_runs(search_all_experiments=True)
        names = {e.experiment_id: e.name for e in mlflow.search_experiments()}
    finally:
        mlflow.set_tracking_uri(before)
    if len(runs) and runs["experiment_id"].nunique() > 1:
        known = _some(names[number] for number in runs["experiment_id"].unique())
        raise TableError(
            f"{file} holds several experiments ({known}): set MLFLOW_TRACKING_URI={uri}, give mlflow:NAME"
        )
    return runs


def optuna_trials(file: Path) -> pd.DataFrame:
    """Read the trials of the only study in Optuna's database or journal."""
    optuna = package(str(file), "optuna", "optuna", extra="train")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if file.suffix in (".db", ".sqlite", ".sqlite3"):
        storage = optuna.storages.RDBStorage(f"sqlite:///{os.fspath(file.absolute())}")
    else:
        backend = optuna.storages.journal.JournalFileBackend(os.fspath(file))
        storage = optuna.storages.JournalStorage(backend)
    studies = optuna.study.get_all_study_names(storage)
    if len(studies) != 1:
        raise TableError(
            f"{file} holds {len(studies)} studies ({_some(studies)}), not one; write one as a table with "
            "study.trials_dataframe().to_csv(...)"
        )
    return optuna.load_study(study_name=studies[0], storage=storage).trials_dataframe()


def _some(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))[:8])
