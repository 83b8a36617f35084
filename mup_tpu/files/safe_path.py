"""Python processes that look for no module in the working folder: anybody may have put files there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "PYTHONSAFEPATH"
"""Environment variable that has Python leave the working folder off the path of modules (`-P`)."""


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Have Python processes that start in the block leave the working folder off their path of modules."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def is_needed(folder: str) -> bool:
    """Whether this package itself is found in a folder of the path of modules, as in a checkout."""
    return os.path.realpath(folder) == str(Path(__file__).resolve().parents[2])


def leave_working_folder() -> None:
    """Take the working folder off this process's path, where `python -m` has put it first."""
    if not sys.flags.safe_path and sys.path and not is_needed(sys.path[0]):
        del sys.path[0]
