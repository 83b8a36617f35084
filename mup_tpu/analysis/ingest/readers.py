"""Readers of other tools' runs, from their files or with their packages: one entry each in `READERS`.

A reader returns a row per run, or a row per step of a run, under the tool's names of columns; settings become
columns `config/NAME`. `table_columns.find_columns` says what the names mean. Settings that a tool keeps in
names of folders are found by `tables`, from the column `run`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import logging
import math
import os
import re
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from mup_tpu.analysis.ingest.files import is_file, read_file, read_yaml
from mup_tpu.analysis.ingest.table_columns import means
from mup_tpu.analysis.ingest.tables import AXES, settings
from mup_tpu.errors import TableError, extra_with, reason
from mup_tpu.files import read_local
from mup_tpu.logs import TrainingLog, read_log
from mup_tpu.store.header import STORE_FILE

# Columns of Ray Tune that say nothing of a trial
_BOOKKEEPING = (
    "time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore", "timestamp", "date",
    "pid", "hostname", "node_ip", "done", "trial_id", "experiment_tag", "checkpoint_dir_name",
    "should_checkpoint",
)  # fmt: skip
_PROBED = 2**16  # bytes at the beginning of a file
_RANK = re.compile(r"(rank|worker|node|proc(ess)?|gpu|host)[-_.]?[0-9]+", re.IGNORECASE)


def tune_result(file: Path) -> pd.DataFrame:
    lines = [line for line in _text(file).splitlines() if line.strip()]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"line {number} is no JSON") from None
            incomplete = f"{file}: the last line is incomplete (was the writer killed?) and is skipped"
            warnings.warn(incomplete, stacklevel=2)
    if not rows:
        warnings.warn(f"{file} holds no report: its trial is left out", stacklevel=2)
    return pd.json_normalize(rows, sep="/").drop(columns=[*_BOOKKEEPING], errors="ignore")


def tune_progress(file: Path) -> pd.DataFrame:
    """Read Ray Tune's progress.csv, or any logger's; settings that it lacks are in params.json."""
    rows = pd.read_csv(io.BytesIO(content)) if (content := _bytes(file)) else pd.DataFrame()
    if not any(str(name).startswith("config/") for name in rows):
        rows = rows.assign(**_settings_beside(file))
    return rows.drop(columns=[*_BOOKKEEPING], errors="ignore")


def lightning(file: Path) -> pd.DataFrame:
    """Read Lightning's metrics.csv: held-out losses have rows of their own; settings are in hparams.yaml."""
    rows = pd.read_csv(io.BytesIO(_bytes(file)))
    held_out = [name for name in rows if re.search(r"val|eval|test", str(name)) and "loss" in str(name)]
    if held_out:
        rows = rows.dropna(subset=held_out[:1])
    return rows.assign(**_settings_beside(file))


def trainer(file: Path) -> pd.DataFrame:
    """Read Trainer's trainer_state.json; the newest one of a run has its whole history."""
    run = file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
    states = [*run.glob("trainer_state.json"), *run.glob("checkpoint-*/trainer_state.json")]
    if file != max(states, key=lambda state: (json.loads(_text(state))["global_step"], state == file)):
        return pd.DataFrame()
    # The model's configuration lies beside the weights; of the learning rate only the schedule is logged.
    files = [folder / "config.json" for folder in (file.parent, run)]
    config: dict[str, Any] = next((json.loads(_text(one)) for one in files if one.exists()), {})
    sizes = {f"config/{name}": v for name, v in config.items() if means(name) in ("width", "depth")}
    return _by_step(read_log(_METRICS[file.name](file))).assign(**sizes)


def training_log(file: Path) -> pd.DataFrame:
    """Read the output of a training program; settings are in names of files and folders, or beside it."""
    content = _bytes(file)
    # The command or the configuration stands above the first step.
    in_name = settings(f"{file.parent.name}/{file.stem}")
    above = map(settings, content[:_PROBED].decode(errors="replace").splitlines()[:200])
    printed = next((line for line in above if "lr" in line and {*line} & {"width", "depth", "size"}), {})
    beside = {} if in_name else _settings_beside(file)
    known = {what: value for what, value in printed.items() if what not in in_name}
    known |= {name: v for name, v in beside.items() if means(name) not in printed}
    is_set = "lr" in {*in_name, *printed, *map(means, beside)}
    return _by_step(read_log(content), with_rates=not is_set).assign(**known)


