"""Results folders by their path, and errors about them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Literal

from mup_tpu.errors import StoreError, raised_as
from mup_tpu.files import Folder


def results_folder(path: str | os.PathLike[str]) -> Folder:
    """A results folder by its local path or fsspec URL.

    Raises:
        StoreError: the URL is of an unknown kind, or its package is not installed.
    """
    with accessed(path, "opened"):
        return Folder(path)


def accessed(
    folder: object, how: Literal["opened", "read", "written"], file: str = ""
) -> AbstractContextManager[None]:
    """Raise errors of the file system as StoreErrors, which name the file where it is known."""
    return raised_as(StoreError, f"results folder {folder} cannot be {how}{file and f': {file}'}")
