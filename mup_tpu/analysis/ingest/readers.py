"""Readers of other tools' runs: one entry each in `READERS`, with the files that it reads.

A reader returns a row a run, or a row a step of a run, under the tool's names of columns. What these mean is
told by `table_columns.find_columns`; `Reader.columns` names the ones that it could not tell. Settings that a
tool keeps in names of folders are found by `run_names`, from the column `run`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pandas as pd

from mup_tpu.analysis.ingest import tools
from mup_tpu.analysis.ingest.table_files import is_file, read_file
from mup_tpu.errors import TableError
from mup_tpu.store.header import FILE as STORE
from mup_tpu.store.runs import LOG_FILE

_OURS = (STORE, LOG_FILE)


@dataclass(frozen=True)
class Reader:
    """Reader of the runs that one tool writes."""

    tool: str
    """Name of the tool, for messages."""
    files: str
    """Pattern of the names of its files, as `trainer_state.json` or `*.db`."""
    read: Callable[[Path], pd.DataFrame]
    """Reads one file; with `of_folder`, all files of a folder."""
    probe: Callable[[bytes], bool] | None = None
    """Whether a file's first line is of this tool; None if its name is enough."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The tool's names of columns, with ours."""
    of_folder: bool = False
    """Whether `read` takes the folder that holds the files."""
    of_file: bool = True
    """Whether a file that is given by its path is read; else only those in a folder."""

    def matches(self, file: Path) -> bool:
        if not fnmatch(file.name, self.files):
            return False
        try:
            if self.probe is None or not file.is_file():
                return self.probe is None
            with file.open("rb") as opened:
                return self.probe(opened.readline(2**20))
        except OSError:  # the reader of tables says why
            return False

    def found_in(self, folder: Path) -> list[Path]:
        return sorted(file for file in folder.rglob(self.files) if self.matches(file))


# All readers; of several that match, the first one reads. `tools.TRACKERS` reads places as `wandb:…`.
READERS = (
    Reader("Ray Tune", "result.json", tools.tune_result, tools.is_tune_result),
    # Tune writes progress.csv beside result.json, so this is for folders that have lost the latter.
    Reader("Ray Tune", "progress.csv", tools.tune_progress, of_file=False),
    Reader("Lightning", "metrics.csv", tools.lightning, of_file=False),
    Reader("Trainer", "trainer_state.json", tools.trainer),
    Reader("W&B", "wandb-summary.json", tools.wandb_run),
    Reader("Hydra", "metrics.json", tools.hydra_run, of_file=False),
    Reader("MLflow", "meta.yaml", tools.mlflow_run, tools.is_mlflow_run, of_file=False),
    Reader("nanoGPT", "log.txt", tools.training_log),
    Reader("nanoGPT", "*.out", tools.training_log),
    Reader("W&B", "*.json", tools.wandb_dump, of_file=False),
    Reader("TensorBoard", "*events.out.tfevents*", tools.tensorboard, of_folder=True, of_file=False),
    Reader("W&B", "run-*.wandb", tools.offline_wandb, of_folder=True, of_file=False),
    Reader("Aim", "*.csv", tools.aim_export, tools.is_aim_export),
    *(Reader("Optuna or MLflow", pattern, tools.database) for pattern in ("*.db", "*.sqlite", "*.sqlite3")),
    Reader("Optuna", "*", tools.optuna_journal, tools.is_optuna_journal),
)


def find_reader(path: str | Path) -> Callable[[str | Path], pd.DataFrame] | None:
    """Return the function that reads somebody's runs at a place; None for a results folder of ours."""
    if str(path).startswith(tuple(f"{tracker}:" for tracker in tools.TRACKERS)):
        return tools.read_project
    place = Path(str(path))
    if place.is_file() and any(reader.of_file and reader.matches(place) for reader in READERS):
        return read_tool
    if is_file(path):
        return read_file
    is_foreign = place.is_dir() and not any((place / name).exists() for name in _OURS)
    if not is_foreign or next(place.glob(f"*/{STORE}"), None) is not None:  # a folder of our sweeps
        return None
    # A probe reads files, so it waits until they are read.
    is_read = any(next(place.rglob(reader.files), None) for reader in READERS if reader.files != "*")
    return read_tool if is_read else None


def read_tool(path: str | Path) -> pd.DataFrame:
    """Read the runs in a folder or file of another tool.

    Raises:
        TableError: it cannot be read, holds several studies or experiments, or no loss.
    """
    place = Path(str(path))
    with tools.errors_in_a_sentence(str(path)):
        if place.is_file():
            reader = next(r for r in READERS if r.of_file and r.matches(place))
            return reader.read(place).rename(columns=dict(reader.columns))
        matches = [(reader, files) for reader in READERS if (files := reader.found_in(place))]
        if not matches:
            raise TableError(f"{path} holds no runs that are read")
        # A reader of a whole folder leaves a damaged run out, and says so.
        alone = [file for reader, files in matches if not reader.of_folder for file in files]
        if other := next((file for file in alone if not file.is_file()), None):
            raise TableError(f"{other} is not a regular file: take it away")
        reader, matching = matches[0]
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
            name = file.stem if "*" in reader.files else place.name if folder == "." else folder
            with tools.errors_in_a_sentence(str(file)):
                rows.append(reader.read(file).assign(run=name))
        table = pd.concat([frame for frame in rows if len(frame)] or [pd.DataFrame()], ignore_index=True)
    if table.empty:
        raise TableError(f"{path} holds {len(matching)} files {matching[0].name}, and none has a loss")
    return table.rename(columns=dict(reader.columns))


# Names of all tools, for messages
TOOLS = ", ".join(dict.fromkeys(reader.tool for reader in READERS if reader.tool != "Optuna or MLflow"))
