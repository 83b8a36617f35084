"""Folders on a local disk or at an fsspec URL (gs://, s3://, memory://), each file whole or not there.

On a local disk a file appears by a rename, on an object store by one upload. Errors of a bucket's library
(HTTP answers, missing credentials) become OSErrors, as for a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mup_tpu.errors import ConfigError, StoreError, raised_as
from mup_tpu.files.leftovers import partial, remove_partial, scratch_folder
from mup_tpu.files.local import flush, open_own, read_regular
from mup_tpu.files.remote import BUCKETS, errors_as_oserror, file_system, scheme

NOTICE_S = 15.0
"""Time without an answer of a bucket after which a warning says so."""

UNANSWERED_S = 60.0
"""Time limit of a request to a bucket, besides the time of its bytes at MIN_RATE."""

MIN_RATE = 2**16
"""Bytes a second below which a transfer counts as failed."""

_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """Folder of the caches (tokens, compiled programs): $MUP_TPU_CACHE, or ~/.cache/mup_tpu.

    Raises:
        ConfigError: the variable is not set, and the user has no home folder.
    """
    if folder := os.environ.get("MUP_TPU_CACHE"):
        return Path(folder)
    try:
        return Path.home() / ".cache" / "mup_tpu"
    except RuntimeError:
        raise ConfigError(
            "MUP_TPU_CACHE is not set, and this user has no home folder; set it to a folder"
        ) from None


class Folder:
    """A local folder or fsspec URL, there already or not. Names of files are relative, with `/` between
    parts.

    Raises:
        OSError: the URL is of an unknown kind, or its package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fs, self._root = file_system(os.fspath(path))
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._is_bucket = scheme(os.fspath(path)) in BUCKETS
        self.path: str = self._root if self.is_local else os.fspath(path).rstrip("/")
        """Absolute local path, or the URL: it names the same folder in every process."""

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """Names of files and folders in this one, sorted; none if it is not there."""
        if self.is_local:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return sorted(os.listdir(self._root))
            return []
        # Cloud consoles make a folder of a bucket by an empty object `folder/`, which is in its own listing.
        inside = [path.rstrip("/") for path in self._listed(False) if path.rstrip("/") != self._root]
        return sorted(path.rsplit("/", 1)[-1] for path in inside)

    def _listed(self, detail: bool) -> list[Any]:
        with self._asking():
            self._fs.invalidate_cache()  # others may have written since
            try:
                return list(self._fs.ls(self._root, detail=detail, **self._limit()))
            except FileNotFoundError:
                return []

    def require_bucket(self) -> None:
        """Check that the bucket of a URL is there; an empty list of names does not tell.

        Raises:
            OSError: the bucket is not there, or does not answer.
        """
        if not self._is_bucket:
            return
        with self._bucket_errors():
            self._fs.invalidate_cache()
            self._fs.ls(self._root.partition("/")[0], detail=False, **self._limit())

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file in this folder, by sorted name; none if it is missing."""
        if self.is_local:
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(self._root) as entries,
            ):
                found = {}
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        found[entry.name] = entry.stat().st_size
                return dict(sorted(found.items()))
            return {}
        files = {d["name"].rsplit("/", 1)[-1]: d["size"] for d in self._listed(True) if d["type"] == "file"}
        return {name: int(size) for name, size in sorted(files.items()) if name}

    def read(self, name: str, most: int | None = None) -> bytes:
        """Content of a file.

        Raises:
            OSError: the file is not there, cannot be read, is too large or not regular, such as a named pipe.
        """
        if self.is_local:
            return read_regular(self._at(name), most)
        with self._asking():
            return bytes(self._fs.cat_file(self._at(name)))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with self._asking():
            return int(self._fs.size(self._at(name), **self._limit()))

    def write(self, name: str, content: bytes, flushed: bool = True) -> None:
        """Put a file in place, over an earlier one; on return it is on disk, unless `flushed` is False."""
        if not self.is_local:
            return self._upload(name, content)
        with self.writing(name, flushed) as path:
            path.write_bytes(content)

    def create(self, name: str, content: bytes) -> None:
        """Write a file that is not there yet; only one of several writers succeeds.

        Raises:
            OSError: the file cannot be written, or is there. A service that tries again by itself may say so
                of a file that it wrote.
        """
        if not self.is_local:
            return self._upload(name, content, mode="create")
        self._make_room(name)
        target = Path(self._at(name))
        with partial(target) as made:
            made.write_bytes(content)
            flush(made)
            try:
                os.link(made, target)
            except FileExistsError:
                raise
            except OSError:  # a disk without hard links
                with target.open("xb") as file:
                    file.write(content)

    def _upload(self, name: str, content: bytes, **options: Any) -> None:
        with self._bucket_errors():
            self._make_room(name)
            self._fs.pipe_file(self._at(name), content, **options, **self._limit(len(content)))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """A local path to read a file at: its own, or a copy's for the length of the block."""
        if self.is_local:
            yield Path(self._at(name))
            return
        with scratch_folder() as scratch:
            copy = scratch / "file"
            with self._asking():
                self._fs.get_file(self._at(name), str(copy))
            yield copy

    @contextlib.contextmanager
    def writing(self, name: str, flushed: bool = True) -> Iterator[Path]:
        """A local path to write a file to; the file is put in place when the block ends without an error."""
        target = self._at(name)
        if not self.is_local:
            with scratch_folder() as scratch:
                made = scratch / "file"
                yield made
                with self._bucket_errors():
                    self._make_room(name)
                    self._fs.put_file(str(made), target, **self._limit(made.stat().st_size))
            return
        self._make_room(name)
        with partial(Path(target)) as made:
            yield made
            if flushed:
                flush(made)
            made.replace(target)

    def remove(self, *names: str) -> None:
        """Remove files, and folders with their contents; a missing one is no error."""
        for name in names:
            self._remove(self._at(name))

    def append_to(self, name: str) -> TextIOWrapper:
        """Open a file of a local folder to append to; see `open_own`.

        Raises:
            OSError: the file cannot be opened, or it or a folder on the way to it is a link.
        """
        self._make_room(name)
        return open_own(self._at(name), self._root)

    @contextlib.contextmanager
    def locked(self, name: str, busy: str | None = None) -> Iterator[None]:
        """Lock that one process holds for the length of a block; a bucket has none.

        The system frees it however the process ends.

        Args:
            name: file of the lock, with the name of its last holder.
            busy: error if another process holds the lock, with {who} for its name; None waits for it.

        Raises:
            StoreError: the file cannot be opened, or the lock is held.
        """
        if not self.is_local:
            yield
            return
        with raised_as(StoreError, f"{self}/{name} cannot be opened"):
            file = self.append_to(name)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except BlockingIOError:
                who = os.pread(file.fileno(), 200, 0).decode(errors="replace").strip() or "another process"
                raise StoreError((busy or "").replace("{who}", who)) from None
            if busy:
                file.truncate(0)
                file.write(f"process {os.getpid()} of {platform.node()}")
                file.flush()
            yield

    def remove_leftovers(self) -> None:
        """Remove half-written files of this machine's killed processes, here and in folders below."""
        if self.is_local:
            remove_partial(Path(self._root))

    def remove_all(self) -> None:
        """Remove this folder with its contents."""
        self._remove(self._root)

    def _remove(self, path: str) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True, **self._limit())

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_room(self, name: str) -> None:
        if not self._is_bucket:  # a bucket has no folders, and s3fs would make a bucket of a mistyped name
            self._fs.makedirs(self._at(name).rsplit("/", 1)[0], exist_ok=True)

    def _limit(self, size: int = 0) -> dict[str, float]:
        """Time limit of a transfer, as an option of fsspec; s3fs would wait without end."""
        return {"timeout": UNANSWERED_S + size / MIN_RATE} if self._is_bucket else {}

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise errors as OSErrors, and warn if a bucket does not answer for long."""
        waits = threading.Timer(
            NOTICE_S, _log.warning, ["%s has not answered for %g s: still waiting", self, NOTICE_S]
        )
        waits.daemon = True
        if self._is_bucket:
            waits.start()
        try:
            with errors_as_oserror():
                yield
        finally:
            waits.cancel()

    @contextlib.contextmanager
    def _bucket_errors(self) -> Iterator[None]:
        with self._asking():
            try:
                yield
            except FileNotFoundError:
                if not self._is_bucket:
                    raise
                # The text of gcsfs is the address alone.
                raise OSError(f"there is no bucket {self._root.partition('/')[0]}") from None
