"""Errors that the user can mend: one sentence naming the field, the value and what is allowed.

The command line prints the sentence and exits with the error's code, 2 for most; nothing else in the package
catches them.
"""

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

_OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("options", default=None)


def given(name: str, value: object = None) -> str:
    """Write a field for a message, with its value: `chance=5.5`, or in a command `--chance 5.5`.

    A message is written where its fact is known, and only the command line knows its options.
    """
    options = _OPTIONS.get()
    if options is None:
        return name if value is None else f"{name}={value!r}"
    option = options.get(name, f"--{name.replace('_', '-')}")
    if value is None or value is True:
        return f"{option}COLUMN" if option.endswith("=") else option
    text = shlex.quote(str(value))
    return f"{option}{text}" if option.endswith("=") else f"{option} {text}"


@contextlib.contextmanager
def fields_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Let messages name options; those that are not called as their field stand in the mapping."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


class MupTpuError(Exception):
    """Base of every error whose message alone is enough to mend it."""

    exit_code = 2


class ConfigError(MupTpuError):
    """A configuration value is not allowed, or does not fit the others."""


class DataError(MupTpuError):
    """A corpus, tokenizer or shard cannot be used as it is."""


class StoreError(MupTpuError):
    """A results folder cannot be read or written."""


class PackTooLarge(MupTpuError):
    """A pack does not fit in memory.

    Args:
        message: how much it needs and what there is.
        fits: members that are expected to fit.
    """

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message, fits)  # both, so that it can be pickled
        self.fits = fits

    def __str__(self) -> str:
        return str(self.args[0])


class DeviceFailed(MupTpuError):
    """A GPU has failed, and is lost to this process; another process may find it well."""

    exit_code = 1


class Preempted(MupTpuError):
    """The machine is being taken away (SIGTERM); running trials have checkpointed."""

    exit_code = 143


class TrialsFailed(MupTpuError):
    """Trials failed; the results of all others are stored."""

    exit_code = 1


class CheckFailed(MupTpuError):
    """A check fails: a layer grows or dies with width, or doctor finds what would stop a run."""

    exit_code = 1


class TableError(MupTpuError):
    """A run table cannot be analysed as it is."""


def extra_with(module: str) -> str | None:
    """Return the extra that brings a module, "" for the base install; None if no requirement has its name."""
    import importlib.metadata  # slow, and only an error needs it

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout that is not installed
        for line in importlib.metadata.requires("mup_tpu") or ():
            if re.split(r"\W", line)[0] == module:
                extra = re.search(r"""extra == ['"](.+?)['"]""", line)
                return extra[1] if extra else ""
    return None


def not_installed(package: str) -> str:
    extra = extra_with(package)
    install = "." if extra == "" else f"'.[{extra or 'train'}]'"
    return f"needs {package}, which is not installed: pip install {install}"


def reason(error: BaseException) -> str:
    message = str(getattr(error, "strerror", None) or error).strip()
    return message.splitlines()[0] if message else type(error).__name__


@contextlib.contextmanager
def raised_as(
    kind: type[MupTpuError], sentence: str, errors: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Raise errors of the block as another error: the sentence, with their reason."""
    try:
        yield
    except errors as error:
        raise kind(f"{sentence}: {reason(error)}") from None


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"
