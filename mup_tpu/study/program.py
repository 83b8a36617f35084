"""Trainers by name: a function of a module, or a program with a trial's values in its words."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import select
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

from mup_tpu.config.values import as_number
from mup_tpu.errors import ConfigError, first_line, reason
from mup_tpu.files.leftovers import scratch_folder
from mup_tpu.study.attempt import Function
from mup_tpu.study.report import Report
from mup_tpu.study.space import Space, Trial

RESULT = "MUP_TPU_RESULT"
"""Environment variable with the path at which a program may write its result as JSON."""

_NAME = r"[\w.]+:[\w.]+"
_LONGEST_LINE = 10_000
_LONGEST_PIPE = 2**20
"""Bytes that a pipe may hold at the end of its writer."""
_LOOK_EVERY_S = 0.1


def trainer_of(text: str, space: Space) -> Function:
    """Training function of `package.module:function`, or of a command line.

    Args:
        text: name or command line.
        space: the study, whose names a command line may hold in braces.

    Raises:
        ConfigError: there is no such module, function or program, or a name is not one of the study's.
    """
    if re.fullmatch(_NAME, text.strip()):
        function: Function = load(text.strip(), "trainer")
        return function
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"trainer {text!r} is not a command line: {reason(error)}") from None
    if not words:
        raise ConfigError("trainer is empty: write my_package.my_module:train, or a command line")
    return Program(words, space)


def load(text: str, what: str) -> Any:
    """Object that `package.module:name` names; `what` is its own name in errors.

    Raises:
        ConfigError: the text has another form, or there is no such module or name.
    """
    if not re.fullmatch(_NAME, text):
        raise ConfigError(f"{what} {text!r} is not of the form my_package.my_module:name")
    module, name = text.split(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the installed command does not
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # a module raises what it likes
        raise ConfigError(f"{what} {text} cannot be imported: {first_line(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what} {text}: module {module} has no {name}")
        found = getattr(found, part)
    return found


class Program:
    """A training function that runs a program, without a shell.

    The result is a number, or a JSON object with the key "loss", in the file that `MUP_TPU_RESULT` names;
    without one, the last line of standard output. All output is kept as the trial's.

    Args:
        words: the program and its arguments; each `{name}` becomes the trial's value, `{folder}` its folder
            for checkpoints, `{id}` its id.
        space: the study.

    Raises:
        ConfigError: a name in braces is not one of the study's, or there is no such program.
    """

    def __init__(self, words: list[str], space: Space) -> None:
        if "{" not in words[0] and shutil.which(words[0]) is None:
            raise ConfigError(f"trainer: there is no program {words[0]!r} here")
        names = {*space.columns, "seed", "folder", "id"}
        for word in words:
            try:
                fields = [field for _, field, _, _ in string.Formatter().parse(word) if field is not None]
            except ValueError as error:
                raise ConfigError(
                    f"trainer: {word!r}: {reason(error)}; write {{{{ and }}}} for braces"
                ) from None
            if unknown := [field for field in fields if field not in names]:
                raise ConfigError(
                    f"trainer: {{{unknown[0]}}} in {word!r} is not one of {', '.join(sorted(names))}"
                )
        self._words, self._space = words, space

    def __call__(self, trial: Trial, report: Report) -> Any:
        """Run the program.

        Raises:
            RuntimeError: it cannot be started, ends with another exit code than 0, or gives no number.
        """
        values = {**trial.values, "folder": report.folder, "id": trial.id}
        words = [word.format(**{k: _text(v) for k, v in values.items()}) for word in self._words]
        with scratch_folder() as scratch:
            file = scratch / "result.json"
            environment = os.environ | {RESULT: str(file)}
            try:
                # A process group of its own: `kill 0` in a script means the script.
                program = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, process_group=0)
            except OSError as error:
                raise RuntimeError(f"{words[0]} cannot be started: {reason(error)}") from None
            last = _last_line(program)
            if code := program.wait():
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise RuntimeError(f"{words[0]} {how}")
            return _result(file, last)


def _text(value: Any) -> str:
    """A value in a word of a command line: numbers exactly."""
    return repr(value) if isinstance(value, float) else str(value)


def _last_line(program: subprocess.Popen[bytes]) -> str:
    """Pass printed output of a program on until it ends; returns its last line with text.

    Processes that it leaves behind may hold its output open: nothing is read after a pipe's content.
    """
    assert program.stdout is not None
    last = line = b""
    descriptor, left = program.stdout.fileno(), _LONGEST_PIPE
    while left > 0:
        has_ended = program.poll() is not None
        if not select.select([descriptor], [], [], 0.0 if has_ended else _LOOK_EVERY_S)[0]:
            if has_ended:
                break
            continue
        if not (part := os.read(descriptor, 65536)):
            break
        left -= len(part) if has_ended else 0
        with contextlib.suppress(OSError):
            os.write(1, part)
        *whole, line = (line + part).split(b"\n")
        line = line[-_LONGEST_LINE:]
        last = next((w for w in reversed(whole) if w.strip()), last)
    return (line if line.strip() else last)[-_LONGEST_LINE:].decode(errors="replace").strip()


def _result(file: Path, last: str) -> Any:
    """Loss that a program gave."""
    if file.exists():
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{RESULT} holds no JSON: {reason(error)}") from None
        if isinstance(found, dict):
            found = found.get("loss")
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise RuntimeError(f'{RESULT} holds no number and no {{"loss": number}}')
        return found
    if (value := as_number(last)) is None:
        shown = repr(last if len(last) <= 60 else f"{last[:57]}...") if last else "nothing"
        raise RuntimeError(f"its last line of output is {shown}, not a number")
    return value
