"""The run table on disk: Parquet parts, each written whole or not at all, read back as one pandas table.

A results folder holds one experiment:

    results/lr_transfer/store.json        which experiment, which format
    results/lr_transfer/runs/*.parquet    one row a trial
    results/lr_transfer/curves/*.parquet  learning curves, keyed by trial_id

Writers only ever add parts, so any number of them may write at once and a kill leaves no damaged file. A row
written twice (by two drivers, or by a compaction that was killed) is one row when read. Paths may be fsspec
URLs (`gs://`, `memory://`), where a write is one atomic upload.
"""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mup_tpu.errors import StoreError, reason
from mup_tpu.files import Folder

FORMAT = 1

FINAL = ("finished", "diverged", "stopped")
"""Statuses that are results; "failed" and "preempted" trials are run again."""

_RUN_TYPES = {
    "experiment": pa.string(),
    "trial_id": pa.string(),
    "parametrization": pa.string(),
    "width": pa.int64(),
    "base_width": pa.int64(),
    "depth": pa.int64(),
    "heads": pa.int64(),
    "head_size": pa.int64(),
    "growing": pa.string(),
    "tied": pa.bool_(),
    "params": pa.int64(),
    "params_non_embedding": pa.int64(),
    "optimizer": pa.string(),
    "lr": pa.float64(),
    "weight_decay": pa.float64(),
    "decay_mode": pa.string(),
    "schedule": pa.string(),
    "warmup_steps": pa.int64(),
    "grad_clip": pa.float64(),
    "eps": pa.float64(),
    "beta1": pa.float64(),
    "beta2": pa.float64(),
    "init_std": pa.float64(),
    "alpha_in": pa.float64(),
    "alpha_out": pa.float64(),
    "alpha_attn": pa.float64(),
    "readout_zero_init": pa.bool_(),
    "seed": pa.int64(),
    "data_seed": pa.int64(),
    "batch_size": pa.int64(),
    "sequence_length": pa.int64(),
    "steps_planned": pa.int64(),
    "steps_done": pa.int64(),
    "tokens": pa.int64(),
    "dataset": pa.string(),
    "data_fingerprint": pa.string(),
    "loss": pa.float64(),
    "loss_kind": pa.string(),
    "status": pa.string(),
    "reason": pa.string(),
    "wall_time_s": pa.float64(),
    "device": pa.string(),
    "precision": pa.string(),
    "pack_size": pa.int64(),
    "versions": pa.string(),
    "git_commit": pa.string(),
    "config": pa.string(),
    "finished_at": pa.string(),
}
_CURVE_TYPES = {
    "trial_id": pa.string(),
    "step": pa.int64(),
    "tokens": pa.int64(),
    "split": pa.string(),
    "loss": pa.float64(),
}
_SCHEMAS = {"runs": pa.schema(list(_RUN_TYPES.items())), "curves": pa.schema(list(_CURVE_TYPES.items()))}


