"""Results folders by their path, and errors about them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Literal

from mup_tpu.errors import StoreError, raised_as
from mup_tpu.files import Folder, patiently

LOCK = "store.lock"
"""File that writers of the header or of predictions lock; a bucket has no locks."""


def results_folder(path: str | os.PathLike[str]) -> Folder:
    """A results folder by its local path or fsspec URL.

    Raises:
        StoreError: the URL is of an unknown kind, or its package is not installed.
    """
    with accessed(path, "opened"):
        return Folder(path)


def read_if_there(folder: Folder, file: str, most: int | None = None) -> bytes | None:
    """Content of a file of a results folder; None if it is not there."""
    with accessed(folder, "read", file):
        try:
            return folder.read(file, most)
        except (FileNotFoundError, NotADirectoryError):
            return None


def write_whole(folder: Folder, file: str, content: bytes) -> None:
    """Put a file of a results folder in place; try again while a bucket cannot be reached."""
    with accessed(folder, "written", file):
        patiently(lambda: folder.write(file, content))


def accessed(
    folder: object, how: Literal["opened", "read", "written"], file: str = ""
) -> AbstractContextManager[None]:
    """Raise errors of the file system as StoreErrors, which name the file where it is known."""
    return raised_as(StoreError, f"results folder {folder} cannot be {how}{file and f': {file}'}")
