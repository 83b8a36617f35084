"""Trainers of a study, functions or programs with a trial's values in their words, and the job of a trial."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from mup_tpu.config.values import as_number, on_one_line
from mup_tpu.errors import ConfigError, StoreError, first_line, reason
from mup_tpu.files import Folder, short_hash
from mup_tpu.files.local import scratch_folder
from mup_tpu.jobs.job import Job, Preparing, Surroundings
from mup_tpu.study.attempt import Call, Function, Keeper, Outcome, ProgramFailed
from mup_tpu.study.report import Report
from mup_tpu.study.space import Space, Trial
from mup_tpu.training.process import handling

RESULT = "MUP_TPU_RESULT"
"""Environment variable with the path at which a program may write its result as JSON."""

_NAME = r"[\w.]+:[\w.]+"
_LONGEST_LINE, _LONGEST_PIPE = 10_000, 2**20  # bytes of a line; bytes in a pipe whose writer has ended
_LOOK_EVERY_S = 0.1


def find_trainer(train: Any, space: Space) -> Function:
    """Find the function of a study: itself, `package.module:function`, or a command line.

    Raises:
        ConfigError: there is no such module, function or program, a name in braces is not one of the study's,
            or the function cannot be called with a trial and its report.
    """
    if isinstance(train, str):
        if not re.fullmatch(_NAME, train.strip()):
            return Program(train, space)
        train = load(train.strip(), "trainer")
    name = getattr(train, "__name__", type(train).__name__)
    if not callable(train):
        raise ConfigError(f"trainer {train!r} is not a function")
    try:
        inspect.signature(train).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"trainer {name}{inspect.signature(train)} cannot be called with a trial and its report: "
            f"{error}; write def {name}(trial, report)"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    function: Function = train
    return function


def load(text: str, what: str) -> Any:
    """Load the object that `package.module:name` names; `what` names it in errors.

    Raises:
        ConfigError: the text has another form, or there is no such module or name.
    """
    if not re.fullmatch(_NAME, text):
        raise ConfigError(f"{what} {text!r} is not of the form my_package.my_module:name")
    module, name = text.split(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the installed command does not
    try:
        loaded: Any = importlib.import_module(module)
    except Exception as error:  # a module raises what it likes
        raise ConfigError(f"{what} {text} cannot be imported: {first_line(error)}") from None
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise ConfigError(f"{what} {text}: module {module} has no {name}")
        loaded = getattr(loaded, part)
    return loaded


def fingerprint(train: Function) -> str | None:
    """Hash the code of a trainer without its comments: a function's module, or a program's words and files.

    Returns None where the code cannot be read.
    """
    if isinstance(train, Program):
        files = [Path(word) for word in train.words if os.path.isfile(word)]
        contents = [_without_comments(path.read_bytes()) for path in files if path.stat().st_size < 2**20]
        return short_hash("\n".join([*train.words, *contents]))
    try:
        module = inspect.getmodule(train)
        source = inspect.getsource(module if getattr(module, "__file__", None) and module else train)
    except (OSError, TypeError):
        return None
    return short_hash(_without_comments(source.encode()))


def _without_comments(source: bytes) -> str:
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):  # not Python
        return short_hash(source)


def pickled(function: Function, by_value: bool) -> bytes:
    """Send a function to other processes as a pickle; functions of notebooks and scripts too.

    Args:
        function: training function.
        by_value: whether to include its module, which other machines may lack.

    Raises:
        ConfigError: an object in it cannot be sent.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    is_ours = module is None or module.__name__.partition(".")[0] in ("mup_tpu", "__main__")
    includes_module = by_value and not is_ours
    try:
        if includes_module:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(function))
    except Exception as error:  # objects in the function raise what they like
        raise ConfigError(
            f"trainer cannot be sent to a worker: {first_line(error)}; open files, locks and connections "
            "inside the function"
        ) from None
    finally:
        if includes_module:
            cloudpickle.unregister_pickle_by_value(module)


