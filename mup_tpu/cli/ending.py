"""The end of a command: errors that the user can mend become one sentence and an exit code."""

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
    """Run a command; errors that are the user's to mend become one sentence and exit code 2."""
    prepare_streams()
    Console.failure = None
    try:
        call()
        sys.stdout.flush()  # here, where what goes wrong becomes a sentence
        if Console.failure is not None:
            raise Console.failure
    except MupTpuError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not _is_for_training(missing):
            raise
        _fail(f"this command {not_installed(missing)}", 2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped", style="yellow")
        with contextlib.suppress(OSError):  # Ctrl-C reaches a reader of ours too
            sys.stdout.flush()
        # What libraries do at exit waits for threads, which an interrupt may have left without partners.
        os._exit(130)
    except OSError as error:
        _end_for_the_system(error)


def _end_for_the_system(error: OSError) -> None:
    """End for an error of the system that no command has turned into a sentence; raise any other again."""
    if error.errno == errno.EPIPE:
        discard_output()  # its reader has read enough
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        discard_output()
        _fail(f"{reason(error)}; what was stored before is kept, the same command goes on", 2)
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
    """End with a sentence on stderr; the disk that it goes to may be full too."""
    Console(stderr=True).print(f"error: {sentence}", style="red")
    sys.exit(code)


def _is_for_training(package: str) -> bool:
    """Whether the extra `train` installs a package: it is imported by the package's own name."""
    try:
        asked = importlib.metadata.requires("mup_tpu") or []
    except importlib.metadata.PackageNotFoundError:  # of a checkout that was not installed
        return package != "mup_tpu"
    return package in {
        re.split(r"\W", line, maxsplit=1)[0] for line in asked if "extra == 'train'" in line.replace('"', "'")
    }
