"""Shared by tests that look for processes: other tests, beside them, have their own."""

import contextlib
import os
from collections.abc import Callable

import psutil
import pytest


@pytest.fixture
def is_of_these_tests() -> Callable[[psutil.Process], bool]:
    """Whether a process was started by these tests or by what they have started, whoever its parent is.

    Not those of the shared local Ray, which may have been started before the tests had a cache of their own.
    """

    def is_of_these_tests(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
            return process.environ().get("MUP_TPU_CACHE") == os.environ["MUP_TPU_CACHE"]
        return False

    return is_of_these_tests
