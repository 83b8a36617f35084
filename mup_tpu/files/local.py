"""Local files: written beside their name, and renamed to it when they are on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def short_hash(content: bytes | str) -> str:
    """Return the first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def near(path: str) -> str:
    """Write a path below the present folder without it; others, and URLs, are returned as they are."""
    return os.path.relpath(path) if os.path.isabs(path) and Path(path).is_relative_to(os.getcwd()) else path


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Most bytes of a user's file, unpacked: every reader then ends within about a minute, in a few GB of memory.
MOST_BYTES = 2**27
MOST_BYTES_OF_CONFIG = 2**20  # YAML and TOML are parsed at 100 kB a second


def read_local(path: str | os.PathLike[str], most: int | None = MOST_BYTES) -> bytes:
    """Read a local file; raise OSError if it has more bytes than are read."""
    with open(path, "rb") as file:
        return bounded(file, most)


def bounded(file: IO[bytes], most: int | None = MOST_BYTES) -> bytes:
    """Read a file to its end, unless it is endless or a bomb; raise OSError if it has too many bytes."""
    content = file.read() if most is None else file.read(most + 1)
    require_size(len(content), most)
    return content


def require_size(size: float, most: int | None = MOST_BYTES) -> None:
    if most is not None and size > most:
        raise OSError(f"it has more than {most:,} bytes unpacked, the most that is read")


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def partial(target: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path beside a target; it is renamed to the target, or removed if the block fails."""
    path = target.with_name(f".partial-{uuid.uuid4().hex}")
    path.mkdir() if folder else path.touch(exist_ok=False)
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mup_tpu_", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