def _by_step(log: TrainingLog, with_rates: bool = True) -> pd.DataFrame:
    """Return the losses of a program's output by step, with the learning rates that it logs."""
    table = pd.DataFrame({_column(name): pd.Series(dict(curve)) for name, curve in log.curves().items()})
    if log.is_diverged and len(table):
        table.loc[table.index.max()] = math.inf
    if with_rates and log.learning_rate and len(table):
        rates = pd.Series(log.rates, dtype=float) if log.rates else log.learning_rate
        rate = pd.Series(rates, name="learning_rate", index=None if log.rates else table.index)
        table = pd.concat([table, rate], axis=1)
    return table.rename_axis("step").reset_index()


# Settings of a run that frameworks write beside its log
_BESIDE = (
    "params.json", "hparams.yaml", "config.yaml", "args.yaml", "args.json", ".hydra/config.yaml",
    ".hydra/overrides.yaml",
)  # fmt: skip


def _settings_beside(log: Path) -> dict[str, Any]:
    """Return the settings of a run, as `config/NAME`, from the first file of them in its folder."""
    file = next((log.parent / name for name in _BESIDE if (log.parent / name).is_file()), None)
    if file is None:
        return {}
    text = _text(file)
    if file.name == "overrides.yaml":
        content: Any = dict(re.findall(r"(?m)^- \+*([\w.]+)=(.+)$", text))
    else:
        content = json.loads(text) if file.suffix == ".json" else read_yaml(text)
    if isinstance(content, dict):  # W&B writes a value beside its description
        known = {k: v for k, v in content.items() if k not in ("_wandb", "wandb_version")}
        content = {k: v["value"] if isinstance(v, dict) and "value" in v else v for k, v in known.items()}
    config = pd.json_normalize({"config": content}, sep="/").iloc[0].items()
    return {str(name): v for name, v in config if pd.api.types.is_scalar(v) and pd.notna(v)}


def _column(name: str) -> str:
    if means(name) == "loss":
        return name
    return "val_bpb" if re.search(r"bpb|bits", name, re.I) else "loss"


def is_log(head: bytes) -> bool:
    """Return whether text is a training's output, and not a table with a row per run."""
    first = head.decode(errors="replace").splitlines()[:50]
    lines = [line for line in first if not re.search("[:=0-9]", line)]
    heads = [{means(cell) for cell in re.split(r"[,;|\s]+", line)} for line in lines]
    return bool(read_log(head).curves()) and not any("loss" in known and known & {*AXES} for known in heads)


def json_of_a_run(file: Path) -> pd.DataFrame:
    return pd.json_normalize(json.loads(_text(file)), sep="/").assign(**_settings_beside(file))


def is_result(head: bytes) -> bool:
    """Return whether a JSON file has a run's settings and loss."""
    with contextlib.suppress(ValueError):
        known = {means(name) for name in pd.json_normalize(json.loads(head), sep="/")}
        return "loss" in known and bool(known & {*AXES})
    return False


def is_tune_result(head: bytes) -> bool:
    """Return whether result.json begins with a line of Tune, whole or torn, or is empty as after a kill."""
    first = head.partition(b"\n")[0].strip()
    return not first or (first.startswith(b"{") and first != b"{")


def _text(file: Path) -> str:
    return _bytes(file).decode(errors="replace")


def _bytes(file: Path) -> bytes:
    try:
        return read_local(file)
    except OSError as error:
        raise TableError(f"{file} cannot be read: {reason(error)}") from None


_EVENTS = "events.out.tfevents"


def read_project(path: str | Path) -> pd.DataFrame:
    """Read the runs of a tracker, one row per run.

    The path is `wandb:ENTITY/PROJECT`, or `mlflow:EXPERIMENT` of the server or database MLFLOW_TRACKING_URI.
    """
    tracker, _, name = str(path).partition(":")
    with errors_in_a_sentence(str(path)):
        table = TRACKERS[tracker](str(path), name)
    if table.empty:
        raise TableError(f"{path} holds no runs")
    return table


