"""Checkpoints of a pack: one folder, safetensors and JSON, written whole or not at all.

A pack of 16 is one checkpoint. The folder appears by a rename once everything in it is on disk, and carries a
checksum, so that a torn one is recognised and the one before it taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mup_tpu.errors import StoreError

KEEP = 2
"""Checkpoints kept: the last, and one before it in case the last is damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """What a pack needs to go on."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Write the checkpoint of `step`, then drop all but the last `KEEP`.

    Args:
        folder: the pack's folder of checkpoints.
        step: steps done.
        tensors: named tensors, from any device.
        meta: plain values for meta.json.

    Raises:
        StoreError: the folder cannot be written; earlier checkpoints stay.
    """
    target = folder / f"step-{step:08d}"
    partial = folder / f".partial-{step:08d}-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, partial / "tensors.safetensors")
        content = {"step": step, "sha256": _checksum(partial / "tensors.safetensors"), **meta}
        (partial / "meta.json").write_text(json.dumps(content))
        for path in partial.iterdir():
            _flush_to_disk(path)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(f"checkpoint folder {folder} cannot be written: {error.strerror}") from None
    for old in _steps(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_latest(folder: Path) -> Checkpoint | None:
    """The last checkpoint that is whole, or None; says so when it passes over a damaged one."""
    for path in reversed(_steps(folder)):
        try:
            meta = json.loads((path / "meta.json").read_text())
            if _checksum(path / "tensors.safetensors") != meta["sha256"]:
                raise ValueError("its checksum does not match")
            return Checkpoint(meta["step"], load_file(path / "tensors.safetensors"), meta)
        except (OSError, ValueError, KeyError) as error:
            warnings.warn(f"checkpoint {path} is damaged ({error}); taking the one before it", stacklevel=2)
    return None


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