class Store:
    """A results folder, open for writing.

    Args:
        path: local folder or fsspec URL; made where it is not there.
        experiment: name of the experiment whose rows it takes.

    Raises:
        StoreError: the folder cannot be written, or holds another experiment.
    """

    def __init__(self, path: str | os.PathLike[str], experiment: str) -> None:
        self.folder = results_folder(path)
        self.experiment = experiment
        held = _read_header(self.folder)
        if held is None:
            _write(self.folder, "store.json", json.dumps(_header(experiment)).encode())
        elif held["experiment"] != experiment:
            raise StoreError(
                f"results folder {self.folder} holds experiment {held['experiment']!r}, not {experiment!r}; "
                "give this one a folder of its own"
            )

    def append(self, rows: Iterable[Mapping[str, Any]], curves: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add rows of the run table and their curve points; on return they are on disk.

        Curves go first: a row in the run table says that all of its trial is there.

        Raises:
            StoreError: the folder cannot be written; nothing stored before is touched.
        """
        curves, rows = list(curves), [{"experiment": self.experiment, **row} for row in rows]
        part = uuid.uuid4().hex
        for table, records in (("curves", curves), ("runs", rows)):
            if records:
                _write(self.folder, f"{table}/{part}.parquet", _parquet(records, _SCHEMAS[table]))

    def done(self, stopped: bool = True) -> set[str]:
        """trial_ids whose result is stored, those that were stopped early among them or not."""
        runs = _read_table(self.folder, "runs")
        final = runs["status"].isin(FINAL) & (stopped | (runs["status"] != "stopped"))
        return set(runs.loc[final, "trial_id"])

    def compact(self) -> None:
        """Merge all parts into one of each table (a folder to commit is easier to look at)."""
        for table in ("runs", "curves"):
            parts = _parts(self.folder, table)
            if len(parts) > 1:
                merged = pa.Table.from_pandas(_read_table(self.folder, table), preserve_index=False)
                _write(self.folder, f"{table}/{uuid.uuid4().hex}.parquet", _parquet_bytes(merged))
                self.folder.remove(*parts)


def results_folder(path: str | os.PathLike[str]) -> Folder:
    """A results folder by its local path or fsspec URL.

    Raises:
        StoreError: the URL is of a kind that is not known, or whose package is not installed.
    """
    try:
        return Folder(path)
    except OSError as error:
        raise StoreError(f"results folder {path} cannot be opened: {reason(error)}") from None


def load_runs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The run table of a results folder, one row a trial.

    Args:
        path: local folder or fsspec URL.

    Raises:
        StoreError: there is no such folder, or it holds no runs.
    """
    folder = results_folder(path)
    if _read_header(folder) is None:
        raise StoreError(f"results folder {path} holds no store (no store.json in it)")
    runs = _read_table(folder, "runs")
    if runs.empty:
        raise StoreError(f"results folder {path} holds no runs yet")
    order = ["parametrization", "width", "lr", "seed", "trial_id"]
    return runs.sort_values(order, ignore_index=True)


def load_curves(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Learning curves of a results folder: trial_id, step, tokens, split, loss (nat per token)."""
    return _read_table(results_folder(path), "curves").sort_values(
        ["trial_id", "split", "step"], ignore_index=True
    )


def _header(experiment: str) -> dict[str, Any]:
    return {"experiment": experiment, "format": FORMAT}


def _read_header(folder: Folder) -> dict[str, Any] | None:
    try:
        header = json.loads(folder.read("store.json"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise StoreError(f"results folder {folder} cannot be read: store.json: {error}") from None
    if header.get("format") != FORMAT:
        raise StoreError(
            f"results folder {folder} has store format {header.get('format')!r}; this version reads {FORMAT}"
        )
    return header


def _parts(folder: Folder, table: str) -> list[str]:
    return [f"{table}/{name}" for name in (folder / table).names() if name.endswith(".parquet")]


def _read_table(folder: Folder, table: str) -> pd.DataFrame:
    tables = []
    try:
        parts = _parts(folder, table)
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be read: {reason(error)}") from None
    for part in parts:
        try:
            tables.append(pq.read_table(io.BytesIO(folder.read(part))))
        except FileNotFoundError:
            continue  # merged into another part by a compaction since the listing
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"part {folder}/{part} of the results folder cannot be read: {error}") from None
    whole = pa.concat_tables([_SCHEMAS[table].empty_table(), *tables], promote_options="permissive")
    frame = whole.to_pandas()
    if table == "curves":
        return frame.drop_duplicates(["trial_id", "split", "step"], keep="last", ignore_index=True)
    # A whole run outranks one that was stopped early, and that a failure; of two equals the first stays.
    rank = frame["status"].map({"finished": 0, "diverged": 0, "stopped": 1}).fillna(2)
    return frame.iloc[rank.argsort(kind="stable")].drop_duplicates("trial_id", ignore_index=True)


def _parquet(records: list[Mapping[str, Any]], schema: pa.Schema) -> bytes:
    extra = sorted({key for record in records for key in record} - set(schema.names))
    fields = [*schema, *(pa.field(k, pa.array([r.get(k) for r in records]).type) for k in extra)]
    return _parquet_bytes(pa.Table.from_pylist([dict(r) for r in records], pa.schema(fields)))


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _write(folder: Folder, name: str, content: bytes) -> None:
    try:
        folder.write(name, content)
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be written: {reason(error)}") from None
