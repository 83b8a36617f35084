"""Runs in folders and files of other tools as a table: Ray Tune, Lightning, Trainer, nanoGPT, Optuna, MLflow.

Each reader returns a row a run, or a row a step, with the run's folder in `run`. Settings are the tool's own
(`config/...`), else they stand in the folder's name, where `run_names` finds them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.trackers import errors_in_a_sentence, hush_mlflow, is_foreign, package
from mup_tpu.errors import TableError
from mup_tpu.store.header import FILE as STORE

_BOOKKEEPING = (
    "time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore", "timestamp", "date",
    "pid", "hostname", "node_ip", "done", "trial_id", "experiment_tag", "checkpoint_dir_name",
    "should_checkpoint",
)  # fmt: skip
"""Columns of Ray Tune that say nothing of a trial."""
_LINES = (
    re.compile(r"step (?P<step>\d+): train loss (?P<train_loss>\S+), val loss (?P<val_loss>\S+)"),
    re.compile(r"step[: ](?P<step>\d+)(?:/\d+)?,? val[_ ]loss[: ](?P<val_loss>\S+)"),
    re.compile(r"(?P<step>\d+) val (?P<val_loss>\S+)"),
    re.compile(r"iter (?P<step>\d+): loss (?P<train_loss>[^\s,]+)"),
    re.compile(r"(?P<step>\d+) train (?P<train_loss>\S+)"),
)
"""Lines of training logs, as train.py of nanoGPT, modded-nanogpt and build-nanogpt write them."""
_DATABASES = (".db", ".sqlite", ".sqlite3")


def is_of_another_tool(path: str | Path) -> bool:
    """Whether a path is a folder with runs of another tool, a database, or a journal of Optuna."""
    place = Path(str(path))
    if place.is_file():
        return place.suffix in _DATABASES or _reader_of_file(place) is not None
    if not is_foreign(place) or next(place.glob(f"*/{STORE}"), None) is not None:  # a folder of sweeps
        return False
    return any(next(place.rglob(pattern), None) is not None for pattern in _FOLDERS)


def read_other_tool(path: str | Path) -> pd.DataFrame:
    """Runs in a folder or file of another tool.

    Args:
        path: folder with runs of one tool, each in a folder of its own (`result.json` or `progress.csv` of
            Ray Tune, `metrics.csv` of Lightning, `trainer_state.json` of Hugging Face's Trainer, `log.txt`
            of nanoGPT, JSON with `config` and `summary`, as W&B's API gives it); or a database of MLflow or
            Optuna, or Optuna's journal.

    Raises:
        TableError: it cannot be read, or holds several studies or experiments.
    """
    place = Path(str(path))
    with errors_in_a_sentence(str(path)):
        if place.is_file():
            return (_reader_of_file(place) or _database)(place)
        found = {pattern: sorted(place.rglob(pattern)) for pattern in _FOLDERS}
        if other := next((file for files in found.values() for file in files if not file.is_file()), None):
            raise TableError(f"{other} is not a regular file: take it away")
        readers = {_FOLDERS[pattern]: files for pattern, files in found.items() if files}
        # Tune writes result.json beside progress.csv, and tools keep tables of their own beside JSON.
        reader, files = next(iter(readers.items()))
        _warn_of_others(path, files, [f for name in _STRUCTURED for f in found[name]])
        rows = [_with_run(reader(file), place, file) for file in files]
        table = pd.concat([frame for frame in rows if len(frame)] or [pd.DataFrame()], ignore_index=True)
    if table.empty:
        raise TableError(f"{path} holds {len(files)} files {files[0].name}, and none has a loss")
    return table


def _warn_of_others(path: str | Path, files: Sequence[Path], others: Sequence[Path]) -> None:
    """Warn of runs of another tool that lie in none of the folders that are read."""
    read = {file.parent for file in files}
    if left := [file for file in others if not read & {*file.parents}]:
        warnings.warn(
            f"{path} holds runs of several tools: {len(files)} files {files[0].name} are read, and "
            f"{len(left)} others are not, such as {left[0]}; give the folder of one tool",
            stacklevel=2,
        )


def _with_run(rows: pd.DataFrame, root: Path, file: Path) -> pd.DataFrame:
    """Rows with the run's folder; of a file beside others, its name."""
    folder = file.parent.relative_to(root).as_posix()
    alone = file.name in _FOLDERS and folder != "."
    return rows.assign(run=folder if alone else (root.name if file.name in _FOLDERS else file.stem))


def _tune_result(file: Path) -> pd.DataFrame:
    """Ray Tune's result.json: a line a report, each with the configuration."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return pd.json_normalize(rows, sep="/").drop(columns=[*_BOOKKEEPING], errors="ignore")


def _tune_progress(file: Path) -> pd.DataFrame:
    """Ray Tune's progress.csv, or any logger's; settings that it lacks are in params.json."""
    rows = pd.read_csv(file) if file.stat().st_size else pd.DataFrame()
    params = file.parent / "params.json"
    if params.exists() and not any(str(name).startswith("config/") for name in rows):
        known = pd.json_normalize({"config": json.loads(params.read_text())}, sep="/").iloc[0]
        rows = rows.assign(**{str(name): value for name, value in known.items()})
    return rows.drop(columns=[*_BOOKKEEPING], errors="ignore")


def _lightning(file: Path) -> pd.DataFrame:
    """Lightning's metrics.csv: held-out losses stand in rows of their own; settings are in hparams.yaml."""
    rows = pd.read_csv(file)
    held_out = [name for name in rows if re.search(r"val|eval|test", str(name)) and "loss" in str(name)]
    if held_out:
        rows = rows.dropna(subset=held_out[:1])
    hparams = file.parent / "hparams.yaml"
    if hparams.exists():
        import yaml

        known = yaml.safe_load(hparams.read_text()) or {}
        rows = rows.assign(
            **{f"config/{name}": v for name, v in known.items() if isinstance(v, str | int | float)}
        )
    return rows


def _trainer(file: Path) -> pd.DataFrame:
    """Trainer's trainer_state.json; the newest one of a run has its whole history."""
    run = file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
    states = [*run.glob("trainer_state.json"), *run.glob("checkpoint-*/trainer_state.json")]
    newest = max(states, key=lambda state: (json.loads(state.read_text())["global_step"], state == file))
    if newest != file:
        return pd.DataFrame()
    rows = pd.DataFrame(json.loads(file.read_text())["log_history"])
    losses = [name for name in ("eval_loss", "loss") if name in rows]
    return rows.dropna(subset=losses[:1])[["step", *losses[:1]]] if losses else pd.DataFrame()


def _training_log(file: Path) -> pd.DataFrame:
    """Rows of a log of training, a line a step; held-out losses if it has any."""
    rows = []
    for line in file.read_text(errors="replace").splitlines():
        if match := next((m for pattern in _LINES if (m := pattern.match(line.strip()))), None):
            rows.append({name: float(value) for name, value in match.groupdict().items()})
    found = pd.DataFrame(rows)
    return found.dropna(subset=["val_loss"]) if "val_loss" in found else found


def _dump(file: Path) -> pd.DataFrame:
    """A run of W&B as JSON: `config` and `summary` (a number of the summary is no setting), or `history`."""
    run = json.loads(file.read_text())
    if not isinstance(run, dict) or not isinstance(run.get("config"), dict):
        return pd.DataFrame()
    plain = {key: value["value"] if isinstance(value, dict) and "value" in value else value
             for key, value in run["config"].items()}  # fmt: skip
    history, summary = run.get("history"), run.get("summary") or {}
    metrics = history if isinstance(history, list) and history else [summary]
    if summary.get("_step", 0) > metrics[-1].get("_step", math.inf):  # a sampled history lacks the end
        metrics = [*metrics, summary]
    state = {"State": run["state"]} if "state" in run else {}
    return pd.json_normalize([{"config": plain, **state, **row} for row in metrics], sep="/")


_FOLDERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "result.json": _tune_result,
    "progress.csv": _tune_progress,
    "metrics.csv": _lightning,
    "trainer_state.json": _trainer,
    "log.txt": _training_log,
    "*.json": _dump,
}
"""Files of runs and their readers; a folder's first one is read."""
FILES = ", ".join(_FOLDERS)
_STRUCTURED = ("result.json", "progress.csv", "metrics.csv", "trainer_state.json")
"""Names of files that only runs have."""