def package(path: str, name: str, module: str) -> Any:
    """Import a module of a package that an extra of ours installs, and hush the package."""
    try:
        imported = importlib.import_module(module)
        for logger in (name, "alembic"):  # MLflow's migrations
            logging.getLogger(logger).setLevel(logging.ERROR)
        return imported
    except ImportError as error:
        extra = extra_with(name) or name
        raise TableError(
            f"{path} needs the package {name} ({reason(error)}): pip install '.[{extra}]'"
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


def _wandb(path: str, project: str) -> pd.DataFrame:
    if len(project.split("/")) != 2 or not all(project.split("/")):
        raise TableError(f"{path} is not wandb:ENTITY/PROJECT")
    runs = package(path, "wandb", "wandb").Api().runs(project, per_page=500, lazy=False)
    rows = [{"Name": r.name, "State": r.state, "config": r.config, **r.summary_metrics} for r in runs]
    return pd.json_normalize(rows, sep="/")


def _mlflow(path: str, experiment: str) -> pd.DataFrame:
    mlflow = package(path, "mlflow", "mlflow")
    if mlflow.get_experiment_by_name(experiment) is None:
        known = ", ".join(sorted(e.name for e in mlflow.search_experiments()))
        raise TableError(f"{path}: {mlflow.get_tracking_uri()} has no such experiment; there are {known}")
    return mlflow.search_runs(experiment_names=[experiment])


TRACKERS = {"wandb": _wandb, "mlflow": _mlflow}  # readers of trackers whose runs are named `TRACKER:…`


def tensorboard(folder: Path) -> pd.DataFrame:
    """Read scalars by run and step, with the run's hyperparameters as `hparams/…`.

    `SummaryWriter.add_hparams` writes into a folder of its own below the run's, which is part of the run.
    """
    hparams = package(str(folder), "tensorboard", "tensorboard.plugins.hparams.plugin_data_pb2")
    runs: dict[Path, tuple[dict[str, Any], list[pd.Series]]] = {}
    for inside in sorted({file.parent for file in folder.rglob(f"*{_EVENTS}*")}):
        events = _events(inside)
        hyperparameters = _settings(events, hparams)
        scalars = []
        for tag in events.Tags()["scalars"]:
            # After a restart a step may be logged twice; its last value counts.
            values = {event.step: event.value for event in events.Scalars(tag)}
            scalars.append(pd.Series(values, name=tag, dtype="float64"))
        parent = runs.get(inside.parent)
        if hyperparameters and parent and not parent[0]:
            parent[0].update(hyperparameters)
            parent[1].extend(scalars)
        else:
            runs[inside] = hyperparameters, scalars
    # At damage TensorBoard's reader stops without a word. `--track tensorboard` writes the last value as
    # `loss`, in folders named by trial_id.
    is_ours = {run: re.fullmatch("[0-9a-f]{16}", run.name) is not None for run in runs}
    names = {run: {scalar.name for scalar in scalars} for run, (_, scalars) in runs.items()}
    if lost := [run for run in runs if not (names[run] & {"loss"} if is_ours[run] else names[run])]:
        warnings.warn(
            f"{len(lost)} of {len(runs)} runs in {folder} are left out, the first {lost[0].name}: "
            "their event files are empty, cut or damaged",
            stacklevel=2,
        )
    tables = [
        pd.concat(scalars, axis=1)
        .rename_axis("step")
        .reset_index()
        .assign(run=os.fspath(run.relative_to(folder)), **{f"hparams/{k}": v for k, v in known.items()})
        for run, (known, scalars) in runs.items()
        if run not in lost
    ]
    if not tables:
        raise TableError(f"{folder} holds no runs")
    return pd.concat(tables, ignore_index=True)


def _events(folder: Path) -> Any:
    module = package(str(folder), "tensorboard", "tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(os.fspath(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def _settings(events: Any, hparams: Any) -> dict[str, Any]:
    try:
        content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    except KeyError:
        return {}
    stored = hparams.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in stored.items()}


def database(file: Path) -> pd.DataFrame:
    """Read the runs in a SQLite database of MLflow or Optuna, by that package."""
    uri = f"sqlite:///{file.absolute()}"
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if {"trials", "studies"} <= tables:
        return _optuna(file, uri)
    if not {"experiments", "runs"} <= tables:
        raise TableError(
            f"{file} is a database of neither MLflow nor Optuna: it has the tables {_some(tables)}"
        )
    mlflow = package(str(file), "mlflow", "mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        runs = mlflow.search_runs(search_all_experiments=True)
        names = {e.experiment_id: e.name for e in mlflow.search_experiments()}
    finally:
        mlflow.set_tracking_uri(before)
    if len(runs) and runs["experiment_id"].nunique() > 1:
        known = _some(map(names.get, runs["experiment_id"].unique()))
        raise TableError(
            f"{file} holds several experiments ({known}): set MLFLOW_TRACKING_URI={uri}, give mlflow:NAME"
        )
    return runs


def optuna_journal(file: Path) -> pd.DataFrame:
    storages = package(str(file), "optuna", "optuna.storages")
    journal = storages.journal.JournalFileBackend(str(file))
    return _optuna(file, storages.JournalStorage(journal))


def _optuna(file: Path, storage: Any) -> pd.DataFrame:
    """Read the trials of the only study, or of several whose names hold their size."""
    optuna = package(str(file), "optuna", "optuna")
    names = optuna.get_all_study_names(storage)
    if len(names) != 1 and not all({"width", "depth", "size"} & {*settings(name)} for name in names or [""]):
        raise TableError(
            f"{file} holds {len(names)} studies ({_some(names)}), not one, and their names "
            "hold no width; write one as a table with study.trials_dataframe().to_csv(...)"
        )
    frames = []
    for name in names:
        study = optuna.load_study(study_name=name, storage=storage)
        trials = study.trials_dataframe(("number", "value", "params", "state"))
        frames.append(trials.assign(run=name) if len(names) > 1 else trials)
    return pd.concat(frames, ignore_index=True)


def _some(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))[:8])


