"""Checkpoints of a pack, in a local folder or at an fsspec URL: safetensors and JSON, whole or not counted.

A pack of 16 is one checkpoint:

    step-00000500/tensors.safetensors   parameters, optimizer state and losses of all members
    step-00000500/meta.json             written last, with checksums of both files: it makes this a checkpoint

Object stores have no rename, so meta.json is the marker in both kinds of folder. Without a valid one, the
checkpoint is half-written or damaged, and the previous one is used. Several drivers may train the same pack:
each writes the same tensors; a driver that ends removes them, and the others write theirs again.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mup_tpu.config import Trial
from mup_tpu.errors import StoreError, raised_as, reason
from mup_tpu.files import Folder, checksum, patiently, require_seal, sealed
from mup_tpu.training import open_steps

KEEP = 2  # Checkpoints kept: the last, and the previous one in case the last is damaged

_TENSORS, _META = "tensors.safetensors", "meta.json"

# A checkpoint is written so often if another driver removes the folder meanwhile.
_TRIES = 5


@dataclass(frozen=True)
class Checkpoint:
    """State of a pack after a step."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save(
    path: str | os.PathLike[str], step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write the checkpoint of `step`; then drop all except the last `KEEP` and open ones.

    If others remove the folder each time that it is written, training goes on with a warning. Of the plain
    values `meta`, `trial_ids` names the pack, and `is_open` says that a longer run can go on from here.
    """
    on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    for left in reversed(range(_TRIES)):
        try:
            folder = Folder(path)
            content = {"step": step, **meta}
            patiently(partial(_write, folder, f"step-{step:08d}", on_host, content))
            break
        except (OSError, SafetensorError) as error:
            # FileExistsError: another process made and removed the folder, or a file is in its place.
            gone = isinstance(error, FileNotFoundError)
            gone |= isinstance(error, FileExistsError) and not os.path.isfile(error.filename or path)
            if left and gone:
                continue
            if not gone:
                raise StoreError(f"checkpoint folder {path} cannot be written: {reason(error)}") from None
            # Another driver that is ahead with this pack always removes checkpoints older than its last.
            warnings.warn(
                f"the checkpoint of step {step} in {path} was removed each of {_TRIES} times that it was "
                "written, as by another driver of the same trials that is ahead; training goes on without it",
                stacklevel=2,
            )
            return
    with contextlib.suppress(OSError):  # the next checkpoint tries again
        _drop_old(folder, content)


def _write(folder: Folder, name: str, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    folder.remove(f"{name}/{_META}")
    with folder.writing(f"{name}/{_TENSORS}") as file:
        file.touch()  # raises where the folder is gone or may not be written
        try:
            save_file(tensors, file)
        except SafetensorError:
            if not file.exists():  # removed since then; the error of safetensors does not say so
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from None
            raise
        content["sha256"] = checksum(file)
    # Without a checksum nobody could tell a changed step or status from the true one.
    folder.write(f"{name}/{_META}", json.dumps(sealed(content)).encode())


class CheckpointWriter:
    """Writes a pack's checkpoints in a thread while the pack trains on, one at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[None] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Start `save` in the thread; return once all is in host memory, after the previous checkpoint."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._in_flight = self._thread.submit(save, self._path, step, copies, copy.deepcopy(meta))

    def wait(self) -> None:
        write, self._in_flight = self._in_flight, None
        if write is not None:
            write.result()

    def close(self) -> None:
        # Only a warning: a pack at its end must not lose its results.
        try:
            self.wait()
        except StoreError as error:
            warnings.warn(str(error), stacklevel=2)


def _reading(folder: object) -> contextlib.AbstractContextManager[None]:
    return raised_as(StoreError, f"checkpoint folder {folder} cannot be read")


def load_latest(path: str | os.PathLike[str]) -> Checkpoint | None:
    with _reading(path):
        folder = Folder(path)
        return _first_whole(folder, reversed(_steps(folder)))


def _first_whole(folder: Folder, names: Iterable[str]) -> Checkpoint | None:
    for name in names:
        try:
            meta = _read_meta(folder, name)
            with folder.reading(f"{name}/{_TENSORS}") as file:
                if checksum(file) != meta["sha256"]:
                    raise ValueError("its checksum does not match")
                return Checkpoint(meta["step"], load_file(file), meta)
        except FileNotFoundError:
            why = "half-written: a file of it is missing"
        except (ValueError, RecursionError, SafetensorError) as error:
            why = str(error)
        warnings.warn(
            f"checkpoint {folder}/{name} is damaged ({why}); taking the one before it", stacklevel=4
        )
    return None


def _drop_old(folder: Folder, written: Mapping[str, Any]) -> None:
    """Keep the pack's last checkpoints up to the new one, and open ones.

    Later ones are damaged: otherwise the pack would have gone on from them.
    """
    names = _steps(folder)
    metas, ids = _metas(folder).items(), written.get("trial_ids")
    of_pack = {n: m for n, m in metas if m["step"] <= written["step"] and m.get("trial_ids") == ids}
    open_ones = [name for name, meta in of_pack.items() if meta.get("is_open")]
    kept = {*list(of_pack)[-KEEP:], *open_ones}
    folder.remove(*(name for name in names if name not in kept))


def _steps(folder: Folder) -> list[str]:
    return [name for name in folder.names() if re.fullmatch(r"step-\d{8,}", name)]


def _metas(folder: Folder) -> dict[str, dict[str, Any]]:
    metas = {}
    for name in _steps(folder):
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            metas[name] = _read_meta(folder, name)
    return metas


def _read_meta(folder: Folder, name: str) -> dict[str, Any]:
    """Read a checkpoint's meta.json; ValueError if it is damaged."""
    meta: dict[str, Any] = json.loads(folder.read(f"{name}/{_META}"))
    require_seal(meta, _META)
    return meta


def begin(
    before: str,
    shorter: Sequence[Trial],
    folder: str,
    trials: Sequence[Trial],
    trial_id: Callable[[Trial], str],
) -> int:
    """Write a checkpoint for a pack to go on from, made of one of the same pack with fewer steps.

    `before` is the folder of the shorter pack, `folder` that of this one. Updates of both must agree up to
    the checkpoint, so it has at most `open_steps` steps. Return its steps; 0 without such a checkpoint.
    """
    ids, shorter_ids = ([trial_id(trial) for trial in some] for some in (trials, shorter))
    latest = load_latest(folder)
    if latest is not None and latest.meta.get("trial_ids") == ids:
        return latest.step
    most = min(map(open_steps, [*shorter, *trials]))
    with _reading(before):
        source = Folder(before)
        metas = _metas(source)
        names = [n for n, m in metas.items() if 0 < m["step"] <= most and m.get("trial_ids") == shorter_ids]
        part = _first_whole(source, reversed(names))
    if part is None:
        return 0
    losses_SK = torch.full((trials[0].train.steps, len(trials)), torch.nan, dtype=torch.float64)
    losses_SK[: part.step] = part.tensors["losses_SK"][: part.step]
    save(folder, part.step, part.tensors | {"losses_SK": losses_SK}, part.meta | {"trial_ids": ids})
    return part.step
