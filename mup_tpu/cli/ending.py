"""The end of a command: an error that the user can mend becomes one sentence and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mup_tpu.cli.console import Console, discard_output, prepare_streams
from mup_tpu.errors import MupTpuError, not_installed, reason


def guard(call: Callable[[], Any]) -> None:
    """Run a command; an error that the user can mend becomes one sentence and an exit code."""
    prepare_streams()
    Console.failure = None
    try:
        call()
        sys.stdout.flush()  # while errors still become sentences
        if Console.failure is not None:
            raise Console.failure
    except MupTpuError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not _is_for_training(missing):
            raise
        _fail(f"this command {not_installed(missing)}", 2)
    except KeyboardInterrupt as interrupt:
        Console(stderr=True).print(str(interrupt) or "stopped", style="yellow")
        with contextlib.suppress(OSError):  # Ctrl-C ends a reader of the output too
            sys.stdout.flush()
        # At exit libraries would wait for threads, and the interrupt may have left those hanging.
        os._exit(130)
    except OSError as error:
        _end_for_the_system(error)


def _end_for_the_system(error: OSError) -> None:
    """End for a closed pipe, a full disk, a long name or a missing folder; raise any other error again."""
    if error.errno == errno.EPIPE:
        discard_output()  # the reader has read enough
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        discard_output()
        _fail(f"{reason(error)}; stored results are kept, and the same command goes on", 2)
    elif error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        _fail(f"{shown!r} is too long for the name of a file or folder; give a shorter one", 2)
    elif not _is_there(os.curdir):
        _fail("the working folder is gone; change to one that is there", 2)
    else:
        raise error


def _is_there(folder: str) -> bool:
    try:
        os.listdir(folder)
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _fail(sentence: str, code: int) -> NoReturn:
    """End with a sentence on stderr."""
    Console(stderr=True).print(f"error: {sentence}", style="red")
    sys.exit(code)


def _is_for_training(package: str) -> bool:
    """Whether the extra `train` installs a package that is imported by its own name."""
    try:
        asked = importlib.metadata.requires("mup_tpu") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return package != "mup_tpu"
    return package in {
        re.split(r"\W", line, maxsplit=1)[0] for line in asked if "extra == 'train'" in line.replace('"', "'")
    }