@dataclass(frozen=True)
class Reader:
    """Reader of the runs that one tool writes."""

    tool: str  # Name of the tool, for messages
    files: str  # Pattern of its files' names, such as `trainer_state.json` or `*.db`
    read: Callable[[Path], pd.DataFrame]  # Reads one file; with `of_folder`, all files of a folder
    probe: Callable[[bytes], bool] | None = None
    """Whether the beginning of a file is of this tool; None if its name is enough."""
    of_folder: bool = False  # Whether `read` takes the folder that holds the files
    of_file: bool = True  # Whether a file that is given by its path is read; else only those in a folder

    def matches(self, file: Path) -> bool:
        if not fnmatch(file.name, self.files) or file.is_fifo():  # a pipe is waited for without end
            return False
        try:
            if self.probe is None or not file.is_file():
                return self.probe is None
            with file.open("rb") as opened:
                return self.probe(opened.read(_PROBED))
        except OSError:  # the reader of tables says why
            return False


# Of several readers that match, the first one reads. `TRACKERS` has those of places such as `wandb:…`.
READERS = (
    Reader("Ray Tune", "result.json", tune_result, is_tune_result),
    # Tune writes progress.csv beside result.json, so this is for folders that have lost the latter.
    Reader("Ray Tune", "progress.csv", tune_progress, of_file=False),
    Reader("Lightning", "metrics.csv", lightning, of_file=False),
    Reader("Trainer", "trainer_state.json", trainer),
    Reader("W&B", "wandb-summary.json", json_of_a_run),
    Reader("TensorBoard", "*events.out.tfevents*", tensorboard, of_folder=True, of_file=False),
    *(Reader("Optuna or MLflow", pattern, database) for pattern in ("*.db", "*.sqlite", "*.sqlite3")),
    Reader("Optuna", "*", optuna_journal, lambda head: re.match(rb'\{.*"op_code"', head) is not None),
    *(Reader("training logs", pattern, training_log) for pattern in ("log.txt", "*.log", "*.out")),
    Reader("training logs", "*.txt", training_log, is_log),
    *(Reader("training logs", kind, training_log, is_log, of_file=False) for kind in ("*.jsonl", "*.csv")),
    Reader("JSON files", "*.json", json_of_a_run, is_result, of_file=False),
)


def find_reader(path: str | Path) -> Callable[[str | Path], pd.DataFrame] | None:
    """Return the function that reads somebody's runs at a place; None for a results folder of ours."""
    if str(path).startswith(tuple(f"{tracker}:" for tracker in TRACKERS)):
        return read_project
    place = Path(str(path))
    if _reader_of(place) is not None:
        return read_tool
    if is_file(path):
        return read_file
    is_foreign = place.is_dir() and not (place / STORE_FILE).exists()
    if not is_foreign or next(place.glob(f"*/{STORE_FILE}"), None) is not None:  # a folder of our sweeps
        return None
    # A probe reads files, so it waits until they are read.
    is_read = any(next(place.rglob(reader.files), None) for reader in READERS if reader.files != "*")
    return read_tool if is_read else None