def _reader_of_file(file: Path) -> Callable[[Path], pd.DataFrame] | None:
    """Reader of a single file, if it is a tool's."""
    if file.name in ("trainer_state.json", "log.txt"):
        return _FOLDERS[file.name]
    try:
        with file.open("rb") as opened:
            head = opened.readline(2**20)
    except OSError:  # the reader of tables says why
        return None
    if head.startswith(b"{") and b'"op_code"' in head:
        return _optuna
    return _tune_result if file.name == "result.json" and head.rstrip().endswith(b"}") else None


def _database(file: Path) -> pd.DataFrame:
    """Runs in a SQLite database of MLflow or Optuna."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if {"trials", "studies"} <= tables:
        return _optuna(file)
    if {"experiments", "runs"} <= tables:
        return _mlflow(file)
    raise TableError(f"{file} is a database of neither MLflow nor Optuna: it has the tables {_some(tables)}")


def _mlflow(file: Path) -> pd.DataFrame:
    """Runs of the only experiment with runs in MLflow's database."""
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
        there = _some(names[number] for number in runs["experiment_id"].unique())
        raise TableError(
            f"{file} holds several experiments ({there}): set MLFLOW_TRACKING_URI={uri}, give mlflow:NAME"
        )
    return runs


def _optuna(file: Path) -> pd.DataFrame:
    """Trials of the only study in Optuna's database or journal."""
    optuna = package(str(file), "optuna", "optuna", extra="train")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if file.suffix in _DATABASES:
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