class Program:
    """A training function that runs a program, without a shell.

    The result is a number, or a JSON object with the key "loss", in the file that `MUP_TPU_RESULT` names;
    without one, the last line of standard output. All output is kept as the trial's.

    Args:
        line: command line; in each word `{name}` becomes the trial's value, `{folder}` its folder for
            checkpoints, `{id}` its id.
        space: space of the study.

    Raises:
        ConfigError: a name in braces is not one of the study's, or there is no such program.
    """

    def __init__(self, line: str, space: Space) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"trainer {line!r} is not a command line: {reason(error)}") from None
        if not self.words:
            raise ConfigError("trainer is empty: write my_package.my_module:train, or a command line")
        if "{" not in self.words[0] and shutil.which(self.words[0]) is None:
            raise ConfigError(f"trainer: there is no program {self.words[0]!r} here")
        names = {*space.columns, "seed", "folder", "id"}
        for word in self.words:
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

    def __call__(self, trial: Trial, report: Report) -> Any:
        """Run the program.

        Raises:
            ProgramFailed: it cannot be started, ends with another exit code than 0, or gives no number.
        """
        values = {**trial.values, "folder": report.folder, "id": trial.id}
        texts = {k: repr(v) if isinstance(v, float) else str(v) for k, v in values.items()}
        words = [word.format(**texts) for word in self.words]
        with scratch_folder() as scratch:
            file = scratch / "result.json"
            environment = os.environ | {RESULT: str(file)}
            try:
                # In a new process group: `kill 0` in a script means the script.
                program = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, process_group=0)
            except OSError as error:
                raise ProgramFailed(f"{words[0]} cannot be started: {reason(error)}") from None
            last = _pass_output_on(program)
            if code := program.wait():
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise ProgramFailed(f"{words[0]} {how}")
            return _result(file, last)


def _pass_output_on(program: subprocess.Popen[bytes]) -> str:
    """Print the output of a program until it ends; return its last line with text.

    Processes that it leaves behind may keep its output open: nothing is read after a pipe's content.
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
        *lines, line = (line + part).split(b"\n")
        line = line[-_LONGEST_LINE:]
        last = next((w for w in reversed(lines) if w.strip()), last)
    return (line if line.strip() else last)[-_LONGEST_LINE:].decode(errors="replace").strip()


def _result(file: Path, last: str) -> Any:
    """Return the loss that a program gave in its file or its last line."""
    if file.exists():
        try:
            result = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ProgramFailed(f"{RESULT} holds no JSON: {reason(error)}") from None
        if isinstance(result, dict):
            result = result.get("loss")
        if isinstance(result, bool) or not isinstance(result, int | float):
            raise ProgramFailed(f'{RESULT} holds no number and no {{"loss": number}}')
        return result
    if (value := as_number(last)) is None:
        shown = repr(last if len(last) <= 60 else f"{last[:57]}...") if last else "nothing"
        raise ProgramFailed(f"its last line of output is {shown}, not a number")
    return value


@dataclass(frozen=True)
class How:
    """Settings for each trial of a study."""

    folder: str
    """Folder or fsspec URL of the study."""
    threads: int = 1
    """CPU threads for libraries of the function."""
    timeout: float = math.inf
    """Seconds after which a trial counts as failed."""
    halving: bool = False
    """Whether trials far behind the best stop early."""

    def rungs(self, group: str) -> str | None:
        return f"{Folder(self.folder) / 'rungs' / group}" if self.halving else None


class FunctionJob(Job):
    """Job of one trial of a study.

    `payload` is the pickled function; `group` names the trials among which halving stops those far behind.
    """

    def __init__(self, payload: bytes, trial: Trial, how: How, group: str) -> None:
        self.payload, self.trial, self.how, self.group = payload, trial, how, group
        self.trials = [trial]
        self.values = " ".join(f"{name} {on_one_line(value)}" for name, value in trial.values.items())

    def __str__(self) -> str:
        return str(self.trial)

    def was_preempted(self, result: Outcome) -> bool:
        return result.status == "preempted"

    def run(self, here: Surroundings) -> Generator[Any, None, Outcome]:
        """Import the function's modules, fork a process that calls it, and pass its reports on.

        Raises:
            ConfigError: the function cannot be imported here.
            StoreError: its folder or output is a link.
            WorkerLost: a signal has killed its process.
        """
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, str(self.how.threads))
        yield Preparing("importing the trainer")
        function = here.once(self.payload, self._load)
        keepers = here.once(("keepers", self.payload), list[Keeper])
        if not keepers or keepers[-1].is_lost:
            keepers.append(Keeper(function))
        folder = Folder(self.how.folder) / "work" / self.trial.id
        if folder.is_local:
            if os.path.islink(folder.path):
                raise StoreError(f"{folder} is a link: the trial would write its checkpoints elsewhere")
            os.makedirs(folder.path, exist_ok=True)
        report = functools.partial(Report, folder.path, rungs=self.how.rungs(self.group), name=self.trial.id)
        output = f"output/{self.trial.id}.txt" if folder.is_local else None  # a bucket's objects cannot grow
        call = Call(self.trial, report, self.how.folder, output)
        signals: list[int] = []
        handlers = {signal.SIGTERM: lambda number, frame: signals.append(number)}
        with handling(handlers if here.handles_sigterm else {}):
            return (yield from keepers[-1].run(call, self.how.timeout, lambda: bool(signals)))

    def _load(self) -> Function:
        try:
            function: Function = cloudpickle.loads(self.payload)
        except Exception as error:
            raise ConfigError(f"trainer cannot be imported by a worker: {first_line(error)}") from None
        return function