def _reader_of(file: Path) -> Reader | None:
    return _probed(file, file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None


@functools.lru_cache(maxsize=256)
def _probed(file: Path, *_stamp: int) -> Reader | None:
    """Return the reader of a file, which is asked for several times and probed once."""
    return next((reader for reader in READERS if reader.of_file and reader.matches(file)), None)


def is_log_of_one_run(path: str | Path) -> bool:
    reader = _reader_of(Path(str(path)))
    return reader is not None and reader.read is training_log


def read_tool(path: str | Path) -> pd.DataFrame:
    """Read the runs in a folder or file of another tool."""
    place = Path(str(path))
    with errors_in_a_sentence(str(path)):
        if (reader_of_file := _reader_of(place)) is not None:
            return reader_of_file.read(place)
        matches = [(r, sorted(file for file in place.rglob(r.files) if r.matches(file))) for r in READERS]
        matches = [(reader, files) for reader, files in matches if files]
        if not matches:
            raise TableError(f"{path} holds no runs that are read")
        reader, matching = matches[0]
        # Each process of a run writes a log, of the same losses.
        firsts = {(file.parent, _RANK.sub("", file.name)): file for file in reversed(matching)}
        matching = [file for file in matching if file in firsts.values()]
        # Names with a star may be anybody's files.
        others = [file for r, files in matches if "*" not in r.files for file in files]
        folders = {file.parent for file in matching}
        if left := [file for file in others if not folders & {*file.parents}]:
            warnings.warn(
                f"{place} holds runs of several tools: {len(matching)} files {matching[0].name} are read, "
                f"and {len(left)} others are not, such as {left[0]}; give the folder of one tool",
                stacklevel=2,
            )
        if reader.of_folder:
            return reader.read(place)
        rows = []
        for file in matching:
            folder = file.parent.relative_to(place).as_posix()
            name = place.name if folder == "." else folder
            if "*" in reader.files:
                name = file.stem if folder == "." else f"{folder}/{file.stem}"
            with errors_in_a_sentence(str(file)):
                rows.append(reader.read(file).assign(run=name))
        table = pd.concat([frame for frame in rows if len(frame)] or [pd.DataFrame()], ignore_index=True)
    if table.empty:
        raise TableError(f"{path} holds {len(matching)} files {matching[0].name}, and none has a loss")
    return table


def metrics_of(folder: str | Path, loss: str | None = None) -> TrainingLog | None:
    """Read the metrics in the folder of one run, such as a trial's, as if the run had printed them.

    Args:
        folder: searched for `trainer_state.json`, metrics as JSON lines or CSV (Lightning's), TensorBoard's
            events, and a summary as JSON. The newest file of the first kind that holds a loss is read.
        loss: name of the loss, as in `TrainingLog`; by default it is recognised.

    Raises:
        TableError: a file cannot be read, and no other has a loss.
    """
    error: TableError | None = None
    for pattern, read in _METRICS.items():
        files = [file for file in Path(folder).rglob(pattern) if not file.is_fifo()]
        files.sort(key=lambda file: file.lstat().st_mtime, reverse=True)
        for file in files[:_MOST_FILES]:
            try:
                with errors_in_a_sentence(str(file)):
                    if (log := read_log(read(file), loss)).curves():
                        return log
            except TableError as caught:
                error = error or caught
    if error is not None:
        raise error
    return None


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _scalars(file: Path) -> bytes:
    events = _events(file.parent)
    scalars = [(event, tag) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    scalars.sort(key=lambda scalar: (scalar[0].wall_time, scalar[0].step))
    return _lines({"step": event.step, tag: event.value} for event, tag in scalars)


_MOST_FILES = 20  # of a kind in the folder of a run, the newest
_METRICS: dict[str, Callable[[Path], bytes]] = {
    "trainer_state.json": lambda file: _lines(json.loads(_text(file))["log_history"]),
    "*.jsonl": _bytes,
    "*.csv": _bytes,
    f"*{_EVENTS}*": _scalars,
    **dict.fromkeys(("wandb-summary.json", "*metrics*.json", "*results*.json"), _bytes),
}

# Names of all tools, for messages
TOOLS = ", ".join(dict.fromkeys(reader.tool for reader in READERS if reader.tool != "Optuna or MLflow"))
